"""The model against what hardware counted: reports/*/counters, every counted cell once."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from flashbench import decoding, iomodel, kernels, presets
from flashbench.kernels import Target, _compile

ROOT = Path(__file__).parent.parent


def tool(name: str) -> Any:
    """A script of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


counted = tool("counters_table")

FUSED = ("flash", "sdpa-flash", "sdpa-cudnn")
OUTSIDE = ("flash-v1", "flash-v2-atomic")
BUNDLED = sorted({record.cell.implementation for record in counted.records()} & set(_compile.BUNDLED))
"""Implementations with kernels of this package that were counted."""
LENGTHS = [1024 * 2**step for step in range(7)]


def levels(level: str, *implementations: str):
    """Of cells as a whole."""
    found = [
        row
        for row in counted.load()
        if row.level.level == level
        and not row.level.kernel
        and row.record.cell.implementation in implementations
    ]
    assert found
    return found


def of(row) -> tuple[str, int, int, bool]:
    p = row.record.cell.problem
    return row.record.cell.pass_, p.seqlen_q, p.head_dim, p.causal


@pytest.mark.parametrize("implementation", FUSED)
def test_the_sweep_is_whole(implementation: str) -> None:
    """bf16, N = 1k to 64k, d = 64 and 128, both masks, forward and backward, each once."""
    found = [of(row) for row in levels("L2 read", implementation) if counted.plain(row.record)]
    wanted = [
        (pass_, n, d, mask) for pass_ in ("fwd", "bwd") for n in LENGTHS for d in (64, 128) for mask in (0, 1)
    ]
    assert sorted(found) == sorted(wanted)


def test_a_cell_that_was_counted_twice_counts_once_by_its_latest_run() -> None:
    keys = [record.cell.key for record in counted.records()]
    assert len(keys) == len(set(keys)) >= 230
    fused = [r for r in counted.records() if r.cell.implementation in ("flash", "sdpa-flash")]
    apart = ["spill_write_bytes" in r.counters["total"] for r in fused if r.cell.problem.seqlen_q > 1]
    assert len(apart) == 125
    assert all(apart)  # older runs did not count them


def listed(title: str) -> dict[str, list[str]]:
    """The rows of one of the page's lists of cells: key → the other columns."""
    page = (ROOT / "docs" / "counters.md").read_text(encoding="utf-8")
    part = page.split(f"**{title}**")[1].split("**")[0].split(counted.END)[0]
    rows = [[column.strip() for column in line.split("|")[1:-1]] for line in part.splitlines()]
    return {row[0]: row[1:] for row in rows if row and row[0].startswith("flash")}


def test_cells_that_were_not_counted_as_they_run_today_are_named_as_such() -> None:
    """The page's two lists are what differs between each record's configuration and what is launched now, in
    anything; of which cannot be told are those whose row lacks the form alone, of a form as old as the row.
    """
    card = Target(device="cuda", capability=(9, 0), num_sms=132, smem_per_block_bytes=232448)
    wanted, unknown = set(), set()
    for record in counted.bundled():
        cell = record.cell
        now = kernels.get(cell.implementation).on_card(cell.problem, cell.pass_, card)
        ran = [{**one, "kernels": str(one.get("kernels", "")).split(":")[0]} for one in (record.config, now)]
        if ran[0] != ran[1]:
            wanted.add(cell.key)
        if ran[0] == {name: value for name, value in ran[1].items() if name != "fwd_cut"} != ran[1]:
            new = any(part in now["fwd_cut"] for part in ("max3", ".e", ".p1", "guard"))
            unknown |= set() if new else {cell.key}
    assert set(listed("Counted with another cut")) == wanted - unknown
    assert set(listed("Not known")) == unknown
    assert len(counted.bundled()) > len(wanted)


