"""The time model: its invariants, what limits where, the roofs, its speed, and its explanation."""

from __future__ import annotations

import time
from dataclasses import replace

import child
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashbench import devices
from flashbench._iomodel import constants
from flashbench._iomodel.constants import FAMILIES, LAUNCH_S, OF_MODEL
from flashbench._iomodel.time import KERNELS, RESOURCES
from flashbench.ceilings import Ceilings
from flashbench.devices import DEVICES, Device, find
from flashbench.errors import SpecError, UnknownName
from flashbench.iomodel import MODELS, Estimate, Variant, estimate, explain, predict, roofs
from flashbench.problem import Problem

H100 = find("h100-sxm")


def problem(**changes: object) -> Problem:
    base = Problem(
        batch=4, num_heads=16, num_kv_heads=16, seqlen_q=4096, seqlen_k=4096, head_dim=128, head_dim_v=128,
        dtype="fp16", causal=False,
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


@st.composite
def cells(draw: st.DrawFn) -> tuple[Estimate, Device]:
    """Any model, pass and shape that it covers, on any card."""
    group, kv_heads = draw(st.sampled_from([1, 2, 8])), draw(st.integers(1, 4))
    nq = draw(st.integers(1, 20_000))
    shape = problem(
        batch=draw(st.sampled_from([1, 3, 16])), num_heads=group * kv_heads, num_kv_heads=kv_heads,
        seqlen_q=nq, seqlen_k=draw(st.sampled_from([nq, draw(st.integers(1, 20_000))])),
        head_dim=draw(st.sampled_from([32, 64, 128, 256])), causal=draw(st.booleans()),
        window=draw(st.sampled_from([(-1, -1), (-1, -1), (256, 0), (17, 99)])),
    )  # fmt: skip
    model = draw(st.sampled_from([row for row in MODELS if row.refuses(shape) is None]))
    device = draw(st.sampled_from(DEVICES))
    return estimate(model.name, shape, draw(st.sampled_from(model.passes)), device=device), device


@settings(max_examples=300, deadline=None)
@given(cells())
def test_no_roof_is_passed_and_every_kernel_has_a_limit(cell: tuple[Estimate, Device]) -> None:
    row, device = cell
    found = predict(row, device)
    assert tuple(found.roofs) == RESOURCES
    assert all(0 <= share <= 1 for share in found.roofs.values()), found.roofs
    assert found.time_s == pytest.approx(sum(part.time_s for part in found.parts))
    assert [part.name for part in found.parts] == [step.name for step in row.steps]
    for part in found.parts:
        assert part.time_s >= LAUNCH_S
        assert part.limiting in (*RESOURCES, "prologue", "instructions", "launch")
        assert part.time_s >= max(part.products, part.exps, part.l2, part.smem, part.dram, part.instructions)
    assert found.limiting in (*RESOURCES, "prologue", "instructions", "launch")


@settings(max_examples=300, deadline=None)
@given(cells(), st.integers(2, 3))
def test_longer_sequences_take_longer(cell: tuple[Estimate, Device], times: int) -> None:
    row, device = cell
    p = replace(row.problem, seqlen_k=row.problem.seqlen_q)
    if row.model == "flash" and p.seqlen_k == 1:
        return  # for a single key, the bundled kernel sums delta by a matrix product that others do without
    row = estimate(row.model, p, row.pass_, device=device, tiles=row.tiles)
    longer = replace(p, seqlen_q=times * p.seqlen_q, seqlen_k=times * p.seqlen_k)
    more = estimate(row.model, longer, row.pass_, device=device, tiles=row.tiles)
    if [step.name for step in row.steps] != [step.name for step in more.steps]:
        return  # torch's flash cuts the keys of a small grid into splits, and not those of a larger one
    assert predict(more, device).time_s >= predict(row, device).time_s * (1 - 1e-9)


@settings(max_examples=300, deadline=None)
@given(cells())
def test_causal_takes_no_longer_than_full(cell: tuple[Estimate, Device]) -> None:
    """Of tiled kernels with the same tiles; eager attention has a mask to apply.

    Without delta, which takes a product in the bundled kernel where a row sees one key, as the first
    does under a mask, and without what DRAM limits, where thread blocks of unequal length lose step.
    """
    row, device = cell
    if row.model.startswith("standard") or row.model == "flash-v1-cuda":
        return
    p = replace(row.problem, window=(-1, -1))
    full, causal = (
        estimate(row.model, replace(p, causal=mask), row.pass_, device=device, tiles=row.tiles)
        for mask in (False, True)
    )
    for masked, unmasked in zip(predict(causal, device).parts, predict(full, device).parts, strict=True):
        if masked.name != "delta" and masked.limiting != "DRAM":
            assert masked.time_s <= unmasked.time_s * (1 + 1e-9)


@settings(max_examples=200, deadline=None)
@given(cells(), st.sampled_from(["hbm_bytes_per_s", "l2_bytes_per_s", "clock_hz", "l2_bytes"]))
def test_a_faster_card_is_not_slower(cell: tuple[Estimate, Device], field: str) -> None:
    row, device = cell
    value = getattr(device, field)
    if value is None:
        return
    changes = {field: value * 2}
    if field == "clock_hz":
        changes["peak_flops_per_s"] = {k: v and 2 * v for k, v in device.peak_flops_per_s.items()}
    assert predict(row, replace(device, **changes)).time_s <= predict(row, device).time_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("model", "changes", "pass_", "limiting"),
    [
        ("flash-v3", {"seqlen_q": 16384, "seqlen_k": 16384, "batch": 1}, "fwd", "tensor cores"),
        ("flash-v2-atomic", {}, "bwd", "tensor cores"),
        ("standard", {}, "fwd", "instructions"),  # torch 2.11's softmax of rows of 4k: 1.2 TB/s
        ("standard", {}, "bwd", "DRAM"),
        ("standard-added", {}, "fwd", "DRAM"),
        ("flash-v3", {"seqlen_q": 1, "seqlen_k": 16384, "num_kv_heads": 2, "batch": 132}, "fwd", "DRAM"),
        ("flash-v2", {"seqlen_q": 16, "seqlen_k": 16, "batch": 1}, "fwd", "launch"),
        ("standard", {"seqlen_q": 128, "seqlen_k": 128, "batch": 1}, "fwd", "launch"),
    ],
)
def test_what_limits_where(model: str, changes: dict[str, int], pass_: str, limiting: str) -> None:
    row = estimate(model, problem(**changes), pass_, device=H100)
    assert predict(row, H100).limiting == limiting


