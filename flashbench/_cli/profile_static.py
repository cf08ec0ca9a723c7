"""``flashbench profile --static``: what the compiler made of the bundled kernels; needs no GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flashbench._cli import options
from flashbench.errors import GateError, SpecError, UnavailableError

if TYPE_CHECKING:
    from flashbench._profilers.occupancy import Limits
    from flashbench._profilers.static import Grid
    from flashbench.console import Column

DEFAULTS = {
    "impls": "flash", "head_dims": "64,128", "dtypes": "bf16", "causal": "both", "passes": "fwd,bwd",
}  # fmt: skip
ARCHES = ((8, 0), (9, 0), (10, 0))
"""Compiled for where neither --arch nor --gpu is given."""


def show(
    *,
    impls: str | None,
    head_dims: str | None,
    dtypes: str | None,
    causal: str | None,
    passes: str | None,
    arches: str | None,
    gpu: str | None,
    json: bool,
    csv: bool,
    quiet: bool,
) -> None:
    """Compile the kernels of the grid and print a row for each; options are as typed, None the default.

    Raises SpecError or UnknownName for a bad value, UnavailableError without Triton, GateError where a
    kernel does not compile.
    """
    options.one_format(json, csv)
    line = {"impls": impls, "head_dims": head_dims, "dtypes": dtypes, "causal": causal, "passes": passes}
    grid, notes = grid_of(options.given(line), arches, gpu)
    from flashbench import console, units
    from flashbench._profilers import static

    reason = static.why_unavailable()
    if reason is not None:
        raise UnavailableError(f"--static: {reason}")
    if not quiet:
        console.note(
            f"compiling {units.many(static.kernel_count(grid), 'kernel')}; Triton's cache keeps them"
        )
    try:
        rows = static.profile(grid)
    except UnavailableError as error:
        raise UnavailableError(f"--static: {error}", error.hint) from None
    if json or csv:
        console.show_table(_raw_columns(rows), rows, json=json, csv=csv)
    else:
        title = f"static profile, Triton {rows[0]['triton_version']}"
        console.show_table(_columns(rows), [row | _made(row) for row in rows], title=title)
        notes += _explanations(rows)
    if not quiet:
        for text in [*notes, *static.summary(rows)]:
            console.note(text)
    _verdict([row for row in rows if row["status"] == static.FAILED], len(rows))


def _verdict(failed: Sequence[Mapping[str, Any]], count: int) -> None:
    """Raise GateError where kernels did not compile, naming the first."""
    from flashbench import environment, units

    if failed:
        environment.need_torch()  # else that is what failed
        row = failed[0]
        mask = "causal" if row["causal"] else "full"
        name = (
            f"{row['implementation']} {row['kernel']} {row['arch']} {row['dtype']} d{row['head_dim']} {mask}"
        )
        reason = " ".join(str(row["reason"]).split())
        raise GateError(
            f"{len(failed)} of {units.many(count, 'kernel')} did not compile, first: {name}: {reason}"
        )


def grid_of(line: Mapping[str, Any], arches: str | None, gpu: str | None = None) -> tuple[Grid, list[str]]:
    """What to compile, and what is to be said of the choice."""
    from flashbench import sweep
    from flashbench._profilers.static import Grid
    from flashbench.kernels._compile import BUNDLED

    typed = sweep.parse(DEFAULTS | dict(line), options.on_line, BUNDLED)
    if "top-left" in typed["causal"]:
        raise SpecError(
            "--causal 'top-left': compiled is one mask of either alignment; accepted: yes, no, both"
        )
    limits, notes = _limits(arches, gpu)
    return Grid(
        implementations=typed["impls"],
        head_dims=typed["head_dims"],
        dtypes=typed["dtypes"],
        causal=typed["causal"],
        passes=tuple(sorted({one for name in typed["passes"] for one in name.split("+")})),
        limits=limits,
    ), notes


def _limits(arches: str | None, gpu: str | None) -> tuple[dict[tuple[int, int], Limits], list[str]]:
    """The limits of each architecture: of the card given for it, else the general ones; and notes."""
    from flashbench._profilers.occupancy import LIMITS
    from flashbench._profilers.static import architecture

    cards = {} if gpu is None else _cards(gpu)
    wanted = tuple(cards) if cards and arches is None else arches_of(arches)
    unused = [f"--gpu {cards[one].name}: is {architecture(one)}, not compiled for"
              for one in cards if one not in wanted]  # fmt: skip
    return {one: cards.get(one) or LIMITS[one] for one in wanted}, unused


def arches_of(text: str | None) -> Sequence[tuple[int, int]]:
    """Compute capabilities of a comma list: sm_90; sm90 and sm_90a mean the same. Without one, the usual."""
    if text is None:
        return ARCHES
    from flashbench import units
    from flashbench._profilers.occupancy import LIMITS
    from flashbench._profilers.static import architecture

    known = {architecture(one): one for one in LIMITS}
    plain = ",".join(re.sub(r"^\s*sm_?(\d+)a?\s*$", r"sm_\1", item) for item in text.split(","))
    return [known[name] for name in units.parse_names(plain, "--arch", known)]


def _cards(text: str) -> dict[tuple[int, int], Limits]:
    """Limits of the cards of --gpu. Raises SpecError where one is not of this kind, or two are alike."""
    from flashbench._cli import gpu as gpu_
    from flashbench._profilers.occupancy import LIMITS, limits_of
    from flashbench._profilers.static import architecture

    found: dict[tuple[int, int], Limits] = {}
    for card in gpu_.choose(text):
        capability = card.capability
        if capability not in LIMITS or capability is None:
            known = ", ".join(map(architecture, LIMITS))
            raise SpecError(f"--gpu {card.name!r}: is {card.arch}; accepted with --static: a card of {known}")
        if capability in found:
            raise SpecError(
                f"--gpu {card.name!r}: {found[capability].name} is {card.arch} too;"
                " accepted with --static: one card of each architecture"
            )
        found[capability] = limits_of(card)
    return found


def _made(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a person reads in the place of several columns."""
    if row["instructions"] is None:
        return {"tile": _tile(row)}
    stored, loaded = row["spill_stored_bytes_per_thread"], row["spill_loaded_bytes_per_thread"]
    tensor = {name: row[f"{name}_instructions"] for name in ("wgmma", "mma", "tcgen05")}
    copies = {"TMA": row["tma_instructions"], "cp.async": row["cp_async_instructions"]}
    return {
        "tile": _tile(row),
        "spills": f"{stored}+{loaded}" if stored or loaded else "0",
        "tensor": ", ".join(f"{number} {name}" for name, number in tensor.items() if number) or "0",
        "copies": ", ".join(f"{number} {name}" for name, number in copies.items() if number) or "0",
        "shared_bytes": row["static_shared_bytes"] + row["dynamic_shared_bytes"],
        "limited": ", ".join(row["occupancy_limited_by"]).replace("_", " "),
    }


