"""DEVICES: one row per GPU, each with its source and what is uncertain about it.

To add a card, add a row. Capacities of memories are powers of two (a data sheet's "80 GB" of HBM
is 80 GiB); bandwidths and rates are decimal. Peaks are dense (no sparsity) and, where a card
distinguishes, with fp32 accumulation, which attention needs. Query the driver first and the
table second: ``match`` takes what the driver reports.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from flashbench import ceilings
from flashbench.ceilings import Ceilings
from flashbench.errors import SpecError, UnknownName

KIB = 2**10
MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU as its data sheet and measurements describe it.

    name: id on the command line. reported: names by which drivers report this card, without the
    vendor's name. capability: CUDA compute capability, None on AMD. smem: shared memory (AMD: LDS)
    per SM (AMD: CU) and the most one block may use. hbm: the card's memory, HBM or GDDR.
    peak_flops_per_s: dense peak per dtype (fp16, bf16, tf32, fp32, fp8), FLOP/s, None where the
    card lacks it. mufu_per_clk_per_sm: exponentials per clock per SM. clock_hz: the boost clock
    that the peaks are quoted at. tdp_w: watts. uncertain: what is doubtful about the row, or empty.
    l2_bytes_per_s: measured bandwidth from L2 to all SMs, None where nobody measured it. measured:
    ceilings of this very card that replace the data sheet's (``with_calibration``), by name, and
    calibration, one line that says so; both are empty for a row of the table.
    """

    name: str
    reported: tuple[str, ...]
    arch: str
    capability: tuple[int, int] | None
    num_sms: int
    smem_per_sm_bytes: int
    smem_per_block_bytes: int
    registers_per_sm_bytes: int = 256 * KIB
    l2_bytes: int
    hbm_bytes: int
    hbm_bytes_per_s: float
    peak_flops_per_s: Mapping[str, float | None]
    mufu_per_clk_per_sm: int = 16
    clock_hz: float
    tdp_w: int
    source: str
    uncertain: str = ""
    l2_bytes_per_s: float | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    calibration: str = ""

    @property
    def exps_per_s(self) -> float:
        """Exponentials per second of the whole card: measured, else units x SMs x clock."""
        return self.measured.get("exps_per_s") or self.mufu_per_clk_per_sm * self.num_sms * self.clock_hz

    @property
    def roofs(self) -> str:
        """Where the ceilings come from, for a note beside a table."""
        return self.calibration or f"data sheet ({self.source})"


def _peaks(
    half: float, tf32: float | None, fp32: float, fp8: float | None, *, bf16: bool = True
) -> dict[str, float | None]:
    """Dense peaks in TFLOP/s to FLOP/s per dtype; fp16 and bf16 share ``half``."""
    rates = {"fp16": half, "bf16": half if bf16 else None, "tf32": tf32, "fp32": fp32, "fp8": fp8}
    return {dtype: None if rate is None else round(rate * 1000) * 1e9 for dtype, rate in rates.items()}


