"""Kernel timelines: their arithmetic from plain records, and the real thing on a GPU."""

from __future__ import annotations

import pytest
import torch

from flashbench._profilers import timeline as lines
from flashbench.errors import UnavailableError

RECORDS = [
    ("second", 1030.0, 1050.0), ("first", 1000.0, 1010.0),
    ("first", 1010.0, 1030.0), ("third", 1060.0, 1110.0),
]  # fmt: skip
"""(name, start, end) in microseconds, out of order, with one gap of 10."""


def test_a_timeline_is_in_order_and_starts_at_0() -> None:
    found = lines.arrange(RECORDS)
    assert [kernel.name for kernel in found.kernels] == ["first", "first", "second", "third"]
    assert [round(kernel.start_s * 1e6) for kernel in found.kernels] == [0, 10, 30, 60]
    assert found.kernel_s == pytest.approx(100e-6)
    assert found.span_s == pytest.approx(110e-6)
    assert found.gaps_s == pytest.approx((0, 0, 10e-6))
    assert found.shares() == [
        ("third", pytest.approx(0.5)),
        ("first", pytest.approx(0.3)),
        ("second", pytest.approx(0.2)),
    ]


def test_kernels_that_overlap_have_no_gap() -> None:
    found = lines.arrange([("a", 0.0, 10.0), ("b", 5.0, 12.0)])
    assert found.gaps_s == (0.0,)
    assert found.span_s == pytest.approx(12e-6)


@pytest.mark.parametrize(("event_us", "bound"), [(100, False), (119, False), (125, True)])
def test_events_that_exceed_the_kernels_by_a_fifth_are_launch_bound(event_us: float, bound: bool) -> None:
    assert lines.arrange(RECORDS).launch_bound(event_us / 1e6) is bound
    assert not lines.arrange([]).launch_bound(1.0)


@pytest.mark.parametrize(
    ("names", "backend"),
    [
        (["void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>"], "flash"),
        (["Memset (Device)", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16"], "cudnn"),
        (["fmha_cutlassF_bf16_aligned_64x128_rf_sm80"], "efficient"),
        (["nvjet_sm90_tst", "softmax_warp_forward"], "math"),
        ([], None),
    ],
)
def test_a_backend_is_known_by_its_kernels(names: list[str], backend: str | None) -> None:
    """cuDNN's attention has ``flash`` in its kernels' names."""
    assert lines.backend_of(names) == backend


def test_without_a_gpu_there_is_none() -> None:
    with pytest.raises(UnavailableError, match="GPU"):
        lines.timeline(lambda: None, "cpu")


def test_it_goes_into_json() -> None:
    whole = lines.arrange(RECORDS).to_json()
    assert whole["gap_s"] == pytest.approx(10e-6)
    assert whole["kernels"][0] == {"kernel": "first", "start_s": 0.0, "duration_s": pytest.approx(10e-6)}


@pytest.mark.gpu
def test_two_products_on_a_gpu_are_two_kernels() -> None:
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)

    def call() -> None:
        torch.relu(a @ a)

    call()
    found = lines.timeline(call, "cuda:0")
    kernels = [kernel for kernel in found.kernels if not kernel.name.startswith("Mem")]
    assert len(kernels) == 2
    assert all(1e-6 < kernel.duration_s < 1e-2 for kernel in kernels)