def test_a_cell_whose_form_alone_is_another_is_counted_with_another_cut() -> None:
    """16 bits of head dims 64 and 128: blocks and kernels are those of then, the form is not."""
    shown = listed("Counted with another cut")
    assert shown["flash fwd b4 h16 n4096 d128 bf16 full"] == [
        "fwd_cut not recorded", "fwd_cut 2w.n128.s2.q1.pingpong.guard1",
    ]  # fmt: skip
    assert shown["flash fwd b8 h32 n2048 d64 bf16 full"] == [
        "fwd_q_stages 2, fwd_cut not recorded", "fwd_q_stages 1, fwd_cut 3w.n128.s2.q1.pingpong.guard2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("form", "known"),
    [
        ("2w.n128.s2.q2", False),
        ("2w.n128.s2.q2.pingpong", False),
        ("2w.n128.s2.q2.max3", True),
        ("2w.n128.s2.q2.e2", True),
        ("2w.n128.s2.q2.e2.p16", True),
        ("2w.n128.s2.q2.pingpong.guard1", True),
    ],
)
def test_a_row_without_a_form_was_not_counted_with_what_is_younger(form: str, known: bool) -> None:
    """What it tells and today's differ in is known, whatever the form."""
    then = {"fwd_block_q": 128, "fwd_num_stages": 2}
    now = {**then, "fwd_cut": form}
    assert counted.untold(counted.differing("flash-v3", then, now)) is not known
    assert not counted.untold(counted.differing("flash-v3", {**then, "fwd_num_stages": 3}, now))
    assert not counted.untold(counted.differing("flash-v3", {**then, "fwd_cut": "of old"}, now))


@pytest.mark.parametrize(
    "field",
    ["kernels", "fwd_block_q", "split_block_k", "fwd_num_warps", "fwd_num_stages", "fwd_q_stages", "fwd_cut"],
)
def test_a_cut_is_kernels_tiles_splits_warps_buffers_and_the_form(field: str) -> None:
    ran = {
        "kernels": "flash-v3: why", "fwd_block_q": 128, "split_block_k": 512, "fwd_num_warps": 8,
        "fwd_num_stages": 2, "fwd_q_stages": 1, "fwd_cut": "2w.n128.s2.q1",
    }  # fmt: skip
    assert counted.cut("flash", ran) != counted.cut("flash", {**ran, field: "other"})
    assert counted.cut("flash", ran) == counted.cut("flash", {**ran, "kernels": "flash-v3", "seed": 1})
    assert counted.cut("flash-v2", {"fwd_block_q": 64}) == {"kernels": "flash-v2", "fwd_block_q": 64}


def test_each_bundled_kernel_requests_what_the_model_says_within_1_percent() -> None:
    """Kernel by kernel; less by no more than the L1 may answer, which the page shows for each."""
    rows = counted.requested(counted.load())
    assert {row.record.cell.implementation for row in rows} == set(BUNDLED)
    assert {"backward", "dkdv", "dq", "delta", "merge", ""} < {counted.kernel(row) for row in rows}
    assert len(rows) >= 250
    for row in rows:
        assert counted.close(row), (row.record.cell.key, row.level.kernel, row.level.ratio)
        apart = counted.kernel(row) in ("dkdv", "dbias", "merge")
        assert (counted.spared(row) > 0) == apart, (row.record.cell.key, row.level.kernel)


def test_every_option_that_was_counted_is_shown_cell_by_cell() -> None:
    shown = "\n".join(counted.others(counted.load()))
    wanted = {row.record.cell.key for row in levels("L2 read", *BUNDLED) if not counted.plain(row.record)}
    assert wanted
    assert all(f"| {key} |" in shown for key in wanted)


@pytest.mark.parametrize("implementation", BUNDLED)
def test_the_bundled_kernels_request_what_the_model_says_within_1_percent(implementation: str) -> None:
    for row in levels("L2 read", implementation):
        key = row.record.cell.key
        assert row.level.ratio == pytest.approx(1, abs=0.01), key


@pytest.mark.parametrize("implementation", BUNDLED)
def test_the_bundled_kernels_write_what_the_model_says_within_1_permille(implementation: str) -> None:
    """Spilled registers apart. Whole sectors of an lse of one row, of a decode's parts, of dsinks."""
    for row in levels("L2 write", implementation):
        assert row.level.ratio == pytest.approx(1, abs=1e-3), row.record.cell.key