# What the cards of one chip share; a row adds what is its own.
_V100 = partial(
    Device, arch="sm70", capability=(7, 0), num_sms=80,
    smem_per_sm_bytes=96 * KIB, smem_per_block_bytes=96 * KIB,
    l2_bytes=6 * MIB, hbm_bytes_per_s=900e9, peak_flops_per_s=_peaks(125, None, 15.7, None, bf16=False),
    clock_hz=1530e6, tdp_w=300, source="NVIDIA V100 data sheet; 895 GB/s measured by gpu-benches",
    uncertain="from memory of the data sheet",
)  # fmt: skip
_A100 = partial(
    Device, arch="sm80", capability=(8, 0), num_sms=108,
    smem_per_sm_bytes=164 * KIB, smem_per_block_bytes=163 * KIB,
    l2_bytes=40 * MIB, l2_bytes_per_s=5.4e12, peak_flops_per_s=_peaks(312, 156, 19.5, None),
    clock_hz=1410e6,
    source="NVIDIA A100 data sheet; gpu-benches measures 1503 GB/s (40 GB), 1880 GB/s (80 GB), L2 5.4 TB/s",
)  # fmt: skip
_GDDR = partial(Device, smem_per_sm_bytes=100 * KIB, smem_per_block_bytes=99 * KIB)
_AMPERE = partial(_GDDR, arch="sm86", capability=(8, 6))
_ADA = partial(_GDDR, arch="sm89", capability=(8, 9))
_HOPPER = partial(
    Device, arch="sm90", capability=(9, 0), num_sms=132, smem_per_sm_bytes=228 * KIB,
    smem_per_block_bytes=227 * KIB, l2_bytes=50 * MIB,
)  # fmt: skip
_HOPPER_SXM = partial(
    _HOPPER,
    peak_flops_per_s=_peaks(989.4, 494.7, 66.9, 1978.9),
    clock_hz=1830e6,
    tdp_w=700,
    l2_bytes_per_s=9.7e12,
)
_BLACKWELL = partial(_HOPPER, arch="sm100", capability=(10, 0), l2_bytes=129536 * KIB, hbm_bytes_per_s=8000e9)
_BLACKWELL_ULTRA = partial(_BLACKWELL, arch="sm103", capability=(10, 3), mufu_per_clk_per_sm=32)
_INFINITY_CACHE = "exp rate from memory; the 256 MiB Infinity Cache (17 TB/s) is not in the row"
_CDNA3 = partial(
    Device, arch="gfx942", capability=None, num_sms=304,
    smem_per_sm_bytes=64 * KIB, smem_per_block_bytes=64 * KIB,
    registers_per_sm_bytes=512 * KIB, l2_bytes=32 * MIB, peak_flops_per_s=_peaks(1307, 654, 163.4, 2615),
    clock_hz=2100e6, uncertain=_INFINITY_CACHE,
)  # fmt: skip

