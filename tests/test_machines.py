"""Machines that we lack, faked: ``doctor`` names what is special of each, and what to do about it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fuzzing import check
from test_cli_doctor import GPU, fake_nvml

from flashbench import environment
from flashbench._cli import doctor, driver, profile_static, surroundings
from flashbench._cli.finding import Finding
from flashbench.environment import Probe
from flashbench.errors import UnavailableError

CUDA = Probe(
    torch_version="2.11.0+cu130", torch_cuda="13.0", devices=0, visible=None, driver="580.1", nvml_gpus=1
)


def torch_cuda(*cards: tuple[str, int, int]) -> SimpleNamespace:
    rows = [SimpleNamespace(name=name, major=major, minor=minor) for name, major, minor in cards]
    return SimpleNamespace(device_count=lambda: len(rows), get_device_properties=rows.__getitem__)


def torch_of(**probe: Any) -> Callable[[], Iterable[Finding]]:
    def look() -> Iterable[Finding]:
        with pytest.MonkeyPatch.context() as patch:
            status = environment.gpu_status(replace(CUDA, **probe))
            patch.setattr(environment, "gpu_status", lambda: status)
            return list(doctor.torch_())

    return look


def driver_of(**answers: Any) -> Callable[[], Iterable[Finding]]:
    return lambda: doctor.driver_(driver.look(fake_nvml(**answers)))


def without_nvml() -> Iterable[Finding]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", None)
        return list(doctor.driver_(driver.look()))


def read_only_home() -> Iterable[Finding]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_CACHE_DIR", raising=False)
        patch.setenv("TRITON_HOME", "/proc")
        return list(surroundings.cache())


def wsl(folder: Path) -> Iterable[Finding]:
    (folder / "version").write_text("Linux version 5.15.167.4-microsoft-standard-WSL2 (gcc)\n")
    return surroundings.system("linux", folder / "version")


MACHINES: dict[str, tuple[Callable[[], Iterable[Finding]], str, str, str]] = {
    "no GPU": (torch_of(nvml_gpus=0), "problem", "it has no GPU", "--device cpu"),
    "no driver": (torch_of(driver=None, nvml_gpus=None), "problem", "no NVIDIA driver",
    "install the NVIDIA driver"),
    "hidden GPU": (torch_of(visible=""), "problem", "CUDA_VISIBLE_DEVICES=''", "unset CUDA_VISIBLE_DEVICES"),
    "driver too old": (torch_of(), "problem", "can use none", "new enough for torch's CUDA"),
    "driver mismatch": (
        driver_of(nvmlInit=RuntimeError("Driver/library version mismatch")), "problem", "mismatch", "reboot",
    ),
    "Volta": (lambda: surroundings.cards(torch_cuda(("V100", 7, 0))), "warn", "sm_70: no bf16",
    "--dtypes fp16"),
    "Turing": (lambda: surroundings.cards(torch_cuda(("T4", 7, 5))), "warn", "sm_75: no bf16",
    "--impls naive,sdpa"),
    "MIG slice": (lambda: doctor.gpu_(replace(GPU, mig=True)), "warn", "on", "numbers are those of a slice"),
    "unlike GPUs": (
        lambda: surroundings.cards(torch_cuda(("H100", 9, 0), ("A100", 8, 0))), "warn", "cuda:1 A100",
        "--device cuda:N",
    ),
    "ROCm": (torch_of(torch_cuda=None, torch_hip="7.0"), "problem", "ROCm 7.0", "--device cpu"),
    "torch CPU-only": (torch_of(torch_cuda=None), "problem", "without CUDA", "CUDA build of torch"),
    "torch CPU-only, no driver": (
        torch_of(torch_cuda=None, driver=None, nvml_gpus=None), "warn", "CPU-only",
        "nothing on a machine without a GPU",
    ),
    "macOS": (lambda: surroundings.system("darwin"), "warn", "macOS: Triton has no build",
    "naive and sdpa on the CPU"),
    "Windows": (lambda: surroundings.system("win32"), "warn", "Windows: Triton has no build", "WSL 2"),
    "no NVML": (without_nvml, "warn", "nvidia-ml-py cannot be imported", "pip install nvidia-ml-py"),
    "read-only home": (read_only_home, "warn", "Triton's usual cache", "TRITON_CACHE_DIR=DIR"),
    "not UTF-8": (lambda: surroundings.terminal("ISO-8859-1"), "warn", "ISO-8859-1", "LC_ALL=C.UTF-8"),
    "narrow terminal": (lambda: surroundings.terminal("utf-8", 40), "warn", "40 columns", "--json"),
    "low /dev/shm": (lambda: surroundings.shared_memory(free=64 * 2**20), "warn", "in /dev/shm",
    "--shm-size=1g"),
    "few files": (lambda: surroundings.limits(files=256), "warn", "at most 256", "ulimit -n"),
    "limited addresses": (
        lambda: surroundings.limits(address_space=2**33), "warn", "of addresses", "ulimit -v unlimited",
    ),
    "little memory": (lambda: surroundings.memory(free=2**30), "warn", "free", "container's limit"),
}  # fmt: skip


@pytest.mark.parametrize("name", MACHINES)
def test_doctor_names_it_with_its_remedy(name: str) -> None:
    look, state, said, todo = MACHINES[name]
    (found,) = [finding for finding in look() if finding.state != "ok"]
    assert found.state == state
    assert said in found.detail
    assert todo in found.todo


def test_doctor_names_wsl(tmp_path: Path) -> None:
    (found,) = wsl(tmp_path)
    assert found.state == "warn"
    assert "WSL" in found.detail
    assert "Control Panel" in found.todo


def test_an_ordinary_machine_is_fine() -> None:
    """Every look at once, of numbers without a fault."""
    looks = (
        surroundings.cards(torch_cuda(("H100", 9, 0), ("H100", 9, 0))), surroundings.terminal("UTF-8", 120),
        surroundings.limits(files=2**20, address_space=-1), surroundings.memory(2**36),
        surroundings.shared_memory(free=2**33), surroundings.system("linux", Path("/nowhere")),
    )  # fmt: skip
    assert {finding.state for look in looks for finding in look} == {"ok"}


def test_every_look_is_part_of_doctor() -> None:
    names = {row["name"] for row in json.loads(check(["doctor", "--json"]).out)}
    assert names >= {"system", "Triton's cache", "encoding", "open files"}


LACKING = """
import builtins, socket, sys
real = builtins.__import__
def without(name, *arguments, **words):
    if name.split(".")[0] in ("pynvml", "triton"):
        raise ImportError("No module named " + name)
    return real(name, *arguments, **words)
