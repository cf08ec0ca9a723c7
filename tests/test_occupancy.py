"""Occupancy is what NVIDIA's calculator says: known values, and its own code where a C compiler is."""

from __future__ import annotations

import random
import shutil
import subprocess
from importlib import util
from pathlib import Path

import pytest

from flashbench import devices
from flashbench._profilers.occupancy import LIMITS, Block, limits_of, occupancy

GOLDEN = [
    # capability, threads, registers, shared bytes -> blocks, occupancy, limits
    ((8, 0), 256, 32, 0, 8, 1.0, ("registers", "warps")),
    ((8, 0), 256, 64, 0, 4, 0.5, ("registers",)),
    ((8, 0), 1024, 33, 0, 1, 0.5, ("registers",)),
    ((8, 0), 128, 32, 48 * 1024, 3, 0.1875, ("shared_memory",)),
    ((8, 6), 32, 16, 0, 16, 1 / 3, ("blocks",)),
    ((8, 6), 128, 40, 0, 12, 1.0, ("registers", "warps")),
    ((8, 9), 32, 16, 0, 24, 0.5, ("blocks",)),
    ((9, 0), 128, 255, 0, 2, 0.125, ("registers",)),
    ((9, 0), 256, 33, 102400, 2, 0.25, ("shared_memory",)),
    ((9, 0), 256, 255, 229376, 1, 0.125, ("registers", "shared_memory")),
    ((9, 0), 128, 32, 232448, 1, 0.0625, ("shared_memory",)),
    ((9, 0), 128, 32, 232449, 0, 0.0, ("shared_memory",)),
    ((9, 0), 160, 168, 0, 2, 0.15625, ("registers",)),
    ((9, 0), 1024, 65, 0, 0, 0.0, ("registers",)),
    ((12, 0), 64, 24, 0, 24, 1.0, ("warps", "blocks")),
]


@pytest.mark.parametrize(("capability", "threads", "registers", "shared", "blocks", "share", "why"), GOLDEN)
def test_known_values(capability, threads, registers, shared, blocks, share, why) -> None:
    fit = occupancy(Block(threads=threads, registers=registers, shared_bytes=shared), LIMITS[capability])
    assert (fit.blocks_per_sm, fit.limited_by) == (blocks, why)
    assert fit.share == pytest.approx(share, rel=1e-12)


def test_tensor_memory_limits_blocks() -> None:
    block = Block(threads=128, registers=64, shared_bytes=0, tensor_memory_columns=256)
    fit = occupancy(block, LIMITS[10, 0])
    assert (fit.blocks_per_sm, fit.limited_by) == (2, ("tensor_memory",))
    assert occupancy(Block(threads=128, registers=64, shared_bytes=0), LIMITS[10, 0]).blocks_per_sm == 8


def test_more_threads_than_a_block_may_have_do_not_fit() -> None:
    fit = occupancy(Block(threads=1056, registers=16, shared_bytes=0), LIMITS[9, 0])
    assert (fit.blocks_per_sm, fit.limited_by) == (0, ("warps",))


def test_the_table_of_cards_agrees_with_the_table_of_capabilities() -> None:
    for device in devices.DEVICES:
        if device.capability in LIMITS:
            limits, general = limits_of(device), LIMITS[device.capability]
            assert (limits.smem_per_sm_bytes, limits.smem_per_block_bytes, limits.registers_per_sm) == (
                general.smem_per_sm_bytes, general.smem_per_block_bytes, general.registers_per_sm
            )  # fmt: skip
            assert limits.name == device.name


CALCULATOR = """
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include "cuda_occupancy.h"
int main(void) {
  int major, minor, warps, per_sm, per_block, threads, registers, shared;
  while (scanf("%d%d%d%d%d%d%d%d", &major, &minor, &warps, &per_sm, &per_block, &threads, &registers,
               &shared) == 8) {
    cudaOccDeviceProp device = {0};
    cudaOccFuncAttributes kernel = {0};
    cudaOccDeviceState state = {0};
    cudaOccResult result;
    device.computeMajor = major; device.computeMinor = minor;
    device.maxThreadsPerBlock = 1024; device.maxThreadsPerMultiprocessor = 32 * warps;
    device.regsPerBlock = device.regsPerMultiprocessor = 65536; device.warpSize = 32;
    device.sharedMemPerBlock = 49152; device.sharedMemPerMultiprocessor = per_sm;
    device.sharedMemPerBlockOptin = per_block; device.reservedSharedMemPerBlock = 1024;
    device.numSms = 1;
    kernel.maxThreadsPerBlock = 1024; kernel.numRegs = registers;
    kernel.partitionedGCConfig = PARTITIONED_GC_OFF;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN; kernel.maxDynamicSharedSizeBytes = per_block;
    state.carveoutConfig = 100;
    cudaOccError error =
        cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, shared);
    if (error == CUDA_OCC_ERROR_UNKNOWN_DEVICE) printf("unknown\\n");
    else if (error) return 1;
    else printf("%d %d %d %d\\n", result.activeBlocksPerMultiprocessor, result.blockLimitRegs,
           result.blockLimitSharedMem, result.blockLimitBlocks);
  }
  return 0;
}
"""


def test_agrees_with_nvidias_own_code(tmp_path: Path) -> None:
    compiler, triton = shutil.which("gcc") or shutil.which("cc"), util.find_spec("triton")
    if compiler is None or triton is None or triton.origin is None:
        pytest.skip("needs a C compiler, and the header that Triton ships")
    include = Path(triton.origin).parent / "backends" / "nvidia" / "include"
    if not (include / "cuda_occupancy.h").is_file():
        pytest.skip("this Triton ships no cuda_occupancy.h")
    (tmp_path / "calculator.c").write_text(CALCULATOR)
    subprocess.run([compiler, f"-I{include}", "calculator.c", "-o", "calculator"], check=True, cwd=tmp_path)
    draw = random.Random(4)
    cases = []
    for _ in range(20_000):
        capability = draw.choice(list(LIMITS))
        most = LIMITS[capability].smem_per_block_bytes
        shared = draw.choice([0, draw.randint(0, most), draw.randint(most - 200, most + 200)])
        cases.append((capability, draw.choice([32 * draw.randint(1, 32), draw.randint(1, 1024)]),
                      draw.randint(1, 255), shared))  # fmt: skip
    lines = []
    for (major, minor), *block in cases:
        row = LIMITS[major, minor]
        sizes = row.warps_per_sm, row.smem_per_sm_bytes, row.smem_per_block_bytes
        lines.append((major, minor, *sizes, *block))
    text = "\n".join(" ".join(map(str, line)) for line in lines)
    done = subprocess.run([tmp_path / "calculator"], input=text, capture_output=True, text=True, check=True)
    compared = set()
    for (capability, threads, registers, shared), line in zip(cases, done.stdout.splitlines(), strict=True):
        if line == "unknown":  # an older header than the architecture
            continue
        compared.add(capability)
        fit = occupancy(Block(threads=threads, registers=registers, shared_bytes=shared), LIMITS[capability])
        ours = fit.blocks_per_sm, *(fit.blocks[name] for name in ("registers", "shared_memory", "blocks"))
        assert ours == tuple(map(int, line.split())), (capability, threads, registers, shared)
    assert set(LIMITS) - {(10, 3)} <= compared