DEVICES: tuple[Device, ...] = (
    _V100(name="v100-sxm2", reported=("V100-SXM2-16GB",), hbm_bytes=16 * GIB),
    _V100(name="v100-sxm2-32gb", reported=("V100-SXM2-32GB",), hbm_bytes=32 * GIB),
    Device(
        name="t4", reported=("T4",), arch="sm75", capability=(7, 5), num_sms=40,
        smem_per_sm_bytes=64 * KIB, smem_per_block_bytes=64 * KIB, l2_bytes=4 * MIB, hbm_bytes=16 * GIB,
        hbm_bytes_per_s=320e9, peak_flops_per_s=_peaks(65, None, 8.1, None, bf16=False), clock_hz=1590e6,
        tdp_w=70, source="NVIDIA T4 data sheet", uncertain="partly from memory of the data sheet",
    ),
    _AMPERE(
        name="a10g", reported=("A10G",), num_sms=80, l2_bytes=6 * MIB, hbm_bytes=24 * GIB,
        hbm_bytes_per_s=600e9, peak_flops_per_s=_peaks(70, 35, 31.5, None), clock_hz=1710e6, tdp_w=300,
        source="AWS G5 specifications; no public data sheet",
        uncertain="peaks (an A10 has 125 TFLOP/s fp16) and TDP (150 to 300 W)",
    ),
    _A100(name="a100-sxm-40gb", reported=("A100-SXM4-40GB",), hbm_bytes=40 * GIB,
          hbm_bytes_per_s=1555e9, tdp_w=400),
    _A100(name="a100-pcie-40gb", reported=("A100-PCIE-40GB",), hbm_bytes=40 * GIB,
          hbm_bytes_per_s=1555e9, tdp_w=250),
    _A100(name="a100-sxm-80gb", reported=("A100-SXM4-80GB", "A100-SXM-80GB"), hbm_bytes=80 * GIB,
          hbm_bytes_per_s=2039e9, tdp_w=400, uncertain="bandwidth and TDP from memory of the data sheet"),
    _A100(name="a100-pcie-80gb", reported=("A100 80GB PCIe",), hbm_bytes=80 * GIB,
          hbm_bytes_per_s=1935e9, tdp_w=300, uncertain="bandwidth and TDP from memory of the data sheet"),
    _ADA(
        name="l4", reported=("L4",), num_sms=58, l2_bytes=48 * MIB, hbm_bytes=24 * GIB,
        hbm_bytes_per_s=300e9, peak_flops_per_s=_peaks(121, 60, 30.3, 242), clock_hz=2040e6, tdp_w=72,
        source="NVIDIA L4 data sheet", uncertain="some sources say 60 SMs",
    ),
    _ADA(
        name="l40s", reported=("L40S",), num_sms=142, l2_bytes=96 * MIB, hbm_bytes=48 * GIB,
        hbm_bytes_per_s=864e9, peak_flops_per_s=_peaks(362, 183, 91.6, 733), clock_hz=2520e6, tdp_w=350,
        source="NVIDIA L40S data sheet; gpu-benches measures 846 GB/s, L2 5.2 TB/s on an L40",
        l2_bytes_per_s=5.2e12,
    ),
    _AMPERE(
        name="rtx-3090", reported=("GeForce RTX 3090",), num_sms=82, l2_bytes=6 * MIB,
        hbm_bytes=24 * GIB, hbm_bytes_per_s=936e9, peak_flops_per_s=_peaks(71, 35.6, 35.6, None),
        clock_hz=1695e6, tdp_w=350, uncertain="partly from memory",
        source="NVIDIA GA102 white paper, fp32 accumulation (fp16 accumulation: 142 TFLOP/s)",
    ),
    _ADA(
        name="rtx-4090", reported=("GeForce RTX 4090",), num_sms=128, l2_bytes=72 * MIB,
        hbm_bytes=24 * GIB, hbm_bytes_per_s=1008e9, peak_flops_per_s=_peaks(165, 82.6, 82.6, 330),
        clock_hz=2520e6, tdp_w=450,
        source="NVIDIA Ada white paper, fp32 accumulation (fp16 accumulation: 330 fp16, 661 fp8 TFLOP/s)",
    ),
    _GDDR(
        name="rtx-5090", reported=("GeForce RTX 5090",), arch="sm120", capability=(12, 0),
        num_sms=170, l2_bytes=96 * MIB, hbm_bytes=32 * GIB, hbm_bytes_per_s=1792e9,
        peak_flops_per_s=_peaks(209.5, 104.8, 104.8, 419), clock_hz=2407e6, tdp_w=575,
        source="NVIDIA RTX Blackwell white paper, fp32 accumulation",
    ),
    _HOPPER_SXM(name="h100-sxm", reported=("H100 80GB HBM3",), hbm_bytes=80 * GIB,
          hbm_bytes_per_s=3350e9, l2_bytes_per_s=8.9e12,
          source="NVIDIA H100 data sheet; about 3.0 TB/s copy and, of half the L2, 8.9 TB/s measured"
           " (flashbench calibrate, reports/h100-sxm/ceilings.json);"
           " clock: the boost that the tensor peaks are quoted at (the highest is 1980 MHz)"),
    _HOPPER(
        name="h100-pcie", l2_bytes_per_s=6.9e12, num_sms=114, reported=("H100 PCIe",), hbm_bytes=80 * GIB,
        hbm_bytes_per_s=2039e9, peak_flops_per_s=_peaks(756, 378, 51, 1513), clock_hz=1755e6, tdp_w=350,
        source="NVIDIA H100 data sheet; gpu-benches measures 2016 GB/s, L2 6.9 TB/s",
    ),
    _HOPPER(
        name="h100-nvl", reported=("H100 NVL",), hbm_bytes=94 * GIB, hbm_bytes_per_s=3938e9,
        peak_flops_per_s=_peaks(835, 417, 60, 1671), clock_hz=1785e6, tdp_w=400,
        source="NVIDIA H100 NVL product brief", uncertain="from memory; L2 and clock most of all",
    ),
    _HOPPER_SXM(name="h200", reported=("H200",), hbm_bytes=141 * GIB, hbm_bytes_per_s=4800e9,
           source="NVIDIA H200 data sheet; gpu-benches measures 3890 GB/s read, about 4300 GB/s copy,"
           " L2 9.7 TB/s; clock as H100 SXM (the highest is 1980 MHz)",
           uncertain="torch reports 60 MB of L2"),
    _BLACKWELL(
        name="b200", num_sms=148, reported=("B200",), hbm_bytes=180 * GIB,
        peak_flops_per_s=_peaks(2250, 1100, 75, 4500), clock_hz=1850e6, tdp_w=1000,
        source="NVIDIA HGX B200 data sheet; clock from FlashAttention-4 (arXiv:2603.05451); SMs and L2 as a"
        " driver reported them (pytorch/ao, pull request 4002)",
        uncertain="bandwidth given as 7.7 to 8.0 TB/s",
    ),
    _BLACKWELL(
        name="gb200", num_sms=152, reported=("GB200",), hbm_bytes=186 * GIB,
        peak_flops_per_s=_peaks(2500, 1250, 80, 5000), clock_hz=2060e6, tdp_w=1200,
        source="NVIDIA GB200 NVL72 data sheet, per GPU",
        uncertain="sources conflict (148 or 152 SMs, 2250 or 2500 TFLOP/s); L2 and clock approximate",
    ),
    _BLACKWELL_ULTRA(
        name="b300", num_sms=148, reported=("B300", "B300 SXM6 AC"),
        hbm_bytes=270 * GIB, peak_flops_per_s=_peaks(2250, 1100, 75, 4500), clock_hz=2000e6, tdp_w=1100,
        source="NVIDIA HGX B300 data sheet",
        uncertain="148 to 160 SMs (ask the driver), 270 to 288 GB, 7.7 to 8.0 TB/s; L2, clock approximate",
    ),
    _BLACKWELL_ULTRA(
        name="gb300", num_sms=152, reported=("GB300",), hbm_bytes=279 * GIB,
        peak_flops_per_s=_peaks(2500, 1250, 80, 5000), clock_hz=2060e6, tdp_w=1400,
        source="NVIDIA GB300 NVL72 data sheet, per GPU",
        uncertain="152 to 160 SMs (ask the driver), 279 to 288 GB; L2, clock approximate",
    ),
    Device(
        name="mi250x", reported=("Instinct MI250X",), arch="gfx90a", capability=None, num_sms=220,
        smem_per_sm_bytes=64 * KIB, smem_per_block_bytes=64 * KIB, registers_per_sm_bytes=512 * KIB,
        l2_bytes=16 * MIB, hbm_bytes=128 * GIB, hbm_bytes_per_s=3277e9,
        peak_flops_per_s=_peaks(383, None, 47.9, None), clock_hz=1700e6, tdp_w=560,
        source="AMD Instinct MI250X data sheet, both dies together",
        uncertain="from memory; drivers report each die as a device of its own, with half of all this",
    ),
    _CDNA3(name="mi300x", reported=("Instinct MI300X", "Instinct MI300X OAM"),
          hbm_bytes=192 * GIB, hbm_bytes_per_s=5300e9, tdp_w=750, source="AMD Instinct MI300X data sheet"),
    _CDNA3(name="mi325x", reported=("Instinct MI325X", "Instinct MI325X OAM"),
          hbm_bytes=256 * GIB, hbm_bytes_per_s=6000e9, tdp_w=1000, source="AMD Instinct MI325X data sheet"),
    Device(
        name="mi355x", reported=("Instinct MI355X", "Instinct MI355X OAM"), arch="gfx950", capability=None,
        num_sms=256, smem_per_sm_bytes=160 * KIB, smem_per_block_bytes=160 * KIB,
        registers_per_sm_bytes=512 * KIB, l2_bytes=32 * MIB, hbm_bytes=288 * GIB, hbm_bytes_per_s=8000e9,
        peak_flops_per_s=_peaks(2517, None, 157, 5033), clock_hz=2400e6, tdp_w=1400,
        source="AMD Instinct MI355X data sheet", uncertain="partly from memory; " + _INFINITY_CACHE,
    ),
)  # fmt: skip
"""Every known GPU, in the order in which they are listed."""

