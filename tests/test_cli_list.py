"""``flashbench list`` shows every row of every table, and why one cannot be used here."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from flashbench import devices, iomodel, kernels, metrics, presets
from flashbench._cli import driver
from flashbench._cli.driver import Driver, Gpu
from flashbench._iomodel import alternatives
from flashbench.cli import main

H100 = Gpu(
    index=0, name="NVIDIA H100 80GB HBM3", persistence=True, clock_mhz=1980, max_clock_mhz=1980, processes=(),
    mig=False, caps=(),
)  # fmt: skip


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for whole names: a test runner may set COLUMNS to its own terminal's."""
    monkeypatch.setenv("COLUMNS", "400")


def listed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    with pytest.raises(SystemExit) as stop:
        main(["list", *argv])
    captured = capsys.readouterr()
    assert not stop.value.code, captured.err
    return captured.out


def test_all_tables_stand_in_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    tables = json.loads(listed(["--json"], capsys))
    names = {subject: [row["name"] for row in rows] for subject, rows in tables.items()}
    assert names == {
        "implementations": list(kernels.registry()),
        "devices": [row.name for row in devices.DEVICES],
        "metrics": [row.name for row in metrics.METRICS],
        "models": [*(row.name for row in iomodel.MODELS), *alternatives.names()],
        "presets": [row.name for row in presets.PRESETS],
    }
    for rows in tables.values():
        for row in rows:
            assert row["available"] is (row["why_not"] is None)


@pytest.mark.parametrize("subject", ["implementations", "devices", "metrics", "models", "presets"])
def test_one_subject_as_table_json_and_csv(subject: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(listed([subject, "--json"], capsys))
    table = listed([subject], capsys)
    comma = list(csv.DictReader(io.StringIO(listed([subject, "--csv"], capsys))))
    assert [row["name"] for row in rows] == [row["name"] for row in comma]
    for row in rows:
        assert row["name"] in table


def test_without_a_gpu_every_device_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "look", lambda: Driver(why_none="no NVIDIA driver answers (NVML)"))
    rows = json.loads(listed(["devices", "--json"], capsys))
    assert {row["why_not"] for row in rows} == {"no NVIDIA driver answers"}
    rows = {row["name"]: row for row in json.loads(listed(["metrics", "--json"], capsys))}
    assert rows["time_s"]["available"]
    assert "GPU only" in rows["peak_extra_bytes"]["why_not"]
    assert "roofs" in rows["peak_fraction"]["why_not"]


def test_with_a_known_gpu_its_row_and_every_metric_are_available(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "look", lambda: Driver(version="1", gpus=(H100,)))
    rows = json.loads(listed(["devices", "--json"], capsys))
    assert [row["name"] for row in rows if row["available"]] == ["h100-sxm"]
    assert all(row["available"] for row in json.loads(listed(["metrics", "--json"], capsys)))


def test_with_an_unknown_gpu_only_the_roofs_are_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    foo = replace(H100, name="NVIDIA Foo 9999")
    monkeypatch.setattr(driver, "look", lambda: Driver(version="1", gpus=(foo,)))
    rows = {row["name"]: row for row in json.loads(listed(["metrics", "--json"], capsys))}
    assert rows["peak_extra_bytes"]["available"]
    assert "Foo 9999" in rows["peak_fraction"]["why_not"]


FIELDS = {
    "arch", "num_sms", "smem_per_sm_bytes", "smem_per_block_bytes", "registers_per_sm_bytes", "l2_bytes",
    "l2_bytes_per_s", "hbm_bytes", "hbm_bytes_per_s", "mufu_per_clk_per_sm", "clock_hz", "tdp_w", "source",
}  # fmt: skip


def test_devices_have_every_field_in_json_and_csv(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(listed(["devices", "--json"], capsys))
    comma = list(csv.DictReader(io.StringIO(listed(["devices", "--csv"], capsys))))
    for device, row, line in zip(devices.DEVICES, rows, comma, strict=True):
        assert {name: row[name] for name in FIELDS} == {name: getattr(device, name) for name in FIELDS}
        for dtype, peak in device.peak_flops_per_s.items():
            assert row[f"{dtype}_flops_per_s"] == peak
        assert row["uncertain"] == (device.uncertain or None)
        assert line["uncertain"] == device.uncertain
        assert line["l2_bytes"] == str(device.l2_bytes)


@pytest.mark.parametrize("argv", [["list", "devices"], ["list"]])
def test_devices_as_text_mark_what_is_uncertain_and_note_why(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(argv)
    out, err = capsys.readouterr()
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert " yes " in f"{lines['a10g']} "
    assert " yes " not in f"{lines['a100-sxm-40gb']} "
    assert err.count("a10g: uncertain: peaks") == 1
    assert "--json and --csv have every field" in err


def test_quiet_leaves_out_the_notes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["list", "devices", "-q"])
    assert capsys.readouterr().err == ""


def test_the_devices_fit_a_usual_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    out = listed(["devices"], capsys)
    for device in devices.DEVICES:
        assert sum(line.split()[:1] == [device.name] for line in out.splitlines()) == 1