def test_each_kernel_of_a_decode_moves_what_the_model_says_within_1_permille() -> None:
    rows = [
        row
        for row in counted.load()
        if row.record.cell.implementation == "flash-decode" and row.level.level in ("L2 read", "L2 write")
    ]
    assert len(rows) == 4 * 2 + 2 * 2 * 2  # the call, and where keys are split both kernels
    for row in rows:
        assert row.level.ratio == pytest.approx(1, abs=1e-3), (row.record.cell.key, row.level.kernel)


def test_paged_and_fp8_caches_move_what_the_model_says_within_1_permille() -> None:
    """Reads and writes together, of the splits and of the merge; a page table crosses sector by sector."""
    rows = json.loads((counted.FOLDER / "caches" / "decode.json").read_text(encoding="utf-8"))["rows"]
    assert {(row["dtype"], row["page_size"]) for row in rows} == {
        (dtype, size) for dtype in ("bf16", "fp8") for size in (0, 16)
    }
    for row in rows:
        names = ("kv_len", "batch", "page_size", "dtype", "queries")
        step = decoding.Step(preset=presets.find(row["model"]), **{name: row[name] for name in names})
        tiles = {"fwd_block_q": 16, "fwd_block_k": row["block_k"]}
        tiles |= {"split_block_q": 16, "split_block_k": row["split_keys"]}
        steps = iomodel.estimate(
            "flash-decode", step.problem, "fwd", tiles=tiles, variant=step.variant, device=counted.DEVICE
        ).steps
        moved = sum(one.crossing(part) for one in steps for part in ("read", "write"))
        assert row["counted_bytes"] == pytest.approx(moved, rel=1e-3), (row["dtype"], row["page_size"])


@pytest.mark.parametrize("implementation", OUTSIDE)
def test_kernels_with_keys_outside_move_what_the_model_says(implementation: str) -> None:
    """1k and 4k, d = 64 and 128, both masks, both passes: written and added to 0.1 %, DRAM in the band."""
    for level, count in (("L2 write", 16), ("DRAM read", 16), ("DRAM write", 16)):
        rows = levels(level, implementation)
        assert len(rows) == count
        for row in rows:
            close = pytest.approx(1, abs=1e-3)
            assert row.level.within if level != "L2 write" else row.level.ratio == close, row.record.cell.key
    adding = levels("L2 atomic", "flash-v2-atomic")
    assert len(adding) == 8
    assert all(row.level.ratio == pytest.approx(1, abs=1e-3) for row in adding)


@pytest.mark.parametrize("implementation", ["flash", "sdpa-flash"])
def test_they_write_what_the_model_says_within_1_percent(implementation: str) -> None:
    """Spilled registers apart; one row of a decode, and what splits leave, is a part of a sector."""
    rows = levels("L2 write", implementation)
    for row in rows:
        if row.record.cell.problem.seqlen_q > 1:
            assert row.level.ratio == pytest.approx(1, abs=0.01), row.record.cell.key
        else:
            assert 1 <= row.level.ratio < 1.12, row.record.cell.key
    assert len(rows) == (72 if implementation == "sdpa-flash" else 59)


def test_what_torchs_flash_spills_is_known_within_1_percent() -> None:
    rows = [row for row in levels("spills", "sdpa-flash") if row.record.cell.problem.head_dim != 96]
    assert len(rows) == 67
    for row in rows:
        assert row.level.ratio == pytest.approx(1, abs=0.01), row.record.cell.key


@pytest.mark.parametrize("implementation", BUNDLED)
def test_dram_reads_of_the_bundled_kernels_are_within_5_percent_up_to_16k(implementation: str) -> None:
    for row in levels("DRAM read", implementation):
        if row.record.cell.problem.seqlen_q <= 16384:
            assert row.level.ratio == pytest.approx(1, abs=0.05), row.record.cell.key


@pytest.mark.parametrize("implementation", [*FUSED, "naive", "flash-v2"])
def test_dram_reads_of_the_sweep_are_within_5_percent_up_to_16k(implementation: str) -> None:
    for row in levels("DRAM read", implementation):
        if counted.plain(row.record) and row.record.cell.problem.seqlen_q <= 16384:
            assert row.level.ratio == pytest.approx(1, abs=0.05), row.record.cell.key


