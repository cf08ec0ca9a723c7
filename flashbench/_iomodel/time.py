"""Time of one pass on one card, kernel by kernel: the slowest of the SMs, L2, DRAM and shared memory.

    T = Σ over kernels (T_launch + max(T_sm, T_l2, T_smem, T_dram))

T_sm of a tiled kernel, with the work of a thread block t = products/(mma·F) + softmax·exps/X + fixed:
in whole waves, ⌈ctas/SMs⌉·t, where all thread blocks are alike; else their sum over the SMs, and half
of the longest one for those that end alone. The constants are those of the implementation family
(constants.py). docs/time-model.md derives all this and lists what remains against published tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from flashbench._iomodel import constants
from flashbench._iomodel.constants import FAMILIES, LAUNCH_S, Family, Rates
from flashbench._iomodel.dram import Band, Grid, dram
from flashbench._iomodel.l2 import Cache
from flashbench._iomodel.roofline import Roofs, roofs
from flashbench._iomodel.types import Estimate, Step
from flashbench.errors import UnknownName

if TYPE_CHECKING:
    from flashbench.devices import Device

KERNELS = {"forward": "fwd", "backward": "bwd", "dkdv": "dkdv", "dq": "dq"}
"""Steps that are tiled kernels, and the name of their tiles."""

TAIL = 0.5
"""Share of the longest thread block for which, on average, SMs wait at the end of an uneven launch."""

RESOURCES = ("tensor cores", "exponentials", "L2", "DRAM", "shared memory")
"""What can limit, each with a roof; beside them ``prologue`` and ``launch``, which have none."""


class Part(NamedTuple):
    """One kernel: seconds in all, and what each resource alone would take.

    products, softmax, fixed: parts of the SMs' time; exps: of the MUFU alone. waiting: SMs without
    work (waves, uneven blocks). limiting: the resource that sets the time.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What the model expects of one estimate on one card.

    dram: bytes read and written, with dram_read and dram_write apart, each from low to high. time_s:
    seconds. limiting: the resource that sets most of the time. roofs: share of each roof that is
    used. parts: kernel by kernel. family: whose constants. calibrated: False where they come from no
    published table of that card's generation. note: what was assumed, one line.
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


class _Machine(NamedTuple):
    """A card as the time model sees it: roofs with the equivalent of data-sheet peaks."""

    sms: int
    clock: float
    flops: float
    exps: float
    l2: float
    dram: float
    smem: float


def predict(estimate: Estimate, device: Device, family: str | None = None) -> Prediction:
    """DRAM traffic and time of the estimate on the device.

    family: whose constants, else those of the model's own family. Raises UnknownName for an unknown
    family, SpecError for a dtype that the card lacks.
    """
    name = family or constants.OF_MODEL.get(estimate.model, "triton")
    if name not in FAMILIES:
        raise UnknownName("family", name, FAMILIES)
    row = FAMILIES[name]
    roof = roofs(device, estimate.problem.dtype)
    machine = _machine(device, roof, estimate.problem.dtype)
    generation, own = _generation(row, device.arch)
    rates = {kernel: row.rates[kernel, generation] for kernel in ("fwd", "bwd")} if row.rates else {}
    grids = tuple(_grid(step, estimate, rates, device.num_sms) for step in estimate.steps)
    moved = dram(estimate, Cache.of(device), grids)
    backward = False
    parts = []
    for step, grid, bytes_ in zip(estimate.steps, grids, moved.steps, strict=True):
        backward = backward or estimate.pass_ == "bwd" or step.name in _FIRST_OF_BACKWARD
        pass_ = "bwd" if backward else "fwd"
        stream = row.stream.get((pass_, generation)) or row.stream[pass_, "sm80"]
        if grid is None:
            parts.append(_streamed(step, bytes_, machine, stream, row.gemm))
        else:
            parts.append(
                _tiled(step, estimate, grid, bytes_, (machine, rates[_side(step)], stream, row.fills))
            )
    total = sum(part.time_s for part in parts)
    return Prediction(
        dram=moved.total,
        dram_read=moved.read,
        dram_write=moved.write,
        time_s=total,
        limiting=_limiting(parts),
        roofs=_shares(estimate, moved.total.value, parts, roof, total),
        parts=tuple(parts),
        family=name,
        device=device.name,
        calibrated=row.calibrated and own,
        note=_note(row, device, generation, own),
    )


_FIRST_OF_BACKWARD = frozenset({"dp", "delta", "prepare", "backward", "dkdv"})


def _side(step: Step) -> str:
    return "fwd" if step.name == "forward" else "bwd"


def _generation(row: Family, arch: str) -> tuple[str, bool]:
    """Whose constants stand for the card's generation, and whether they are its own."""
    known = {generation for _, generation in (row.rates or row.stream)}
    found = arch
    while found not in known and found in constants.LIKE:
        found = constants.LIKE[found]
    if found not in known:
        found = "sm80" if "sm80" in known else min(known)
    return found, found == arch or (found == "geforce" and constants.LIKE.get(arch) == "geforce")


def _machine(device: Device, roof: Roofs, dtype: str) -> _Machine:
    measured = device.measured
    return _Machine(
        sms=device.num_sms,
        clock=device.clock_hz,
        flops=roof.flops / constants.REFERENCE_MATMUL if f"{dtype}_flops_per_s" in measured else roof.flops,
        exps=roof.exps,
        l2=roof.l2,
        dram=roof.dram / constants.REFERENCE_MEMORY if "hbm_bytes_per_s" in measured else roof.dram,
        smem=roof.smem,
    )