def offline(*_, **__):
    raise OSError("Network is unreachable")
builtins.__import__ = without
socket.socket.connect = socket.getaddrinfo = offline
from flashbench.cli import main
for line in sys.argv[1:]:
    try:
        main(line.split())
    except SystemExit as stop:
        print("ended", stop.code or 0, line)
"""
WORKING = (
    "run --device cpu --dry-run --csv", "run --dry-run --impls naive,flash", "io-model --seqlens 1k",
    "list", "doctor",
    "kv-cache --model llama-3-8b", "list devices --json",
    "check --impls naive --device cpu --seqlens 7 --head-dims 16",
)  # fmt: skip


@pytest.mark.slow
def test_what_can_work_does_on_a_poor_machine(tmp_path: Path) -> None:
    """Without Triton, NVML, network, a home, UTF-8 and columns, and with few file descriptors."""
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n{LACKING}"
    poor = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "30", "HOME": "/proc",
            "CUDA_VISIBLE_DEVICES": ""}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", limited, *WORKING], cwd=tmp_path, env=environment.for_child(**poor),
        capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    ended = [line for line in done.stdout.decode("ascii").splitlines() if line.startswith("ended")]
    assert ended == [f"ended 0 {line}" for line in WORKING], done.stderr.decode("ascii", "replace")[-2000:]


BROKEN = {
    "absent": ModuleNotFoundError("No module named 'torch'", name="torch"),
    "library": OSError("libcudart.so.12: cannot open shared object file"),
    "symbol": ImportError("undefined symbol: _ZN3c10"), "other": RuntimeError("no such\noperator"),
    "dependency": ModuleNotFoundError("No module named 'sympy'", name="sympy"), "memory": MemoryError(),
}  # fmt: skip
NEED_TORCH = (
    "run --seqlens 16", "run --device cpu --seqlens 16", "run --dry-run", "run --device cuda",
    "check --seqlens 16", "check --device cpu --seqlens 16", "check --numerics --device cpu",
    "tune --dry-run",
    "decode", "decode --check", "decode --check --device cpu", "decode --check --pairs --device cpu",
    "calibrate", "block", "ring", "ring --check", "profile", "profile --trace --seqlens 16",
    "gate --config plan.toml --out g.json",
)  # fmt: skip


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Exception], None]:
    """A call makes every import of torch end so."""

    class Finder:
        said: Exception

        def find_spec(self, name: str, *_: object) -> None:
            if name == "torch":
                raise self.said

    finder = Finder()

    def broken(said: Exception) -> None:
        finder.said = said
        monkeypatch.delitem(sys.modules, "torch")
        monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])

    monkeypatch.chdir(tmp_path)
    Path("plan.toml").write_text("[check]\nseqlens = 16\n")
    return broken


@pytest.mark.parametrize("line", NEED_TORCH)
def test_without_torch_a_line_says_so_and_what_to_do(
    line: str, without_torch: Callable[[Exception], None]
) -> None:
    without_torch(BROKEN["library"])
    found = check(line.split())
    assert found.code == 3
    assert "torch cannot be imported: OSError: libcudart.so.12: cannot open" in found.err
    assert "hint: reinstall it: pip install --force-reinstall torch; io-model" in found.err


@pytest.mark.parametrize("kind", BROKEN)
def test_whatever_a_broken_torch_raises(kind: str, without_torch: Callable[[Exception], None]) -> None:
    without_torch(BROKEN[kind])
    found = check(["run", "--dry-run"])
    assert found.code == 3
    assert f"torch cannot be imported: {type(BROKEN[kind]).__name__}" in found.err
    assert ("hint: pip install torch;" in found.err) == (kind == "absent")
    listed = {row["name"]: row for row in json.loads(check(["list", "implementations", "--json"]).out)}
    assert "torch cannot be imported" in listed["naive"]["why_not"]
    told = {row["name"]: row for row in json.loads(check(["doctor", "--json"]).out)}
    assert "torch cannot be imported" in told["torch"]["detail"]
    assert "list work without it" in told["torch"]["todo"]
    assert check(["run", "--dry-run", "--device", "cpu", "--seqlens", "16"]).code == 0


def test_kernels_that_did_not_compile_for_want_of_torch(
    without_torch: Callable[[Exception], None],
) -> None:
    without_torch(BROKEN["library"])
    with pytest.raises(UnavailableError, match="torch cannot be imported"):
        profile_static._verdict([{"kernel": "flash"}], 1)


def test_a_real_torch_that_finds_no_room_for_itself() -> None:
    limited = "import resource; resource.setrlimit(resource.RLIMIT_AS, (400_000 << 10,) * 2)"
    line = f"{limited}; from flashbench.cli import main; main(['run', '--dry-run'])"
    run = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=False)
    assert run.returncode == 3, run.stderr
    assert "error: torch cannot be imported: " in run.stderr
    assert "hint: give it more memory: raise the limit that 'ulimit -v' shows" in run.stderr