def test_what_is_expected_of_programs_that_lose_step_is_within_a_factor_of_four() -> None:
    """flash at 32k and 64k, where what is read is up to 38 times what is compulsory; 2.1 without a mask."""
    rows = [row for row in levels("DRAM read", "flash") if row.record.cell.problem.seqlen_q >= 32768]
    assert len(rows) == 16
    for row in rows:
        most = 4 if row.record.cell.problem.causal else 2.1
        assert 1 / most < row.level.ratio < most, row.record.cell.key
    assert max(row.level.counted / row.level.low for row in rows) > 30


@pytest.mark.parametrize("level", ["DRAM read", "DRAM write"])
def test_dram_of_options_decode_and_fp8_lies_in_the_band(level: str) -> None:
    rows = [row for row in levels(level, *BUNDLED) if not counted.plain(row.record)]
    assert len(rows) >= 27
    assert all(row.level.within for row in rows)


@pytest.mark.parametrize("implementation", FUSED)
@pytest.mark.parametrize("level", ["DRAM read", "DRAM write"])
def test_dram_lies_in_the_band_in_95_percent_of_all_cells(implementation: str, level: str) -> None:
    rows = levels(level, implementation)
    assert len(rows) >= 56
    assert sum(row.level.within is True for row in rows) >= 0.95 * len(rows)


def test_dram_lies_in_the_band_in_every_cell_of_the_sweep() -> None:
    for level in ("DRAM read", "DRAM write"):
        rows = levels(level, *FUSED, "naive", "flash-v2")
        assert len(rows) == 251
        assert not [row.record.cell.key for row in rows if not row.level.within]


