"""Kernels whose traffic is known without a model, to see how far the counters can be trusted.

Copy, softmax and a read that comes back to the same bytes: what they read and write follows from
what they are. The last one, over sets of growing size, also shows how much the L2 keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashbench.counting import Counters, Job
from flashbench.errors import UnknownName
from flashbench.kernels import Target

PASSES = 16
"""How often the reading kernel comes back to its set."""
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2,
          1.3, 1.5, 2.0)  # fmt: skip
"""Sizes of the set that is read again, in parts of the L2."""
_LARGE = 2**29


@dataclass(frozen=True, kw_only=True)
class Known:
    """A kernel of known traffic. make(target, size): its call over ``size`` bytes.

    read, write: bytes that it must ask of L2, per byte of its size.
    """

    name: str
    summary: str
    make: Callable[[Target, int], Callable[[], object]]
    read: int
    write: int


def _copy(target: Target, size: int) -> Callable[[], object]:
    import torch

    source = torch.rand(size // 4, device=target.device)
    sink = torch.empty_like(source)
    return lambda: torch.neg(source, out=sink)


def _softmax(target: Target, size: int) -> Callable[[], object]:
    import torch

    rows = torch.rand(size // 8192, 4096, device=target.device, dtype=torch.float16)
    return lambda: torch.softmax(rows, -1)


def _again(target: Target, size: int) -> Callable[[], object]:
    """Every SM reads on, block by block, past its L1, and each time a block that another one read last."""
    import importlib

    import torch

    probes = importlib.import_module("flashbench.kernels._probes")
    sms = torch.cuda.get_device_properties(target.device).multi_processor_count
    blocks = size // (4 * probes.READ_BLOCK)
    source = torch.rand(blocks * probes.READ_BLOCK, device=target.device)
    sums = torch.empty(sms, device=target.device)

    def call() -> None:
        probes.read[(sms,)](source, sums, blocks, PASSES, BLOCK=probes.READ_BLOCK, UNROLL=1, num_warps=8)

    return call


KNOWN = (
    Known(name="copy", summary="an elementwise kernel from one fp32 tensor to another", make=_copy,
          read=1, write=1),
    Known(name="softmax", summary="softmax over rows of 4096 fp16 elements, kept in registers",
          make=_softmax, read=1, write=1),
    Known(name="read", summary=f"one fp32 tensor read {PASSES} times over by all SMs", make=_again,
          read=PASSES, write=0),
)  # fmt: skip


def find(name: str) -> Known:
    """The row of that name. Raises UnknownName."""
    rows = {row.name: row for row in KNOWN}
    if name not in rows:
        raise UnknownName("known kernel", name, rows)
    return rows[name]


def jobs(target: Target) -> list[Job]:
    """Copy and softmax over 512 MiB, and the reading kernel over sets of every size in SHARES."""
    if target.l2_bytes is None:
        return []
    unit = _read_unit(target)
    sizes = [round(share * target.l2_bytes / unit) * unit for share in SHARES]
    asked = [("copy", _LARGE), ("softmax", _LARGE), *(("read", size) for size in sizes)]
    return [Job(kind="known", what={"name": name, "bytes": size}) for name, size in asked]


def _read_unit(target: Target) -> int:
    """A set is whole rounds of all SMs: 16 KiB each."""
    import torch

    return int(torch.cuda.get_device_properties(target.device).multi_processor_count) * 4 * 4096


def rows(asked: Sequence[Job], found: Sequence[Counters]) -> list[dict[str, Any]]:
    """One row per job: expected and counted bytes at L2 and DRAM, and the share found in L2.

    hit: of the bytes that were asked for again, those that DRAM did not deliver, 1 − (DRAM reads −
    size)/(requested − size); None for a kernel that reads once. clocks: as of the counters.
    """
    return [_row(job.what, counted) for job, counted in zip(asked, found, strict=True)]


def _row(what: Mapping[str, Any], counted: Counters) -> dict[str, Any]:
    kind, size = find(what["name"]), what["bytes"]
    total = counted.get("total", {})
    read, dram = total.get("l2_read_bytes"), total.get("dram_read_bytes")
    again = (kind.read - 1) * size
    return {
        "kernel": kind.name,
        "size_bytes": size,
        "expected_read_bytes": kind.read * size,
        "counted_read_bytes": read,
        "expected_write_bytes": kind.write * size,
        "counted_write_bytes": total.get("l2_write_bytes"),
        "dram_read_bytes": dram,
        "dram_write_bytes": total.get("dram_write_bytes"),
        "hit": 1 - (dram - size) / again if again and dram is not None else None,
        "reason": counted.get("reason"),
        "clocks": counted.get("clocks", {}),
    }
