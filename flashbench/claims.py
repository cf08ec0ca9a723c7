"""The literature's claims, re-measured: each claim is data, its verdict is computed from results files.

A claim names what is to be seen of which rows and between which bounds it holds (``claim``). Cells whose time
is flagged as not the GPU's decide nothing on speed. A claim without rows is one that was not measured, and
says which results are missing and what makes them.
"""

from __future__ import annotations

import json
import math
import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashbench import devices, paths, runfile, table, units, unstarted
from flashbench.claim import NOT_OF_THE_GPU, UNITS, Claim, Judged, Seen, markdown
from flashbench.errors import RunFileError, UsageError
from flashbench.record import spread_of

__all__ = ["Claim", "Judged", "Seen", "judge", "load", "markdown", "of_rows"]

Row = Mapping[str, Any]

SAME = (
    "pass", "batch", "num_heads", "num_kv_heads", "seqlen_q", "seqlen_k", "kv_len", "queries", "head_dim",
    "head_dim_v", "dtype", "causal", "options", "page_size", "model", "mode", "seqlen", "layers", "arch",
)  # fmt: skip
"""Fields in which the two sides of a ratio or difference are the same, but those that a side names."""
_CELL = (*SAME, "implementation")

SEEN = ("ratio", "difference", "value", "slope", "ran", "device", "product")
"""What a claim can be about; ``docs/claims.md`` says each."""

MAX_BYTES = 2**20
"""Of a file of claims."""

FIELDS = {
    "name", "says", "source", "conditions", "command", "untestable", "at_least", "at_most", "range",
    "necessary", "some", "unit", *SEEN,
}  # fmt: skip

FOLDER = "{results}"
"""In a claim's command: the folder that its results are in, or shall be."""


def bundled() -> Path:
    """The claims that come along: in a wheel beside this module, in a clone in configs/."""
    here = Path(__file__).with_suffix(".toml")
    return here if here.is_file() else here.parent.parent / "configs" / "claims.toml"


def load(path: Path | str | None = None) -> tuple[Claim, ...]:
    """The claims of a TOML file, by default ``bundled``. Raises UsageError, in one line, for what is none."""
    path = bundled() if path is None else path
    try:
        tables = tomllib.loads(paths.whole(path, MAX_BYTES).decode("utf-8")).get("claim", [])
    except OSError as error:
        where = f"claims file {units.quoted(path, 200)}"
        raise UsageError(f"{where}: {error.strerror or error}; accepted: a TOML file of claims") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no TOML: {units.cut(' '.join(str(error).split()), 200)}") from None
    if not isinstance(tables, list) or not tables:
        raise UsageError(f"{path} has no [[claim]]; accepted: tables of {', '.join(sorted(FIELDS))}")
    return tuple(_claim(f"{path}, claim {number}", given) for number, given in enumerate(tables, 1))


def _claim(where: str, given: Any) -> Claim:
    fields = dict(given) if isinstance(given, dict) else {}
    if unknown := sorted(set(fields) - FIELDS):
        raise UsageError(f"{where}: {unknown[0]!r} is not known; accepted: {', '.join(sorted(FIELDS))}")
    for name in ("name", "says", "source", "conditions"):
        if not isinstance(fields.get(name), str):
            raise UsageError(f"{where}: {name} must be text")
    for name in ("at_least", "at_most"):
        if not isinstance(fields.get(name, 0), int | float):
            raise UsageError(f"{where}: {name} must be a number")
    if fields.get("unit", "") not in UNITS:
        raise UsageError(f"{where}: unit must be bytes, or left out")
    for name in ("range", "necessary", "some"):
        if not isinstance(fields.get(name, False), bool):
            raise UsageError(f"{where}: {name} must be true or false")
    if fields.get("range") and not {"at_least", "at_most"} <= set(fields):
        raise UsageError(f"{where}: a range must have both ends, at_least and at_most")
    seen = {kind: fields.pop(kind) for kind in SEEN if kind in fields}
    if len(seen) > 1:
        raise UsageError(f"{where}: one of {', '.join(SEEN)} at most; got {', '.join(seen)}")
    if not (seen or fields.get("command") or fields.get("untestable")):
        raise UsageError(f"{where}: what is seen, the command that measures it or untestable must be given")
    return Claim(**fields, seen=seen)


def judge(claims: Iterable[Claim], folder: Path | str, called: str | None = None) -> list[Judged]:
    """What the results files below a folder say of each claim; files are read once. called: the folder's name
    in the commands that make what is missing, by default as it is given.
    """
    files: dict[str, list[Row]] = {}
    name = shlex.quote(str(folder) if called is None else called)

    def rows(name: str) -> list[Row]:
        if name not in files:
            files[name] = _rows(Path(folder) / name)
        return files[name]

    there = (replace(claim, command=claim.command.replace(FOLDER, name)) for claim in claims)
    return [_judged(claim, rows, _lacks(claim, Path(folder))) for claim in there]


