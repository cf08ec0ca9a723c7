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
import sanitizer_right
import torch

from flashbench import kernels

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
    row = {"tool": "memcheck", "group": "fp8", "status": "ran", **sanitize.judged(CLEAN, {"forward"})}
    found = sanitize.judged(MEMCHECK, {"forward"})
    control = {**row, "group": sanitize.CONTROL, **found}
    assert sanitize.wrong([row, control]) == []
    assert sanitize.wrong([{**row, **found}]) == ["memcheck fp8: 1 errors"]
    assert sanitize.wrong([{**row, "status": "killed after 9 s"}]) == ["memcheck fp8: killed after 9 s"]
    assert sanitize.wrong([{**control, **sanitize.judged(CLEAN, {"forward"})}]) == [
        "memcheck control: the broken kernel was not found"
    ]


def test_a_tool_that_breaks_has_not_found_the_broken_kernel() -> None:
    said = "========= Internal Sanitizer Error: out of memory\n========= ERROR SUMMARY: 1 error\n"
    row = {"tool": "memcheck", "group": sanitize.CONTROL, "status": "ran"}
    assert sanitize.wrong([row | sanitize.judged(said, {"forward"})]) == [
        "memcheck control: the broken kernel was not found"
    ]


@pytest.mark.parametrize("said", ["done x\n", "done x========= Error\n========= ERROR SUMMARY: 1 error\n"])
def test_a_log_is_not_clean_where_a_tool_does_not_say_so(said: str) -> None:
    row = {"tool": "memcheck", "group": "fp8", "status": "ran", **sanitize.judged(said, {"forward"})}
    (line,) = sanitize.wrong([row])
    assert line.startswith("memcheck fp8: no report was read, but its last words are ")


DONE = "".join(f"done {one.name}\n" for one in sanitizer_cases.CASES if one.group == "flash-v1")
FIRST = DONE.splitlines()[0] + "\n"
DIED = f"========= Error: {sanitize.DIED}\n========= ERROR SUMMARY: 0 errors\n"


@pytest.mark.parametrize(
    ("said", "then", "status", "missing"),
    [
        (DONE + CLEAN, "exit 0", "ran", 0),
        (DONE + CLEAN, "exit 134", "died or left early, code 134, 2 of 2 done", 0),
        (DONE + DIED, "exit 0", "died or left early, code 0, 2 of 2 done", 0),
        (FIRST + CLEAN, "exit 0", "died or left early, code 0, 1 of 2 done", 1),
        (DONE + CLEAN, "kill -9 $$", "died or left early, code -9, 2 of 2 done", 0),
        (FIRST, "sleep 60", "killed after 1 s", 1),
    ],
)
def test_a_process_ran_if_it_did_all_and_left_well(said, then, status, missing, tmp_path: Path) -> None:
    (tmp_path / "said").write_text(said)
    program = tmp_path / "tool"
    program.write_text(f"#!/bin/sh\ncat '{tmp_path}/said'\n{then}\n")
    program.chmod(0o755)
    row = sanitize.one_process("memcheck", "flash-v1", sanitize.How(str(program), 1, 1.0))
    assert (row["status"], len(row["not_run"]), row["said"]) == (status, missing, said)


ENDS = """
import atexit, sys, types
sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(synchronize=lambda: None))
import sanitize
Case = sanitize.cases.Case
sanitize.cases.CASES = (Case("g", "well", str), Case("bad", "x", lambda _: 1 / 0))
print("started")
atexit.register(print, "the interpreter went on")
sanitize.run_group(sys.argv[1])
"""


@pytest.mark.parametrize(("group", "code", "last"), [("g", 0, "done well"), ("bad", 1, "started")])
def test_a_process_ends_with_its_last_case(group: str, code: int, last: str) -> None:
    """Without the interpreter's end, in which a thread of torch's may abort."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TOOLS.parent), str(TOOLS)])}
    command = [sys.executable, "-c", ENDS, group]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.splitlines()[-1]) == (code, last), run.stderr
    assert ("ZeroDivisionError" in run.stderr) == bool(code)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--program", "no-such"], "error: --program 'no-such': no program"),
        (["--tools", "memcheck,leak"], "error: --tools 'leak': not one of racecheck, initcheck, memcheck"),
        (["--groups", "v9", "--program", "sh"], "error: --groups 'v9': not one of flash-v2"),
    ],
)
def test_a_wrong_option_is_named(given, said, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "--out", str(tmp_path), "--program", "sh", *given])
    with pytest.raises(SystemExit) as left:
        sanitize.main()
    assert left.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(said)
    assert err.count("\n") == 1


def test_the_log_says_what_tool_it_was_and_what_is_wrong(tmp_path: Path) -> None:
    row = {"tool": "memcheck", "group": "fp8", "status": "ran", "said": CLEAN}
    head = {"sanitizer": "Version 2026.4.0.0", "wrong": [], "aside": []}
    sanitize.write(tmp_path, head | {"wrong": ["memcheck fp8: 1 errors"]}, [row])
    log = (tmp_path / "sanitizer.log").read_text("utf-8").splitlines()
    assert log[:2] == ["# compute-sanitizer Version 2026.4.0.0", "# wrong: memcheck fp8: 1 errors"]
    sanitize.write(tmp_path, head, [row])
    assert "# wrong" not in (tmp_path / "sanitizer.log").read_text("utf-8")


LISTED = """
import sanitizer_cases as cases
found = {name for one in cases.CASES for name in cases.launched(one)}
assert found == cases.entries(), found ^ cases.entries()
assert len(found) > 20
"""


def holds_uninterpreted(code: str) -> None:
    """Run the code in a process of its own, where Triton compiles; here it interprets."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TOOLS.parent), str(TOOLS)])}
    if later := os.environ.get("PYTHONPATH"):
        environment["PYTHONPATH"] += os.pathsep + later
    environment.pop("TRITON_INTERPRET", None)
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def test_the_cases_launch_every_bundled_kernel() -> None:
    """Triton is asked what it would launch."""
    holds_uninterpreted(LISTED)