@pytest.mark.parametrize("implementation", FUSED)
def test_what_is_expected_at_dram_is_near_what_was_counted(implementation: str) -> None:
    """The middle of the sizes of all errors, reads and writes: a band alone could be as wide as it likes."""
    for level, most in (("DRAM read", 0.03), ("DRAM write", 0.07)):
        errors = sorted(abs(row.level.ratio - 1) for row in levels(level, implementation))
        assert errors[len(errors) // 2] < most, (level, errors)


@pytest.mark.parametrize("implementation", ["sdpa-flash", "sdpa-cudnn"])
def test_torchs_backends_request_and_add_what_the_model_says(implementation: str) -> None:
    """Decode among it, where FlashAttention-2 packs the query heads of a group into one tile."""
    for row in levels("L2 read", implementation):
        assert row.level.ratio == pytest.approx(1, abs=0.01), row.record.cell.key
    adding = [row for row in levels("L2 atomic", implementation) if row.record.cell.pass_ == "bwd"]
    assert len(adding) == 28
    for row in adding:
        assert row.level.ratio == pytest.approx(1, abs=0.001), row.record.cell.key


def test_a_backward_of_torchs_is_the_kernels_of_its_model() -> None:
    """As many as the profile has, in order, each reading what its step says."""
    by_kernel = [
        row
        for row in counted.load()
        if row.level.kernel
        and row.level.level == "L2 read"
        and row.record.cell.pass_ == "bwd"
        and row.record.cell.implementation in ("sdpa-flash", "sdpa-cudnn")
    ]
    assert len(by_kernel) == 28 * 5 + 28 * 3
    for row in by_kernel:
        assert row.level.ratio == pytest.approx(1, abs=0.01), (row.record.cell.key, row.level.kernel)


def test_cudnns_backward_writes_what_the_model_says() -> None:
    """The main kernel to the byte; of sectors that the small ones write in halves what is expected."""
    rows = [
        row
        for row in counted.load()
        if row.record.cell.implementation == "sdpa-cudnn" and row.level.level == "L2 write"
        if row.record.cell.pass_ == "bwd"
    ]
    whole = [row for row in rows if not row.level.kernel]
    assert len(whole) == 28
    assert all(row.level.ratio == pytest.approx(1, abs=0.01) for row in whole)
    for name, near in (("backward", 1e-6), ("delta", 0.02), ("convert", 0.03)):
        found = [row.level.ratio for row in rows if row.level.kernel.startswith(name)]
        assert len(found) == len(whole)
        assert all(ratio == pytest.approx(1, abs=near) for ratio in found), (name, min(found), max(found))


def test_every_record_has_clocks() -> None:
    for path in counted.files():
        for record in counted.runfile.load(path).records:
            assert record.clocks["before"]["sm_clock_mhz"], (path, record.cell.key)


def test_torchs_causal_forward_at_other_shapes_is_within_a_fifth_of_what_is_expected() -> None:
    """Of less weight in the constants; the same work in another order of heads reads up to 12 % more."""
    rows = [
        row
        for row in levels("DRAM read", "sdpa-flash")
        if not counted.plain(row.record) and row.record.cell.problem.seqlen_q > 1
    ]
    assert len(rows) == 13
    for row in rows:
        assert row.level.within, row.record.cell.key
        assert row.level.ratio == pytest.approx(1, abs=0.2), row.record.cell.key
    near = [row for row in rows if row.level.ratio == pytest.approx(1, abs=0.1)]
    assert len(near) >= 9


@pytest.mark.parametrize("what", ["reads", "reads and writes"])
def test_naives_ops_move_what_is_modelled_within_2_percent(what: str) -> None:
    """At DRAM, every op of every cell, without exception."""
    ops = counted.moved(counted.load())[what]
    assert len(ops) >= 130
    for op in ops:
        assert op.ratio == pytest.approx(1, abs=0.02), op.name


def test_what_naives_ops_write_is_missed_by_no_more_than_stays_in_l2() -> None:
    """Writes alone: what is dirty in L2 as an op ends is written after it, so less is seen, never more."""
    for op in counted.moved(counted.load())["writes"]:
        assert op.ratio < 1.02, op.name
        assert op.ratio > 0.98 or op.missing < 0.12, op.name


def test_an_op_counted_again_and_again_reads_the_same_within_1_percent() -> None:
    """naive's backward at 4k, d = 128, in three runs on two cards: what is modelled is no run's own."""
    runs = [
        {
            (record.cell.key, at): kernel["dram_read_bytes"]
            for record in counted.runfile.load(counted.FOLDER / folder / "results.jsonl").records
            for at, kernel in enumerate(record.counters["kernels"])
        }
        for folder in ("sweep-128", "naive-again-1", "naive-again-2")
    ]
    ops = set(runs[1])
    assert len(ops) == 15
    for op in ops:
        reads = [run[op] for run in runs]
        assert max(reads) <= 1.01 * min(reads), (op, reads)


def test_model_trace_and_counters_agree_in_the_records_that_have_all_three() -> None:
    records = counted.runfile.load(ROOT / "reports" / "h100-sxm" / "joined" / "results.jsonl").records
    assert [record.cell.problem.causal for record in records] == [False, True]
    for record in records:
        assert (record.trace["difference_bytes"], record.trace["difference_flops"]) == (0, 0)
        for level in ("read", "write"):
            moved = record.trace["total"][f"{level}_bytes"]
            assert moved == record.trace["total"][f"modelled_{level}_bytes"]
            assert record.counters["total"][f"l2_{level}_bytes"] == pytest.approx(moved, rel=1e-3)


def test_the_page_shows_these_tables() -> None:
    shown = (ROOT / "docs" / "counters.md").read_text(encoding="utf-8")
    assert counted.page() in shown, "run: python tools/counters_table.py --write"


def test_the_share_of_a_serial_bound_that_kernels_reach() -> None:
    efficiency = tool("efficiency_table")
    assert efficiency.page() in (ROOT / "docs" / "counters.md").read_text(encoding="utf-8")
    found = efficiency.timed() | efficiency.tuned()
    assert {key[0] for key in found} == set(efficiency.SHOWN)
    assert all(0 < value < 1 for values in found.values() for value in values)
    of_128 = [
        value for key in found if key[1:3] == ("fwd", 128) and key[0] == "flash-v2" for value in found[key]
    ]
    assert min(of_128) > 0.6  # what was expected of a Triton kernel
