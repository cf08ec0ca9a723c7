"""Time of one pass on one card, kernel by kernel: the slowest of the SMs, L2, DRAM and shared memory.

    T = Σ over kernels (T_launch + max(T_sm, T_l2, T_smem, T_dram))

T_sm of a tiled kernel, with the work of a thread block t = products/(mma·F) + softmax·exps/X + fixed:
in whole waves, ⌈ctas/SMs⌉·t, where all thread blocks are alike; else their sum over the SMs, and half
of the longest one for those that end alone. Persistent programs that take tiles by a schedule, the longest
first, pay ``fixed`` for each tile, and none ends alone. The constants are those of the implementation family
(constants.py). docs/time-model.md derives all this and lists what remains against published tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from flashbench import block_masks, flash_configs, named_masks
from flashbench._iomodel import listed, products
from flashbench._iomodel.again import Grid, Turns
from flashbench._iomodel.constants import LAUNCH_S
from flashbench._iomodel.dram import Alone, Band, alone, dram
from flashbench._iomodel.flash import shipped_config
from flashbench._iomodel.roofline import Roofs
from flashbench._iomodel.setting import Setting, setting
from flashbench._iomodel.types import Estimate, Step
from flashbench.problem import Problem

if TYPE_CHECKING:
    from flashbench.devices import Device

KERNELS = {"forward": "fwd", "backward": "bwd", "dkdv": "dkdv", "dq": "dq", "dbias": "dq"}
"""Steps that are tiled kernels, and the name of their tiles."""

TAIL = 0.5
"""Share of the longest thread block for which, on average, SMs wait at the end of an uneven launch."""

RESOURCES = ("tensor cores", "exponentials", "L2", "DRAM", "shared memory")
"""What can limit, each with a roof; beside them, without one, ``prologue``, ``instructions``, ``launch``."""


class Part(NamedTuple):
    """One kernel: seconds in all, and what each resource alone would take.

    products, softmax, fixed: parts of the SMs' time; exps: of the MUFU alone. waiting: SMs without
    work (waves, uneven blocks). limiting: the resource that sets the time. instructions: of a library's
    kernel that is slower than its bytes.
    """

    name: str
    time_s: float
    products: float
    softmax: float
    exps: float
    fixed: float
    waiting: float
    l2: float
    smem: float
    dram: float
    launch: float
    limiting: str
    instructions: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What the model expects of one estimate on one card.

    dram: bytes read and written, with dram_read and dram_write apart, each from low to high. time_s:
    seconds. limiting: the resource that sets most of the time. roofs: share of each roof that is
    used. parts: kernel by kernel. family: whose constants. calibrated: False where they come from no
    published table of that card's generation. note: what was assumed, one line. setting: the numbers
    behind it.
    """

    dram: Band
    dram_read: Band
    dram_write: Band
    time_s: float
    limiting: str
    roofs: Mapping[str, float]
    parts: tuple[Part, ...]
    family: str
    device: str
    calibrated: bool
    note: str
    setting: Setting = field(repr=False)


def predict(estimate: Estimate, device: Device, family: str | None = None) -> Prediction:
    """DRAM traffic and time of the estimate on the device.

    family: whose constants, else those of the model's own family. Raises UnknownName for an unknown
    family, SpecError for a dtype that the card lacks.
    """
    on = setting(device, estimate.model, family, estimate.problem.dtype)
    grids = tuple([_grid(step, estimate, on) for step in estimate.steps])
    moved = dram(estimate, on.cache, grids)
    backward = estimate.pass_ == "bwd"
    parts = []
    for step, grid, bytes_ in zip(estimate.steps, grids, moved.steps, strict=True):
        backward = backward or step.name == _FIRST_OF_BACKWARD
        memory = bytes_ / ((on.stream_bwd if backward else on.stream_fwd) * on.dram)
        if step.name in _MASKS and step.name not in on.paces:
            memory /= on.family.mask
        requested = sum(step.read.values()) + sum(step.write.values()) + sum(step.atomic.values())
        requested += step.spills.written
        l2 = requested / on.roof.l2
        if grid is None or not step.exps:
            paced = requested / on.pace(step.name, estimate.problem.seqlen_k)
            parts.append(_streamed(step, on, paced, l2, memory))
        else:
            parts.append(_tiled(step, estimate, (grid, on), l2, memory))
    total = sum([part.time_s for part in parts])
    return Prediction(
        dram=moved.total,
        dram_read=moved.read,
        dram_write=moved.write,
        time_s=total,
        limiting=_limiting(parts),
        roofs=_shares(estimate, moved.total.value, parts, on.roof, total),
        parts=tuple(parts),
        family=on.family.name,
        device=device.name,
        calibrated=on.calibrated,
        note=on.note + (f"; {words}" if (words := uncounted(estimate.problem, on)) else ""),
        setting=on,
    )


