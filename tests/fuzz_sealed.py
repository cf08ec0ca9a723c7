"""A results file with a row of every kind, from those under reports/, and such a file with what its lines
hold changed and sealed again, as by somebody who means it."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from flashbench._runfile import lines

REPORTS = Path(__file__).parents[1] / "reports"
ROWS = {
    "h200-sxm/results.jsonl": ("record", 2), "h100-sxm/joined/results.jsonl": ("record", 2),
    "h200-sxm/detail/results.jsonl": ("record", 1), "h200-sxm/energy/results.jsonl": ("record", 1),
    "h200-sxm/alternatives/results.jsonl": ("record", 2), "h100-sxm/features/varlen-8x2k/results.jsonl":
    ("record", 1), "h200-sxm-x2/fleet/two/results.jsonl": ("record", 2),
    "h200-sxm-x2/ring/forward.jsonl": ("ring", 1), "h200-sxm/block/llama-3-8b.jsonl": ("blocks", 2),
    "h200-sxm/numerics.jsonl": ("numerics", 1),
}  # fmt: skip
"""From which file how many lines of a type: the longest, which say most, and what belongs to them."""
NAME, TWIN, CLAIMS = "full.jsonl", "twin.jsonl", "all.toml"
READERS = (
    "report full.jsonl -o r.html", "report full.jsonl --markdown", "report full.jsonl --terminal",
    "report full.jsonl twin.jsonl other.jsonl -o r.html", "report full.jsonl --claims . -o r.html",
    "report full.jsonl --figures f", "compare full.jsonl twin.jsonl --noise 1%",
    "compare twin.jsonl full.jsonl --metric time_s,peak_extra_bytes,dram_bytes --json",
    "compare twin.jsonl full.jsonl --noise 1% --by pass -o junit=x -o csv=y -o markdown=z -o html=h",
    "history full.jsonl twin.jsonl", "history full.jsonl twin.jsonl --csv",
    "verify full.jsonl", "verify full.jsonl --json", "noise full.jsonl,twin.jsonl --out n.json",
    "claims all.toml --results .", "claims all.toml --results . --json",
    "baseline save full.jsonl --name full --store new", "bisect --base full.jsonl -- x {out}",
    "run --resume --out . --dry-run --device cpu",
)  # fmt: skip
AFTER = ("counters", "trace")
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 64, 2**31, 2**53, 2**63 - 1, 2**63, 10**30, 0.5, 64.0, -0.5, 1e-320,
    1e29, 1e308, "", " ", "x", "0", "64", "fp32", "fwd", "ok", "oom", "flash-v2", "nan", "\x00", "\u202e",
    "a" * 3000, "\ud800", "\ud800.npz", "2026-01-01T00:00:00+00:00", [], {}, [[]], [None], [0], ["x"],
    {"": None}, {"x": {"y": [1]}}, {"kernel": "x"}, [{}], [64, 64],
)  # fmt: skip


@cache
def full() -> bytes:
    """The good file."""
    found = [_of("h200-sxm/results.jsonl")[0] | {"cells": []}]
    for name, (kind, most) in ROWS.items():
        every = _of(name)
        chosen = sorted(every[1:], key=lambda row: (row.get("type") == kind, len(str(row))))[-most:]
        keys = {row.get("key") for row in chosen} - {None}
        found += chosen
        found += [row for row in every if row.get("type") in AFTER and row.get("key") in keys]
    found += [row for row in _of("h200-sxm/results.jsonl") if row.get("type") == "timings"][:1]
    own = (row for row in found if row["type"] == "record")
    next(own).update(io_model=None, stated={"read": {"q": 4096, "kv": 8192}, "write": 4096, "flops": 10**9})
    next(own)["tuned"] = {"file": "tuned.json", "cases": ["flash-v2 fwd"]}
    found[0]["cells"] = [row["key"] for row in found if row.get("type") == "record"]
    return b"".join(map(lines.seal, found))


def others() -> dict[str, bytes]:
    """What the lines read beside it: the same file, and the claims that come along, all of that file."""
    claims = (REPORTS.parent / "configs" / "claims.toml").read_text(encoding="utf-8")
    of_it = re.sub(r'file = "[^"]*jsonl"', f'file = "{NAME}"', claims)
    return {NAME: full(), TWIN: full(), CLAIMS: of_it.encode()}


def _of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (REPORTS / name).read_text(encoding="utf-8").splitlines()]


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in the value; of a list in its first and last."""
    if at:
        yield at
    inside = list(value.items()) if isinstance(value, dict) else []
    if isinstance(value, list) and value:
        inside = [(0, value[0]), *[(len(value) - 1, value[-1])][: len(value) - 1]]
    for key, item in inside:
        yield from _places(item, (*at, key))


def changed(data: bytes, seed: int) -> bytes:
    """One to three places of a line of the file, or of each line of its type, changed and sealed again."""
    chance = random.Random(seed)
    rows = [json.loads(line) for line in data.splitlines()]
    for row in rows:
        row.pop(lines.FIELD, None)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        which = chance.choice(sorted({row["type"] for row in rows}))
        same = [row for row in rows if row["type"] == which]
        # the field first, so that a long list of numbers is not most of what is changed
        one = chance.choice(same)
        field = chance.choice(sorted(set(one) - {"type"}))
        *into, last = chance.choice([place for place in _places(one) if place[0] == field])
        kind = chance.choice(("value",) * 8 + ("drop", "double"))
        value = chance.choice(_like(one, [*into, last]) if chance.random() < 0.6 else VALUES)
        for row in same if chance.random() < 0.3 else [one]:
            _change(row, into, last, kind, value)
    return b"".join(map(lines.seal, rows))


def _like(value: Any, place: list[Any]) -> list[Any]:
    """Values that are of the kind of what stands there, most of which no shape refuses."""
    for key in place:
        value = value[key]
    return [one for one in VALUES if type(one) is type(value) or {type(one), type(value)} == {int, float}]


def _change(row: Any, into: list[Any], last: Any, kind: str, value: Any) -> None:
    """Change what stands there in the row, if it has such a place."""
    for key in into:
        try:
            row = row[key]
        except (KeyError, IndexError, TypeError):
            return
    there = (isinstance(row, dict) and last in row) or (isinstance(row, list) and last < len(row))
    if not there:
        return
    if kind == "drop":
        del row[last]
    elif kind == "double" and isinstance(row, list):
        row.append(copy.deepcopy(row[last]))
    else:
        row[last] = copy.deepcopy(value)
