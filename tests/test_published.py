"""The model against what the papers print: memory to rounding, time within bounds, and what stays outside."""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pytest
from published import FIGURE_2_GB, MASKED_MS, MEMORY_MIB, SEQLENS, SERIES, Series

from flashbench import hopper_configs, runfile
from flashbench._iomodel.constants import FAMILIES
from flashbench.devices import find
from flashbench.iomodel import estimate, flops, predict
from flashbench.problem import Problem

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import measured_times  # noqa: E402
import time_fit  # noqa: E402
import time_model  # noqa: E402
from measured_times import Time, of_today  # noqa: E402

LONG, SHORT, MEDIAN = 0.10, 0.15, 0.05
"""Largest |predicted/published − 1| at N ≥ 1k and at 512, and the median over a family."""

_ALL = (512, 1024, 2048, 4096, 8192, 16384)
OUTSIDE: dict[str, tuple[int, ...]] = {
    # closed source: tiles and schedule are not known, FA3's are taken
    "cudnn h100-sxm fwd d64 causal": (1024,),
    "cudnn h100-sxm fwd d128 full": (2048,),
    "cudnn h100-sxm fwd d128 causal": (1024,),
    # slower than the same length without a mask, in seconds: not the kernel's time alone
    "triton h100-sxm fwd d64 causal": (512,),
    "triton h100-sxm fwd d128 causal": (512,),
    # makes q, k, v contiguous first, which weighs while P is small: ops that the model does not have
    "eager h100-sxm fwd d128 full": (512, 1024),
    "eager a100-sxm-80gb fwd+bwd d128 causal": (512, 1024),
    "eager h100-sxm fwd+bwd d128 causal": (512, 1024),
    "eager h100-sxm bwd d64 full": (512, 1024),
    "eager h100-sxm bwd d128 full": (512, 1024, 2048),
    "eager a100-sxm-80gb fwd+bwd d64 full": (512, 1024),
    "eager a100-sxm-80gb fwd+bwd d128 full": (512, 1024, 2048, 4096),
    "eager h100-sxm fwd+bwd d64 full": (512, 1024),
    "eager h100-sxm fwd+bwd d128 full": (512, 1024),
    "eager a100-sxm-40gb fwd d64 full": (512, 1024),
    "eager a100-sxm-40gb bwd d64 full": (512,),
    "eager a100-sxm-40gb fwd+bwd d64 full": (512,),
    # one constant for both head dims and for releases that differ by a third
    "fa1 a100-sxm-80gb fwd+bwd d64 full": (8192, 16384),
    "fa1 a100-sxm-80gb fwd+bwd d128 full": _ALL,
    "fa1 a100-sxm-40gb fwd d64 full": _ALL,
    "fa1 a100-sxm-40gb bwd d64 full": _ALL,
}
"""Every published number that the model misses by more, and why. It may shrink, and must not grow."""


@pytest.mark.parametrize("row", SERIES, ids=lambda row: row.name)
def test_published_times_are_met_but_for_the_known_ones(row: Series) -> None:
    found = time_model.residuals(row)
    outside = tuple(
        seqlen
        for seqlen, value in zip(SEQLENS, found, strict=False)
        if abs(value) > (LONG if seqlen >= 1024 else SHORT)
    )
    shown = [f"{100 * value:+.1f} %" for value in found]
    assert outside == OUTSIDE.get(row.name, ()), shown


def test_every_known_miss_names_a_row() -> None:
    assert set(OUTSIDE) <= {row.name for row in SERIES}
    assert not any(name.startswith(("fa2", "fa3")) for name in OUTSIDE)


@pytest.mark.parametrize("family", ["fa2", "fa3", "cudnn", "triton"])
def test_half_of_the_numbers_are_met_within_5_percent(family: str) -> None:
    rows = [row for row in SERIES if row.family == family]
    values = [abs(value) for row in rows for value in time_model.residuals(row)]
    assert statistics.median(values) <= MEDIAN


def test_constants_belong_to_families_not_to_rows() -> None:
    """Fewer constants than rows of one table: three per kernel and generation, most of them shared."""
    for name in ("fa2", "fa3", "cudnn"):
        rates = FAMILIES[name].rates
        numbers = {
            (key[0], field, getattr(rate, field))
            for key, rate in rates.items()
            for field in ("mma", "softmax", "fixed_clocks")
        }
        published = sum(len(list(row.cells())) for row in SERIES if row.family == name)
        assert len(numbers) < published / 3