LOOPING = frozenset({"flash-v1", "flash-v1-cuda"})
"""Models with one thread block per head, which loops over K/V and Q."""


def _grid(step: Step, estimate: Estimate, rates: Mapping[str, Rates], sms: int) -> Grid | None:
    kernel = KERNELS.get(step.name)
    if kernel is None or not rates or not step.exps:
        return None
    p, tiles = estimate.problem, estimate.tiles
    heads, kv_heads = p.batch * p.num_heads, p.batch * p.num_kv_heads
    slots = sms * rates[_side(step)].resident
    if estimate.model in LOOPING:
        ctas = step.ctas or heads
        return Grid(ctas, heads, slots, loops=True)
    packed = kernel == "fwd" and bool(estimate.variant.pack_gqa) and p.group > 1
    block_q, block_k = tiles[f"{kernel}_block_q"], tiles[f"{kernel}_block_k"]
    low, high = p.band
    if kernel in ("fwd", "dq"):
        rows, block = p.seqlen_q * (p.group if packed else 1), block_q
        seen = -(-min(p.seqlen_k, high - low + block_q) // block_k)
    else:
        rows, block = p.seqlen_k, block_k
        seen = -(-min(p.seqlen_q, high - low + block_k) // block_q)
    outer = -(-rows // block)
    most = (kv_heads if packed else heads) * outer * estimate.variant.thin(seen) * block_q * block_k
    ctas = step.ctas or heads * outer
    units = heads if kernel == "bwd" else kv_heads
    return Grid(
        ctas, min(units, ctas), slots, rows / (outer * block),
        uneven=max(1.0, min(most / step.exps, ctas)),
    )  # fmt: skip


def _tiled(
    step: Step, estimate: Estimate, grid: Grid, bytes_: float, card: tuple[_Machine, Rates, float, bool]
) -> Part:
    """A kernel of products and softmax on tiles."""
    machine, rates, stream, fills = card
    products = step.flops / (rates.mma * machine.flops)
    softmax = rates.softmax * step.exps / machine.exps
    fixed = grid.ctas * rates.fixed_clocks / (machine.clock * machine.sms)
    exps = rates.mufu * step.exps / machine.exps
    busy = max(products + softmax, exps) + fixed
    mean = busy * machine.sms / grid.ctas
    whole = -(-grid.ctas // machine.sms)
    span = whole * mean
    if fills:
        span = busy
    elif estimate.problem.masked or estimate.problem.lengths:
        longest = mean + (grid.uneven - 1) * (busy - fixed) * machine.sms / grid.ctas
        tail = TAIL * rates.resident * longest
        span = min(max(busy + tail, longest), whole * longest)
    active = 1.0 if fills else min(1.0, grid.ctas / machine.sms)
    requested = _requested(step)
    l2 = requested / (machine.l2 * active)
    smem = rates.smem_bytes * step.flops * estimate.problem.dtype_bytes / machine.smem
    memory = bytes_ / (stream * machine.dram)
    slowest = max(span, l2, smem, memory)
    if slowest == span:
        scores = max(softmax, busy - fixed - products)
        limiting = "tensor cores" if products >= scores else "exponentials"
        limiting = limiting if max(products, scores) >= fixed else "prologue"
    else:
        limiting = "DRAM" if slowest == memory else "L2" if slowest == l2 else "shared memory"
    time_s = LAUNCH_S + slowest
    return Part(
        step.name, time_s, products, softmax, exps, fixed, span - busy, l2, smem, memory, LAUNCH_S,
        limiting if slowest > LAUNCH_S else "launch",
    )  # fmt: skip


def _streamed(step: Step, bytes_: float, machine: _Machine, stream: float, gemm: float) -> Part:
    """A kernel that passes over its operands once: elementwise, a reduction, a library's product."""
    products = step.flops / (gemm * machine.flops)
    softmax = step.exps / machine.exps
    l2 = _requested(step) / machine.l2
    memory = bytes_ / (stream * machine.dram)
    slowest = max(products, softmax, l2, memory)
    limiting = {memory: "DRAM", l2: "L2", softmax: "exponentials", products: "tensor cores"}[slowest]
    return Part(
        step.name, LAUNCH_S + slowest, products, softmax, softmax, 0.0, 0.0, l2, 0.0, memory, LAUNCH_S,
        limiting if slowest > LAUNCH_S else "launch",
    )  # fmt: skip


def _requested(step: Step) -> int:
    return sum(step.read.values()) + sum(step.write.values()) + sum(step.atomic.values())


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
        "exponentials": sum(part.exps for part in parts) / total,
        "L2": estimate.requested.total_bytes / (roof.l2 * total),
        "DRAM": dram_bytes / (roof.dram * total),
        "shared memory": sum(part.smem for part in parts) / total,
    }


def _note(row: Family, device: Device, generation: str, own: bool) -> str:
    words = [f"constants of {row.name}"]
    if not own:
        words.append(f"those of {generation}, for want of {device.arch}'s")
    if not row.calibrated:
        words.append("from a single published number")
    if device.l2_bytes_per_s is None:
        words.append("L2 bandwidth estimated")
    words.append(f"roofs {device.roofs}")
    return "; ".join(words)
