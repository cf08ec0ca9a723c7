"""Kernels read no byte past their inputs: each ends where the page behind it is forbidden (``guarded``)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import guarded
import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if sys.platform != "linux":
    pytest.skip("pages are forbidden by Linux' calls", allow_module_level=True)

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(Path(guarded.__file__)), *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("device", DEVICES)
def test_no_kernel_reads_past_its_inputs(device: str) -> None:
    found = run(device)
    assert found.returncode == 0, found.stdout + found.stderr
    *ran, last = found.stdout.splitlines()
    assert (last, len(ran) >= 3) == ("done", True)


@pytest.mark.parametrize("device", DEVICES)
def test_whoever_reads_past_them_is_found(device: str) -> None:
    found = run(device, "past")
    assert "done" not in found.stdout
    if device == "cpu":
        assert found.returncode < 0, found.stderr  # a signal
    else:
        assert "illegal memory access" in found.stderr
