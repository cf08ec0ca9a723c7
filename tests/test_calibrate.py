"""Calibration: the file and its reader, what a CPU can be measured for, the kernels, the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashbench import calibrate, ceilings, devices, environment
from flashbench.cli import main
from flashbench.errors import RunFileError
from flashbench.kernels import Target
from flashbench.profilers import Policy

ROOT = Path(__file__).resolve().parent.parent
CPU = Target(device="cpu", name="a CPU")


def document(**changes: object) -> dict:
    return {
        "type": "calibration", "schema": 1, "created_at": "2026-01-02T03:04:05Z",
        "device": {"name": "NVIDIA H100 80GB HBM3", "uuid": "GPU-1"},
        "ceilings": {"copy_bytes_per_s": 3.0e12, "read_bytes_per_s": 3.1e12, "l2_bytes_per_s": None,
                     "exps_per_s": 3.8e12, "flops_per_s": {"bf16": 7.5e14, "fp8": None}},
        "measurements": [],
    } | changes  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes that take milliseconds."""
    policy = Policy(limit_s=0.01, min_samples=4, max_samples=8, warmup=1)
    monkeypatch.setattr(calibrate, "_POLICY", {"cpu": policy})
    monkeypatch.setattr(calibrate, "_BUFFER", {"cpu": 2**22})
    monkeypatch.setattr(calibrate, "_MATRIX", {"cpu": 64})


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(ceilings.VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept"


def test_what_is_stored_is_read_again(home: Path) -> None:
    path = ceilings.path_for("NVIDIA H100 80GB HBM3", "GPU-1")
    assert path == home / "GPU-1.json"
    ceilings.save(document(), path)
    row = ceilings.stored("NVIDIA H100 80GB HBM3", "GPU-1")
    assert row == ceilings.load(path)
    assert (row.copy_bytes_per_s, row.l2_bytes_per_s) == (3.0e12, None)
    assert row.flops_per_s == {"bf16": 7.5e14, "fp8": None}
    assert [item.name for item in home.iterdir()] == ["GPU-1.json"]


def test_only_this_card_s_calibration_is_found(home: Path) -> None:
    ceilings.save(document(), home / "a.json")
    ceilings.save(
        document(created_at="2026-02-02T00:00:00Z", device={"name": "NVIDIA H200"}), home / "b.json"
    )
    newer = document(created_at="2026-03-02T00:00:00Z")
    ceilings.save(newer, home / "c.json")
    (home / "broken.json").write_text("{")
    assert ceilings.stored("NVIDIA H100 80GB HBM3").created_at == "2026-03-02T00:00:00Z"
    assert ceilings.stored("NVIDIA H100 80GB HBM3", "GPU-2") is None
    assert ceilings.stored("NVIDIA H200", "GPU-9").device_uuid is None
    assert ceilings.stored("NVIDIA H100 PCIe") is None


def test_without_a_folder_nothing_is_stored(home: Path) -> None:
    assert ceilings.stored("NVIDIA H100 80GB HBM3") is None


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "not JSON"),
        ("[]", "no calibration"),
        (json.dumps(document(schema=2)), "schema 2; accepted: 1"),
        (json.dumps(document(device={})), "no device name"),
        (json.dumps(document(ceilings={})), "no ceilings"),
        (json.dumps(document(ceilings={"flops_per_s": {"bf16": -1}})), "flops_per_s bf16 is -1"),
        (json.dumps(document(ceilings={"flops_per_s": {}, "exps_per_s": "x"})), "exps_per_s is 'x'"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_file_that_is_none_is_named(content: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(content)
    with pytest.raises(RunFileError, match=r"calibration '.*c.json'") as caught:
        ceilings.load(path)
    assert text in str(caught.value)


def test_nothing_is_stored_that_could_not_be_read(home: Path) -> None:
    with pytest.raises(RunFileError):
        ceilings.save(document(schema=7), home / "a.json")
    assert not home.exists()


def test_a_cpu_is_measured_for_what_it_has(small: None) -> None:
    target = environment.target("cpu")
    seen = []
    found = calibrate.measure(target, lambda done, name: seen.append((done, name)))
    assert [name for _, name in seen] == [probe.name for probe in calibrate.PROBES]
    row = ceilings.parse(found, "it")
    assert row.device_name == target.name
    assert row.copy_bytes_per_s > 1e8
    assert row.read_bytes_per_s > 1e8
    assert row.flops_per_s["fp32"] > 1e7
    assert row.l2_bytes_per_s is row.exps_per_s is row.flops_per_s["fp8"] is None
    assert set(row.flops_per_s) == set(calibrate.DTYPES)
    for item in found["measurements"]:
        if item["value"] is None:
            assert item["reason"]
        else:
            assert item["best"] >= item["value"] > 0
            assert item["samples"] >= 4
    json.dumps(found, allow_nan=False)


def test_a_probe_that_fails_leaves_the_others(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(target: Target) -> None:
        raise RuntimeError("out of\nmemory")

    first, *rest = calibrate.PROBES
    bad = calibrate.Probe(name=first.name, unit=first.unit, method=first.method, make=broken)
    monkeypatch.setattr(calibrate, "PROBES", (bad, *rest))
    found = calibrate.measure(environment.target("cpu"))
    assert found["measurements"][0]["reason"] == "RuntimeError: out of memory"
    assert found["ceilings"]["copy_bytes_per_s"] is None
    assert found["ceilings"]["read_bytes_per_s"] > 0


def test_the_value_is_that_of_the_settled_half(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashbench.profilers import Timing
    from flashbench.record import Samples

    samples = Samples(samples_s=(1.0, 1.0, 1.0, 2.0, 2.0, 4.0), cache="hot", method="events")
    monkeypatch.setattr(calibrate, "measure_time", lambda call, **_: Timing(samples=samples))
    probe = calibrate.Probe(name="x", unit="B/s", method="", make=lambda _: (lambda: None, 8))
    row = calibrate._run(probe, CPU, None)
    assert (row["value"], row["best"], row["spread"]) == (4.0, 8.0, 1.0)


KERNELS = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
from flashbench.kernels import _probes
x = torch.rand(6 * 64)
for repeats, unroll in ((1, 1), (3, 1), (2, 2)):
    sums = torch.zeros(3)
    _probes.read[(3,)](x, sums, 6, repeats, BLOCK=64, UNROLL=unroll)
    assert torch.allclose(sums.sum(), repeats * x.sum()), (sums, x.sum())
    if repeats == 1:
        assert torch.allclose(sums, x.view(2, 3, 64).sum((0, 2)))
out = torch.zeros(2)
_probes.exp2[(2,)](out, 3, BLOCK=16, UNROLL=4)
y = (torch.arange(16) + torch.tensor([[0], [1]])) / 16
for _ in range(12):
    y = torch.exp2(-y)
assert torch.allclose(out, y.sum(1)), (out, y.sum(1))
"""


def test_the_kernels_read_everything_and_compute_every_exponential() -> None:
    done = subprocess.run(
        [sys.executable, "-c", KERNELS], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr


def command(*arguments: str, data: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flashbench", "calibrate", *arguments], capture_output=True, text=True,
        cwd=ROOT, check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "300", ceilings.VARIABLE: str(data)},
    )  # fmt: skip


def test_without_a_gpu_the_command_exits_3_with_one_line(tmp_path: Path) -> None:
    done = command(data=tmp_path)
    assert done.returncode == 3
    assert done.stdout == ""
    assert sum(line.startswith("error:") for line in done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_the_command_measures_a_cpu_and_stores_it(tmp_path: Path) -> None:
    done = command("--device", "cpu", "--json", "--quiet", data=tmp_path)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text()) == json.loads(done.stdout)
    assert done.stderr == ""
    assert ceilings.load(path).copy_bytes_per_s > 0


def test_an_interrupt_is_told_and_stores_nothing(
    home: Path, small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "_release", lambda _: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as stop:
        main(["calibrate", "--device", "cpu", "--json", "-q"])
    assert (stop.value.code, capsys.readouterr()) == (
        130, ("", "warning: interrupted; not all ceilings were measured, and none is stored\n"),
    )  # fmt: skip
    assert not home.exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device", "gpu"], "--device 'gpu': not a device"),
        (["--device", "cpu", "--out", "/no/such/folder/x.json"], "there is no folder"),
        (["--device", "cpu", "--out", "."], "--out '.': not a file"),
        (["--device", "cpu", "--json", "--csv"], "exclude each other"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], text: str, tmp_path: Path) -> None:
    done = command(*arguments, data=tmp_path)
    assert done.returncode == 2
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.gpu
def test_a_gpu_reaches_most_of_its_data_sheet_and_not_more() -> None:
    start = time.perf_counter()
    target = environment.target("cuda:0")
    found = calibrate.measure(target)
    assert time.perf_counter() - start < 60
    row = ceilings.parse(found, "it")
    card = devices.match(target.name)
    if card is None:
        pytest.skip(f"{target.name} has no row in DEVICES")
    for value in (row.copy_bytes_per_s, row.read_bytes_per_s):
        assert 0.6 < value / card.hbm_bytes_per_s < 1.02
    assert row.l2_bytes_per_s > 1.2 * row.read_bytes_per_s
    # boost clocks may lie above the one that the row's rates are quoted at
    most = card.num_sms * card.mufu_per_clk_per_sm * card.clock_hz
    assert 0.5 < row.exps_per_s / most < 1.15
    for dtype, peak in card.peak_flops_per_s.items():
        if peak is not None:
            assert 0.4 < row.flops_per_s[dtype] / peak < 1.15, dtype