def test_exponentials_limit_head_dim_64_at_fp8() -> None:
    """fp8 doubles the products and leaves the exponentials (FlashAttention-3, section 3.1)."""
    row = estimate("flash-v3", problem(head_dim=64, head_dim_v=64, dtype="fp8"), "fwd", device=H100)
    assert predict(row, H100).limiting == "exponentials"


def test_decode_is_the_time_of_reading_the_cache() -> None:
    """Llama-3-8B layer, batch 16, 8192 tokens, 8 splits: K and V of 537 MB at 90 % of the bandwidth."""
    shape = problem(batch=16, num_heads=32, num_kv_heads=8, seqlen_q=1, seqlen_k=8192)
    variant = Variant(pack_gqa=True, num_splits=8)
    row = estimate("flash-v3", shape, "fwd", device=H100, variant=variant)
    found = predict(row, H100)
    bound = 536_870_912 / (0.9 * H100.hbm_bytes_per_s)
    assert bound < found.time_s < 1.15 * bound + 2 * LAUNCH_S
    assert found.roofs["DRAM"] > 0.75


def test_splits_help_where_thread_blocks_are_few() -> None:
    shape = problem(batch=1, num_heads=8, num_kv_heads=8, seqlen_q=1, seqlen_k=131072)
    one, many = (
        predict(estimate("flash-v3", shape, "fwd", device=H100, variant=Variant(num_splits=n)), H100)
        for n in (1, 16)
    )
    assert many.time_s < one.time_s / 4


def test_few_thread_blocks_draw_a_share_of_the_l2() -> None:
    shape = problem(batch=1, num_heads=8, num_kv_heads=8, seqlen_q=1, seqlen_k=131072)
    row = estimate("flash-v3", shape, "fwd", device=H100)
    (part,) = predict(row, H100).parts
    assert part.l2 == pytest.approx(row.requested.total_bytes / (8.9e12 * 8 / 132), rel=1e-6)


def test_a_window_scales_with_the_length() -> None:
    """Every thread block sees as much: no long ones to wait for, and no K/V to come back to late."""
    short = problem(batch=4, seqlen_q=16384, seqlen_k=16384, window=(256, 0))
    long = replace(short, batch=1, seqlen_q=65536, seqlen_k=65536)
    for pass_ in ("fwd", "bwd"):
        one, four = (predict(estimate("flash-v2", p, pass_, device=H100), H100) for p in (long, short))
        assert one.time_s == pytest.approx(four.time_s, rel=0.02)
        assert one.dram.value == pytest.approx(four.dram.value, rel=0.02)


