"""Cells across cards → rows: the model's word, what the ranks measured, and why one did not run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flashbench import devices, iomodel
from flashbench._iomodel import across
from flashbench.devices import Device
from flashbench.errors import SpecError
from flashbench.kernels import Target
from flashbench.problem import Cell
from flashbench.ring import torch_cp
from flashbench.ring.group import CellFailed, Group, RankLost

IMPLEMENTATIONS = (*across.ALGORITHMS, torch_cp.NAME)
"""What ``--impls`` knows: the bundled algorithms and the peer."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What every cell of a run shares. device_type: cuda or cpu; limit_s: for one cell."""

    ranks: int
    device_type: str
    link: str = ""
    seed: int = 0
    limit_s: float = 600.0
    timed: bool = True


def measured(cells: Sequence[Cell], asked: Asked, target: Target) -> Iterator[dict[str, Any]]:
    """The row of each cell in turn. A cell in which a rank raises costs a new group; others go on.

    Raises RankLost, after the row that says so and a ``skipped`` one for each cell after it, where a rank
    died or fell silent.
    """
    card = None
    if target.type == "cuda":
        card = devices.match(target.name, sms=target.num_sms, memory_bytes=target.total_bytes)
    group: Group | None = None
    gone: RankLost | None = None
    try:
        for cell in cells:
            row = modelled(cell, asked.ranks, card, asked.link) | {"device": target.name}
            if gone is not None:
                yield row | {"status": "skipped", "reason": f"the run ended before it: {gone}"}
                continue
            if reason := why_unsupported(cell, asked.ranks, asked.device_type):
                yield row | {"status": "unsupported", "reason": reason}
                continue
            try:
                group = group or Group(asked.ranks, asked.device_type, seed=asked.seed, limit_s=asked.limit_s)
                yield row | joined(cell, group.run(cell, timed=asked.timed))
            except CellFailed as failure:
                group = None
                yield row | {"status": _status(str(failure)), "reason": str(failure)}
            except RankLost as lost:
                gone = lost
                yield row | {"status": "failed", "reason": str(lost)}
    finally:
        if group is not None:
            group.close()
    if gone is not None:
        raise gone


def _status(reason: str) -> str:
    return "oom" if "OutOfMemory" in reason or "out of memory" in reason else "failed"


def joined(cell: Cell, replies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of what all ranks said: rank 0's, the bytes of the one that sent most, the first complaint."""
    row = {"status": "ok", **replies[0]}
    if bad := [reply for reply in replies if reply.get("status", "ok") != "ok"]:
        row |= {"status": bad[0]["status"], "reason": bad[0]["reason"]}
    sent = [reply["sent_bytes"] for reply in replies if "sent_bytes" in reply]
    if sent:
        row |= {"sent_bytes": max(sent), "sent_by_rank": sent}
    if sent and row.get("link_s"):
        row["link_bytes_per_s"] = max(sent) / row["link_s"]
    if "time_s" in row:
        p = cell.problem
        row |= {
            "flops_per_s": iomodel.flops(p, cell.pass_) / row["time_s"],
            "tokens_per_s": p.batch * p.seqlen_q / row["time_s"],
        }
    return row


def why_unsupported(cell: Cell, ranks: int, device_type: str) -> str | None:
    """Why the cell is not run, one sentence, or None."""
    p = cell.problem
    if reason := across.why_unsupported(cell.implementation, p, ranks):
        return reason
    if cell.implementation == torch_cp.NAME:
        return torch_cp.why_unsupported(p, ranks, device_type)
    return None


def why_not_modelled(cell: Cell) -> str | None:
    """Why the model says nothing of the cell's algorithm, one sentence, or None."""
    if cell.implementation in across.ALGORITHMS:
        return None
    return f"{cell.implementation} is another package's: measured, and not modelled"


def modelled(cell: Cell, ranks: int, card: Device | None, link: str = "") -> dict[str, Any]:
    """The cell's fields and what the model says of it; without a card of links no seconds."""
    p = cell.problem
    row: dict[str, Any] = {
        "implementation": cell.implementation, "pass": cell.pass_, "world_size": ranks, "dtype": p.dtype,
        "causal": p.causal, "batch": p.batch, "num_heads": p.num_heads, "num_kv_heads": p.num_kv_heads,
        "seqlen": p.seqlen_q, "head_dim": p.head_dim, "head_dim_v": p.head_dim_v,
    }  # fmt: skip
    if cell.implementation not in across.ALGORITHMS or across.why_unsupported(cell.implementation, p, ranks):
        return row
    try:
        found = across.across(cell.implementation, p, cell.pass_, ranks=ranks, device=card, link=link)
    except SpecError:
        if link:
            raise
        found = across.across(cell.implementation, p, cell.pass_, ranks=ranks)
    return row | {
        "link": found.link, "link_bytes": found.total_bytes, "link_tensors": dict(found.link_bytes),
        "model_compute_s": found.compute_s, "model_link_s": found.link_s, "model_time_s": found.time_s,
        "model_one_card_s": found.one_card_s, "model_exposed_s": found.exposed_s,
        "model_efficiency": found.efficiency, "hidden": found.hidden, "hidden_from": found.hidden_from,
    }  # fmt: skip
