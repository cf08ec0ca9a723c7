"""How many blocks of a kernel an SM can hold, and what stops it from holding more.

The arithmetic is that of NVIDIA's occupancy calculator (``cuda_occupancy.h`` of the CUDA toolkit, which
Triton ships too); the tests hold one to the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flashbench._profilers.sass import RESERVED_SHARED_BYTES
from flashbench.devices import KIB, Device

WARP = 32
PARTITIONS = 4
"""Schedulers of an SM, each with a quarter of the registers."""

REGISTERS_PER_SM = 64 * KIB
REGISTERS_PER_THREAD = 255
REGISTER_UNIT = 256
"""Registers are given to a warp in multiples of this."""

SHARED_UNIT_BYTES = 128
THREADS_PER_BLOCK = 1024
SOURCE = "CUDA C++ Programming Guide, Technical Specifications per Compute Capability"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What an SM has and what one block may use of it.

    tensor_memory_columns: 0 where there is no tensor memory. name and source: whose limits these are.
    """

    warps_per_sm: int
    blocks_per_sm: int
    smem_per_sm_bytes: int
    smem_per_block_bytes: int
    tensor_memory_columns: int = 0
    registers_per_sm: int = REGISTERS_PER_SM
    name: str = ""
    source: str = SOURCE


def _row(warps: int, blocks: int, shared_kib: int, columns: int = 0) -> Limits:
    """A row of the guide's table; a block may have all the shared memory but what the system keeps."""
    return Limits(
        warps_per_sm=warps,
        blocks_per_sm=blocks,
        smem_per_sm_bytes=shared_kib * KIB,
        smem_per_block_bytes=shared_kib * KIB - RESERVED_SHARED_BYTES,
        tensor_memory_columns=columns,
    )


LIMITS: Mapping[tuple[int, int], Limits] = {
    capability: replace(row, name=f"sm_{capability[0]}{capability[1]}")
    for capability, row in {
        (8, 0): _row(64, 32, 164),
        (8, 6): _row(48, 16, 100),
        (8, 7): _row(48, 16, 164),
        (8, 9): _row(48, 24, 100),
        (9, 0): _row(64, 32, 228),
        (10, 0): _row(64, 32, 228, columns=512),
        (10, 3): _row(64, 32, 228, columns=512),
        (12, 0): _row(48, 24, 100),
    }.items()
}
"""By compute capability."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """What one block of a kernel takes. shared_bytes: static and dynamic, without what the system keeps."""

    threads: int
    registers: int
    shared_bytes: int
    tensor_memory_columns: int = 0


@dataclass(frozen=True)
class Occupancy:
    """blocks: how many each resource would allow on one SM, None where the kernel takes none of it."""

    blocks: Mapping[str, int | None]
    warps_per_block: int
    warps_per_sm: int

    @property
    def blocks_per_sm(self) -> int:
        """The least of them; 0 where one block does not fit."""
        return min(number for number in self.blocks.values() if number is not None)

    @property
    def limited_by(self) -> tuple[str, ...]:
        """Every resource that allows no more blocks than fit."""
        return tuple(name for name, number in self.blocks.items() if number == self.blocks_per_sm)

    @property
    def share(self) -> float:
        """Resident warps over the most that an SM can hold, 0 to 1."""
        return self.blocks_per_sm * self.warps_per_block / self.warps_per_sm


def limits_of(device: Device) -> Limits:
    """The limits of a card: its own shared memory and registers, its capability's warps and blocks.

    Raises KeyError for a capability that LIMITS lacks.
    """
    if device.capability is None:
        raise KeyError(device.name)
    return replace(
        LIMITS[device.capability],
        smem_per_sm_bytes=device.smem_per_sm_bytes,
        smem_per_block_bytes=device.smem_per_block_bytes,
        registers_per_sm=device.registers_per_sm_bytes // 4,
        name=device.name,
        source=f"{device.source}; {SOURCE}",
    )


def occupancy(block: Block, limits: Limits) -> Occupancy:
    """How many blocks fit on an SM by each resource."""
    warps = -(-block.threads // WARP)
    by_warps = limits.warps_per_sm // warps if block.threads <= THREADS_PER_BLOCK else 0
    columns = block.tensor_memory_columns
    return Occupancy(
        blocks={
            "registers": _by_registers(block.registers, warps, limits),
            "shared_memory": _by_shared_memory(block.shared_bytes, limits),
            "warps": by_warps,
            "blocks": limits.blocks_per_sm,
            "tensor_memory": limits.tensor_memory_columns // columns if columns else None,
        },
        warps_per_block=warps,
        warps_per_sm=limits.warps_per_sm,
    )


def _by_registers(registers: int, warps: int, limits: Limits) -> int:
    """Each warp lives in one partition with all its registers; a block may use every partition."""
    if registers > REGISTERS_PER_THREAD:
        return 0
    per_warp = _round_up(max(registers, 1) * WARP, REGISTER_UNIT)
    return limits.registers_per_sm // PARTITIONS // per_warp * PARTITIONS // warps


def _by_shared_memory(shared_bytes: int, limits: Limits) -> int:
    """Every block takes its own and what the system keeps, so that even one without any is limited."""
    if shared_bytes > limits.smem_per_block_bytes:
        return 0
    return limits.smem_per_sm_bytes // _round_up(shared_bytes + RESERVED_SHARED_BYTES, SHARED_UNIT_BYTES)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
