"""FlashAttention-3's backward for sm_90: launches. Import through ``_triton.load``.

Three kernels: rows' LSE and delta, and dQ's accumulator cleared; dK, dV and the sum of dQ
(_hopper_backward.py); dQ converted. The deterministic form leaves dQ to flash-v2's kernel, which computes S
and dP once more. All are made ready once per layout, as the forward (``Plan``).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from itertools import starmap
from typing import NamedTuple

import torch
from torch import Tensor

from flashbench import hopper_configs
from flashbench.hopper_configs import KEYS, ROWS, BackwardTiles
from flashbench.kernels import _flash_v2 as flash_v2
from flashbench.kernels import _hopper_backward as kernels
from flashbench.kernels import _hopper_gradient_kernels as rows_kernels
from flashbench.kernels import _hopper_schedule as schedule
from flashbench.kernels._call import Call
from flashbench.kernels._hopper_plan import Laid, descriptor, loadable, output, programs
from flashbench.kernels._hopper_ready import Ready
from flashbench.kernels._launches import Backward, Saved
from flashbench.kernels._layout import unit_stride

LINE = 32
"""fp32 of a line of dQ's accumulator."""
WIDEST = 128
"""Columns that the rows' kernel takes at once."""


def backward_launches(
    saved: Saved, call: Call, *, deterministic: bool = False, tiles: BackwardTiles | None = None
) -> Backward:
    """What fills (dq, dk, dv), of head dims up to 128 that are multiples of 8, none of the tensors empty.

    call: causal, scale and, for flash-v2's kernel of dq, configs. Unless deterministic, the last bits of dq
    differ from run to run, as additions by TMA have no order.
    """
    q, k, v, do = (loadable(x) for x in (saved.q, saved.k, saved.v, saved.do))
    rows = rows_of(saved)
    layout = tuple((x.shape, x.stride()) for x in (q, do, k, v, rows.o))
    plan = planned(layout, (q.dtype, *rows.dtypes), q.device, call.causal, deterministic, tiles)
    dk, dv, lse_2, delta = plan.dk.empty(k), plan.dv.empty(v), *rows.empty(plan.rows)
    acc = None if deterministic else torch.empty(plan.lines, LINE, dtype=torch.float32, device=q.device)
    prepare = plan.prepare.launch((rows.o, do, rows.lse, rows.dlse, lse_2, delta, acc))
    # the probability of an only key is 1, whatever its score
    of_dk = 0.0 if k.shape[2] == 1 and rows.dlse is None else call.scale
    # without an accumulator an address that nothing is added to
    tensors = q, do, k, v, lse_2, delta, lse_2 if acc is None else acc, dk, dv
    main = plan.main.launch(tensors, call.scale * math.log2(math.e), of_dk)
    if acc is None:
        work = flash_v2.backward_launches(replace(saved, q=q, k=k, v=v, o=rows.o, do=do), call)
        of_dq = (one for one in work.launches if one.name != "dkdv")
        return replace(work, dk=dk, dv=dv, launches=(prepare, main, *of_dq))
    dq = plan.dq.empty(q)
    convert = plan.convert.launch((acc, dq), call.scale)
    return Backward(dq=dq, dk=dk, dv=dv, launches=(prepare, main, convert))


class Rows(NamedTuple):
    """What a backward knows of queries beside q and do, as the kernel that prepares it takes them."""

    o: Tensor
    lse: Tensor
    dlse: Tensor | None

    @property
    def dtypes(self) -> tuple[torch.dtype | None, ...]:
        """Of each, None without a gradient of lse."""
        return self.o.dtype, self.lse.dtype, None if self.dlse is None else self.dlse.dtype

    def empty(self, count: int) -> tuple[Tensor, Tensor]:
        """LSE in powers of two and delta, of so many rows, to fill."""
        lse_2, delta = torch.empty(2, count, dtype=torch.float32, device=self.o.device)
        return lse_2, delta


def rows_of(saved: Saved) -> Rows:
    """Of what was saved."""
    return Rows(unit_stride(saved.o), saved.lse, None if saved.dlse is None else saved.dlse.contiguous())