def test_wave_quantisation() -> None:
    """132 thread blocks fill an H100 once; 133 take twice as long, less launch."""
    shape = problem(batch=1, num_heads=132, num_kv_heads=1, seqlen_q=128, seqlen_k=8192)
    more = replace(shape, num_heads=133)
    tiles = {"block_q": 128, "block_k": 128}
    one, two = (predict(estimate("flash-v3", p, "fwd", tiles=tiles), H100).time_s for p in (shape, more))
    assert (two - LAUNCH_S) / (one - LAUNCH_S) == pytest.approx(2, rel=1e-6)


def test_packed_batches_take_about_the_sum() -> None:
    from flashbench.problem import packed

    base = problem(batch=1, causal=True)
    lengths = [(1024, 1024)] * 4 + [(4096, 4096)] * 4
    together = predict(estimate("flash-v3", packed(base, lengths), "fwd", device=H100), H100).time_s
    apart = sum(
        predict(
            estimate("flash-v3", replace(base, batch=4, seqlen_q=n, seqlen_k=n), "fwd", device=H100), H100
        ).time_s
        for n in (1024, 4096)
    )
    assert together == pytest.approx(apart, rel=0.15)


def test_both_passes_take_as_long_as_one_after_the_other() -> None:
    """Eager ops reach another share of the bandwidth in the backward; both passes together know it too."""
    for model in ("standard", "flash-v1", "flash-v2"):
        both, forward, backward = (
            predict(estimate(model, problem(), pass_, device=H100), H100).time_s
            for pass_ in ("fwd+bwd", "fwd", "bwd")
        )
        assert both == pytest.approx(forward + backward, rel=0.02)


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_a_schedule_deals_out_a_causal_mask_evenly(pass_: str) -> None:
    full = Problem(
        batch=1, num_heads=8, num_kv_heads=8, seqlen_q=65536, seqlen_k=65536, head_dim=128, head_dim_v=128,
        dtype="bf16", causal=False,
    )  # fmt: skip
    card = devices.find("h100-sxm")
    times = [
        predict(estimate("flash-v3-gluon", replace(full, causal=causal), pass_, device=card), card).time_s
        for causal in (False, True)
    ]
    assert times[1] == pytest.approx(times[0] / 2, rel=0.03)


def test_families() -> None:
    row = estimate("flash-v2", problem(), "fwd", device=H100)
    assert predict(row, H100).family == "triton"
    slow, fast = predict(row, H100, "fa2"), predict(row, H100, "fa3")
    assert (slow.family, fast.family) == ("fa2", "fa3")
    assert fast.time_s < slow.time_s
    with pytest.raises(UnknownName, match="family 'fa33' is not known; did you mean 'fa3'"):
        predict(row, H100, "fa33")
    for family in FAMILIES.values():
        assert family.source
        for rates in family.rates.values():
            assert 0 < rates.mma <= 1
            assert rates.softmax >= 0
            assert rates.resident >= 1
    assert set(OF_MODEL.values()) <= set(FAMILIES)


def test_missing_generations_are_said() -> None:
    row = estimate("flash-v3", problem(), "fwd")
    own, other = predict(row, H100), predict(row, find("b200"))
    assert own.calibrated
    assert not other.calibrated
    assert "for want of sm100's" in other.note
    assert "L2 bandwidth estimated" in other.note
    assert "data sheet" in own.note
    assert not predict(estimate("flash-v4", problem(), "fwd"), find("b200")).calibrated


def test_every_card_has_constants_for_every_model() -> None:
    for device in DEVICES:
        for model in MODELS:
            shape = problem(causal=False)
            if model.refuses(shape) is None:
                for pass_ in model.passes:
                    assert predict(estimate(model.name, shape, pass_, device=device), device).time_s > 0


