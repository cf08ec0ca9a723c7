"""Measure what this card really reaches: copy, read, L2, matrix products per dtype, exponentials.

    measure(target) -> dict, the document that ceilings.save writes

Every probe runs long enough to heat the card and is told as it settles: the value is that of the
median of the later half of its samples; ``best`` is that of the fastest. Buffers are far larger
than the L2 where memory is meant; data is random, as zeros draw less power and run faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from flashbench import ceilings, devices, environment
from flashbench.flash_configs import FP8_CAPABILITY
from flashbench.kernels import Target
from flashbench.profilers import Clocks, Policy, measure_time, open_clocks

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DTYPES = ("fp16", "bf16", "tf32", "fp32", "fp8")
_POLICY = {
    "cuda": Policy(limit_s=1.5, min_samples=8, max_samples=2000, warmup=3),
    "cpu": Policy(limit_s=0.3, min_samples=4, max_samples=50, warmup=2),
}
_BUFFER = {"cuda": 2**31, "cpu": 2**26}
"""Bytes of the largest buffer, if the memory allows."""
_MATRIX = {"cuda": 8192, "cpu": 512}
"""Rows and columns of the factors."""


class Skip(Exception):
    """A probe cannot run here; its text says why."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One ceiling. ``make(target)`` gives the call and the bytes, FLOPs or exponentials that it does.

    make raises Skip where the probe cannot run. name: ``flops_per_s.bf16`` is ceilings.flops_per_s
    by dtype, others are fields of Ceilings. method: what is measured, for the file.
    """

    name: str
    unit: str
    method: str
    make: Callable[[Target], tuple[Callable[[], object], int]]


def measure(target: Target, on_probe: Callable[[int, str], None] = lambda done, name: None) -> dict[str, Any]:
    """Run every probe and return the document to store; ``on_probe`` tells how far it is.

    A probe that cannot run has a null ceiling and its reason under measurements.
    """
    clocks = open_clocks(target.device)
    rows: list[dict[str, Any]] = []
    for done, probe in enumerate(PROBES):
        on_probe(done, probe.name)
        rows.append(_run(probe, target, clocks))
        _release(target)
    values = {row["name"]: row["value"] for row in rows}
    rates = {name: value for name, value in values.items() if "." not in name}
    rates["flops_per_s"] = {name: values[f"flops_per_s.{name}"] for name in DTYPES}
    return {
        "type": "calibration",
        "schema": ceilings.SCHEMA,
        "created_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **_facts(target),
        "ceilings": rates,
        "measurements": rows,
    }


def measure_one(name: str, target: Target) -> dict[str, Any]:
    """One ceiling by its name, as measure has it under measurements: value, spread, or a reason."""
    probe = next(probe for probe in PROBES if probe.name == name)
    row = _run(probe, target, open_clocks(target.device))
    _release(target)
    return row


def _facts(target: Target) -> dict[str, Any]:
    found = environment.collect(target)
    row = devices.match(target.name) if target.type == "cuda" else None
    return {
        "device": {
            "name": target.name,
            "id": row.name if row else None,
            "type": target.type,
            "memory_bytes": found["total_bytes"],
            **{name: found.get(name) for name in
               ("uuid", "num_sms", "l2_bytes", "power_limit_w", "max_sm_clock_mhz", "capability")},
        },
        "driver": found["driver"],
        "versions": {name: found[name] for name in ("flashbench", "torch", "cuda", "triton", "python")},
        "clocks": found["clocks"],
    }  # fmt: skip


def _run(probe: Probe, target: Target, clocks: Clocks | None) -> dict[str, Any]:
    """One measurement; a probe that fails says why instead of a value."""
    row: dict[str, Any] = {"name": probe.name, "unit": probe.unit, "method": probe.method, "value": None}
    try:
        call, work = probe.make(target)
        call()
        timing = measure_time(
            call, device=target.device, cache="hot", policy=_POLICY[target.type], clocks=clocks
        )
    except Skip as reason:
        return row | {"reason": str(reason)}
    except Exception as error:  # out of memory, a dtype that the library lacks: the other ceilings stand
        return row | {"reason": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    samples = timing.samples.samples_s
    settled = samples[len(samples) // 2 :]
    middle = statistics.median(settled)
    return row | {
        "value": work / middle,
        "best": work / min(samples),
        "spread": (max(settled) - min(settled)) / middle,
        "samples": len(samples),
        "seconds": sum(samples),
        "work": work,
        "flags": list(timing.flags),
        "clocks": timing.clocks.get("after"),
    }


def _release(target: Target) -> None:
    if target.type == "cuda":
        import torch

        torch.cuda.empty_cache()


def _buffer_bytes(target: Target) -> int:
    """A power of two: the wanted size, or what an eighth of the free memory holds."""
    free = environment.free_bytes(target)
    size = _BUFFER[target.type]
    while free is not None and size > free // 8 and size > 2**20:
        size //= 2
    return size


def _random(target: Target, size: int) -> Tensor:
    """``size`` bytes of random fp32."""
    import torch

    return torch.rand(size // 4, device=target.device)


def _copy(target: Target) -> tuple[Callable[[], object], int]:
    size = _buffer_bytes(target)
    source = _random(target, size)
    sink = source.clone()
    return lambda: sink.copy_(source), 2 * size


def _read(target: Target) -> tuple[Callable[[], object], int]:
    if target.type == "cpu":
        size = _buffer_bytes(target)
        source = _random(target, size)
        return lambda: source.sum(), size
    return _read_kernel(target, _buffer_bytes(target), per_sm=8, repeats=1)


def _l2(target: Target) -> tuple[Callable[[], object], int]:
    if not target.l2_bytes:
        raise Skip("torch does not tell the size of an L2 here")
    return _read_kernel(target, target.l2_bytes // 2, per_sm=4, repeats=256)


def _read_kernel(target: Target, size: int, *, per_sm: int, repeats: int) -> tuple[Callable[[], object], int]:
    """Read ``size`` bytes, rounded down to whole rounds of all programs, ``repeats`` times."""
    import torch

    probes = _probes(target)
    programs, unroll = per_sm * _sms(target), 4 if size > 2**27 else 1
    blocks = size // (4 * probes.READ_BLOCK) // (programs * unroll) * (programs * unroll)
    if not blocks:
        programs, unroll = max(1, size // (4 * probes.READ_BLOCK)), 1
        blocks = programs
    source = _random(target, blocks * probes.READ_BLOCK * 4)
    sums = torch.empty(programs, device=target.device)

    def call() -> None:
        probes.read[(programs,)](
            source, sums, blocks, repeats, BLOCK=probes.READ_BLOCK, UNROLL=unroll, num_warps=8
        )

    return call, blocks * probes.READ_BLOCK * 4 * repeats


def _exp(target: Target) -> tuple[Callable[[], object], int]:
    import torch

    probes = _probes(target)
    programs, rounds = 32 * _sms(target), 256
    sums = torch.empty(programs, device=target.device)

    def call() -> None:
        probes.exp2[(programs,)](sums, rounds, BLOCK=probes.EXP_BLOCK, UNROLL=probes.EXP_UNROLL, num_warps=4)

    return call, programs * rounds * probes.EXP_UNROLL * probes.EXP_BLOCK


def _probes(target: Target) -> Any:
    """The module of Triton kernels. Raises Skip where Triton cannot compile here."""
    import importlib

    from flashbench.kernels import _triton

    if target.type == "cpu":
        raise Skip("measured on a GPU only")
    if reason := _triton.why_unavailable(target):
        raise Skip(reason)
    if _triton.interpreted(target):
        raise Skip("Triton interprets here; unset TRITON_INTERPRET")
    return importlib.import_module("flashbench.kernels._probes")


def _sms(target: Target) -> int:
    import torch

    return int(torch.cuda.get_device_properties(target.device).multi_processor_count)


def _matmul(dtype: str) -> Callable[[Target], tuple[Callable[[], object], int]]:
    def make(target: Target) -> tuple[Callable[[], object], int]:
        size = _MATRIX[target.type]
        call = _scaled_product(target, size) if dtype == "fp8" else _product(target, dtype, size)
        return call, 2 * size**3

    return make


def _product(target: Target, dtype: str, size: int) -> Callable[[], object]:
    import torch

    from flashbench.problem import DTYPES as ROWS

    if target.type == "cpu" and dtype == "tf32":
        raise Skip("a CPU has no TF32")
    if dtype in ("bf16", "tf32") and target.capability is not None and target.capability < (8, 0):
        raise Skip(f"{target.name} has no {dtype}")
    of = {"device": target.device, "dtype": getattr(torch, ROWS[dtype].torch_name)}
    left, right = torch.randn(size, size, **of), torch.randn(size, size, **of)
    out = torch.empty(size, size, **of)

    def call() -> None:
        with _precision(tf32=dtype == "tf32"):
            torch.mm(left, right, out=out)

    return call


def _precision(*, tf32: bool) -> Any:
    """TF32 products on or off, and what was set before afterwards."""
    from contextlib import contextmanager

    import torch

    @contextmanager
    def inner() -> Iterator[None]:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    return inner()


def _scaled_product(target: Target, size: int) -> Callable[[], object]:
    """fp8 (e4m3) factors, bf16 result; accumulated in the tensor cores, as attention kernels do."""
    import torch

    if target.type == "cpu" or target.capability is None or target.capability < FP8_CAPABILITY:
        raise Skip(f"{target.name} has no fp8 products")
    one = torch.ones((), device=target.device)

    def factor() -> torch.Tensor:
        return torch.randn(size, size, device=target.device).to(torch.float8_e4m3fn)

    left, right = factor(), factor().t()
    return lambda: torch._scaled_mm(
        left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


_PRODUCT = "two 8192 x 8192 factors (on a CPU 512 x 512) of normal random numbers, back to back"
PROBES = (
    Probe(
        name="copy_bytes_per_s", unit="B/s", make=_copy,
        method="Tensor.copy_ of up to 2 GiB of fp32; bytes read plus bytes written",
    ),
    Probe(
        name="read_bytes_per_s", unit="B/s", make=_read,
        method="a kernel that sums up to 2 GiB of fp32 (on a CPU Tensor.sum); bytes read",
    ),
    Probe(
        name="l2_bytes_per_s", unit="B/s", make=_l2,
        method="the same kernel over half the L2, 256 times, past the L1; bytes read",
    ),
    Probe(
        name="exps_per_s", unit="1/s", make=_exp,
        method="a kernel of independent chains x -> 2^-x in fp32; exponentials",
    ),
    *(
        Probe(
            name=f"flops_per_s.{dtype}", unit="FLOP/s", make=_matmul(dtype),
            method=_PRODUCT + ("; e4m3, fast accumulation" if dtype == "fp8" else ""),
        )
        for dtype in DTYPES
    ),
)  # fmt: skip
"""Every ceiling, in the order in which they are measured."""
