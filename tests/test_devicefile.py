"""Cards from TOML files, from the driver and from a calibration."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashbench import ceilings, devicefile, devices
from flashbench._cli import driver, gpu
from flashbench.devices import GIB, find
from flashbench.errors import FlashbenchError, RunFileError, SpecError, UnavailableError, UnknownName

FULL = """
name = "my-card"
arch = "sm90"
capability = [9, 0]
reported = ["My Card"]
num_sms = 100
smem_per_sm_bytes = 233472
smem_per_block_bytes = 232448
l2_bytes = 52428800
hbm_bytes = 85899345920
hbm_bytes_per_s = 2.5e12
clock_hz = 1.5e9
tdp_w = 500
source = "a data sheet"
[peak_flops_per_s]
bf16 = 700e12
fp16 = 700e12
"""


def write(path: Path, text: str) -> Path:
    file = path / "card.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_file_gives_a_whole_card(tmp_path: Path) -> None:
    card = devicefile.load(write(tmp_path, FULL))
    assert (card.name, card.num_sms, card.hbm_bytes_per_s, card.capability) == (
        "my-card",
        100,
        2.5e12,
        (9, 0),
    )
    assert card.peak_flops_per_s == {"fp16": 700e12, "bf16": 700e12, "tf32": None, "fp32": None, "fp8": None}
    assert card.mufu_per_clk_per_sm == 16
    assert card.exps_per_s == 16 * 100 * 1.5e9


def test_a_base_fills_what_is_not_said(tmp_path: Path) -> None:
    text = 'name = "slow"\nbase = "h100-sxm"\nhbm_bytes_per_s = 2e12\n[peak_flops_per_s]\nfp8 = 0\n'
    card, base = devicefile.load(write(tmp_path, text)), find("h100-sxm")
    assert card.hbm_bytes_per_s == 2e12
    assert card.num_sms == base.num_sms
    assert card.peak_flops_per_s["fp8"] is None
    assert card.peak_flops_per_s["bf16"] == base.peak_flops_per_s["bf16"]
    assert "h100-sxm" in card.source
    assert card.reported == ()


BAD = {
    "not TOML": ("name = ", "not TOML"),
    "not UTF-8": ("name = '\x00'", "not TOML"),
    "unknown key": (FULL.replace("tdp_w", "tpd_w"), "did you mean 'tdp_w'"),
    "missing keys": (FULL.replace("num_sms = 100\n", ""), "num_sms missing"),
    "no name": ('base = "h100-sxm"', "name missing"),
    "unknown base": ('name = "x"\nbase = "h100-smx"', "did you mean 'h100-sxm'"),
    "text for a count": (FULL.replace("num_sms = 100", 'num_sms = "many"'), "num_sms 'many'"),
    "true for a count": (FULL.replace("num_sms = 100", "num_sms = true"), "num_sms 'True'"),
    "half a count": (FULL.replace("num_sms = 100", "num_sms = 10.5"), "num_sms '10.5'"),
    "no SMs": (FULL.replace("num_sms = 100", "num_sms = 0"), "num_sms '0'"),
    "nan": (FULL.replace("2.5e12", "nan"), "hbm_bytes_per_s 'nan'"),
    "infinite": (FULL.replace("2.5e12", "inf"), "hbm_bytes_per_s 'inf'"),
    "negative": (FULL.replace("2.5e12", "-1"), "hbm_bytes_per_s '-1'"),
    "unknown dtype": (FULL.replace("bf16 =", "bfloat16 ="), "did you mean 'bf16'"),
    "no dtype": (FULL.replace("bf16 = 700e12\nfp16 = 700e12\n", "fp8 = 0\n"), "no dtype"),
    "peaks are a number": (FULL.replace("[peak_flops_per_s]\nbf16 = 700e12\nfp16 = 700e12", "")
                           .replace("tdp_w", "peak_flops_per_s = 1\ntdp_w"), "peak_flops_per_s '1'"),
    "a name of the table": (FULL.replace("my-card", "h100-sxm"), "is in the table"),
    "smem": (FULL.replace("232448", "333333"), "exceeds smem_per_sm_bytes"),
    "capability": (FULL.replace("[9, 0]", "9.0"), "capability '9.0'"),
    "reported": (FULL.replace('["My Card"]', "[1]"), "reported '[1]'"),
    "two lines of text": (FULL.replace('"a data sheet"', '"""a\nb"""'), "source"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_line_that_names_it(tmp_path: Path, name: str) -> None:
    text, said = BAD[name]
    file = write(tmp_path, text)
    with pytest.raises((SpecError, UnknownName)) as error:
        devicefile.load(file)
    message = str(error.value)
    assert said in message
    assert "\n" not in message
    assert error.value.exit_code == 2
    if name != "unknown base":
        assert str(file) in message


def test_a_file_that_is_none(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.toml"):
        with pytest.raises(SpecError, match="accepted: a TOML file"):
            devicefile.load(path)
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(SpecError, match="larger than 1 MiB"):
        devicefile.load(large)


def calibration(name: str = "NVIDIA H100 80GB HBM3", **rates: Any) -> dict[str, Any]:
    measured = {"copy_bytes_per_s": 3.0e12, "read_bytes_per_s": 3.1e12, "l2_bytes_per_s": 9.9e12,
                "exps_per_s": 3.7e12, "flops_per_s": {"bf16": 798e12, "fp8": None}}  # fmt: skip
    return {
        "type": "calibration", "schema": ceilings.SCHEMA, "created_at": "2026-01-02T03:04:05Z",
        "device": {"name": name, "uuid": "GPU-1"}, "ceilings": measured | rates, "measurements": [],
    }  # fmt: skip


def test_measured_ceilings_replace_the_data_sheets_and_say_so(tmp_path: Path) -> None:
    file = tmp_path / "card.json"
    file.write_text(json.dumps(calibration()), encoding="utf-8")
    base = find("h100-sxm")
    card = devices.with_calibration(base, str(file))
    assert card.hbm_bytes_per_s == 3.1e12
    assert card.l2_bytes_per_s == 9.9e12
    assert card.exps_per_s == 3.7e12
    assert card.peak_flops_per_s["bf16"] == 798e12
    assert card.peak_flops_per_s["fp8"] == base.peak_flops_per_s["fp8"]
    assert "2026-01-02" in card.roofs
    for word in ("memory", "L2", "exp", "bf16", "the rest from the data sheet"):
        assert word in card.roofs
    assert "fp8" not in card.roofs
    assert "data sheet" in base.roofs
    assert find("h100-sxm") is base, "the table is not changed"


def test_a_calibration_of_another_card_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "card.json"
    file.write_text(json.dumps(calibration("NVIDIA H200")), encoding="utf-8")
    with pytest.raises(SpecError, match=r"is of 'NVIDIA H200'; accepted: one of h100-sxm"):
        devices.with_calibration(find("h100-sxm"), str(file))
    file.write_text("{}", encoding="utf-8")
    with pytest.raises(RunFileError):
        devices.with_calibration(find("h100-sxm"), str(file))


def nvml(**changes: Any) -> Any:
    """An NVML with one H100; a change replaces a function by a value to return or an error to raise."""
    answers: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlDeviceGetHandleByIndex": "gpu",
        "nvmlDeviceGetMigMode": (0, 0),
        "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetUUID": "GPU-1",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=79 * GIB),
        "nvmlDeviceGetNumGpuCores": 120 * 128,
        "nvmlDeviceGetCudaComputeCapability": (9, 0),
    } | changes

    def answer(value: Any) -> Any:
        def call(*given: Any) -> Any:
            if isinstance(value, Exception):
                raise value
            return value(*given) if callable(value) else value

        return call

    return SimpleNamespace(**{name: answer(value) for name, value in answers.items()})


@pytest.fixture(autouse=True)
def _own_calibrations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ceilings.VARIABLE, str(tmp_path / "calibrations"))


def test_auto_takes_the_drivers_numbers() -> None:
    (card,) = gpu.choose("auto", library=nvml())
    assert (card.name, card.num_sms, card.hbm_bytes) == ("h100-sxm", 120, 79 * GIB)
    assert card.calibration == ""


@pytest.mark.parametrize(
    ("capability", "cores"), [((7, 0), 64), ((7, 5), 64), ((8, 0), 64), ((8, 6), 128), ((10, 0), 128)]
)
def test_sms_from_cores(capability: tuple[int, int], cores: int) -> None:
    found = driver.card(
        nvml(nvmlDeviceGetCudaComputeCapability=capability, nvmlDeviceGetNumGpuCores=50 * cores)
    )
    assert found is not None
    assert found.num_sms == 50


def test_auto_takes_the_stored_calibration_of_that_card() -> None:
    ceilings.save(calibration(), ceilings.path_for("NVIDIA H100 80GB HBM3", "GPU-1"))
    assert gpu.here(library=nvml()).peak_flops_per_s["bf16"] == 798e12
    other = gpu.here(library=nvml(nvmlDeviceGetUUID="GPU-2"))
    assert other.calibration == ""


def test_auto_scales_a_mig_slice() -> None:
    fake = nvml(
        nvmlDeviceGetMigMode=(1, 1),
        nvmlDeviceGetMaxMigDeviceCount=7,
        nvmlDeviceGetMigDeviceHandleByIndex=lambda _, index: "slice" if index == 2 else 1 / 0,
        nvmlDeviceGetName=lambda handle: "NVIDIA H100 80GB HBM3 MIG 1g.10gb" if handle == "slice" else "card",
        nvmlDeviceGetAttributes=SimpleNamespace(multiprocessorCount=16),
        nvmlDeviceGetMemoryInfo=SimpleNamespace(total=10 * GIB),
    )
    card, whole = gpu.here(library=fake), find("h100-sxm")
    assert (card.num_sms, card.hbm_bytes) == (16, 10 * GIB)
    assert card.hbm_bytes_per_s == whole.hbm_bytes_per_s / 8
    assert card.l2_bytes_per_s is not None
    assert whole.l2_bytes_per_s is not None
    assert card.l2_bytes_per_s == whole.l2_bytes_per_s * min(16 / 132, 1 / 8)
    assert "MIG" in card.uncertain


def test_auto_without_a_known_card() -> None:
    with pytest.raises(UnavailableError):
        gpu.choose("auto", library=nvml(nvmlDeviceGetHandleByIndex=RuntimeError("no GPU")))
    with pytest.raises(SpecError, match="'NVIDIA H800' is not in the table"):
        gpu.choose("auto", library=nvml(nvmlDeviceGetName="NVIDIA H800"))


QUERIES = [
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetNumGpuCores",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetCudaComputeCapability",
]


@pytest.mark.parametrize("broken", QUERIES)
def test_what_the_driver_refuses_is_the_tables(broken: str) -> None:
    card = gpu.here(library=nvml(**{broken: RuntimeError("Not Supported")}))
    assert card.name == "h100-sxm"
    expected = {"nvmlDeviceGetMemoryInfo": 80 * GIB}.get(broken, 79 * GIB)
    assert card.hbm_bytes == expected


def test_names_and_files_mix(tmp_path: Path) -> None:
    file = write(tmp_path, FULL)
    assert [card.name for card in gpu.choose(f"h200, {file}, t4")] == ["h200", "my-card", "t4"]
    for bad in ("", "h200,", "h200,h200", "h200,nonsense", f"{tmp_path / 'none.toml'}"):
        with pytest.raises(FlashbenchError) as error:
            gpu.choose(bad)
        assert error.value.exit_code == 2
        assert "\n" not in str(error.value)