def test_measured_ceilings() -> None:
    """A card as good as the reference is predicted the same; a slower one slower, and the note says so."""

    def measured(share: float) -> Device:
        found = Ceilings(
            device_name="NVIDIA H100 80GB HBM3", device_uuid=None, created_at="2026-01-01T00:00:00Z",
            copy_bytes_per_s=constants.REFERENCE_MEMORY * 3350e9 * share, read_bytes_per_s=None,
            l2_bytes_per_s=H100.l2_bytes_per_s * share, exps_per_s=H100.exps_per_s * share,
            flops_per_s={"fp16": constants.REFERENCE_MATMUL * 989.4e12 * share},
        )  # fmt: skip
        return devices.with_ceilings(H100, found)

    for model, pass_ in (("flash-v3", "fwd"), ("standard", "bwd")):
        row = estimate(model, problem(), pass_, device=H100)
        base, same, slow = (predict(row, card) for card in (H100, measured(1), measured(0.8)))
        assert same.time_s == pytest.approx(base.time_s, rel=1e-3)
        assert 1.15 < slow.time_s / base.time_s < 1.26
        assert "measured on this card 2026-01-01" in same.note
    assert roofs(measured(1), "fp16").flops == pytest.approx(798e12, rel=1e-3)


def test_roofline() -> None:
    found = roofs(H100, "bf16")
    assert round(found.ridge) == 295
    assert found.attainable(1) == 3350e9
    assert found.attainable(1e6) == 989.4e12
    assert found.exps == pytest.approx(3.87e12, rel=0.01)
    with pytest.raises(SpecError, match="no matrix products in fp8"):
        roofs(find("a100-sxm-80gb"), "fp8")


def test_published_rates_of_the_roofs() -> None:
    """FlashAttention-3: 3.9 T exponentials/s on an H100. FlashAttention-4: cycles per tile on a B200."""
    assert H100.exps_per_s == pytest.approx(3.9e12, rel=0.02)
    row = estimate("flash-v4", problem(batch=16), "fwd", device=find("b200"))
    (part,) = predict(row, find("b200")).parts
    clock = find("b200").clock_hz * find("b200").num_sms
    tiles = row.exps / 128**2
    assert part.smem * clock / tiles == pytest.approx(768, rel=0.01)
    assert part.exps * clock / tiles == pytest.approx(0.8 * 1024, rel=0.01)
    products = row.done_flops / find("b200").peak_flops_per_s["fp16"]  # type: ignore[operator]
    assert products * clock / tiles == pytest.approx(1024, rel=0.01)


def test_the_l2_roof_at_64_rows() -> None:
    """Intensity between SM and L2 is Br FLOP/B at 2 bytes: 64 rows at 8.9 TB/s allow 570 TFLOP/s."""
    row = estimate("flash-v3", problem(batch=16), "fwd", tiles={"block_q": 64, "block_k": 128})
    (part,) = predict(row, H100).parts
    assert row.flops / part.l2 == pytest.approx(570e12, rel=0.03)


def test_100_000_predictions_in_10_seconds() -> None:
    """In processor time, over the models of the default table and both passes; a hundredth of them here."""
    shapes = [problem(seqlen_q=n, seqlen_k=n) for n in range(1024, 1024 + 64 * 50, 64)]
    rows = [
        estimate(model, shape, pass_, device=H100)
        for model in ("standard", "flash-v1", "flash-v2", "flash-v2-atomic", "flash-v3")
        for pass_ in ("fwd", "bwd")
        for shape in shapes
    ]
    best = 1e9
    for _ in range(3):
        begin = time.process_time()
        for row in rows:
            predict(row, H100)
        best = min(best, time.process_time() - begin)
    assert best * 100_000 / len(rows) / child.pace() < 10


@settings(max_examples=100, deadline=None)
@given(cells())
def test_the_explanation_holds_every_number(cell: tuple[Estimate, Device]) -> None:
    row, device = cell
    text = explain(row, predict(row, device))
    for step in row.steps:
        for tensors in (step.read, step.write, step.atomic):
            assert all(f"{count:,} B" in text for count in tensors.values())
    assert f"{row.requested.read_bytes:,}" in text
    assert f"{row.flops:,} FLOP" in text
    assert f"{row.done_flops:,} FLOP" in text
    assert "\x1b" not in text
    assert not any(line.rstrip() != line for line in text.splitlines())


def test_the_explanations_products_are_right() -> None:
    """Every "a · b = c B" line multiplies out."""
    for model in ("standard", "flash-v1", "flash-v2-atomic", "flash-v3"):
        row = estimate(model, problem(num_kv_heads=4, causal=model != "flash-v1"), "fwd+bwd", device=H100)
        checked = 0
        for line in explain(row).splitlines():
            parts = line.split(" = ")
            if len(parts) != 3 or not parts[2].endswith(" B"):
                continue
            product = 1.0
            for factor in parts[1].replace(" · ", "·").split("·"):
                product *= float(factor)
            assert product == pytest.approx(int(parts[2][:-2].replace(",", "")), rel=1e-3), line
            checked += 1
        assert checked >= 8