def _tile(row: Mapping[str, Any]) -> str | None:
    rows, keys = row["block_q"], row["block_k"]
    return None if rows is None else f"{rows}x{keys}" if keys else str(rows)


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    from flashbench.console import Column

    def number(name: str, header: str, format_: Any = str) -> Column:
        return Column(name=name, header=header, format=format_, justify="right")

    columns = [
        Column(name="arch", header="arch"),
        Column(name="implementation", header="implementation"), Column(name="kernel", header="kernel"),
        Column(name="dtype", header="dtype"), number("head_dim", "d"),
        Column(name="causal", header="causal", format=lambda value: "yes" if value else "no"),
        Column(name="tile", header="tile q x k"), number("num_warps", "warps"),
        number("num_stages", "stages"), number("registers_per_thread", "registers"),
        number("spills", "spilled B"), number("shared_bytes", "shared B", "{:,}".format),
        number("tensor", "tensor core"), number("copies", "copies"),
        number("ex2_instructions", "ex2"), number("barrier_instructions", "barriers"),
        number("atomic_instructions", "atomics"), number("instructions", "instructions", "{:,}".format),
        number("code_bytes", "code B", "{:,}".format), number("blocks_per_sm", "blocks/SM"),
        number("occupancy_percent", "occupancy", "{:.1f}%".format),
        Column(name="limited", header="limited by"), Column(name="reason", header="reason"),
    ]  # fmt: skip
    hidden = set() if any(row["reason"] for row in rows) else {"reason"}
    return [column for column in columns if column.name not in hidden]


def _raw_columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    from flashbench.console import Column

    return [Column(name=name, header=name) for name in rows[0]]


def _explanations(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    cards: dict[str, dict[str, None]] = {}
    for row in rows:
        cards.setdefault(row["limits_source"], {})[row["limits_of"]] = None
    sources = [f"{', '.join(names)} ({source})" for source, names in cards.items()]
    return [
        "counts are of instructions in the code, not of executions; spilled B: stored+loaded per thread by"
        " the code as written; --json and --csv have every field",
        f"occupancy: resident warps over the most that an SM holds, with the limits of {'; '.join(sources)}",
    ]
