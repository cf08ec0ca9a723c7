"""FlashAttention-3's backward of head dims over 128 for sm_90: launches. Import through ``_triton.load``.

Three kernels: rows' LSE and delta; dK and dV (_hopper_wide_dkdv.py); dQ (_hopper_wide_dq.py), which computes
S and dP once more. Nothing is added in an order that could change. Made ready once per layout, as the
forward (``Plan``).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flashbench.hopper_configs import ROWS, WIDE_BLOCK_Q, pieces
from flashbench.kernels import _hopper_schedule as schedule
from flashbench.kernels import _hopper_wide_dkdv as of_keys
from flashbench.kernels import _hopper_wide_dq as of_queries
from flashbench.kernels._call import Call, Launch
from flashbench.kernels._flash_v3_backward import gradient, prepare_launch
from flashbench.kernels._hopper_plan import Laid, Made, PlannedLaunch, bound, descriptor, loadable, programs
from flashbench.kernels._launches import Backward, Saved

WIDTH = 256
"""Columns of a tile in shared memory."""


def backward_launches(saved: Saved, call: Call) -> Backward:
    """What fills (dq, dk, dv), of head dims up to 256 that are multiples of 8, none of the tensors empty."""
    q, k, v, do = (loadable(x) for x in (saved.q, saved.k, saved.v, saved.do))
    dq, dk, dv = gradient(q), gradient(k), gradient(v)
    alone = saved.dlse is None  # then the probability of an only key is 1, whatever its score
    laid = tuple(Laid(x.shape, x.stride()) for x in (q, do, k, v, dq, dk, dv))
    plan = planned(laid, q.dtype, q.device, call.causal, alone)
    lse_2, delta = torch.empty(2, plan.tiles * ROWS, dtype=torch.float32, device=q.device)
    unit = call.scale * math.log2(math.e)
    of_dk = 0.0 if k.shape[2] == 1 and alone else call.scale
    main = plan.dkdv.launch((q, do, k, v, lse_2, delta, dk, dv), (unit, of_dk))
    last = plan.dq.launch((q, do, k, v, lse_2, delta, dq), (unit, call.scale))
    prepare = prepare_launch(saved, do, plan.rows, ROWS, (lse_2, delta))
    return Backward(dq=dq, dk=dk, dv=dv, launches=(prepare, main, last))


@lru_cache(maxsize=256)
def planned(
    laid: tuple[Laid, ...], dtype: torch.dtype, device: torch.device, causal: bool, alone: bool
) -> Plan:
    """The plan for q, do, k, v, dq, dk and dv laid out so."""
    return Plan(laid, dtype, device, causal, alone)


class Plan:
    """What backward launches over tensors of one layout share: those of two kernels.

    tiles: of 64 queries, of all heads. rows: heads of queries, their rows, tiles of one.
    """

    def __init__(
        self, laid: tuple[Laid, ...], dtype: torch.dtype, device: torch.device, causal: bool, alone: bool
    ) -> None:
        q, do, k, v, dq, dk, dv = laid
        (batch, heads, seqlen_q, dim), (_, kv_heads, seqlen_k, dim_v) = q.shape, v.shape
        group, row_bytes = heads // kv_heads, (dim + dim_v) * dtype.itemsize
        by_key = schedule.KeyShape(
            heads=batch * kv_heads, group=group, seqlen_q=seqlen_q, seqlen_k=seqlen_k, block_m=ROWS,
            block_n=ROWS, causal=causal, kv_bytes=seqlen_q * group * row_bytes,
        )  # fmt: skip
        by_query = schedule.Shape(
            heads=batch * heads, group=group, seqlen_q=seqlen_q, seqlen_k=seqlen_k, block_m=WIDE_BLOCK_Q,
            block_n=ROWS, causal=causal, kv_bytes=seqlen_k * row_bytes,
        )  # fmt: skip
        self.rows = (heads, seqlen_q, -(-seqlen_q // ROWS))
        self.tiles = batch * heads * self.rows[2]
        row = descriptor(Laid((self.tiles * ROWS,), (1,)), [ROWS], torch.float32)
        of_q, of_do, of_k, of_v, of_dq, of_dk, of_dv = (
            descriptor(x, [1, 1, ROWS, WIDTH], dtype) for x in (q, do, k, v, dq, dk, dv)
        )
        (d0, d1), (e0, e1) = pieces(dim), pieces(dim_v)
        columns = {"D0": d0, "D1": d1, "E0": e0, "E1": e1, "CAUSAL": causal}
        registers = {"REGISTERS": 240, "PRODUCER_REGISTERS": 24}
        made = Made({**columns, **registers})
        self.dkdv = Half(
            "v3_dkdv", of_keys.backward_dkdv, made, schedule.table(by_key, programs(device)),
            (of_q, of_do, of_k, of_v, row, row, of_dk, of_dv), device,
            (by_key.tiles, kv_heads, group, seqlen_q, seqlen_k),
        )  # fmt: skip
        made = Made({**columns, "ALONE": alone, **registers})
        self.dq = Half(
            "v3_dq", of_queries.backward_dq, made, schedule.table(by_query, programs(device)),
            (of_q, of_do, of_k, of_v, None, None, of_dq), device,
            (by_query.tiles, heads, group, seqlen_q, seqlen_k),
        )  # fmt: skip


class Half:
    """One of the two kernels: what its launches share."""

    def __init__(
        self, name: str, kernel: Any, made: Made, walk: tuple[tuple[int, ...], ...],
        descriptors: tuple[Any, ...], device: torch.device, numbers: tuple[int, ...],
    ) -> None:  # fmt: skip
        self.name, self.kernel, self.made = name, kernel, made
        self.descriptors, self.numbers = descriptors, numbers
        self.programs = len(walk[0])
        self.table = torch.tensor(walk, dtype=torch.int32, device=device)

    def launch(self, tensors: tuple[Tensor, ...], scales: tuple[float, float]) -> Launch:
        """Over tensors in the descriptors' order; one without a descriptor is handed on as it is."""
        boxes = (
            x if box is None else own
            for x, box, own in zip(tensors, self.descriptors, bound(self.descriptors, tensors), strict=True)
        )
        args = (*boxes, self.table, *self.numbers, *scales)
        return PlannedLaunch(self.name, self.kernel, self.programs, args, self.made.options, self.made)
