"""What machine code for Hopper shows of the overlap of products and softmax, and of who waits for whom."""

from __future__ import annotations

import re
from collections.abc import Iterable

PRODUCTS = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([012])|(MUFU\.EX2)|(QGMMA)")
EVENTS = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([012])|(MUFU\.EX2)")


def exponentials_in_flight(code: str) -> list[int]:
    """Per warpgroup: those between the wait for the scores, which leaves P V in flight, and that for P V.

    Were products serialised (ptxas C7510 to C7520), no wait would leave any in flight.
    """
    found, counting = [], False
    for line in code.splitlines():
        event = EVENTS.search(line)
        if event is None:
            continue
        if event[2]:
            if counting:
                found[-1] += 1
        elif event[1] == "0":
            counting = False
        elif not counting:
            counting = True
            found.append(0)
    return found


SOFTMAX = re.compile(
    r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([012])|HGMMA|(MUFU\.EX2)|(FADD)|(F2FP\.B?F16\.F32\.PACK_AB)"
)


def softmax_order(code: str) -> list[tuple[bool, str]]:
    """Between products and waits for them: whether P V is in flight, and the order of a tile's softmax.

    m: a power of two; a: a sum; c: a conversion of two. What has fewer than 16 of the first is left out.
    """
    found, flying, order = [], False, ""
    for line in [*code.splitlines(), "HGMMA"]:
        event = SOFTMAX.search(line)
        if event is None:
            continue
        if event[2] or event[3] or event[4]:
            order += "m" if event[2] else "a" if event[3] else "c"
            continue
        if order.count("m") >= 16:
            found.append((flying, order))
        flying, order = event[1] in ("1", "2"), ""
    return found


PLACE = re.compile(r"^\s*\.(L_\w+):|^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", re.MULTILINE)
BACK = re.compile(r"\bBRA\b.*\.(L_\w+)\)")


def loops(code: str) -> list[list[str]]:
    """The instructions of each loop: from where a branch goes back to, up to it."""
    instructions: list[str] = []
    places: dict[str, int] = {}
    found = []
    for label, instruction in PLACE.findall(code):
        if label:
            places[label] = len(instructions)
            continue
        instructions.append(instruction)
        if (branch := BACK.search(instruction)) and branch[1] in places:
            found.append(instructions[places[branch[1]] :])
    return found


def exponentials_between(code: str) -> list[int]:
    """Per wait that leaves a product in flight: those between the first and last product before it.

    Of P V, the exponentials beside it, and the scores issued behind them.
    """
    found, since, last, product = [], 0, 0, False
    for line in code.splitlines():
        event = PRODUCTS.search(line)
        if event is None:
            continue
        if event[2]:
            since += product
        elif event[3]:
            product, last = True, since
        else:
            if event[1] == "1":
                found.append(last)
            since, last, product = 0, 0, False
    return found


STEP = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?(U?P\w+)\s+)?([A-Z][\w.]*)(.*)")
LABEL = re.compile(r"(\.L\w+):")
GOES = re.compile(r"(?:BRA|BRX|JMP|JMX|CALL)\b")
ENDS = re.compile(r"(?:BRA|BRX|JMP|JMX|EXIT|RET)(?!\.DIV|\.CONV)\b")


class Flow:
    """Instructions of a kernel by number, and which may follow which."""

    def __init__(self, code: str) -> None:
        self.steps: list[str] = []
        labels, ways = dict[str, int](), list[tuple[bool, list[str]]]()
        for line in code.splitlines():
            if label := LABEL.match(line):
                labels[label[1]] = len(self.steps)
            elif step := STEP.match(line):
                self.steps.append(step[2] + step[3])
                ends = ENDS.match(step[2]) and step[1] in (None, "PT", "UPT")
                ways.append((not ends, re.findall(r"\.L\w+", step[3]) if GOES.match(step[2]) else []))
        self.next = [
            {*([n + 1] if on else []), *(labels[to] for to in targets)} & {*range(len(self.steps))}
            for n, (on, targets) in enumerate(ways)
        ]

    def find(self, pattern: str, among: Iterable[int] | None = None) -> list[int]:
        return [n for n in (range(len(self.steps)) if among is None else among)
                if re.match(pattern, self.steps[n])]  # fmt: skip

    def reach(self, start: int, stop: str) -> set[int]:
        """What may come at or after an instruction, up to the first of each way that stop matches."""
        found, ahead = {start}, [start]
        while ahead:
            n = ahead.pop()
            for other in self.next[n] - found if n == start or not re.match(stop, self.steps[n]) else ():
                found.add(other)
                ahead.append(other)
        return found

    def partition(self) -> set[int]:
        """What warps of the first partition run: the others go on by a table of where theirs are."""
        return self.reach(0, "BRX")

    def in_flight(self) -> set[int]:
        """What may come between a product and the next wait, where that leaves one in flight."""
        wait = r"WARPGROUP\.DEPBAR"
        parts = (self.reach(n, wait) for n in self.find("QGMMA|HGMMA"))
        return set().union(*(part for part in parts if self.find(rf"{wait}\S* gsb0, 0x1\b", part)))

    def unguarded(self, first: str, then: str, barrier: str) -> bool:
        """Whether ``then`` may follow ``first``, both of the first partition, without the barrier between."""
        own = self.partition()
        return any(self.find(then, self.reach(n, barrier) - {n}) for n in self.find(first, own))