def _judged(claim: Claim, rows: Callable[[str], list[Row]], lacks: str = "") -> Judged:
    found, not_begun = _found(claim, rows)
    return Judged(
        claim=claim, lacks=lacks, not_begun=not_begun,
        found=tuple(one for one in found if not one.flags),
        left_out=tuple(one for one in found if one.flags),
    )  # fmt: skip


def _lacks(claim: Claim, folder: Path) -> str:
    """What a claim of cells misses in a folder where nothing is found of it."""
    if not claim.of_cells:
        return ""
    sides = [side for given in claim.seen.values() for side in _sides(given)]
    files = list(dict.fromkeys(str(side.get("file")) for side in sides))
    gone = [f"`{name}`" for name in files if not (folder / name).is_file()]
    return f"no results of {', '.join(gone)}" if gone else f"no such cells in `{'`, `'.join(files)}`"


def of_rows(claims: Iterable[Claim], rows: list[Row]) -> list[Judged]:
    """What the rows of one run say of the claims that are about cells, whatever files these name: what else a
    side names tells its rows. Claims of which they say nothing, or cannot, are left out (``unjudged``).
    """
    judged = (replace(_judged(_of_one_run(one), lambda _: rows), claim=one) for one in claims)
    return [one for one in judged if one.found or one.left_out or one.not_begun]


def unjudged(claims: Iterable[Claim], judged: Iterable[Judged]) -> list[Judged]:
    """The claims about cells that nothing was said of: without a number, and with what makes one."""
    names = {one.claim.name for one in judged}
    return [
        Judged(
            claim=replace(one, command=one.command.replace(FOLDER, "DIR")), found=(),
            lacks="no such cells here",
        )
        for one in claims if one.of_cells and one.name not in names
    ]  # fmt: skip


def _of_one_run(claim: Claim) -> Claim:
    """A claim as one run's rows can tell it: without pairs that the file alone tells apart from others, or
    whose sides it alone tells apart.
    """
    seen = dict(claim.seen) if claim.of_cells else {}
    for kind in {"ratio", "difference"} & set(seen):
        pairs = {repr([_told(pair["of"]), _told(pair["to"]), pair.get("per")]): pair for pair in seen[kind]}
        seen[kind] = [pair for pair in pairs.values() if _told(pair["of"]) != _told(pair["to"])]
    return replace(claim, seen=seen)


def columns(claims: Iterable[Claim]) -> set[str]:
    """The fields of rows that a verdict on the claims, or the name of a cell, takes."""
    sides = [side for claim in claims for given in claim.seen.values() for side in _sides(given)]
    named = {name for side in sides for name in side} | {name for side in sides for name in _metrics(side)}
    return {*SAME, *_PARTS, *named, "status", "reason", "spread", "device", "flags"} - {"file", "metric"}


def _sides(given: Any) -> list[Mapping[str, Any]]:
    """The sides of what is seen: none of what is no row's."""
    if isinstance(given, list):
        pairs = [pair for pair in given if isinstance(pair, dict)]
        return [pair[which] for pair in pairs for which in ("of", "to") if isinstance(pair.get(which), dict)]
    return [given] if "file" in given else []


def _found(claim: Claim, rows: Callable[[str], list[Row]]) -> tuple[tuple[Seen, ...], tuple[str, ...]]:
    """What is seen, and what was not begun, in words."""
    try:
        for kind, given in claim.seen.items():
            return tuple(_KINDS[kind](given, rows)), tuple(unstarted.lines(_cells(given, rows)))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        said = units.cut(" ".join(str(error).split()), 200)
        raise UsageError(f"claim {units.cut(claim.name, 100)}: {type(error).__name__}: {said}") from None
    return (), ()


def _cells(given: Any, rows: Callable[[str], list[Row]]) -> list[Row]:
    """A row for each cell that is asked about and can be run; of two sides the one that was not begun, unless
    they were in another file. None where every cell was.
    """
    files = {side["file"] for side in _sides(given)}
    if not any(unstarted.is_one(row) for name in files for row in rows(name)):
        return []
    if not isinstance(given, list):
        return [row for row in _rows_of(given, rows) if _can(row)]
    cells: list[tuple[Any, Row]] = []
    for pair in (pair for pair in given if isinstance(pair, dict)):
        keys = _shared(pair)
        to = {_key(row, keys): row for row in _rows_of(pair["to"], rows) if _can(row)}
        for row in (row for row in _rows_of(pair["of"], rows) if _can(row) and _key(row, keys) in to):
            other = to[_key(row, keys)]
            cells.append((_key(row, _CELL) + _key(other, _CELL), _as(row, other)))
    begun = {both for both, row in cells if not unstarted.is_one(row)}
    return [row for both, row in cells if both not in begun or not unstarted.is_one(row)]