def uncounted(problem: Problem, on: Setting) -> str:
    """The arithmetic per score that no constant stands for, though its bytes are counted; empty for none."""
    p = problem
    asked = {"softcap": p.softcap, "alibi": p.alibi, "bias": p.bias, "dropout": p.dropout_p}
    if not on.tiled or not any(asked.values()):
        return ""
    return f"time without the arithmetic of {', '.join(name for name in asked if asked[name])}"


def kernels_alone(estimate: Estimate, device: Device, family: str | None = None) -> tuple[Alone, ...]:
    """DRAM traffic of each kernel from a cold L2. Raises as ``predict`` does."""
    on = setting(device, estimate.model, family, estimate.problem.dtype)
    return alone(estimate, on.cache, tuple([_grid(step, estimate, on) for step in estimate.steps]))


_MASKS = frozenset({"mask", "mask backward: fill"})
"""Ops that apply a mask."""

_FIRST_OF_BACKWARD = "dv"
"""The op with which an eager backward begins; other families reach the same bandwidth in both passes."""


STANDARD = frozenset({"standard", "standard-hf", "standard-added", "standard-minimal"})
"""Models whose products are a library's."""

LOOPING = frozenset({"flash-v1", "flash-v1-cuda", "flash-v1-triton"})
"""Models with one thread block per head, which loops over K/V and Q."""

STAGGERED = frozenset({"flash-v2-atomic", "sdpa-flash"})
"""Models whose masked forward begins at the last key that a tile sees and goes back to the first.

Source: flash-attention 2, flash_fwd_kernel.h. The bundled kernels begin at the first key, all in step."""


PERSISTENT = frozenset({"sdpa-cudnn"})
"""Models whose kernels are one program per SM that takes tiles one after the other, beside those that read a
schedule, as ``flash-v3-gluon`` does: the latter's programs never wait for each other."""