_BY_NAME = {device.name: device for device in DEVICES}
_BY_REPORTED = {reported.casefold(): device for device in DEVICES for reported in device.reported}
_VENDOR = re.compile(r"^(nvidia|amd|tesla)\s+", re.IGNORECASE)
_MIG = re.compile(r"\s+mig\s+(\d+)g\.(\d+)gb(\S*)$", re.IGNORECASE)


def find(name: str) -> Device:
    """The device with that id ("h100-sxm"). Raises UnknownName, offering the nearest."""
    if name not in _BY_NAME:
        raise UnknownName("GPU", name, _BY_NAME)
    return _BY_NAME[name]


def match(
    reported_name: str,
    *,
    sms: int | None = None,
    memory_bytes: int | None = None,
    l2_bytes: int | None = None,
) -> Device | None:
    """The row of the card that a driver reports by that name, or None for a card without a row.

    The whole name must agree, so that an "H100 PCIe" or an "RTX 4090 D" never passes for a
    relative. sms, memory_bytes and l2_bytes, where given, are the driver's and win over the table.
    A MIG slice ("… MIG 3g.40gb") is the card scaled to its SMs and memory; it needs both numbers,
    else the answer is None.
    """
    name = " ".join(reported_name.split())
    slice_ = _MIG.search(name)
    name = name[: slice_.start()] if slice_ else name
    while (shorter := _VENDOR.sub("", name)) != name:
        name = shorter
    device = _BY_REPORTED.get(name.casefold())
    if device is None:
        return None
    if slice_:
        return None if sms is None or memory_bytes is None else _sliced(device, sms, memory_bytes)
    return replace(
        device,
        num_sms=sms or device.num_sms,
        hbm_bytes=memory_bytes or device.hbm_bytes,
        l2_bytes=l2_bytes or device.l2_bytes,
    )


