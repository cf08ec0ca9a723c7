"""Where an estimate's numbers come from: formulas with the numbers filled in, level, unit and source.

    explain(estimate) -> str
    explain(estimate, predict(estimate, device)) -> str
    explain(estimate, None, device) -> str      why the device has no DRAM bytes and time for it

Every byte count is written as how many times a whole tensor is moved, times the size of that tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from flashbench import units
from flashbench._iomodel.dram import tensor_bytes
from flashbench._iomodel.engine import find, known
from flashbench._iomodel.roofline import roofs
from flashbench._iomodel.time import TAIL, Part, Prediction
from flashbench._iomodel.types import Estimate, Step
from flashbench.errors import SpecError

if TYPE_CHECKING:
    from flashbench.devices import Device

_QUERY, _KEY = "B·H·Nq", "B·Hk·Nk"
_SIZES: dict[str, tuple[str, str]] = {
    "q": (_QUERY, "d·e"), "dq": (_QUERY, "d·e"), "dq_acc": (_QUERY, "d·4"), "dq_tmp": (_QUERY, "d·4"),
    "o": (_QUERY, "dv·e"), "do": (_QUERY, "dv·e"), "o_tmp": (_QUERY, "dv·4"),
    "lse": (_QUERY, "4"), "delta": (_QUERY, "4"), "norm": (_QUERY, "4"), "lse_log2": (_QUERY, "4"),
    "l, m": (_QUERY, "8"), "l": (_QUERY, "4"), "m": (_QUERY, "4"),
    "k": (_KEY, "d·e"), "dk": (_KEY, "d·e"), "v": (_KEY, "dv·e"), "dv": (_KEY, "dv·e"),
    "dk_acc": (_KEY, "d·4"), "dv_acc": (_KEY, "dv·4"),
    "k_heads": ("B·H·Nk", "d·e"), "dk_heads": ("B·H·Nk", "d·e"),
    "v_heads": ("B·H·Nk", "dv·e"), "dv_heads": ("B·H·Nk", "dv·e"),
}  # fmt: skip
"""Rows and bytes per row of each tensor."""

_SCORES = frozenset({"s", "p", "dp", "ds", "dp_p", "p_dropped", "s_scaled", "s_masked"})

_FORMULAS: dict[str, dict[str, str]] = {
    "flash-v1": {
        "forward": "read Nk(d+dv)e + ΣQ(d·e + dv·e + 8); write (ΣQ + Nq)(dv·e + 8), per query head",
        "backward": "read Nk(d+dv)e + ΣQ(2d·e + 2dv·e + 8); write (ΣQ + Nq)d·e + 2Nk(d+dv)e, per query head",
    },
    "flash-v1-cuda": {
        "forward": "read Nk(d+dv)e + Tc·Nq·d·e + (Tc−1)Nq(4dv+4); write (Tc−1)4Nq·dv + Nq·dv·e + 4Tc·Nq",
        "backward": "read Nk(d+dv)e + Tc·Nq(d·e+dv·e+4) + Nq·dv·e + (Tc−1)Nq(4d+4);"
                    " write (Tc−1)4Nq·d + Nq·d·e + Nk(d+dv)e + 4Nq",
    },
    "": {
        "forward": "read Nq·d·e + ΣK(d+dv)e; write Nq·dv·e + 4Nq, per query head",
        "dkdv": "read, per K/V head, Nk(d+dv)e and g·ΣQ(d·e + dv·e + 8); write Nk(d+dv)e",
        "dq": "read Nq(d·e + dv·e + 8) + ΣK(d+dv)e; write Nq·d·e, per query head",
        "backward": "read Nk(d+dv)e + ΣQ(d·e + dv·e + 8), add 4ΣQ·d, write Nk(d+dv)e, per query head",
        "delta": "delta = rowsum(o·do): read 2Nq·dv·e; write 4Nq, and zeroes an fp32 dq where there is one",
        "merge": "read S·Nq(4dv + 4); write Nq·dv·e + 4Nq, per query head",
    },
}  # fmt: skip
_FORMULAS["flash-v1-triton"] = {
    "forward": "read Nk(d+dv)e + ΣQ(d·e + 4dv + 8); write (ΣQ + Nq)(4dv + 8), per query head; in 16 bits read"
               " 4Nq·dv and write Nq·dv·e more",
    "backward": "read, per K/V head, Nk(d+dv)e and g·ΣQ(d·e + 2dv·e + 4d + 8); write g(ΣQ + Nq)4d and"
                " Nk(d+dv)e; in 16 bits read g·4Nq·d and write g·Nq·d·e more",
}  # fmt: skip
_FORMULAS["flash-v2-atomic-triton"] = {
    **_FORMULAS[""],
    "delta": "delta = rowsum(o·do): read 2Nq·dv·e; write 4Nq",
    "clear": "zeroes dq in fp32: write 4Nq·d, per query head",
    "backward": "read, per K/V head, Nk(d+dv)e and g·ΣQ(d·e + dv·e + 8), add g·4ΣQ·d, write Nk(d+dv)e",
    "convert": "read 4Nq·d; write Nq·d·e, per query head",
}
_FORMULAS["flash"] = {
    **_FORMULAS[""],
    "dkdv": f"{_FORMULAS['']['dkdv']}; fp32 and tf32 read g·ΣQ·4 more (norm)",
    "dq": "read Nq(d·e + dv·e + 8) + ΣK(d+dv)e; write Nq·d·e, fp32 and tf32 8Nq more (norm, delta), per"
          " query head, and read 4 per program with sinks",
    "dbias": "read Tk·Nq(d·e + dv·e + 8) + Tq·Nk(d+dv)e and the bias, fp32 and tf32 Tk·4Nq more (norm),"
             " per query head, masked or not; of a bias that all keys share 8Nq alone; write the bias's size",
    "dsinks": "read 8Nq, per query head, and 4 per head; write 4 per head",
}  # fmt: skip
_FORMULAS["flash-v3-gluon"] = {
    **_FORMULAS["flash"],
    "forward": "read Nq·d·e + ΣK(d+dv)e; write Nq·dv·e + 4Nq, per query head; a tile of queries without keys"
               " reads one of K and V; the schedule, 8 B per warpgroup and tile",
    "prepare": "rows' lse in base 2 and delta, dq's accumulator zeroed: read 2Nq·dv·e + 4Nq; write 8N', 4N'·D"
               " per query head, N': Nq in whole tiles, D: 64 or 128 columns",
    "backward": "read, per K/V head, Nk(d+dv)e, g·ΣQ(d+dv)e and g·8ΣQ', add g·4ΣQ'·D, write Nk(d+dv)e; ΣQ':"
                " in whole tiles; the schedule, 12 B per tile of keys and program",
    "convert": "read 4N'·D; write Nq·d·e, per query head",
}  # fmt: skip
_FORMULAS["flash-fp8"] = {
    "forward": "read Nq·d + ΣK(d+dv) + 4Tr and 8 per K/V tile visited (scales); write 2Nq·dv + 4Nq, per query"
               " head; the last tile of V padded to 16 keys",
}  # fmt: skip
_FORMULAS["flash-v3-fp8"] = {
    "forward": "read Nq·d + ΣK(d+dv) and, per warpgroup, 4Tr and 8 per K/V tile visited (scales), 2Tr·D"
               " where V is without its mean (D: dv as a box has it); write 2Nq·dv + 4Nq, per query head; V"
               " padded to 32 keys; the schedule as flash-v3-gluon's",
}  # fmt: skip
_FORMULAS["flash-decode"] = {
    "decode": "read, per K/V head, S·g·Nq·d·e + ΣK(d+dv)e; write S·g·Nq(4dv + 4), with S = 1 o and lse",
    "merge": "read S·Nq(4dv + 4); write Nq·dv·e + 4Nq, per query head; S: splits that a row has",
}
"""Closed forms per step, by model; "" stands for every model of FlashAttention-2's loop order."""

