"""``flashbench doctor`` tells causes apart and says what to do about each; it never fails itself."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashbench import environment
from flashbench._cli import doctor, driver
from flashbench._cli.doctor import Finding
from flashbench._cli.driver import Driver, Gpu
from flashbench.cli import main
from flashbench.environment import GpuStatus

GPU = Gpu(
    index=0, name="NVIDIA H100 80GB HBM3", persistence=True, clock_mhz=1980, max_clock_mhz=1980, processes=(),
    mig=False, caps=(),
)  # fmt: skip


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_it_reports_and_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert not stop.value.code
    assert {row["name"] for row in rows} >= {"python", "torch", "driver", "ncu", "triton", "cores", "disk"}
    for row in rows:
        assert row["state"] in {"ok", "warn", "problem"}
        assert row["detail"]
        assert row["todo"] or row["state"] == "ok", row


@pytest.mark.parametrize(
    ("status", "state", "said"),
    [
        (GpuStatus(kind="ok", message="torch sees 1 GPU"), "ok", "torch sees 1 GPU"),
        (GpuStatus(kind="cpu-only-torch", message="built without CUDA"), "warn", "CPU-only torch"),
        (
            GpuStatus(kind="cpu-only-torch", message="built without CUDA", hint="install a CUDA build"),
            "problem",
            "cpu-only-torch",
        ),
        (GpuStatus(kind="no-driver", message="no driver", hint="install it"), "problem", "no-driver"),
        (GpuStatus(kind="hidden", message="CUDA_VISIBLE_DEVICES=''", hint="unset it"), "problem", "hidden"),
    ],
)
def test_causes_without_a_gpu_are_told_apart(
    status: GpuStatus, state: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "gpu_status", lambda: status)
    (found,) = doctor.torch_()
    assert found.state == state
    assert said in found.detail
    assert status.hint in found.todo


def test_a_quiet_gpu_is_fine() -> None:
    assert {finding.state for finding in doctor.gpu_(GPU)} == {"ok"}


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        ({"name": "NVIDIA Foo 9999"}, "gpu 0", "not known"),
        ({"persistence": False}, "gpu 0 persistence", "off"),
        ({"processes": (41, 42)}, "gpu 0 processes", "41, 42"),
        ({"mig": True}, "gpu 0 MIG", "on"),
        ({"caps": ("power cap",)}, "gpu 0 clocks", "power cap"),
    ],
)
def test_what_spoils_numbers_is_a_warning(change: dict[str, Any], name: str, said: str) -> None:
    found = by_name(doctor.gpu_(replace(GPU, **change)))[name]
    assert found.state == "warn"
    assert said in found.detail
    assert found.todo


def test_a_gpu_that_tells_nothing_is_no_crash() -> None:
    silent = Gpu(
        index=0, name=None, persistence=None, clock_mhz=None, max_clock_mhz=None, processes=None, mig=None,
        caps=(),
    )  # fmt: skip
    assert [finding.name for finding in doctor.gpu_(silent) if finding.state != "ok"] == ["gpu 0"]


@pytest.mark.parametrize(
    ("parameters", "privileged", "state"),
    [
        ("RmProfilingAdminOnly: 0\n", False, "ok"),
        ("RmProfilingAdminOnly: 1\n", False, "warn"),
        ("RmProfilingAdminOnly: 1\n", True, "ok"),
        (None, False, "warn"),
    ],
)
def test_counter_permission(parameters: str | None, privileged: bool, state: str, tmp_path: Path) -> None:
    path = tmp_path / "params"
    if parameters is not None:
        path.write_text(parameters)
    found = by_name(doctor.ncu("/usr/bin/ncu", path, privileged=privileged, gpu=True))
    assert found["ncu"].state == "ok"
    assert found["counters"].state == state


def test_ncu_that_is_missing_is_a_warning(tmp_path: Path) -> None:
    found = by_name(doctor.ncu(None, tmp_path / "params", privileged=False, gpu=False))
    assert found["ncu"].state == "warn"
    assert "counters" not in found


def test_a_look_that_crashes_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterable[Finding]:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(doctor, "triton", broken)
    found = by_name(doctor.findings())["triton"]
    assert found.state == "problem"
    assert found.detail == "RuntimeError: two lines"


def fake_nvml(**changes: Any) -> SimpleNamespace:
    answers: dict[str, Any] = {
        "nvmlInit": None, "nvmlSystemGetDriverVersion": b"570.1", "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": "handle", "nvmlDeviceGetName": b"NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetPersistenceMode": 1, "nvmlDeviceGetClockInfo": 1980, "nvmlDeviceGetMaxClockInfo": 1980,
        "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=1)], "nvmlDeviceGetMigMode": [0, 0],
        "nvmlDeviceGetCurrentClocksEventReasons": 4, "nvmlDeviceGetPowerUsage": 1000,
        "nvmlDeviceGetTemperature": 30, "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    }  # fmt: skip

    def call(value: Any) -> Any:
        def answer(*_: Any) -> Any:
            if isinstance(value, Exception):
                raise value
            return value

        return answer

    functions = {name: call(value) for name, value in {**answers, **changes}.items()}
    return SimpleNamespace(**functions, NVML_CLOCK_SM=1, NVML_TEMPERATURE_GPU=0)


def test_the_driver_is_read() -> None:
    found = driver.look(fake_nvml())
    assert found == Driver(version="570.1", gpus=(replace(GPU, processes=(1,), caps=("power cap",)),))


REFUSABLE = [name for name in vars(fake_nvml()) if name.startswith("nvml")]


@pytest.mark.parametrize("name", REFUSABLE)
def test_any_call_of_nvml_may_be_refused(name: str) -> None:
    found = driver.look(fake_nvml(**{name: RuntimeError("Not Supported")}))
    assert bool(found.gpus) == (name not in {"nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"})
    assert found.gpus or found.why_none
    for gpu in found.gpus:
        assert list(doctor.gpu_(gpu))
