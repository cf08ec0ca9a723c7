"""How long a call takes, how much memory it needs, what its Triton kernels move. Knows a call, not attention.

Time is taken in rounds (``_profilers/rounds.py``) by a timer (``timers.py``), the same for all calls that are
compared (``methods.py``), until there is enough of it (``stopping.py``). Every sample is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashbench._profilers.clocks import Clocks, open_clocks
from flashbench._profilers.energy import measure_energy
from flashbench._profilers.flush import Flush
from flashbench._profilers.gpm import measure as measure_gpm
from flashbench._profilers.methods import Candidate, time_together
from flashbench._profilers.overheads import measure_overheads
from flashbench._profilers.patience import Patience
from flashbench._profilers.rounds import LEAD_S, SUSTAINED, DeviceLost, Setting, Timing
from flashbench._profilers.steadiness import drifted, multimodal
from flashbench._profilers.stopping import LEAST_ROUNDS, Policy
from flashbench._profilers.timeline import Timeline, backend_of, timeline
from flashbench._profilers.trace import Launch, Moved, trace

__all__ = [
    "CPU_POLICY",
    "GPU_POLICY",
    "LEAD_S",
    "LEAST_ROUNDS",
    "SUSTAINED",
    "Candidate",
    "Clocks",
    "DeviceLost",
    "Flush",
    "Launch",
    "Moved",
    "Patience",
    "Policy",
    "Setting",
    "Timeline",
    "Timing",
    "Usage",
    "backend_of",
    "drifted",
    "measure_energy",
    "measure_gpm",
    "measure_memory",
    "measure_overheads",
    "measure_time",
    "multimodal",
    "open_clocks",
    "policy_for",
    "time_together",
    "timeline",
    "trace",
]

GPU_POLICY = Policy(limit_s=0.3, min_samples=5, max_samples=200, warmup=3, min_s=0.05, precision=0.005)
CPU_POLICY = Policy(limit_s=0.2, min_samples=5, max_samples=200, warmup=3, min_s=0.05, precision=0.005)


def policy_for(device: str) -> Policy:
    """The policy of a device type."""
    return GPU_POLICY if device.startswith("cuda") else CPU_POLICY


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Memory of one call, bytes. peak_extra and reserved are None on a CPU, which torch does not track."""

    outputs_bytes: int
    peak_extra_bytes: int | None
    reserved_bytes: int | None


def measure_time(
    call: Callable[[], object],
    *,
    device: str,
    cache: str = "cold",
    policy: Policy | None = None,
    clocks: Clocks | None = None,
    method: str = "events",
) -> Timing:
    """Time one call that has run before (so that nothing compiles here). Raises what the call raises.

    cache: ``cold`` or ``hot``; a CPU's caches are never flushed, and its samples say ``hot``. Nothing waits
    for the chip to cool, nor heats it: what came before is the caller's business.
    """
    setting = Setting(policy=policy or policy_for(device), cache=cache, clocks=clocks)
    (found,) = time_together([Candidate(name="the call", call=call)], device, method, setting)
    if isinstance(found, BaseException):
        raise found
    return found


def measure_memory(call: Callable[[], object], device: str) -> Usage:
    """Memory of one call that has run before; its outputs are freed again.

    Peak is the most allocated during the call above what was allocated just before; what the
    allocator had cached is given back first, so that reserved is of this call and not of an earlier.
    """
    if not device.startswith("cuda"):
        return Usage(outputs_bytes=_bytes(call()), peak_extra_bytes=None, reserved_bytes=None)
    import torch

    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    outputs = _bytes(call())
    torch.cuda.synchronize(device)
    return Usage(
        outputs_bytes=outputs,
        peak_extra_bytes=torch.cuda.max_memory_allocated(device) - before,
        reserved_bytes=torch.cuda.max_memory_reserved(device),
    )


def _bytes(output: Any) -> int:
    tensors = output if isinstance(output, tuple | list) else (output,)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