def test_a_persistent_program_pays_for_each_tile() -> None:
    """Its prologue and epilogue for each of them; a whole wave of tiles more where all are alike, and no
    wave where they are dealt out, the longest first; each kernel by its own constants."""
    clock, t0 = H100.clock_hz, FAMILIES["gluon"].rates["fwd", "sm90"].fixed_clocks
    for causal in (False, True):
        shape = problem(seqlen_q=1024, seqlen_k=1024, dtype="bf16", batch=16, causal=causal)
        (part,) = predict(estimate("flash-v3-gluon", shape, "fwd", device=H100), H100).parts
        tiles = 16 * 16 * 8
        assert part.fixed == pytest.approx(tiles * t0 / (132 * clock))
        busy = part.products + part.softmax + part.fixed
        assert part.waiting == pytest.approx(0 if causal else busy * (16 * 132 / tiles - 1), abs=1e-12)
    one = problem(seqlen_q=4096, seqlen_k=4096, batch=1, num_heads=1, num_kv_heads=1, causal=True)
    (part,) = predict(estimate("flash-v3-gluon", one, "fwd", device=H100), H100).parts
    busy = part.products + part.softmax + part.fixed
    assert part.time_s > LAUNCH_S + 1.5 * busy * 132 / 32  # of 32 tiles the longest is nearly two mean ones
    wide = problem(head_dim=256, head_dim_v=256, causal=True)
    row = estimate("flash-v3-gluon", wide, "bwd", device=H100)
    text = explain(row, predict(row, H100))
    apart = FAMILIES["gluon"].rates["apart", "sm90"]
    assert text.count(f"{apart.fixed_clocks:g} clocks a tile") == 2
    assert text.count("tiles are dealt out, the longest first") == 2


@pytest.mark.parametrize(
    ("dim", "causal", "keys", "kernel"),
    [
        (128, False, 2048, "fwd"), (128, False, 2049, "sums"), (128, True, 2048, "fwd"),
        (128, True, 4096, "sums"), (80, True, 4096, "sums"), (64, False, 16384, "fwd"),
    ],
)  # fmt: skip
def test_fp8_takes_the_constants_of_the_kernel_that_runs(
    dim: int, causal: bool, keys: int, kernel: str
) -> None:
    """With row maxima, or guarded by row sums; a family that has one forward takes it for both."""
    shape = problem(dtype="fp8", causal=causal, seqlen_q=keys, seqlen_k=keys, head_dim=dim, head_dim_v=dim)
    row = estimate("flash-v3-fp8", shape, "fwd", device=H100)
    own = FAMILIES["gluon-fp8"].rates[kernel, "sm90"]
    assert f"{own.fixed_clocks:g} clocks a tile" in explain(row, predict(row, H100))
    other = FAMILIES["fa3"].rates["fwd", "sm90"]
    assert f"{other.fixed_clocks:g} clocks a tile" in explain(row, predict(row, H100, "fa3"))


def test_instructions_go_with_the_clock_and_not_with_the_memory() -> None:
    """torch's softmax and masked_fill take as long on an H200 as on an H100; its other ops are faster."""
    row = estimate("standard", problem(causal=True), "fwd", device=H100)
    ours, theirs = (predict(row, find(name)) for name in ("h100-sxm", "h200"))
    for one, other in zip(ours.parts, theirs.parts, strict=True):
        held = one.name in ("softmax", "mask")
        assert (one.limiting == "instructions") == held
        assert other.time_s == pytest.approx(one.time_s) if held else other.time_s < 0.8 * one.time_s


def test_the_explanation_names_levels_units_and_sources() -> None:
    row = estimate("flash-v2", problem(causal=True), "fwd", device=H100)
    bare, full = explain(row), explain(row, predict(row, H100))
    assert full.startswith(bare)
    for word in (
        "between SM and L2, exact",
        "arXiv:2307.08691",
        "tiles:",
        "ΣK",
        "GB = 10^9 bytes",
        "assumes:",
    ):
        assert word in bare
    roof = ("Share of each roof", "989 TFLOP/s", "limited by", "data sheet")
    for word in ("DRAM bytes (modelled", "flashbench calibrate", "0.42", *roof):
        assert word in full
    assert set(KERNELS.values()) == {"fwd", "bwd", "dkdv", "dq"}