def _as(row: Row, other: Row) -> Row:
    """A row, as one that was not begun if what it is set beside was not."""
    as_it_is = unstarted.is_one(row) or not unstarted.is_one(other)
    return row if as_it_is else {**row, **{name: other.get(name) for name in ("status", "reason")}}


def _can(row: Row) -> bool:
    return row.get("status") not in ("unsupported", "unavailable")


def _rows(path: Path) -> list[Row]:
    """The rows of a results file, or of a JSON document of them; none where there is no file."""
    if not path.is_file():
        return []
    if path.suffix == ".jsonl":
        file = runfile.intact(runfile.load(path))
        card = (file.header.get("environment") or {}).get("device_name")
        rows = table.rows(table.build([file]))
        return [*rows, *unstarted.unreached(file.header, rows), *timed(file.blocks, card)]
    try:
        document = json.loads(paths.whole(path))
        if isinstance(document, list) and document:  # of profile --static: of no card
            return timed(document, None)
        return timed(document["rows"], (document.get("environment") or {}).get("device_name"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise RunFileError(f"{path} has no rows") from None


def timed(rows: Iterable[Row], card: str | None) -> list[Row]:
    """Rows that carry their samples, with the spread of these and the card that they were taken on."""
    return [{**row, "spread": spread_of(row.get("samples_s")), "device": card} for row in rows]


def _rows_of(side: Mapping[str, Any], rows: Callable[[str], list[Row]]) -> Iterator[Row]:
    """The rows of a side's file that have the fields it names."""
    wanted = {name: value for name, value in side.items() if name not in ("file", "metric")}
    for row in rows(side["file"]):
        if all(_accepts(value, row.get(name)) for name, value in wanted.items()):
            yield row


def _accepts(wanted: Any, here: Any) -> bool:
    """A value, one of a list, or, of a table of at_least and at_most, one between these."""
    if isinstance(wanted, dict):
        least, most = wanted.get("at_least", -math.inf), wanted.get("at_most", math.inf)
        return isinstance(here, int | float) and bool(least <= here <= most)
    here = "" if here is None else here
    return here in wanted if isinstance(wanted, list) else bool(here == wanted)


def _chosen(side: Mapping[str, Any], rows: Callable[[str], list[Row]]) -> Iterator[tuple[Row, float]]:
    """(row, its metric) of a side: file and metric (names, of which the sum is meant), and fields that rows
    have.
    """
    for row in _rows_of(side, rows):
        values = [row.get(name) for name in _metrics(side)]
        if all(isinstance(x, int | float) and math.isfinite(x) for x in values):
            yield row, float(sum(x for x in values if x is not None))


def _metrics(side: Mapping[str, Any]) -> list[str]:
    given = side.get("metric", "time_s")
    return [given] if isinstance(given, str) else list(given)


def _spread_of(row: Row, side: Mapping[str, Any]) -> float:
    """Of a row's time, for what is made of it; of all else, which is counted, none."""
    return (row.get("spread") or 0.0) if _TIMED.intersection(_metrics(side)) else 0.0


def _flags_of(row: Row, side: Mapping[str, Any]) -> set[str]:
    """Those that keep a row's time, and what is made of it, from deciding anything."""
    flags = row.get("flags") or ()
    flags = flags.split() if isinstance(flags, str) else flags
    return {flag for flag in NOT_OF_THE_GPU if flag in flags and _TIMED.intersection(_metrics(side))}


def _told(side: Mapping[str, Any]) -> dict[str, Any]:
    """What a side names but its file."""
    return {name: value for name, value in side.items() if name != "file"}


def _shared(pair: Mapping[str, Any]) -> list[str]:
    """The fields that make a cell of one side and one of the other the same cell."""
    named = {*pair["of"], *pair["to"]}
    return [name for name in SAME if name not in named or pair["of"].get(name) == pair["to"].get(name)]


def _ratio(given: Any, rows: Callable[[str], list[Row]]) -> Iterator[Seen]:
    """``of`` over ``to``, cell by cell, over ``per``."""
    for pair in given:
        keys = _shared(pair)
        below = {_key(row, keys): (row, value) for row, value in _chosen(pair["to"], rows)}
        for row, value in _chosen(pair["of"], rows):
            other, base = below.get(_key(row, keys), (row, 0.0))
            if base:
                spread = math.hypot(_spread_of(row, pair["of"]), _spread_of(other, pair["to"]))
                flags = _flags_of(row, pair["of"]) | _flags_of(other, pair["to"])
                yield _seen(row, value / base / pair.get("per", 1), spread, flags)


def _difference(given: Any, rows: Callable[[str], list[Row]]) -> Iterator[Seen]:
    """``of`` less ``to``, cell by cell, each the sum over its kernels; not where both are 0, as then there is
    nothing to be seen.
    """
    for pair in given:
        sides: list[dict[Any, tuple[Row, float]]] = []
        for side in (pair["of"], pair["to"]):
            sums: dict[Any, tuple[Row, float]] = {}
            for row, value in _chosen(side, rows):
                key = _key(row, _shared(pair))
                sums[key] = (row, sums.get(key, (row, 0.0))[1] + value)
            sides.append(sums)
        for key, (row, value) in sides[0].items():
            if key in sides[1] and (value or sides[1][key][1]):
                other, less = sides[1][key]
                flags = _flags_of(row, pair["of"]) | _flags_of(other, pair["to"])
                yield _seen(row, value - less, flags=flags)


def _value(given: Any, rows: Callable[[str], list[Row]]) -> Iterator[Seen]:
    """The metric itself."""
    for row, value in _chosen(given, rows):
        yield _seen(row, value, _spread_of(row, given), _flags_of(row, given))


def _slope(given: Any, rows: Callable[[str], list[Row]]) -> Iterator[Seen]:
    """The exponent of seqlen in the metric of a sequence, by least squares over lengths, three or more."""
    keys = [name for name in SAME if name not in ("batch", "seqlen_q", "seqlen_k")]
    groups: dict[Any, list[tuple[Row, float]]] = {}
    for row, value in _chosen(given, rows):
        if value > 0 and row["seqlen_q"]:
            groups.setdefault(_key(row, keys), []).append((row, value / row["batch"]))
    for group in groups.values():
        points = [(math.log(row["seqlen_q"]), math.log(value)) for row, value in group]
        if len(points) >= 3:
            mid_x, mid_y = (sum(side) / len(points) for side in zip(*points, strict=True))
            run = sum((x - mid_x) ** 2 for x, _ in points)
            rise = sum((x - mid_x) * (y - mid_y) for x, y in points)
            flags = {flag for row, _ in group for flag in _flags_of(row, given)}
            yield _seen({**group[0][0], "batch": None, "seqlen_q": "…"}, rise / run, flags=flags)


def _ran(given: Any, rows: Callable[[str], list[Row]]) -> Iterator[Seen]:
    """1 for each row that ran, 0 for one that did not; nothing of one that was not begun."""
    for row, _ in _chosen({**given, "metric": []}, rows):
        if not unstarted.is_one(row):
            yield _seen(row, float(row["status"] == "ok"))


def _device(given: Any, _: Callable[[str], list[Row]]) -> Iterator[Seen]:
    """A field of one card's data sheet over another's; of ``…_per_sm…`` all SMs together."""
    of, to = (devices.find(given[side]) for side in ("of", "to"))
    each = [
        getattr(card, given["field"]) * (card.num_sms if "_per_sm" in given["field"] else 1)
        for card in (of, to)
    ]
    yield Seen(cell=f"{of.name} over {to.name}", value=each[0] / each[1])


def _product(given: Any, _: Callable[[str], list[Row]]) -> Iterator[Seen]:
    """Arithmetic: the factors' product."""
    yield Seen(cell=" · ".join(f"{x:g}" for x in given), value=float(math.prod(given)))


_TIMED = {"time_s", "flops_per_s", "peak_fraction"}

_KINDS: Mapping[str, Callable[[Any, Callable[[str], list[Row]]], Iterator[Seen]]] = {
    "ratio": _ratio, "difference": _difference, "value": _value, "slope": _slope, "ran": _ran,
    "device": _device, "product": _product,
}  # fmt: skip


def _key(row: Row, names: Iterable[str]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in names)


_PARTS = {
    "model": "", "mode": "", "implementation": "", "pass": "", "batch": "b", "num_heads": "h", "seqlen": "n",
    "seqlen_q": "n", "kv_len": "kv", "head_dim": "d", "dtype": "", "options": "", "arch": "",
}  # fmt: skip
"""What names a cell, and the letter before it."""


def _seen(row: Row, value: float, spread: float = 0.0, flags: Iterable[str] = ()) -> Seen:
    said = [f"{short}{row[name]}" for name, short in _PARTS.items() if row.get(name) not in (None, "")]
    name = " ".join([*said, *(["causal"] if row.get("causal") else [])])
    return Seen(
        cell=name, value=value, spread=spread, card=row.get("device") or "", flags=tuple(sorted(flags))
    )
