"""FlashAttention-3's backward of head dims over 128 for sm_90: launches. Import through ``_triton.load``.

Three kernels: rows' LSE and delta; dK and dV (_hopper_wide_dkdv.py); dQ (_hopper_wide_dq.py), which computes
S and dP once more. Nothing is added in an order that could change. All are made ready once per layout, as
the forward (``Plan``).
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import starmap
from typing import Any

import torch

from flashbench.hopper_configs import ROWS, WIDE_BLOCK_Q, pieces
from flashbench.kernels import _hopper_schedule as schedule
from flashbench.kernels import _hopper_wide_dkdv as dkdv_kernels
from flashbench.kernels import _hopper_wide_dq as dq_kernels
from flashbench.kernels._call import Call
from flashbench.kernels._flash_v3_backward import gradient, prepare_ready, rows_of
from flashbench.kernels._hopper_plan import Laid, descriptor, loadable, programs
from flashbench.kernels._hopper_ready import Ready
from flashbench.kernels._launches import Backward, Saved

BOX = [1, 1, ROWS, 256]
"""A tile in shared memory."""


def backward_launches(saved: Saved, call: Call) -> Backward:
    """What fills (dq, dk, dv), of head dims up to 256 that are multiples of 8, none of the tensors empty."""
    q, k, v, do = (loadable(x) for x in (saved.q, saved.k, saved.v, saved.do))
    rows = rows_of(saved)
    layout = tuple((x.shape, x.stride()) for x in (q, do, k, v, rows.o))
    plan = planned(layout, (q.dtype, *rows.dtypes), q.device, call.causal)
    dq, dk, dv = plan.dq.empty(q), plan.dk.empty(k), plan.dv.empty(v)
    lse_2, delta = rows.empty(plan.rows)
    unit = call.scale * math.log2(math.e)
    # the probability of an only key is 1, whatever its score
    of_dk = 0.0 if k.shape[2] == 1 and rows.dlse is None else call.scale
    prepare = plan.prepare.launch((rows.o, do, rows.lse, rows.dlse, lse_2, delta, None))
    of_keys = plan.of_keys.launch((q, do, k, v, lse_2, delta, dk, dv), unit, of_dk)
    of_queries = plan.of_queries.launch((q, do, k, v, lse_2, delta, dq), unit, call.scale)
    return Backward(dq=dq, dk=dk, dv=dv, launches=(prepare, of_keys, of_queries))


@lru_cache(maxsize=256)
def planned(
    layout: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], dtypes: tuple[torch.dtype | None, ...],
    device: torch.device, causal: bool,
) -> Plan:  # fmt: skip
    """The plan for q, do, k, v and o laid out so: the shape and the strides of each.

    dtypes: of q and of ``Rows``.
    """
    return Plan(tuple(starmap(Laid, layout)), dtypes, device, causal)


class Plan:
    """The three kernels, made ready for tensors of one layout.

    rows: of all tiles of 64 queries, of all heads. dq, dk, dv: how they lie.
    """

    def __init__(
        self, laid: tuple[Laid, ...], dtypes: tuple[torch.dtype | None, ...], device: torch.device,
        causal: bool,
    ) -> None:  # fmt: skip
        q, do, k, v, o = laid
        dtype, alone = dtypes[0], dtypes[3] is None
        assert dtype is not None
        self.dq, self.dk, self.dv = gradient(q), gradient(k), gradient(v)
        self.prepare = prepare_ready(o, do, ROWS, 0)
        self.rows = self.prepare.programs * ROWS
        (d0, d1), (e0, e1) = pieces(q.shape[3]), pieces(v.shape[3])
        columns = {"D0": d0, "D1": d1, "E0": e0, "E1": e1, "CAUSAL": causal}
        registers = {"REGISTERS": 240, "PRODUCER_REGISTERS": 24}
        row = descriptor(Laid((self.rows,), (1,)), [ROWS], torch.float32)
        inputs = tuple(descriptor(x, BOX, dtype) for x in (q, do, k, v))
        of_dq, of_dk, of_dv = (descriptor(x, BOX, dtype) for x in (self.dq, self.dk, self.dv))
        programs, fixed = walk(q, v, dtype, device, causal, by_key=True)
        self.of_keys = Ready(
            "v3_dkdv", dkdv_kernels.backward_dkdv, programs, (*inputs, row, row, of_dk, of_dv), fixed,
            {**columns, **registers},
        )  # fmt: skip
        programs, fixed = walk(q, v, dtype, device, causal, by_key=False)
        self.of_queries = Ready(
            "v3_dq", dq_kernels.backward_dq, programs, (*inputs, None, None, of_dq), fixed,
            {**columns, "ALONE": alone, **registers},
        )  # fmt: skip


def walk(
    q: Laid, v: Laid, dtype: torch.dtype, device: torch.device, causal: bool, *, by_key: bool
) -> tuple[int, tuple[Any, ...]]:
    """Programs of one of the two kernels; and the schedule on the device, its length and the problem's."""
    (batch, heads, seqlen_q, dim), (_, kv_heads, seqlen_k, dim_v) = q.shape, v.shape
    group, row_bytes = heads // kv_heads, (dim + dim_v) * dtype.itemsize
    shape: schedule.KeyShape | schedule.Shape
    if by_key:
        own = kv_heads
        shape = schedule.KeyShape(
            heads=batch * own, group=group, seqlen_q=seqlen_q, seqlen_k=seqlen_k, block_m=ROWS,
            block_n=ROWS, causal=causal, kv_bytes=seqlen_q * group * row_bytes,
        )  # fmt: skip
    else:
        own = heads
        shape = schedule.Shape(
            heads=batch * own, group=group, seqlen_q=seqlen_q, seqlen_k=seqlen_k, block_m=WIDE_BLOCK_Q,
            block_n=ROWS, causal=causal, kv_bytes=seqlen_k * row_bytes,
        )  # fmt: skip
    rows = schedule.table(shape, programs(device))
    table = torch.tensor(rows, dtype=torch.int32, device=device)
    return len(rows[0]), (table, shape.tiles, own, group, seqlen_q, seqlen_k)