@pytest.mark.slow
@pytest.mark.parametrize("family", ["fa2", "fa3"])
def test_constants_that_saw_no_causal_row_predict_them(
    family: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fitted to the rows without a mask, the causal rows are met within 10 % at N ≥ 1k, median 5 %."""
    monkeypatch.setitem(FAMILIES, family, FAMILIES[family])  # put back afterwards what the fit changes
    time_model.fit(family, hold_out="causal")
    median, _, largest_long = time_model.summary([r for r in SERIES if r.family == family and r.causal])
    assert median <= MEDIAN
    assert largest_long <= LONG
    assert "held out" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("family", ["fa2", "fa3"])
def test_the_constants_are_the_fit(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = FAMILIES[family]
    monkeypatch.setitem(FAMILIES, family, known)
    time_model.fit(family)
    for key, rates in FAMILIES[family].rates.items():
        for field in ("mma", "softmax", "fixed_clocks"):
            assert getattr(rates, field) == pytest.approx(getattr(known.rates[key], field), rel=0.03), (
                key,
                field,
            )


def test_single_numbers_of_cards_without_a_table() -> None:
    """FlashAttention-4 on a B200, 1613 TFLOP/s at most (arXiv:2603.05451): within 10 %.

    flash-attention on an RTX 5090, 190.6 TFLOP/s: GeForce cards run above the clock that their peaks are
    quoted at (an RTX 4090 was seen above its peak), so that the model stays below, by up to 30 %.
    """
    long = Problem(
        batch=1, num_heads=16, num_kv_heads=16, seqlen_q=32768, seqlen_k=32768, head_dim=128, head_dim_v=128,
        dtype="bf16", causal=False,
    )  # fmt: skip
    card = find("b200")
    row = estimate("flash-v4", long, "fwd", device=card)
    assert row.flops / predict(row, card).time_s == pytest.approx(1613e12, rel=0.10)
    short = Problem(
        batch=1, num_heads=8, num_kv_heads=8, seqlen_q=4096, seqlen_k=8192, head_dim=128, head_dim_v=128,
        dtype="bf16", causal=False,
    )  # fmt: skip
    card = find("rtx-5090")
    row = estimate("flash-v2-atomic", short, "fwd", device=card)
    found = predict(row, card)
    assert 0.7 < row.flops / found.time_s / 190.6e12 < 1
    assert not found.calibrated


@pytest.mark.parametrize("model", MEMORY_MIB)
def test_the_memory_table_to_rounding(model: str) -> None:
    """FlashAttention table 21: the model's peak and 7 more tensors: q, k, v, do and the packed gradient."""
    for seqlen, printed in MEMORY_MIB[model].items():
        shape = Problem(
            batch=16, num_heads=8, num_kv_heads=8, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=64,
            head_dim_v=64, dtype="fp16", causal=False,
        )  # fmt: skip
        tensor = 16 * 8 * seqlen * 64 * 2
        peak = estimate(model, shape, "fwd+bwd").extra_bytes + 7 * tensor
        assert round(peak / 2**20) == printed, seqlen


def figure_2() -> Problem:
    return Problem(
        batch=64, num_heads=16, num_kv_heads=16, seqlen_q=1024, seqlen_k=1024, head_dim=64, head_dim_v=64,
        dtype="fp16", causal=False,
    )  # fmt: skip


def test_figure_2_is_consistent_with_the_model_and_no_more() -> None:
    """FlashAttention figure 2 cannot be reproduced: print and text differ, and so do countings.

    The two versions of the paper print 40.3 and 35.3 GB for standard attention, and its code of that
    week has a mask and dropout or not. Eager op lists give 32 to 56 GB, both prints lie inside. For
    flash, four countings of the same algorithm (tiles of 256 or 384 keys, accumulators in fp16 or
    fp32) lie between 4.4 and 6.1 GB around the printed 4.4: the figure cannot tell them apart.
    """
    shape = figure_2()
    plain = estimate("standard", shape, "fwd+bwd").requested.total_bytes / 1e9
    scores = 64 * 16 * 1024**2 * 2 / 1e9
    most = plain + 11 * scores  # padding mask and dropout, each in both passes
    for printed in FIGURE_2_GB["standard"]:
        assert plain <= printed <= most
    paper = estimate("flash-v1", shape, "fwd+bwd", sram_bytes=192 * 1024).requested.total_bytes / 1e9
    narrow = estimate("flash-v1", shape, "fwd+bwd", tiles={"block_q": 64, "block_k": 256})
    code = estimate("flash-v1-cuda", shape, "fwd+bwd").requested.total_bytes / 1e9
    countings = [paper, narrow.requested.total_bytes / 1e9, code]
    assert max(countings) / min(countings) > 1.25
    for printed in FIGURE_2_GB["flash-v1"]:
        assert all(0.6 <= printed / value <= 1.4 for value in countings)


def test_figure_2_prints_other_flops_than_its_workload_has() -> None:
    """66.6 GFLOPs are printed for standard attention; the stated shape has twelve times as many."""
    assert flops(figure_2(), "fwd+bwd") / 66.6e9 > 12


def test_eager_softmax_backward_is_the_six_pass_form() -> None:
    """FlashAttention tables 18, 19 at 4k: the model's bytes over the printed ms: 1.07, 1.29 TB/s of 1.555."""
    shape = Problem(
        batch=16, num_heads=8, num_kv_heads=8, seqlen_q=4096, seqlen_k=4096, head_dim=64, head_dim_v=64,
        dtype="fp16", causal=False,
    )  # fmt: skip
    backward = estimate("standard", shape, "bwd").requested.total_bytes / 33.87e-3
    forward = estimate("standard", shape, "fwd").requested.total_bytes / 16.47e-3
    assert backward == pytest.approx(1.29e12, rel=0.02)
    assert forward == pytest.approx(1.07e12, rel=0.02)


JUDGED = ("naive", "sdpa-flash", "sdpa-cudnn", "flash")
SWEPT = measured_times.sweeps()


@pytest.mark.parametrize("card", SWEPT)
def test_a_cards_sweep_is_predicted_within_15_percent(card: str) -> None:
    """The median over the cells of each implementation and pass, at N >= 1k, on every card that was swept.

    By the constants of the kernels that a row says it ran; of cards but the first nothing was fitted. A pass
    has 28 cells, less those of naive that need more memory than the card has: 20 must have run. Of flash,
    those are judged whose kernel is in its tables today.
    """
    ran: dict[tuple[str, str], list[Time]] = {}
    for time in SWEPT[card]:
        ran.setdefault((time.name, time.row.pass_), []).append(time)
    for name in JUDGED:
        for pass_ in ("fwd", "bwd"):
            assert len(ran[name, pass_]) >= 20
            errors = [time_model.error(time) for time in ran[name, pass_] if of_today(time)]
            assert name == "flash" or len(errors) == len(ran[name, pass_])
            assert statistics.median(map(abs, errors)) <= 0.15, (name, pass_)


def test_the_mask_of_tables_12_and_13_is_a_masked_fill_forward_and_more_than_one_backward() -> None:
    """Q7 of docs/counters.md: 2^31 scores at 4k there and here, where the mask's passes cost nearly alike."""
    swept = {
        (time.row.pass_, time.row.problem.causal): 1e3 * time.seconds
        for time in SWEPT["h100-sxm"]
        if time.name == "naive" and (time.row.problem.seqlen_k, time.row.problem.head_dim) == (4096, 64)
    }
    here = {pass_: swept[pass_, True] - swept[pass_, False] for pass_ in MASKED_MS}
    there = {pass_: masked - plain for pass_, (plain, masked) in MASKED_MS.items()}
    assert here["bwd"] / here["fwd"] == pytest.approx(1.2, abs=0.05)
    assert there["bwd"] / there["fwd"] == pytest.approx(4.2, abs=0.05)
    card, scores = find("a100-sxm-40gb"), 16 * 8 * 4096**2
    ((_, pace),) = FAMILIES["naive"].paces["mask", "sm90"]
    fill = 1e3 * 5 * scores / (pace * card.num_sms * card.clock_hz)  # a score twice, its mask once
    copy = 1e3 * 4 * scores / (0.9 * card.hbm_bytes_per_s)
    assert fill == pytest.approx(there["fwd"], rel=0.05)
    assert fill + copy < 0.4 * there["bwd"]
    page = (ROOT / "docs" / "counters.md").read_text(encoding="utf-8")
    for text in (
        f"costs {here['fwd']:.1f} ms forward and {here['bwd']:.1f} backward",
        f"{there['fwd']:.0f} and {there['bwd']:.0f} ms on an A100",
        f"gives an A100 {fill:.1f} ms", f"{fill + copy:.0f} with a copy",
        f"{there['bwd'] - fill - copy:.0f} ms",
    ):  # fmt: skip
        assert text in page, text


def test_every_sweep_of_a_gpu_is_judged() -> None:
    """Each reports/<card>/results.jsonl whose rows are of a GPU, by the row of the card that it names."""
    of_gpus = {path.parent.name for path in (ROOT / "reports").glob("*/results.jsonl")} - {"cpu"}
    assert set(SWEPT) == of_gpus
    assert time_fit.FITTED_ON in SWEPT
    assert {time.kernels for time in SWEPT[time_fit.FITTED_ON] if time.name == "flash"} == {"flash-v2"}
    for times in SWEPT.values():
        assert len({time.card.name for time in times}) == 1


@pytest.mark.parametrize("model", ["flash", "flash-v3-gluon"])
def test_a_row_of_flash_is_judged_by_the_kernels_that_it_names(model: str, tmp_path: Path) -> None:
    """A sweep on an H200 whose flash ran flash-v3, made from the H100's: other card, other constants."""
    lines = [json.loads(line) for line in (ROOT / "reports/h100-sxm/results.jsonl").read_text().splitlines()]
    record = next(r for r in lines[1:] if r["cell"]["implementation"] == "flash")
    record["io_model"] = model
    for place in (record, lines[0]):
        place["environment"] = {**lines[0]["environment"], "device_name": "NVIDIA H200"}
        place.pop("checksum", None)
    (tmp_path / "h200-sxm").mkdir()
    path = tmp_path / "h200-sxm" / "results.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (lines[0], record)))
    ((time,),) = measured_times.sweeps(tmp_path).values()
    assert (time.card.name, time.row.model) == ("h200", model)
    assert time.kernels == {"flash": "flash-v2", "flash-v3-gluon": "flash-v3"}[model]
    assert predict(time.row, time.on()).family == {"flash": "bundled", "flash-v3-gluon": "gluon"}[model]
    path.write_text(path.read_text().replace("NVIDIA H200", "NVIDIA X1"))
    with pytest.raises(ValueError, match="X1 has no row"):
        measured_times.sweeps(tmp_path)


def test_flash_v3_is_predicted_within_15_percent() -> None:
    """The median of every pass, head dim and mask, at N >= 1k, of what was measured of ``flash``.

    Of the kernels that its tables have today: counted calls and tiles under load. What was measured of others
    is in the count of all alone.
    """
    found = time_model.measured_v3()
    assert {key[1:3] for key in found} == {(p, d) for p in ("fwd", "bwd") for d in ("64", "128", "256")}
    for key, errors in found.items():
        assert len(errors) >= 4, key
        assert statistics.median(map(abs, errors)) <= 0.15, key
        assert max(map(abs, errors)) <= 0.2, key
    every = [error for errors in found.values() for error in errors]
    assert len(every) >= 120
    assert len(list(time_model.of_v3())) >= 180
    assert statistics.median(map(abs, every)) <= MEDIAN


@pytest.mark.parametrize(
    ("said", "counts"),
    [
        ({"fwd_cut": "2w.n128.s2.q1.pingpong.guard1"}, True),
        ({"fwd_cut": "2w.n128.s2.q1.pingpong.max3"}, False),
        ({}, False),
    ],
)
def test_a_forward_counts_where_its_form_is_the_tables(
    said: dict[str, str], counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of an H200's sweep whose form is another's, or is not named, as after the next change of a table.

    It is in no error, no fit, and in the line that says how many were left out.
    """
    lines = [json.loads(line) for line in (ROOT / "reports/h200-sxm/results.jsonl").read_text().splitlines()]
    record = next(
        r
        for r in lines[1:]
        if (r["cell"]["implementation"], r["cell"]["pass"]) == ("flash", "fwd")
        and (r["cell"]["problem"]["head_dim"], r["cell"]["problem"]["seqlen_k"]) == (128, 4096)
        and not r["cell"]["problem"]["causal"]
    )
    record["config"] = {key: value for key, value in record["config"].items() if key != "fwd_cut"} | said
    for line in (record, lines[0]):
        line.pop("checksum", None)
    (tmp_path / "h200-sxm").mkdir()
    path = tmp_path / "h200-sxm" / "results.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (lines[0], record)))
    ((time,),) = measured_times.sweeps(tmp_path).values()
    assert of_today(time) is counts
    monkeypatch.setitem(time_fit.MEASURED, "gluon", (lambda: iter([time]),))
    assert len(time_fit.numbers("gluon")) == counts
    monkeypatch.setattr(measured_times, "sweeps", lambda: {"h200-sxm": [time]})
    assert list(time_model.measured()) == [("h200-sxm", "flash", "flash-v3", "fwd", "128")] * counts
    told = f"`{said['fwd_cut']}`" if said else "no form named"
    assert list(time_model.left_out(time_model.swept())) == (
        [] if counts else [f"- h200-sxm, `flash`, fwd: 1 of 1 ({told} 1)"]
    )


def test_calls_that_another_card_counts_are_taken_as_its_own(tmp_path: Path) -> None:
    """The next counters of a sweep are read wherever their card's folder is."""
    text = (ROOT / "reports/h100-sxm/counters/sweep-128/results.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    of_flash = [line for line in lines[1:] if line["cell"]["implementation"] == "flash"]
    for line in (lines[0], *of_flash):
        line["environment"] = {**lines[0]["environment"], "device_name": "NVIDIA H200"}
        line.pop("checksum", None)
    for name in ("sweep-128", "again"):
        path = tmp_path / "h200-sxm" / "counters" / name / "results.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in (lines[0], *of_flash)))
    times = list(measured_times.counted(tmp_path))
    assert len(times) == 28
    assert {(time.card.name, time.source) for time in times} == {("h200", "counters/sweep-128")}


def test_a_backward_counts_by_its_numbers_and_another_kernel_always() -> None:
    backward = next(time for time in measured_times.counted() if time.row.pass_ == "bwd")
    assert of_today(backward)
    assert not of_today(backward._replace(config={**backward.config, "bwd_block_q": 32}))
    assert not of_today(backward._replace(config={}))
    wide = next(time for time in measured_times.tuned() if "dkdv_block_q" in time.config)
    assert of_today(wide)
    assert not of_today(wide._replace(config={**wide.config, "dq_num_warps": 8}))
    assert of_today(backward._replace(kernels="flash-v2", config={}))


def test_the_forward_that_was_tuned_is_the_tables_in_every_field() -> None:
    """A name in the file stands for what the table has: guarded forms with their own loop, others without.

    All six series are there, at every length from 1k on, and so are the backward's.
    """
    path = measured_times.REPORTS / "h200-sxm" / "tuning" / measured_times.TUNED_FWD[0]
    forms = json.loads(path.read_text())["configurations"]
    times = list(measured_times.tuned())
    forwards = [time for time in times if time.row.pass_ == "fwd"]
    cells = [(p.head_dim, p.causal, p.seqlen_k) for p in (time.row.problem for time in forwards)]
    assert set(cells) == set(product((64, 128, 256), (False, True), (1024, 2048, 4096, 8192, 16384)))
    assert len(cells) == 30
    for (dim, causal, keys), time in zip(cells, forwards, strict=True):
        assert time.card.name == "h200"
        own = asdict(hopper_configs.choose(dim, dim, causal, keys, fp16=True))
        assert forms[time.config["fwd_cut"]] == {**own, "inner": own["guarded"] > 0}
    assert sum(time.row.pass_ == "bwd" for time in times) == 50
    assert all(map(of_today, times))


def test_short_calls_of_todays_forward_are_predicted_as_the_page_says() -> None:
    """28 in the H200's sweep, to which nothing is fitted: by head dim, and the clocks that they ran at."""
    short = [t for t in SWEPT["h200-sxm"] if (t.kernels, t.row.pass_) == ("flash-v3", "fwd") and of_today(t)]
    assert len(short) == 28
    of = {dim: [time_model.error(t) for t in short if t.row.problem.head_dim == dim] for dim in (64, 128)}
    assert max(map(abs, of[64])) < 0.03
    assert (round(100 * min(of[128])), round(100 * max(of[128]))) == (6, 12)
    records = [
        record
        for record in runfile.load(ROOT / "reports/h200-sxm/results.jsonl").records
        if (record.cell.implementation, record.cell.pass_) == ("flash", "fwd")
        and record.cell.problem.seqlen_q >= measured_times.SHORTEST
    ]
    clocks = [record.clocks["during"]["sm_clock_mhz"]["median"] for record in records]
    throttled = sum("throttled" in record.flags for record in records)
    page = (ROOT / "docs" / "time-model.md").read_text(encoding="utf-8")
    said = (
        f"has 28 of them (at {min(clocks):.0f} to {max(clocks):.0f} MHz; {throttled} are flagged `throttled`)"
    )
    assert f"{said}: at d = 64 they are predicted within 3 %, at 128 6 to 12 % too slow" in page


def test_the_page_says_what_load_left_of_fp8() -> None:
    """Its clock under sustained load, and the same forms in bursts, which no fit takes apart."""
    tuning = ROOT / "reports" / "h200-sxm" / "tuning"
    held = json.loads((tuning / measured_times.GUARDED).read_text(encoding="utf-8"))
    assert held["load"] == "sustained"
    bursts = json.loads((tuning / "flash-v3-fp8-burst.json").read_text(encoding="utf-8"))
    assert bursts["load"] == "burst"

    def own(row: dict) -> str:
        return hopper_configs.choose_fp8(128, 128, row["causal"], row["seqlen"]).name

    clocks = [row["mhz"][own(row)] for row in held["rows"]]
    speeds = {(row["causal"], row["seqlen"]): row["tflops"][own(row)] for row in held["rows"]}
    over = [row["tflops"][own(row)] / speeds[row["causal"], row["seqlen"]] for row in bursts["rows"]]
    assert len(over) == len(speeds) == 6
    page = (ROOT / "docs" / "time-model.md").read_text(encoding="utf-8")
    assert f"left the second {min(clocks)} to {max(clocks)} of 1980 MHz" in page
    assert f"the same forms were {min(over):.2f} to {max(over):.2f} times as fast" in page
    assert not any(time.sustained for time in measured_times.tuned_fp8())


def test_fp8s_kernels_are_predicted_as_the_page_says() -> None:
    """Each by its own constants, and how few the numbers of the one guarded by row sums are.

    Forms with maxima that were timed beside it, on its card and under its load, are of neither fit: by the
    constants of maxima they are predicted as well as those of the card that these were fitted on.
    """
    of: dict[str, list[time_fit.Number]] = {"fwd": [], "sums": []}
    for number in time_fit.numbers("gluon-fp8"):
        (kernel,) = time_fit.kernels(number, "gluon-fp8")
        of[kernel].append(number)
    largest = {
        kernel: max(abs(time_fit.error(number, "gluon-fp8")) for number in numbers)
        for kernel, numbers in of.items()
    }
    problems = [number.row.problem for number in of["sums"]]
    assert {(p.head_dim, p.seqlen_k, p.causal) for p in problems} == set(
        product((128,), (4096, 8192, 16384), (False, True))
    )
    assert [{number.card.name for number in numbers} for numbers in of.values()] == [{"h100-sxm"}, {"h200"}]
    beside = json.loads((measured_times.REPORTS / "h200-sxm" / "tuning" / measured_times.GUARDED).read_text())
    unseen = [
        _with_maxima(number) / (statistics.median(row["samples_ms"][form]) / 1e3) - 1
        for row in beside["rows"]
        for form in row["samples_ms"]
        for number in of["sums"]
        if ".max3" in form
        and (row["causal"], row["seqlen"]) == (number.row.problem.causal, number.row.problem.seqlen_k)
    ]
    assert len(unseen) == 6
    page = (ROOT / "docs" / "time-model.md").read_text(encoding="utf-8")
    said = f"{len(of['fwd'])} numbers of an H100, predicted at most"
    assert f"{said} {100 * largest['fwd']:.1f} % off" in page
    said = "six numbers of one head dim, d = 128 at 4k to 16k on an H200, predicted at most"
    assert f"{said} {100 * largest['sums']:.1f} % off" in page
    said = "forms with maxima, timed beside the second kernel on the H200, are predicted at most"
    assert f"{said} {100 * max(map(abs, unseen)):.1f} % off by `fwd`" in page


def _with_maxima(number: time_fit.Number) -> float:
    """Seconds that the constants of the kernel with row maxima predict, which leaves V its mean."""
    (step,) = number.row.steps
    read = {name: count for name, count in step.read.items() if name != "v_mean"}
    return predict(replace(number.row, steps=(step._replace(read=read),)), number.card).time_s


@pytest.fixture
def _fits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put back what a fit changes."""
    for family in ("gluon", "gluon-fp8"):
        monkeypatch.setitem(FAMILIES, family, FAMILIES[family])
    yield
    time_fit.reset_load()


@pytest.mark.slow
@pytest.mark.usefixtures("_fits")
@pytest.mark.parametrize("family", ["gluon", "gluon-fp8"])
def test_the_constants_of_flash_v3_are_the_fit(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Within what a percent of rms allows, with the share that sustained load leaves."""
    known = FAMILIES[family]
    now, least = time_model.fit(family)
    assert now <= least + 0.5
    for key, rates in FAMILIES[family].rates.items():
        assert rates.mma == pytest.approx(known.rates[key].mma, rel=0.03)
    if family == "gluon":
        share = float(re.search(r"sustained load ([\d.]+)", capsys.readouterr().out)[1])  # type: ignore[index]
        assert share == pytest.approx(measured_times.SUSTAINED, abs=0.01)


@pytest.mark.slow
@pytest.mark.usefixtures("_fits")
def test_a_fit_does_not_stay_where_a_share_is_at_most_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the constants of the forward with maxima, on whose way shares pass 1, as from those in use."""
    every, known = time_fit.numbers("gluon"), FAMILIES["gluon"]
    logs = [math.log1p(time_fit.error(number, "gluon")) for number in every]
    in_use = 100 * math.sqrt(statistics.fmean(log * log for log in logs))
    then = known.rates["fwd", "sm90"]._replace(mma=0.95, softmax=0.78, fixed_clocks=4000)
    monkeypatch.setitem(FAMILIES, "gluon", known._replace(rates={**known.rates, ("fwd", "sm90"): then}))
    _, least = time_model.fit("gluon")
    assert least <= in_use + 0.05


@pytest.mark.slow
@pytest.mark.usefixtures("_fits")
@pytest.mark.parametrize("family", ["gluon", "gluon-fp8"])
@pytest.mark.parametrize(
    ("left_out", "median", "largest"), [("causal", 8, 25), ("length", 5, 20), ("head-dim", 8, 25)]
)
def test_flash_v3_is_predicted_unseen(
    family: str, left_out: str, median: float, largest: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each length, each head dim, and the causal rows, by constants that have not seen them; in percent."""
    time_model.fit(family, hold_out=left_out)
    told = re.search(r"held out: median ([\d.]+) %, largest ([\d.]+) %", capsys.readouterr().out)
    assert told is not None
    assert float(told[1]) <= median
    assert float(told[2]) <= largest
    group = {"causal": "causal rows", "length": "a length", "head-dim": "a head dim"}[left_out]
    page = (ROOT / "docs" / "time-model.md").read_text(encoding="utf-8")
    assert f"| {family} | {group} | {told[1]} % | {told[2]} % |" in page


@pytest.mark.slow
@pytest.mark.parametrize("family", time_fit.SWEPT)
def test_what_was_fitted_to_the_sweep_still_fits_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a new sweep: if no constants do much better than those in use, these need no new fit."""
    monkeypatch.setitem(FAMILIES, family, FAMILIES[family])
    now, least = time_model.fit(family)
    assert 0 < least <= now + 1e-9
    assert now <= least + 1.5


def test_the_page_shows_these_residuals_and_constants() -> None:
    """docs/time-model.md is what ``python tools/time_model.py --write`` makes of the model as it is."""
    text = (ROOT / "docs" / "time-model.md").read_text(encoding="utf-8")
    shown = text.partition(time_model.BEGIN)[2].partition(time_model.END)[0].strip()
    assert shown == "\n".join(time_model.table())
    shown = text.partition(time_model.BEGIN_MEASURED)[2].partition(time_model.END)[0].strip()
    assert shown == "\n".join(time_model.measured_table())
    shown = text.partition(time_model.BEGIN_V3)[2].partition(time_model.END)[0].strip()
    assert shown == "\n".join(time_model.v3_table())
    for family in ("fa2", "fa3", "cudnn", "triton", "bundled", "gluon", "gluon-fp8"):
        for kernel, generation in FAMILIES[family].rates:
            if generation != "sm90":
                continue
            rate = FAMILIES[family].rates[kernel, "sm90"]
            line = f"| {family} | {kernel} | H100 | {rate.mma} | {rate.softmax:g} | {rate.fixed_clocks:g} |"
            assert f"{line} {rate.resident} |" in text