_LABEL = 26

BELOW = "DRAM may be less than compulsory: lines that were written may still be in L2 at the end"


def explain(estimate: Estimate, prediction: Prediction | None = None, device: Device | None = None) -> str:
    """Text of several paragraphs: problem, FLOPs, requested and compulsory bytes, DRAM, time; no colours.

    device: where there is no prediction, the card that lacks one; the text then says why.
    """
    blocks = [_head(estimate), _flops(estimate), _requested(estimate), _compulsory(estimate)]
    if prediction is not None:
        blocks += [_dram(estimate, prediction), _time(estimate, prediction), _roofs(prediction)]
    elif device is not None:
        blocks.append(_blank(estimate, device))
    return "\n\n".join("\n".join(block) for block in blocks)


def why_blank(model: str, device: Device, dtype: str) -> str:
    """Why there are no DRAM bytes and no time, in words; empty where nothing known is in the way."""
    if not known(model):
        return f"{model}: DRAM and time are not modelled for it"
    try:
        roofs(device, dtype)
    except SpecError:
        return f"{device.name}: no DRAM and time in {dtype}: the card has no peak for it"
    return ""


def _blank(estimate: Estimate, device: Device) -> Iterator[str]:
    yield f"DRAM bytes and time on {device.name}: none"
    why = why_blank(estimate.model, device, estimate.problem.dtype)
    yield f"  {why or 'the time model does not cover this case'}"
    if device.uncertain:
        yield f"  {device.name}: uncertain: {device.uncertain}"


