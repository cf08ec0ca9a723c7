"""What machine code for Hopper shows of the overlap of products and softmax."""

from __future__ import annotations

import re

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
