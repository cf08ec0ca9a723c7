"""Every card has one sane row, and is matched by its whole reported name or not at all."""

from __future__ import annotations

import pytest

from flashbench.devices import DEVICES, GIB, find, match
from flashbench.errors import UnknownName

REPORTED = {
    "Tesla V100-SXM2-16GB": "v100-sxm2",
    "Tesla V100-SXM2-32GB": "v100-sxm2-32gb",
    "Tesla T4": "t4",
    "NVIDIA A10G": "a10g",
    "NVIDIA A100-SXM4-40GB": "a100-sxm-40gb",
    "A100-SXM4-40GB": "a100-sxm-40gb",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-sxm-80gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA GeForce RTX 5090": "rtx-5090",
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "nvidia h100 80gb hbm3": "h100-sxm",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA B300 SXM6 AC": "b300",
    "NVIDIA GB300": "gb300",
    "AMD Instinct MI250X": "mi250x",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI325X": "mi325x",
    "AMD Instinct MI355X": "mi355x",
}

UNKNOWN = [
    "", "NVIDIA", "H100", "NVIDIA H100", "NVIDIA H800", "NVIDIA H20", "NVIDIA H200 NVL", "NVIDIA GH200 480GB",
    "NVIDIA L40", "NVIDIA A10", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100X", "NVIDIA T400", "Tesla V100-PCIE-16GB", "CPU",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
]  # fmt: skip


@pytest.mark.parametrize(("reported", "name"), REPORTED.items())
def test_a_card_is_matched_by_its_reported_name(reported: str, name: str) -> None:
    device = match(reported)
    assert device is not None
    assert device.name == name
    assert device == find(name)


@pytest.mark.parametrize("reported", UNKNOWN)
def test_a_card_without_a_row_matches_none(reported: str) -> None:
    assert match(reported) is None


def test_every_row_is_matched_by_a_name_of_its_own() -> None:
    assert {row.name for row in DEVICES} == set(REPORTED.values())
    names = [name for row in DEVICES for name in (row.name, *row.reported)]
    assert len(names) == len(set(names))


def test_what_the_driver_reports_wins() -> None:
    device = match("NVIDIA GB300", sms=160, memory_bytes=288 * GIB)
    assert device is not None
    assert (device.num_sms, device.hbm_bytes) == (160, 288 * GIB)


def test_a_mig_slice_is_the_card_scaled() -> None:
    whole = find("h100-sxm")
    device = match("NVIDIA H100 80GB HBM3 MIG 3g.40gb", sms=66, memory_bytes=40 * GIB)
    assert device is not None
    assert (device.num_sms, device.hbm_bytes) == (66, 40 * GIB)
    assert device.hbm_bytes_per_s == whole.hbm_bytes_per_s / 2
    assert device.l2_bytes == whole.l2_bytes // 2
    assert device.peak_flops_per_s["bf16"] == (whole.peak_flops_per_s["bf16"] or 0) / 2
    assert device.smem_per_sm_bytes == whole.smem_per_sm_bytes
    assert "MIG" in device.uncertain


@pytest.mark.parametrize("row", DEVICES, ids=lambda row: row.name)
def test_rows_are_sane(row: object) -> None:
    from flashbench.devices import Device

    assert isinstance(row, Device)
    assert row.source
    assert set(row.peak_flops_per_s) == {"fp16", "bf16", "tf32", "fp32", "fp8"}
    assert row.smem_per_block_bytes <= row.smem_per_sm_bytes <= 256 * 1024
    assert 10**9 < row.clock_hz < 3 * 10**9
    assert 10**11 < row.hbm_bytes_per_s <= 8 * 10**12
    half, single = row.peak_flops_per_s["fp16"], row.peak_flops_per_s["fp32"]
    assert half is not None
    assert single is not None
    assert half > single
    assert (row.capability is None) == row.arch.startswith("gfx")
    if row.capability is not None:
        assert row.arch == f"sm{row.capability[0]}{row.capability[1]}"
        # tensor cores do a power of two of FLOPs per clock and SM; data sheets round and vary the clock
        per_clock = half / (row.num_sms * row.clock_hz)
        assert min(abs(per_clock / 2**power - 1) for power in range(8, 14)) < 0.25


def test_published_ridge_points() -> None:
    """Dense fp16 FLOPs per byte of memory traffic above which the tensor cores are the limit."""
    ridges = {"a100-sxm-40gb": 201, "a100-sxm-80gb": 153, "h100-sxm": 295, "h200": 206, "mi300x": 247,
              "l4": 403, "l40s": 419, "rtx-4090": 164, "t4": 203}  # fmt: skip
    for name, ridge in ridges.items():
        device = find(name)
        assert round((device.peak_flops_per_s["fp16"] or 0) / device.hbm_bytes_per_s) == ridge


def test_bf16_is_missing_before_ampere() -> None:
    for name in ("v100-sxm2", "t4"):
        assert find(name).peak_flops_per_s["bf16"] is None


def test_an_unknown_id_offers_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'h100-sxm'"):
        find("h100-smx")
