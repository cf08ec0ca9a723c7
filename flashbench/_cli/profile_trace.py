"""``flashbench profile --trace``: bundled Triton kernels in the interpreter, traced beside modelled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flashbench.errors import GateError, UnavailableError

if TYPE_CHECKING:
    from flashbench.console import Column
    from flashbench.problem import Cell

DEFAULTS: Mapping[str, str] = {
    "seqlens": "65,129,200", "head_dims": "40", "dtypes": "fp16,fp32", "causal": "both",
    "passes": "fwd,bwd", "batch": "1", "heads": "2", "kv_heads": "1", "impls": "flash",
}  # fmt: skip
"""As it would be typed: ragged lengths, both masks, shared K/V heads; some 15 s on 2 cores."""

KINDS = ("read", "write", "atomic")


def show(
    cells: Sequence[Cell], *, config: Mapping[str, Mapping[str, Any]], limit: int, seed: int,
    json: bool, csv: bool, quiet: bool,
) -> None:  # fmt: skip
    """Trace the cells and print a row each; config: tiles by cell key, where not the interpreter's.

    Raises GateError where a kernel moves or computes other than its model says, or raises; UnavailableError
    where nothing could be traced.
    """
    from flashbench import console, environment, tracing
    from flashbench._cli.interrupt import interrupted, interruptible

    environment.need_torch()
    found: list[tuple[Cell, dict[str, Any]]] = []
    with interruptible() as stop, console.progress(len(cells), quiet=quiet) as tick:
        for index, cell in enumerate(cells):
            tick(index, cell.key)
            traced = tracing.trace_cell(cell, config.get(cell.key), limit=limit, seed=seed)
            found.append((cell, traced))
    rows = [_row(cell, traced) for cell, traced in found]
    if json:
        console.show_json([{"cell": cell.key, **traced} for cell, traced in found])
    else:
        console.show_table(
            _columns(), rows, csv=csv, title="Bytes traced in Triton's interpreter, and modelled"
        )
    if stop():
        raise interrupted(f"{len(found)} of {len(cells)} cells were traced")
    _verdict(found, quiet=quiet)


def _verdict(found: Sequence[tuple[Cell, Mapping[str, Any]]], *, quiet: bool) -> None:
    from flashbench import console, units

    left_out = _reasons(row["reason"] for _, row in found if "reason" in row)
    traced = [(cell, row) for cell, row in found if "reason" not in row]
    if not traced:
        raise UnavailableError(f"--trace: nothing was traced: {'; '.join(left_out)}")
    wrong = [(cell, why_wrong(row)) for cell, row in traced if why_wrong(row)]
    if not quiet:
        for reason, count in left_out.items():
            console.note(f"{units.many(count, 'cell')} not traced: {reason}")
        without = sum("difference_bytes" in row and row["difference_bytes"] is None for _, row in traced)
        alone = f"; without a model to differ from: {without}" if without else ""
        console.note(
            f"{units.many(len(traced), 'cell')} traced, of them not as modelled: {len(wrong)}{alone}"
        )
    if wrong:
        cell, text = wrong[0]
        among = units.many(len(traced), "cell")
        raise GateError(
            f"not as their model says: {len(wrong)} of {among}, first: {cell.key}: {text}",
            hint="'flashbench profile --trace --json' shows it tensor by tensor",
        )


def _reasons(given: Iterable[str]) -> dict[str, int]:
    """Each reason once, with how many cells have it.

    Those that differ by a number at their start only (``48 tile visits …``) are one, with the largest.
    """
    alike: dict[str, list[str]] = {}
    for reason in sorted(given):
        alike.setdefault(reason.lstrip("0123456789"), []).append(reason)
    return {_largest(reasons): len(reasons) for reasons in alike.values()}


def _largest(reasons: Sequence[str]) -> str:
    if len(set(reasons)) == 1:
        return reasons[0]
    return "up to " + max(reasons, key=lambda reason: int(reason.split(" ")[0]))


def why_wrong(row: Mapping[str, Any]) -> str | None:
    """What is not as modelled in a traced cell (one without a reason), or None."""
    if "error" in row:
        return f"its kernels raise {row['error']}"
    if row["difference_bytes"]:
        return f"{row['difference_bytes']} B apart ({_where(row)})"
    if row["difference_flops"]:
        return f"{row['difference_flops']} FLOPs apart"
    return None


def _where(row: Mapping[str, Any]) -> str:
    """The first tensor that differs, such as ``dq reads k 4096 B, modelled 2048 B``."""
    for kernel in row["kernels"]:
        for tensor in kernel["tensors"]:
            for kind in KINDS:
                traced, modelled = tensor[f"{kind}_bytes"], tensor[f"modelled_{kind}_bytes"]
                if traced != modelled:
                    name = kernel["kernel"] or f"no kernel for {kernel['step']}"
                    return f"{name}: {kind} of {tensor['tensor']} {traced} B, modelled {modelled} B"
    return "no tensor"


def _row(cell: Cell, traced: Mapping[str, Any]) -> dict[str, Any]:
    total = traced.get("total", {})
    kernels = traced.get("kernels", [])
    share = max((kernel["masked_share"] for kernel in kernels), default=None)
    return {
        "cell": cell.key, **total, "difference_bytes": traced.get("difference_bytes"),
        "largest_masked_share": share, "reason": traced.get("reason") or traced.get("error"),
    }  # fmt: skip


def _columns() -> list[Column]:
    from flashbench.console import Column

    def number(name: str, header: str) -> Column:
        return Column(name=name, header=header, format=lambda x: f"{x:,}", justify="right")

    return [
        Column(name="cell", header="cell"),
        *(
            number(f"{prefix}{kind}_bytes", f"{kind}, {verb} (B)")
            for kind in ("read", "write")
            for prefix, verb in (("", "traced"), ("modelled_", "modelled"))
        ),
        number("atomic_bytes", "atomic (B)"),
        number("difference_bytes", "difference (B)"),
        number("flops", "FLOPs"), number("exps", "exps"),
        Column(
            name="largest_masked_share", header="masked lanes", format=lambda x: f"{x:.0%}", justify="right"
        ),
        Column(name="reason", header="why not"),
    ]  # fmt: skip