def _head(estimate: Estimate) -> Iterator[str]:
    p = estimate.problem
    yield f"{estimate.model}, {estimate.pass_}, {p.key}"
    yield (
        f"  B = {p.batch}, H = {p.num_heads}, Hk = {p.num_kv_heads} (g = {p.group}), Nq = {p.seqlen_q},"
        f" Nk = {p.seqlen_k}, d = {p.head_dim}, dv = {p.head_dim_v}, e = {p.dtype_bytes} B ({p.dtype})"
    )
    if estimate.tiles:
        tiles = ", ".join(f"{name} = {rows}" for name, rows in estimate.tiles.items())
        origin = {
            "sram": f"from M = {estimate.sram_elements:,} elements" if estimate.sram_elements else "from M",
            "shipped": "of the published code",
            "kernel": "of the bundled kernel",
            "given": "given",
        }
        yield f"  tiles: {tiles} ({origin.get(estimate.tile_source, estimate.tile_source)})"
    if known(estimate.model):
        yield f"  source: {find(estimate.model).source}"
    yield f"  assumes: {estimate.assumptions}"


def _flops(estimate: Estimate) -> Iterator[str]:
    p = estimate.problem
    d, dv = p.head_dim, p.head_dim_v
    per_pair = {"fwd": 2 * (d + dv), "bwd": 2 * (3 * d + 2 * dv)}
    per_pair["fwd+bwd"] = per_pair["fwd"] + per_pair["bwd"]
    forms = {"fwd": "2(d + dv)", "bwd": "2(3d + 2dv)", "fwd+bwd": "2(4d + 3dv)"}
    each = per_pair[estimate.pass_]
    yield "FLOPs of matrix products (nominal: visible pairs only)"
    if estimate.flops % each == 0:
        pairs = estimate.flops // each
        yield f"  pairs·{forms[estimate.pass_]} = {pairs:,} · {each} = {estimate.flops:,} FLOP"
    else:
        yield f"  {estimate.flops:,} FLOP"
    done = f"{estimate.done_flops:,} FLOP, {estimate.exps:,} exponentials"
    yield f"  done, on whole tiles and with recomputation: {done}"


def _requested(estimate: Estimate) -> Iterator[str]:
    moved = estimate.requested
    yield "Requested bytes (between SM and L2, exact)"
    sizes = tensor_bytes(estimate.problem)
    for step in estimate.steps:
        formula = _FORMULAS.get(estimate.model, _FORMULAS[""]).get(step.name)
        yield f"  {step.name}" + (f": {formula}" if formula else "")
        for verb, tensors in (("read", step.read), ("write", step.write), ("add", step.atomic)):
            for name, count in tensors.items():
                yield f"    {verb + ' ' + name:<{_LABEL - 4}} {_product(estimate, name, count, sizes)}"
    parts = [f"read {moved.read_bytes:,}", f"write {moved.write_bytes:,}"]
    parts += [f"atomic {moved.atomic_bytes:,}"] if moved.atomic_bytes else []
    yield f"  total: {', '.join(parts)} B = {units.format_bytes(moved.total_bytes)} (GB = 10^9 bytes)"


def _product(estimate: Estimate, name: str, count: int, sizes: Mapping[str, int]) -> str:
    """How many times over the tensor, and its size from the shape."""
    p = estimate.problem
    if name in _SCORES and not p.lengths:
        one = p.batch * p.num_heads * (p.seqlen_q - p.rows_without_keys) * p.seqlen_k * p.dtype_bytes
        return f"{_times(count, one)}B·H·Nq·Nk·e = {count:,} B"
    if name not in _SIZES or p.lengths:
        return f"{count:,} B"
    rows, width = _SIZES[name]
    size = sizes[name]
    numbers = {"B": p.batch, "H": p.num_heads, "Hk": p.num_kv_heads, "Nq": p.seqlen_q, "Nk": p.seqlen_k,
               "d": p.head_dim, "dv": p.head_dim_v, "e": p.dtype_bytes}  # fmt: skip
    filled = "·".join(str(numbers.get(factor, factor)) for factor in f"{rows}·{width}".split("·"))
    times = _times(count, size)
    return f"{times}{rows}·{width} = {times}{filled} = {count:,} B"


def _times(count: int, size: int) -> str:
    if count == size:
        return ""
    return f"{count // size} · " if count % size == 0 else f"{count / size:.4g} · "


def _compulsory(estimate: Estimate) -> Iterator[str]:
    least = estimate.compulsory
    yield "Compulsory bytes (each tensor once, exact)"
    for verb, tensors in (("read", least.read), ("write", least.write)):
        yield f"  {verb} " + " + ".join(f"{name} {count:,}" for name, count in tensors.items()) + " B"
    yield f"  total: {units.format_bytes(least.total_bytes)}"