def prepare_ready(o: Laid, do: Laid, block_q: int, width: int) -> Ready:
    """What fills LSE in powers of two and delta, and clears dQ's accumulator of so many columns, if any.

    It takes o, do, lse, its gradient or None, lse_2, delta, and the accumulator or None.
    """
    batch, heads, seqlen_q, dim_v = o.shape
    per_head = -(-seqlen_q // block_q)
    constants = {
        "BLOCK_M": block_q, "DIM": width, "DIM_V": dim_v, "WIDEST": WIDEST,
        "WIDE": any(KEYS * x.strides[2] >= 2**31 for x in (o, do)),
    }  # fmt: skip
    fixed = *o.strides[:3], *do.strides[:3], heads, seqlen_q, per_head
    tiles = batch * heads * per_head
    return Ready("v3_prepare", rows_kernels.prepare, tiles, (None,) * 7, fixed, constants)


def gradient(x: Laid) -> Laid:
    """How a gradient of what is laid out so lies."""
    return output(x, x.shape[3])


@lru_cache(maxsize=256)
def planned(
    layout: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], dtypes: tuple[torch.dtype | None, ...],
    device: torch.device, causal: bool, deterministic: bool, tiles: BackwardTiles | None,
) -> Plan:  # fmt: skip
    """The plan for q, do, k, v and o laid out so: the shape and the strides of each.

    dtypes: of q and of ``Rows``.
    """
    return Plan(tuple(starmap(Laid, layout)), dtypes, device, causal, deterministic, tiles)


class Plan:
    """The three kernels, made ready for tensors of one layout.

    rows: of all tiles of queries, of all heads. lines: of dQ's accumulator. dq, dk, dv: how they lie.
    """

    def __init__(
        self, laid: tuple[Laid, ...], dtypes: tuple[torch.dtype | None, ...], device: torch.device,
        causal: bool, deterministic: bool, tiles: BackwardTiles | None,
    ) -> None:  # fmt: skip
        q, do, k, v, o = laid
        (heads, seqlen_q, dim), (seqlen_k, dim_v) = q.shape[1:], v.shape[2:]
        config = tiles or hopper_configs.choose_backward(dim, dim_v, causal, seqlen_k)
        block, width = config.block_q, config.width
        per_head = -(-seqlen_q // block)
        count = q.shape[0] * heads * per_head
        self.rows, self.lines = count * block, count * block * width // LINE
        self.dq, self.dk, self.dv = gradient(q), gradient(k), gradient(v)
        self.prepare = prepare_ready(o, do, block, 0 if deterministic else width)
        self.main = self._main(laid, dtypes[0], device, causal, deterministic, config)
        constants = {"BLOCK_M": block, "COLUMNS": dim, "CAUSAL": causal, "ALONE": dtypes[3] is None}
        fixed = *self.dq.strides[:3], heads, seqlen_q, per_head, seqlen_k
        self.convert = Ready("v3_convert", rows_kernels.convert, 2 * count, (None, None), fixed, constants)

    def _main(
        self, laid: tuple[Laid, ...], dtype: torch.dtype | None, device: torch.device, causal: bool,
        deterministic: bool, config: BackwardTiles,
    ) -> Ready:  # fmt: skip
        """What takes q, do, k, v, lse_2, delta, the accumulator, dk and dv."""
        assert dtype is not None
        q, do, k, v, _ = laid
        (batch, heads, seqlen_q, dim), (_, kv_heads, seqlen_k, dim_v) = q.shape, v.shape
        block, width, group = config.block_q, config.width, heads // kv_heads
        shape = schedule.KeyShape(
            heads=batch * kv_heads, group=group, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
            block_m=block, block_n=KEYS, causal=causal,
            kv_bytes=seqlen_q * group * (4 * width + (dim + dim_v) * dtype.itemsize),
        )  # fmt: skip
        walk = schedule.table(shape, programs(device))
        table = torch.tensor(walk, dtype=torch.int32, device=device)
        row, acc, f32 = Laid((self.rows,), (1,)), Laid((self.lines, LINE), (LINE, 1)), torch.float32
        boxes = (
            *(descriptor(x, [1, 1, ROWS, width], dtype) for x in (q, do, k, v)),
            *(descriptor(row, [ROWS], f32) for _ in range(2)),
            descriptor(acc, [ROWS * ROWS // LINE, LINE], f32),
            *(descriptor(x, [1, 1, ROWS, width], dtype) for x in (self.dk, self.dv)),
        )
        constants = {
            "BLOCK_M": block, "BLOCK_N": KEYS, "D": width,
            "STAGES": config.stages, "DS_STAGES": config.ds_stages, "LAG": config.lag,
            "CAUSAL": causal, "ADDS_DQ": not deterministic,
            "EARLY_DV": config.early_dv, "ROTATE": config.rotate, "HELD": config.held,
            "REGISTERS": 240, "PRODUCER_REGISTERS": 24,
        }  # fmt: skip
        fixed = table, shape.tiles, kv_heads, group, seqlen_q, seqlen_k, self.lines
        return Ready("v3_bwd", kernels.backward, len(walk[0]), boxes, fixed, constants)
