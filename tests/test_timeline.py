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


@pytest.mark.parametrize(
    ("spans", "gaps", "busy"),
    [
        ([(0, 100), (10, 30), (90, 120)], (0, 0), 120),  # the second runs within the first
        ([(0, 100), (10, 30), (110, 120)], (0, 10), 110),
        ([(0, 10), (0, 10), (20, 30)], (0, 10), 20),
        ([(0, 10)], (), 10),
        ([], (), 0),
    ],
)
def test_streams_side_by_side_are_busy_once(
    spans: list[tuple[float, float]], gaps: tuple[float, ...], busy: float
) -> None:
    found = lines.arrange([("k", start, end) for start, end in spans])
    assert [gap * 1e6 for gap in found.gaps_s] == pytest.approx(list(gaps))
    assert found.busy_s * 1e6 == pytest.approx(busy)
    share = None if not spans else pytest.approx(busy / max(end for _, end in spans))
    assert found.busy_share == found.to_json()["busy_share"] == share


def test_what_runs_side_by_side_does_not_hide_a_slow_launch() -> None:
    found = lines.arrange([("a", 0.0, 100.0), ("b", 0.0, 100.0)])
    assert found.kernel_s == pytest.approx(200e-6)
    assert found.launch_bound(130e-6)
    assert not found.launch_bound(110e-6)


@pytest.mark.parametrize(("event_us", "bound"), [(100, False), (119, False), (125, True)])
def test_events_that_exceed_the_kernels_by_a_fifth_are_launch_bound(event_us: float, bound: bool) -> None:
    assert lines.arrange(RECORDS).launch_bound(event_us / 1e6) is bound
    assert not lines.arrange([]).launch_bound(1.0)


@pytest.mark.parametrize(
    ("event_us", "said"),
    [
        (50, "events 50% shorter than the kernels: the recorded call was slower"),
        (90, "events 10% shorter than the kernels"), (92, None), (100, None), (109, None),
        (115, "events 15% longer than the kernels: gaps, or other clocks"),
        (150, "events 50% longer than the kernels: launch-bound"),
    ],
)  # fmt: skip
def test_events_and_kernels_that_do_not_agree_are_told_in_either_direction(
    event_us: float, said: str | None
) -> None:
    found = lines.arrange(RECORDS).disagreement(event_us / 1e6)
    assert found is None if said is None else str(found).startswith(said)
    assert lines.arrange([]).disagreement(event_us / 1e6) is None


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
def test_a_named_range_is_no_kernel() -> None:
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)

    def call() -> None:
        with torch.profiler.record_function("my range"):
            torch.relu(a)

    call()
    assert "my range" not in [kernel.name for kernel in lines.timeline(call, "cuda:0").kernels]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flash", "cudnn", "efficient", "math"])
def test_the_kernels_of_a_forced_backend_are_known_as_its_own(backend: str) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    q = torch.randn(2, 8, 1024, 64, device="cuda", dtype=torch.bfloat16)
    forced = SDPBackend.MATH if backend == "math" else getattr(SDPBackend, f"{backend.upper()}_ATTENTION")

    def call() -> torch.Tensor:
        return scaled_dot_product_attention(q, q, q)

    with sdpa_kernel(forced):
        call()
        found = lines.timeline(call, "cuda:0")
    assert lines.backend_of([kernel.name for kernel in found.kernels]) == backend


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