def _dram(estimate: Estimate, prediction: Prediction) -> Iterator[str]:
    cache = prediction.setting.cache
    curve = cache.curve
    yield "DRAM bytes (modelled: low to high, expected value between)"
    yield (
        f"  L2 {units.format_bytes(cache.capacity, binary=True)}; a line is found again with h(x) ="
        f" clamp(({curve.end} − x)/{curve.width}, 0, 1), x = working set/L2; source: {curve.source}"
    )
    yield "  thread blocks that run together fetch a head's K/V (or Q) once; heads over several waves, again"
    for name, band in (("read", prediction.dram_read), ("write", prediction.dram_write)):
        low, value, high = (units.format_bytes(part) for part in band)
        yield f"  {name}: {value} ({low} to {high})"
    yield f"  {BELOW}"
    moved = estimate.requested.read_bytes + estimate.requested.atomic_bytes
    if prediction.dram_read.value:
        yield f"  requested reads and adds over DRAM reads: {moved / prediction.dram_read.value:.2f}x"


def _time(estimate: Estimate, prediction: Prediction) -> Iterator[str]:
    on = prediction.setting
    yield f"Time on {prediction.device}: sum over kernels of launch + max(SMs, L2, DRAM, shared memory)"
    yield f"  constants: {on.family.name} ({on.family.source})"
    if not prediction.calibrated:
        yield f"  not calibrated: {prediction.note}"
    if on.device.uncertain:
        yield f"  {prediction.device}: uncertain: {on.device.uncertain}"
    for step, part in zip(estimate.steps, prediction.parts, strict=True):
        rates = on.rates(step)
        yield f"  {part.name}: {units.format_seconds(part.time_s)}, limited by {part.limiting}"
        if part.fixed and rates is not None:
            yield (
                f"    products  F/(mma·peak) = {step.flops:.4g}/({rates.mma}·{on.flops:.4g}) ="
                f" {units.format_seconds(part.products)}"
            )
            yield (
                f"    softmax   {rates.softmax}·exps/rate ="
                f" {rates.softmax}·{step.exps:.4g}/{on.roof.exps:.4g} = {units.format_seconds(part.softmax)}"
            )
            yield (
                f"    fixed     {rates.fixed_clocks:g} clocks a {_unit(step)} ="
                f" {units.format_seconds(part.fixed)}; waiting {units.format_seconds(max(0.0, part.waiting))}"
                f" ({_waiting(estimate, step)})"
            )
        yield f"    {_memory(step, part, prediction)}"
    yield f"  total {units.format_seconds(prediction.time_s)}; {prediction.note}"


def _unit(step: Step) -> str:
    """What pays the fixed clocks: a persistent program takes tiles by a schedule."""
    return "tile" if "schedule" in step.read else "thread block"


def _waiting(estimate: Estimate, step: Step) -> str:
    if estimate.problem.masked or estimate.problem.lengths:
        if "schedule" in step.read:
            return "tiles are dealt out, the longest first"
        return f"{TAIL} of the longest thread block"
    return "the last wave"


def _memory(step: Step, part: Part, prediction: Prediction) -> str:
    roof = prediction.setting.roof
    words = [
        f"L2 {units.format_seconds(part.l2)} at {units.format_rate(roof.l2, 'B/s')}",
        f"DRAM {units.format_seconds(part.dram)} at {units.format_rate(roof.dram, 'B/s')}",
        f"launch {units.format_seconds(part.launch)}",
    ]
    if part.smem:
        words.insert(1, f"shared memory {units.format_seconds(part.smem)}")
    if part.instructions:
        words.insert(0, f"instructions {units.format_seconds(part.instructions)}")
    if step.spills.written:
        words.append(f"spilled registers {units.format_bytes(step.spills.written)}, in L2's time")
    if not part.fixed and step.flops:
        words.insert(0, f"products {units.format_seconds(part.products)}")
    return ", ".join(words)


def _roofs(prediction: Prediction) -> Iterator[str]:
    roof = prediction.setting.roof
    ceilings = {
        "tensor cores": units.format_rate(roof.flops, "FLOP/s"),
        "exponentials": units.format_rate(roof.exps, "/s"),
        "L2": units.format_rate(roof.l2, "B/s"),
        "DRAM": units.format_rate(roof.dram, "B/s"),
        "shared memory": units.format_rate(roof.smem, "B/s"),
    }
    yield f"Share of each roof over the whole time (most of the time is set by: {prediction.limiting})"
    for name, share in prediction.roofs.items():
        yield f"  {name:<{_LABEL}} {100 * share:5.1f} % of {ceilings[name]}"
