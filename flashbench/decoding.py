"""Decode steps of a model's attention: checked against fp64, timed, beside the model and a measured copy.

    measure(step, target, copy_bytes_per_s=3e12) -> {"time_s": …, "bytes_per_s": …, "copy_fraction": …, …}
    check(step, target) -> {"status": "ok", "max_abs_error": …, "budget": …, …}
    check_case(case, target) -> the same of a case of the covering array, errors and budgets by tensor

One layer, one step: every sequence of the batch has kv_len keys in its cache, the new ones among them,
and asks ``queries`` new tokens of it. What is timed is the attention alone, without the append.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from flashbench import decode_cases, decode_configs, devices, environment, iomodel, presets
from flashbench._runfile.decodes import SCHEMA
from flashbench.decode_cases import Case
from flashbench.decode_configs import DecodeConfig, Shape, math_of
from flashbench.errors import in_words
from flashbench.flash_configs import FP8_CAPABILITY
from flashbench.iomodel import Estimate, Variant
from flashbench.kernels import Target, _triton, get
from flashbench.presets import Preset
from flashbench.problem import Problem
from flashbench.profilers import Clocks, measure_time, open_clocks

if TYPE_CHECKING:
    from flashbench.devices import Device

DTYPES = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "fp8": "bf16"}
"""A cache's dtype, and that of the queries over it."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One row of the table. page_size: 0 is a contiguous cache. splits: 0 is the heuristic's.

    config: takes the place of the table's.
    """

    preset: Preset
    kv_len: int
    batch: int
    page_size: int = 0
    dtype: str = "bf16"
    splits: int = 0
    queries: int = 1
    config: DecodeConfig | None = None

    @property
    def problem(self) -> Problem:
        """The attention of one layer, in the dtype of the queries."""
        p = self.preset
        return Problem(
            batch=self.batch, num_heads=p.num_heads, num_kv_heads=p.num_kv_heads, seqlen_q=self.queries,
            seqlen_k=self.kv_len, head_dim=p.head_dim, head_dim_v=p.head_dim_v, dtype=DTYPES[self.dtype],
            causal=True,
        )  # fmt: skip

    @property
    def shape(self) -> Shape:
        """What the kernel's configuration depends on."""
        p = self.preset
        math = "half" if self.dtype == "fp8" else math_of(self.problem.dtype)
        size = 1 if self.dtype == "fp8" else self.problem.dtype_bytes
        return Shape(math, p.head_dim, p.head_dim_v, size, self.page_size)

    @property
    def cache_bytes(self) -> int:
        """K and V of one layer, in whole pages."""
        keys = self.kv_len if not self.page_size else -(-self.kv_len // self.page_size) * self.page_size
        p, size = self.preset, 1 if self.dtype == "fp8" else self.problem.dtype_bytes
        return self.batch * keys * p.num_kv_heads * (p.head_dim + p.head_dim_v) * size

    @property
    def variant(self) -> Variant:
        """What the model must know beside the problem."""
        return Variant(page_size=self.page_size, cache_bytes=1 if self.dtype == "fp8" else 0)


def to_json(step: Step) -> dict[str, Any]:
    """A JSON-able mapping from which ``from_json`` makes the step."""
    return {**asdict(step), "preset": step.preset.name}


def from_json(row: Mapping[str, Any]) -> Step:
    """The step of such a mapping. Raises UnknownName."""
    config = DecodeConfig(**row["config"]) if row["config"] else None
    return Step(**{**row, "preset": presets.find(row["preset"]), "config": config})


def modelled(step: Step, tiles: dict[str, int], card: Device | None = None) -> dict[str, Any]:
    """What the model says of the step as it is launched: bytes, and on a known card the time."""
    row = iomodel.estimate(
        "flash-decode", step.problem, "fwd", tiles=tiles, variant=step.variant, device=card
    )
    return {
        "bytes": row.compulsory.total_bytes,
        "requested_bytes": row.requested.total_bytes,
        "model_s": None if card is None else iomodel.predict(row, card).time_s,
        "bound_s": None if card is None else _bound(row, card),
    }


def _bound(row: Estimate, card: Device) -> float:
    return row.compulsory.total_bytes / card.hbm_bytes_per_s


def check(step: Step, target: Target, seed: int = 0) -> dict[str, Any]:
    """Decode once and compare with fp64. status: ok, wrong, failed or skipped, the last two with a reason."""
    return _row(step, target, seed, lambda call: {})


def measure(
    step: Step, target: Target, copy_bytes_per_s: float | None = None, *, seed: int = 0,
    clocks: Clocks | None = None,
) -> dict[str, Any]:  # fmt: skip
    """As check, then timed with a cold L2 if it is right; rates are of the compulsory bytes.

    On a GPU the step is a CUDA graph, as serving engines run it: launching two kernels from Python takes
    longer than a short step.
    """

    def timed(call: Callable[[], object]) -> dict[str, Any]:
        if target.type == "cuda":
            call = graphed(call, target.device)
        timing = measure_time(call, device=target.device, clocks=clocks)
        samples = timing.samples.samples_s
        return {
            "time_s": statistics.median(samples), "samples_s": list(samples), "flags": list(timing.flags),
            "clocks": dict(timing.clocks), "cache": timing.samples.cache, "flush": timing.samples.flush,
        }  # fmt: skip

    row = _row(step, target, seed, timed)
    if "time_s" in row:
        row["bytes_per_s"] = row["bytes"] / row["time_s"]
        if copy_bytes_per_s:
            row["copy_fraction"] = row["bytes_per_s"] / copy_bytes_per_s
    return row


def graphed(call: Callable[[], object], device: str) -> Callable[[], object]:
    """The kernels of a call that has run before, as one CUDA graph to replay."""
    import torch

    with torch.cuda.device(device):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
    return lambda: graph.replay()


def _row(
    step: Step, target: Target, seed: int, then: Callable[[Callable[[], object]], dict[str, Any]]
) -> dict[str, Any]:
    p = step.problem
    row: dict[str, Any] = {
        "model": step.preset.name, "batch": step.batch, "kv_len": step.kv_len, "queries": step.queries,
        "num_heads": p.num_heads, "num_kv_heads": p.num_kv_heads, "head_dim": p.head_dim,
        "head_dim_v": p.head_dim_v, "page_size": step.page_size, "dtype": step.dtype,
        "cache_bytes": step.cache_bytes,
    }  # fmt: skip
    if reason := get("flash-decode").why_unsupported(p, "fwd", target) or too_large(step, target):
        return row | {"status": "skipped", "reason": reason}
    try:
        return row | _run(step, target, seed, then)
    except Exception as error:  # a compiler or a driver raises what it likes, and other steps go on
        return row | {"status": "failed", "reason": in_words(error)}
    finally:
        if target.type == "cuda":
            import torch

            torch.cuda.empty_cache()


def too_large(step: Step, target: Target) -> str | None:
    """Why the step, with its check, is not for this card, one sentence, or None."""
    if step.dtype == "fp8" and target.capability is not None and target.capability < FP8_CAPABILITY:
        return f"an fp8 cache needs sm89, this is sm{target.capability[0]}{target.capability[1]}"
    free, p = environment.free_bytes(target), step.problem
    one_in_fp64 = 8 * step.kv_len * p.num_kv_heads * (p.head_dim + p.head_dim_v)
    # an fp8 cache is made of wider numbers; the reference holds a sequence a few times over
    need = step.cache_bytes * (3 if step.dtype == "fp8" else 1) + 3 * one_in_fp64
    if free is not None and need > free:
        return f"needs {need / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"
    return None


def _operands(step: Step, target: Target, seed: int) -> tuple[Any, Any, Any, Any]:
    """The module of the kernels, and q, the cache and the options that its functions take."""
    decode = _triton.load(target.type, "_flash_decode")
    from flashbench.kernels import _decode_reference as reference

    p = step.problem
    q, cache = reference.make(p, step.page_size, step.dtype == "fp8", target.device, seed)
    how = decode.Call(causal=True, scale=p.softmax_scale, num_splits=step.splits, config=step.config)
    return decode, q, cache, how


def call_of(step: Step, target: Target, seed: int) -> Callable[[], object]:
    """What ``measure`` times, made ready and not checked."""
    decode, q, cache, how = _operands(step, target, seed)
    return lambda: decode.run(q, cache, how)


def _run(
    step: Step, target: Target, seed: int, then: Callable[[Callable[[], object]], dict[str, Any]]
) -> dict[str, Any]:
    import torch

    decode, q, cache, how = _operands(step, target, seed)
    from flashbench.kernels import _decode_reference as reference

    config, split_keys, splits = decode.plan(q, cache, how)
    launched = decode.launches(q, cache, how)[2][0]
    tiles = {
        "fwd_block_q": launched.options["BLOCK_M"], "fwd_block_k": config.block_k,
        "split_block_q": launched.options["BLOCK_M"], "split_block_k": split_keys,
    }  # fmt: skip
    card = None
    if target.type == "cuda":
        card = devices.match(target.name, sms=target.num_sms, memory_bytes=target.total_bytes)
    row = {
        "splits": splits, "split_keys": split_keys, "block_k": config.block_k,
        "num_warps": config.num_warps, "num_stages": config.num_stages, **modelled(step, tiles, card),
    }  # fmt: skip

    def call() -> object:
        return decode.run(q, cache, how)

    with torch.no_grad():
        error, budget = reference.compare(step.problem, (q, cache), call())
        row |= {"max_abs_error": error, "budget": budget, "status": "ok" if error <= budget else "wrong"}
        return row | (then(call) if row["status"] == "ok" else {})


def why_not(case: Case, target: Target) -> str | None:
    """Why the kernels do not take a case there, one sentence, or None."""
    if case.fp8 and target.capability is not None and target.capability < FP8_CAPABILITY:
        return f"an fp8 cache needs sm89, this is sm{target.capability[0]}{target.capability[1]}"
    dense = replace(case.problem, lengths=(), dtype=case.dtype)
    if reason := get("flash-decode").why_unsupported(dense, "fwd", target):
        return reason
    limit = target.smem_per_block_bytes
    if _triton.interpreted(target) or limit is None:
        return None
    need = decode_configs.shared_bytes(
        decode_configs.choose(case.shape, target.capability, limit), case.shape
    )
    return f"it needs {need} B of shared memory per block, limit {limit} B" if need > limit else None


def check_case(case: Case, target: Target, seed: int = 0) -> dict[str, Any]:
    """Decode once and compare o, lse and the cache. status: ok, wrong or failed, with the reason."""
    row = {"case": case.key, **{field.name: getattr(case, field.name) for field in fields(case)}}
    try:
        return row | _checked(case, target, seed)
    except Exception as error:  # as above
        return row | {"status": "failed", "reason": in_words(error)}


def _checked(case: Case, target: Target, seed: int) -> dict[str, Any]:
    import torch

    decode = _triton.load(target.type, "_flash_decode")
    from flashbench.kernels import _decode_case as cases

    with torch.no_grad():
        made = cases.make(case, target.device, seed)
        how = cases.call_of(case, decode_cases.TILES if _triton.interpreted(target) else None)
        config, split_keys, splits = decode.plan(made.q, made.after, how)
        errors, budgets = cases.compare(made, *cases.run(made, how), seed)
    wrong = [name for name, error in errors.items() if not error <= budgets[name]]  # a NaN is wrong
    said = [f"{name} is off by {errors[name]:.3g}, allowed {budgets[name]:.3g}" for name in wrong]
    return {
        "launched_splits": splits, "split_keys": split_keys, "block_k": config.block_k,
        "num_warps": config.num_warps, "num_stages": config.num_stages, "max_abs_error": errors,
        "budget": budgets, "status": "wrong" if wrong else "ok", "reason": "; ".join(said) or None,
    }  # fmt: skip


def document(
    rows: list[dict[str, Any]], target: Target, copy: dict[str, Any] | None, **more: Any
) -> dict[str, Any]:
    """What ``flashbench decode --out`` writes: type ``decode``, the machine, the measured copy, the rows."""
    return {
        "type": "decode",
        "schema": SCHEMA,
        "created_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "environment": environment.collect(target),
        "copy": copy,
        **more,
        "rows": rows,
    }


def run(
    steps: list[Step], target: Target, *, copy_bytes_per_s: float | None = None, seed: int = 0,
    only_check: bool = False,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """The row of each step in turn."""
    clocks = open_clocks(target.device)
    for step in steps:
        if only_check:
            yield check(step, target, seed)
        else:
            yield measure(step, target, copy_bytes_per_s, seed=seed, clocks=clocks)
