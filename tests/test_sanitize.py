"""What runs under compute-sanitizer is every bundled kernel, and what a tool says is read as it was meant."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import sanitize
import sanitizer_cases

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

TOOLS = Path(__file__).parents[1] / "tools"
MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at forward+0x4c0 in _flash_kernels.py:120
=========     by thread (0,0,0) in block (1,0,0)
=========     Access at 0x7f0000000190 is out of bounds
=========
========= Invalid __global__ read of size 2 bytes
=========     at void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor>(int)+0x160
=========     by thread (0,0,0) in block (1,0,0)
=========
========= Program hit CUDA_ERROR_LAUNCH_FAILED (error 719) due to "unspecified launch failure".
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at backward+0xc0 in _hopper_backward.py:10
=========     and Read access at backward+0x110 in _hopper_backward.py:11 [124 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
CLEAN = "========= COMPUTE-SANITIZER\ndone x\n========= ERROR SUMMARY: 0 errors\n"


def test_findings_are_told_apart_by_kernel() -> None:
    found = sanitize.judged(MEMCHECK, {"forward", "backward"})
    assert (found["errors"], found["errors_of_others"]) == (1, 1)
    assert found["found"] == ["Invalid __global__ write of size 4 bytes [forward]"]
    assert found["summary"] == "ERROR 2 errors"
    assert sanitize.judged(MEMCHECK, {"backward"})["errors"] == 0
    found = sanitize.judged(RACECHECK, {"forward", "backward"})
    assert found["errors"] == 1
    assert found["summary"] == "RACECHECK 1 hazard displayed (1 error, 0 warnings)"
    assert sanitize.judged(CLEAN, {"forward"})["errors"] == 0
    assert sanitize.judged("done x\n", {"forward"})["summary"] is None


def test_what_names_no_kernel_counts() -> None:
    said = "========= Internal Sanitizer Error: out of memory\n========= ERROR SUMMARY: 1 error\n"
    assert sanitize.judged(said, {"forward"})["errors"] == 1


def test_a_log_is_clean_only_if_all_ran_and_each_tool_finds_its_broken_kernel() -> None:
    row = {"tool": "memcheck", "group": "fp8", "status": "ran", "errors": 0}
    control = {**row, "group": sanitize.CONTROL, "errors": 1}
    assert sanitize.wrong([row, control]) == []
    assert sanitize.wrong([{**row, "errors": 1}]) == ["memcheck fp8: 1 errors"]
    assert sanitize.wrong([{**row, "status": "killed after 9 s"}]) == ["memcheck fp8: killed after 9 s"]
    assert sanitize.wrong([{**control, "errors": 0}]) == ["memcheck control: the broken kernel was not found"]


LISTED = """
import sanitizer_cases as cases
found = {name for one in cases.CASES for name in cases.launched(one)}
assert found == cases.entries(), found ^ cases.entries()
assert len(found) > 20
"""


def test_the_cases_launch_every_bundled_kernel() -> None:
    """In a process of its own: here Triton interprets, and there it is asked what it would launch."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TOOLS.parent), str(TOOLS)])}
    if later := os.environ.get("PYTHONPATH"):
        environment["PYTHONPATH"] += os.pathsep + later
    environment.pop("TRITON_INTERPRET", None)
    run = subprocess.run(
        [sys.executable, "-c", LISTED], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    "case", [one for one in sanitizer_cases.CASES if one.group == "flash-decode"], ids=lambda one: one.name
)
def test_the_caches_of_the_cases_are_sound(case: sanitizer_cases.Case) -> None:
    o = case.run("cpu")
    assert o.isfinite().all()
