"""``flashbench io-model --paper``: the papers' forms, bounds and crossovers, in elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flashbench._cli.io_notes import NO_LIMITS

if TYPE_CHECKING:
    from flashbench._cli.io_request import Request


def show(request: Request, *, json: bool, csv: bool, quiet: bool) -> None:
    """The papers' view: a row per problem, in elements per query head."""
    from flashbench import console
    from flashbench.console import Column
    from flashbench.iomodel import paper_view

    rows = []
    for problem in request.problems:
        for choice in request.choices:
            view = paper_view(problem, choice.sram_bytes or 1)
            rows.append({
                "seqlen_q": problem.seqlen_q, "seqlen_k": problem.seqlen_k, "head_dim": problem.head_dim,
                "dtype": problem.dtype, "causal": problem.causal, "sram_bytes": choice.sram_bytes,
                "sram_elements": view.sram_elements, "block_q": view.block_q, "block_k": view.block_k,
                "passes": view.passes, "standard_elements": view.standard,
                "flash_v1_elements": view.flash_v1, "flash_v2_elements": view.flash_v2,
                "paper_v1_elements": view.paper_v1, "bound_elements": view.bound, "regime": view.regime,
                "covered": view.covered, "crossover_v1_elements": view.crossovers["flash-v1"],
                "limit_v1_elements": view.limits.get("flash-v1"),
                "crossover_v2_elements": view.crossovers["flash-v2"],
                "limit_v2_elements": view.limits.get("flash-v2"),
            })  # fmt: skip
    headers = {
        "seqlen_q": "N", "seqlen_k": "Nk", "head_dim": "d", "sram_bytes": "M (bytes)", "sram_elements": "M",
        "block_q": "B_r", "block_k": "B_c", "passes": "T_c", "standard_elements": "4N^2+4Nd",
        "flash_v1_elements": "12N^2d^2/M+2Nd", "flash_v2_elements": "4N^2d^2/M+2Nd",
        "paper_v1_elements": "paper's v1", "bound_elements": "bound", "covered": "d<=M<=Nd",
        "crossover_v1_elements": "v1 from M", "limit_v1_elements": "3d^2",
        "crossover_v2_elements": "v2 from M", "limit_v2_elements": "d^2",
    }  # fmt: skip
    columns = [
        Column(name=name, header=headers.get(name, name), format=_number, justify="right") for name in rows[0]
    ]
    console.show_table(columns, rows, json=json, csv=csv, title="" if json or csv else "accesses in elements")
    if not quiet:
        for text in (*_PAPER_NOTES, *_not_the_papers(rows)):
            console.note(text)


def _not_the_papers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the papers' forms take for granted and some row does not have."""
    if all(row["limit_v1_elements"] is not None for row in rows):
        return []
    found = [f"no limit beside some rows: {NO_LIMITS}; v1, v2 from M are exact there too"]
    if any(row["seqlen_q"] != row["seqlen_k"] for row in rows):
        found.append(
            "the formulas assume Nq = Nk: where Nq differs from Nk (a decode step, say) they are evaluated"
            " with Nq Nk for N^2 and Nq + Nk for 2N; no theorem of the papers covers them"
        )
    if any(row["seqlen_q"] == row["seqlen_k"] for row in rows if row["limit_v1_elements"] is None):
        found.append(
            "a mask, a window, dropout and a dv beside d are in v1, v2 from M only: the formulas are without"
        )
    return found


_PAPER_NOTES = (
    "elements per query head of one forward; M in elements. 4N^2+4Nd is Theta(Nd+N^2), 12N^2d^2/M+2Nd and"
    " 4N^2d^2/M+2Nd are Theta(N^2 d^2/M) with the constants of the algorithms for long sequences; paper's v1:"
    " 2Nd + T_c(3Nd+4N), with l and m as the paper counts them (FlashAttention, arXiv:2205.14135, Theorem 2)",
    "bound: min(N^2 d^2/M, N^2 d/sqrt(M)), up to a constant, the switch at M = d^2 (Saha and Ye 2024,"
    " arXiv:2402.07443)",
    "v1, v2 from M: the least M from which the exact model requests fewer bytes than standard, found by"
    " bisection; 3d^2 and d^2 are their limits for long unmasked sequences without row statistics",
)


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else "-" if value is None else str(value)
