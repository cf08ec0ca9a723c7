"""Where the rows of sequences are in pages, and copies of those rows, one sequence after the other.

A contiguous cache is pages as long as it, one for each sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashbench.kernels import _drop_in_checks as checks
from flashbench.kernels._drop_in_probabilities import Packed

_PAGES = "(pages, page_size, heads, head_dim)"
_INT32 = 2**31


def places(table: Tensor, size: int, at: Tensor, there: Tensor, sequences: Tensor) -> tuple[Tensor, Tensor]:
    """(page, row in it) of row ``at`` of each of the sequences; of rows that are not there the first of all.

    All of them int64 and of one shape; table: int32 (sequences, pages of each).
    """
    at = torch.where(there, at, 0)
    pages = table[sequences, at // size].long()
    return torch.where(there, pages, 0), at % size


def rows_of(table: Tensor, size: int, first: Tensor, count: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """The same (sequences, span) of each sequence's rows from ``first`` on, ``count`` of which are there."""
    steps = torch.arange(span, device=table.device)
    sequences = torch.arange(table.shape[0], device=table.device)[:, None].expand(-1, span)
    return places(table, size, first.long()[:, None] + steps, steps < count[:, None], sequences)


def one_by_one(pages: Tensor) -> Tensor | None:
    """(rows, 1, heads, head_dim) of pages, where they lie so: pages of one row each, by int32 numbers."""
    count, size = pages.shape[:2]
    if (count > 1 and pages.stride(0) != size * pages.stride(1)) or count * size >= _INT32:
        return None
    return pages.flatten(0, 1)[:, None]


def of_sequences(k: Tensor, v: Tensor, table: Tensor, packed: Packed) -> tuple[Tensor, Tensor, Packed]:
    """k, v and lengths of packed sequences whose k and v are in pages.

    The rows are copied, as many as there can be: how many there are the device alone knows. Those behind the
    last sequence's end are one sequence more, without queries.
    """
    checks.check_dimensions(4, _PAGES, k=k, v=v)
    sequences = packed.cu_k.shape[0] - 1
    checks.check_table(table, sequences)
    checks.check_devices("k", k=k, v=v, block_table=table, cu_seqlens_k=packed.cu_k)
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} in pages differ; accepted: in head_dim alone"
        )
    size, total = k.shape[1], sequences * packed.longest_k if k.shape[0] * k.shape[1] * table.shape[1] else 0
    starts = packed.cu_k
    if k.device.type == "cpu" and not torch.compiler.is_compiling():
        checks.check_starts("cu_seqlens_k", starts, int(starts[-1]), packed.longest_k, "max_seqlen_k")
        held = starts.diff()
        if bool((held > table.shape[1] * size).any()):
            raise ValueError(
                f"cu_seqlens_k {starts.tolist()} is out of range; block_table has room for"
                f" {table.shape[1] * size} keys of a sequence"
            )
        checks.check_pages("block_table", table, held, size, k.shape[0])
    rows = torch.arange(total, dtype=torch.int32, device=k.device)
    whose = torch.searchsorted(starts[1:].contiguous(), rows, right=True).clamp(max=max(0, sequences - 1))
    there = rows < starts[-1]
    page, row = places(table, max(1, size), (rows - starts[whose]).long(), there, whose)
    ends = torch.cat((starts, starts.new_full((1,), total)))
    queries = torch.cat((packed.cu_q, packed.cu_q[-1:]))
    return k[page, row], v[page, row], Packed(queries, ends, packed.longest_q, total)