def _grid(step: Step, estimate: Estimate, on: Setting) -> Grid | None:
    """The grid of a tiled kernel, None for any other step."""
    if step.name in _MASKS:
        return _mask_grid(step, estimate.problem)
    kernel = KERNELS.get(step.name)
    rates = on.rates(step)
    if estimate.model in STANDARD and on.device.arch == "sm90":
        operands = products.fetched_again(step, estimate.problem, on.sms)
        return Grid(1, 1, 1, operands=operands) if operands else None
    if kernel is None or rates is None or not step.exps:
        return None
    p, tiles = estimate.problem, estimate.tiles
    heads, kv_heads = p.batch * p.num_heads, p.batch * p.num_kv_heads
    slots = on.sms * _resident(estimate, kernel, rates.resident, on.device)
    if estimate.model in LOOPING:
        return _loop(step, estimate, kernel, slots)
    packed = kernel == "fwd" and bool(estimate.variant.pack_gqa) and p.group > 1
    block_q, block_k = tiles[f"{kernel}_block_q"], tiles[f"{kernel}_block_k"]
    low, high = p.band
    hides = p.masked or bool(p.block_mask)
    if kernel in ("fwd", "dq"):
        rows, block = p.seqlen_q * (p.group if packed else 1), block_q
        seen = -(-min(p.seqlen_k, high - low + block_q) // block_k)
    else:
        rows, block = p.seqlen_k, block_k
        seen = -(-min(p.seqlen_q, high - low + block_k) // block_q)
    if p.block_mask:
        inner = block_q * block_k // block
        seen = listed.longest(p, keys_outside=kernel not in ("fwd", "dq")) * block_masks.SIZE // inner
    outer = -(-rows // block)
    most = (kv_heads if packed else heads) * outer * estimate.variant.thin(seen) * block_q * block_k
    scheduled = "schedule" in step.read
    taken = (heads if kernel in ("fwd", "dq") else kv_heads) * outer if scheduled else 0
    persistent = scheduled or estimate.model in PERSISTENT
    ctas = step.ctas or heads * outer
    uneven = max(1.0, min(most / step.exps, taken or ctas))
    units = heads if kernel == "bwd" and not taken else kv_heads
    return Grid(
        ctas, min(units, taken or ctas), slots, uneven=uneven,
        section=_section(estimate, kernel, kv_heads), lost=_lost(kernel, hides, outer > slots, persistent),
        skew=_SKEW if hides else 0.0,
        crowd=1.0 if hides else _CROWD_OF_PROGRAMS if persistent else _CROWD,
        stagger=_stagger(estimate, kernel, block_q),
        bias=Turns.of(p) if "bias" in step.read and step.name != "dbias" else None,
        tiles=taken, drifts=scheduled and not hides,
    )  # fmt: skip


def _stagger(estimate: Estimate, kernel: str, block_q: int) -> float:
    """Of a head's keys, the share by which a tile starts after the one before it; 0 where all start alike."""
    p = estimate.problem
    apart = kernel == "fwd" and p.masked and estimate.model in STAGGERED
    return min(1.0, block_q / p.seqlen_k) if apart else 0.0


def _loop(step: Step, estimate: Estimate, kernel: str, slots: int) -> Grid:
    """A thread block owns a head and passes over its queries once per K/V tile."""
    p, tiles = estimate.problem, estimate.tiles
    heads = p.batch * p.num_heads
    block_q, block_k = tiles[f"{kernel}_block_q"], tiles[f"{kernel}_block_k"]
    rows, passes = -(-p.seqlen_q // block_q) * block_q, -(-p.seqlen_k // block_k)
    ctas, scores = step.ctas or heads, max(1, heads * rows * passes * block_k)
    seen = min(1.0, step.exps / scores)
    return Grid(ctas, min(heads, ctas), slots, loops=True, crowd=_LOOPED, passes=max(1, passes), seen=seen)


def _mask_grid(step: Step, p: Problem) -> Grid | None:
    """One head after the other reads the same mask, with its own scores read and written in between."""
    masks = p.batch if p.lengths else 1
    heads = p.batch * p.num_heads
    return Grid(heads, masks, masks, loops=True, crowd=_WRITTEN) if heads > masks else None


def _is_flash(estimate: Estimate, kernel: str) -> bool:
    """Whether the step is one of ``flash``'s kernels, whose forward ``flash-v2-atomic`` launches as well."""
    return estimate.model == "flash" or (estimate.model == "flash-v2-atomic-triton" and kernel == "fwd")


def _resident(estimate: Estimate, kernel: str, most: int, device: Device) -> int:
    """Thread blocks of an SM: the family's, or as many as fit the shared memory of a bundled kernel."""
    if estimate.model == "flash-v1-triton":
        return 1  # 256 threads of 255 registers
    if not _is_flash(estimate, kernel):
        return most
    p, math = estimate.problem, flash_configs.math_of(estimate.problem.dtype)
    config = shipped_config(p, kernel, device)
    block = flash_configs.shared_bytes(kernel, config, math, p.head_dim, p.head_dim_v, device.capability)
    return max(1, min(most, device.smem_per_sm_bytes // block))


def _lost(kernel: str, masked: bool, spread: bool, persistent: bool) -> tuple[float, float]:
    """What L2 loses between waves although it would fit, expected and at worst, as thread blocks lose step.

    Under a mask, or where a head straddles two waves. Set by counts of an H100 SXM, docs/counters.md.
    spread: a head takes more than one wave by itself.
    """
    if masked:
        return (_LOST if kernel == "fwd" and not persistent else _LOST_BWD), 0.35
    return (0.0 if spread else _LOST_OF_PROGRAMS if persistent else _LOST), 0.7


_SKEW = 0.1
_LOST, _LOST_BWD, _LOST_OF_PROGRAMS = 0.15, 0.05, 0.08
_WRITTEN = 3.4
"""As _CROWD, of a mask among scores that are read and written: 6 % of it is fetched again where one head
moves 0.24 of the capacity, nothing at 0.06, all at 0.96 (counted on an H100 SXM, docs/counters.md)."""

_LOOPED = 1.25
"""As _CROWD, of heads that thread blocks pass over by themselves. Set by the 1k cells of ``flash-v1`` that
were counted on an H100 SXM: what is expected is within 3 % of them (docs/counters.md)."""

_CROWD = 1.75
"""Rows of thread blocks that are done are replaced no sooner than live ones: without a mask, where a wave
ends as one, what it moved takes up to twice its room until the next wave comes back to its rows. A set that
is read over and over, with which the curve of l2.py was counted, leaves none behind.

Of what a wave reads again, counts of three implementations on an H100 SXM missed 0 to 1 % where a wave moves
0.24 of the capacity, 2 to 18 % at 0.40, 52 to 65 % at 0.49, 70 % at 0.56 (docs/counters.md).
"""


_CROWD_OF_PROGRAMS = 1.6
"""The same of persistent programs, each of which begins its next tile when it has done with the last, and
not all at once. Of what a wave reads again, ``flash-v3`` and cuDNN missed 0 to 2 % at 0.17 to 0.25 of the
capacity, 5 to 14 % at 0.33 and 29 to 72 % at 0.66 (N up to 16k, no mask). With _LOST_OF_PROGRAMS what is
expected of these cells is within 5 %.
"""


def _section(estimate: Estimate, kernel: str, kv_heads: int) -> int:
    """K/V heads that the bundled kernels interleave under a mask; others go head by head."""
    p = estimate.problem
    interleaved = named_masks.seen(p).grows if p.block_mask else p.masked
    if not (_is_flash(estimate, kernel) or estimate.model == "flash-fp8") or not interleaved:
        return 1
    rows = p.seqlen_q * p.group if kernel == "dkdv" else p.seqlen_k
    return flash_configs.section(rows * (p.head_dim + p.head_dim_v) * p.dtype_bytes, kv_heads)


def _tiled(step: Step, estimate: Estimate, card: tuple[Grid, Setting], l2: float, memory: float) -> Part:
    """A kernel of products and softmax on tiles."""
    grid, on = card
    rates = on.rates(step)
    assert rates is not None
    ctas, sms = grid.ctas, on.sms
    pieces = grid.tiles or ctas
    products = step.flops / (rates.mma * on.flops)
    softmax = rates.softmax * step.exps / on.roof.exps
    exps = rates.mufu * step.exps / on.roof.exps
    fixed = pieces * rates.fixed_clocks / (on.clock * sms)
    busy = max(products + softmax, exps) + fixed
    mean = busy * sms / pieces
    waves = -(-pieces // sms)
    if on.family.fills:
        span = busy
    elif estimate.problem.masked or estimate.problem.block_mask or estimate.problem.lengths:
        longest = mean + (grid.uneven - 1) * (busy - fixed) * sms / pieces
        alone = 0.0 if grid.tiles else TAIL * rates.resident * longest
        span = min(max(busy + alone, longest), waves * longest)
    else:
        span = waves * mean
    if ctas < sms and not on.family.fills:
        l2 *= sms / ctas
    smem = rates.smem_bytes * step.flops * estimate.problem.dtype_bytes / on.roof.smem
    slowest = max(span, l2, smem, memory)
    if slowest <= LAUNCH_S:
        limiting = "launch"
    elif slowest == span:
        scores = max(softmax, busy - fixed - products)
        limiting = "tensor cores" if products >= scores else "exponentials"
        limiting = limiting if max(products, scores) >= fixed else "prologue"
    else:
        limiting = "DRAM" if slowest == memory else "L2" if slowest == l2 else "shared memory"
    return Part(
        step.name, LAUNCH_S + slowest, products, softmax, exps, fixed, span - busy, l2, smem, memory,
        LAUNCH_S, limiting,
    )  # fmt: skip


def _streamed(step: Step, on: Setting, instructions: float, l2: float, memory: float) -> Part:
    """A kernel that passes over its operands once: elementwise, a reduction, a library's product.

    instructions: what it takes by a pace of its own, where it has one.
    """
    products = step.flops / (on.family.gemm * on.flops)
    exps = step.exps / on.roof.exps
    slowest = max(products, exps, instructions, l2, memory)
    if slowest <= LAUNCH_S:
        limiting = "launch"
    elif slowest == memory:
        limiting = "DRAM"
    elif slowest == instructions:
        limiting = "instructions"
    else:
        limiting = "L2" if slowest == l2 else "exponentials" if slowest == exps else "tensor cores"
    return Part(
        step.name, LAUNCH_S + slowest, products, exps, exps, 0.0, 0.0, l2, 0.0, memory, LAUNCH_S, limiting,
        instructions,
    )  # fmt: skip


def _limiting(parts: list[Part]) -> str:
    """The resource that sets most of the time; launches count with every kernel."""
    spent: dict[str, float] = {}
    for part in parts:
        spent[part.limiting] = spent.get(part.limiting, 0.0) + part.time_s - part.launch
        spent["launch"] = spent.get("launch", 0.0) + part.launch
    return max(spent, key=lambda name: spent[name])


def _shares(
    estimate: Estimate, dram_bytes: float, parts: list[Part], roof: Roofs, total: float
) -> dict[str, float]:
    """Share of each roof that the pass uses, over its whole time."""
    return {
        "tensor cores": estimate.done_flops / (roof.flops * total),
        "exponentials": sum([part.exps for part in parts]) / total,
        "L2": estimate.requested.total_bytes / (roof.l2 * total),
        "DRAM": dram_bytes / (roof.dram * total),
        "shared memory": sum([part.smem for part in parts]) / total,
    }