@pytest.mark.parametrize(
    "case", [one for one in sanitizer_cases.CASES if one.group == "flash-decode"], ids=lambda one: one.name
)
def test_the_caches_of_the_cases_are_sound(case: sanitizer_cases.Case) -> None:
    o = case.run("cpu")
    assert o.isfinite().all()


KERNELS = Path(sanitizer_cases.kernels.__path__[0])
RIGHT = Path(sanitizer_right.__file__)
FORWARD, WIDE = KERNELS / "_hopper_kernels.py", KERNELS / "_hopper_wide_tiles.py"
EXCHANGED = "x = PS.index(slot).load(", "PS.index(slot).store("


def at(path: Path, text: str, kernel: str) -> str:
    """Where a kernel's source has the line that begins so, as the tools say it."""
    lines = path.read_text("utf-8").splitlines()
    found = [n for n, line in enumerate(lines, 1) if line.strip().startswith(text)]
    return f"{kernel}+0x100 in {path.name}:{found[0]}"


def race(path: Path, kernel: str, read: str, *writes: str) -> str:
    said = [f"========= Error: Race reported between Read access at {at(path, read, kernel)}"]
    said += [f"=========     and Write access at {at(path, one, kernel)} [5 hazards]" for one in writes]
    return "\n".join([*said, "========= "]) + "\n"


def racecheck(group: str, said: str, *ours: str, summary: str = "1 hazard displayed") -> dict[str, object]:
    said += f"========= RACECHECK SUMMARY: {summary}\n"
    row = {"tool": "racecheck", "group": group, "status": "ran", "said": said}
    return row | sanitize.judged(said, ours)


def right(kernel: str, *lines: str) -> dict[str, object]:
    return racecheck(f"right {kernel}", race(RIGHT, kernel, *lines), kernel)


def test_what_is_reported_of_a_right_kernel_too_is_put_aside() -> None:
    parts = race(FORWARD, "forward", "def forward(", "def forward(", "if NUM_WG == 2:")
    handed = race(WIDE, "backward_dkdv", *EXCHANGED)

    def judged(*others: dict[str, object]) -> tuple[list[str], list[str]]:
        rows = [racecheck("flash-v3 wide", parts + handed, "forward", "backward_dkdv"), *others]
        return sanitizer_right.put_aside(rows), sanitize.wrong(rows)

    exchange = right("exchange", *EXCHANGED)
    part = right("part", "def part(", "def part(", "gl.warp_specialize([")
    line = "racecheck flash-v3 wide: {} reports as of {}"
    assert judged() == ([], ["racecheck flash-v3 wide: 2 errors"])
    assert judged(exchange) == ([line.format(1, "right exchange")], ["racecheck flash-v3 wide: 1 errors"])
    assert judged(exchange, part) == ([line.format(2, "right exchange, right part")], [])
    assert judged({**exchange, "tool": "memcheck"}, part)[1] == ["racecheck flash-v3 wide: 1 errors"]
    late = {**part, "status": "killed after 9 s"}
    assert judged(exchange, late)[1] == ["racecheck right part: killed after 9 s"]


@pytest.mark.parametrize(
    ("lines", "summary", "errors"),
    [
        (("def forward(", "def forward("), "1 hazard displayed", 0),
        (("def forward(", "def forward("), "7 errors were not printed.", 1),
        (("def forward(", "def forward(", "gl.warp_specialize(["), "1 hazard displayed", 1),
        (("mbarrier.wait(QFULL", "def forward("), "1 hazard displayed", 1),
    ],
)
def test_no_other_race_is_put_aside(lines: tuple[str, ...], summary: str, errors: int) -> None:
    """Of the right kernel only a read and a write at the first line were reported."""
    row = racecheck("flash-v3", race(FORWARD, "forward", *lines), "forward", summary=summary)
    sanitizer_right.put_aside([row, right("part", "def part(", "def part(")])
    assert row["errors"] == errors


def test_what_initcheck_does_not_see_written_is_written_anew() -> None:
    p = sanitizer_cases.problem(layout="bshd")
    inputs = sanitizer_cases.tensors(p, "cpu").detached(grad=True)
    o = kernels.get("naive").prepare(p, inputs)()
    right, strides = o.detach().clone(), o.stride()
    o.data.zero_()
    sanitizer_cases.write_anew(o, p)
    assert torch.equal(o, right)
    assert o.stride() == strides
    torch.autograd.grad(o, inputs.leaves, inputs.dout)


COMPILED = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from flashbench.kernels import _compile, _triton
_triton.load("cuda", "_flash_v3")
driver.set_active(_compile._NoDevice(GPUTarget("cuda", 90, 32)))
import sanitizer_right as right
out = torch.empty(4096, dtype=torch.int32, device="meta")
right.part.warmup(out, grid=(1,), num_warps=4)
code = right.exchange.warmup(out, 6, grid=(1,), num_warps=4).asm["ptx"]
for one in ("st.shared.v4", "ld.shared.v4"):  # of all threads; then their barrier, then one arrives
    later = code[code.index(one):]
    assert later.index("bar.sync") < later.index("mbarrier.arrive"), one
"""


def test_the_right_kernels_compile_for_hopper() -> None:
    holds_uninterpreted(COMPILED)