def _sliced(device: Device, sms: int, memory_bytes: int) -> Device:
    """The card scaled to a MIG slice: compute with its SMs, bandwidth and L2 with its memory in eighths.

    L2 bandwidth goes with the smaller of the two shares.
    """
    compute = sms / device.num_sms
    memory = max(1, round(8 * memory_bytes / device.hbm_bytes)) / 8
    return replace(
        device,
        num_sms=sms,
        l2_bytes=round(device.l2_bytes * memory),
        l2_bytes_per_s=device.l2_bytes_per_s and device.l2_bytes_per_s * min(compute, memory),
        hbm_bytes=memory_bytes,
        hbm_bytes_per_s=device.hbm_bytes_per_s * memory,
        peak_flops_per_s={
            dtype: rate if rate is None else rate * compute for dtype, rate in device.peak_flops_per_s.items()
        },
        uncertain="; ".join(filter(None, (device.uncertain, "MIG slice, scaled from the whole card"))),
    )


def with_calibration(device: Device, path: str) -> Device:
    """The card with the ceilings that ``flashbench calibrate`` measured in place of the data sheet's.

    Raises RunFileError for a file that is no calibration, SpecError for one of another card.
    """
    found = ceilings.load(path)
    other = match(found.device_name)
    if other is not None and other.name != device.name:
        raise SpecError(f"calibration {path!r} is of {found.device_name!r}; accepted: one of {device.name}")
    return with_ceilings(device, found)


def with_ceilings(device: Device, found: Ceilings) -> Device:
    """The card with measured ceilings: memory (the better of copy and read), L2, exp and products by dtype.

    What was not measured stays the data sheet's; ``calibration`` says which are which.
    """
    memory = max((rate for rate in (found.copy_bytes_per_s, found.read_bytes_per_s) if rate), default=None)
    products = {name: rate for name, rate in found.flops_per_s.items() if rate}
    measured = {f"{name}_flops_per_s": rate for name, rate in products.items()} | {
        name: rate
        for name, rate in (
            ("hbm_bytes_per_s", memory),
            ("l2_bytes_per_s", found.l2_bytes_per_s),
            ("exps_per_s", found.exps_per_s),
        )
        if rate
    }
    names = {"hbm_bytes_per_s": "memory", "l2_bytes_per_s": "L2", "exps_per_s": "exp"}
    said = ", ".join(names.get(name, name.removesuffix("_flops_per_s")) for name in measured)
    when = f" {found.created_at[:10]}" if found.created_at else ""
    return replace(
        device,
        hbm_bytes_per_s=memory or device.hbm_bytes_per_s,
        l2_bytes_per_s=found.l2_bytes_per_s or device.l2_bytes_per_s,
        peak_flops_per_s=dict(device.peak_flops_per_s) | products,
        measured=measured,
        calibration=f"measured on this card{when} ({said or 'nothing'}; the rest from the data sheet)",
    )
