"""The table of ratios to the fastest other kernel, from records whose ratios are known."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from attention import problem
from test_verify import edit

from flashbench import runfile
from flashbench.problem import Cell
from flashbench.record import Record, Samples

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import peers_table

LENGTHS = peers_table.LENGTHS


def record(name: str, seconds: float, seqlen: int, status: str = "ok", **changes: Any) -> Record:
    """A row whose median is seconds; without a time where its status is another."""
    pass_, flags = changes.pop("pass_", "fwd"), changes.pop("flags", ())
    shape = {"head_dim": 64, "causal": False, **changes}
    p = problem(seqlen_q=seqlen, seqlen_k=seqlen, head_dim_v=shape["head_dim"], dtype="fp16", **shape)
    cell = Cell(implementation=name, problem=p, pass_=pass_)
    if status != "ok":
        return Record(cell=cell, status=status, reason="it says why")
    samples = Samples(samples_s=(seconds, seconds, 9.0), cache="cold", method="events")
    return Record(cell=cell, status="ok", samples=samples, flags=flags)


def test_the_fastest_other_is_asked_and_flash_attention_4_is_scaled_by_cudnn() -> None:
    found = peers_table.ratios([
        record("flash", 2.0, 512), record("sdpa-cudnn", 1.0, 512), record("sdpa-flash", 0.5, 512),
        record("flash", 2.0, 1024), record("sdpa-cudnn", 3.0, 1024), record("sdpa-flash", 4.0, 1024),
        record("naive", 0.1, 1024),
        record("flash", 2.0, 8192), record("sdpa-cudnn", 2.0, 8192),
        record("flash", 2.0, 2048), record("fa4", 2.0, 2048),
    ])  # fmt: skip
    assert found == {
        ("fwd", 64, False, 512): (0.25, "sdpa-flash", True),
        ("fwd", 64, False, 1024): (1.5, "sdpa-cudnn", True),
        ("fwd", 64, False, 8192): (pytest.approx(455 / 537), "fa4 (scaled)", True),
    }
    text = peers_table.render(found)
    assert "| fwd | 64 | full | 0.25* | 1.50* | – | – | 0.85* | – |" in text
    assert "of 3 cells, least 0.2500 (d=64 full at 512); bar 1.02: not judged by 3 of 36" in text
    assert "FlashAttention-4: measured in 0 cells, scaled by cuDNN (*) in 3" in text


@pytest.mark.parametrize("status", ["wrong", "failed", "unavailable"])
def test_flash_attention_4_is_the_runs_own_where_its_row_is_ok_and_scaled_elsewhere(status: str) -> None:
    """Also where the scaled figure would have been the faster."""
    rows = [
        record("flash", 2.0, 4096), record("sdpa-cudnn", 4.0, 4096), record("fa4", 3.0, 4096),
        record("flash", 2.0, 8192), record("sdpa-cudnn", 2.0, 8192), record("fa4", 3.0, 8192),
        record("flash", 2.0, 16384), record("sdpa-cudnn", 2.0, 16384), record("fa4", 0.1, 16384, status),
    ]  # fmt: skip
    found = peers_table.ratios(rows)
    assert found == {
        ("fwd", 64, False, 4096): (1.5, "fa4", False),
        ("fwd", 64, False, 8192): (1.0, "sdpa-cudnn", False),
        ("fwd", 64, False, 16384): (pytest.approx(451 / 530), "fa4 (scaled)", True),
    }
    text = peers_table.render(found)
    assert "| fwd | 64 | full | – | – | – | 1.50 | 1.00 | 0.85* |" in text
    assert "FlashAttention-4: measured in 2 cells, scaled by cuDNN (*) in 1" in text
    assert peers_table.untimed(rows) == [f"- rows of fa4 that are {status}: 1"]


def test_flash_attention_3_is_one_of_the_others() -> None:
    rows = [record(name, seconds, 512) for name, seconds in
            (("flash", 2.0), ("sdpa-cudnn", 4.0), ("fa4", 3.0), ("fa3", 1.0))]  # fmt: skip
    assert peers_table.ratios(rows) == {("fwd", 64, False, 512): (0.5, "fa3", False)}


def whole(pass_: str, ratio: float, **others: float) -> dict[peers_table.Key, peers_table.Ratio]:
    """Ratios over a pass's grid; others: those of head dim 64, full, by length."""
    found = {
        (*of, n): peers_table.Ratio(ratio, "fa4", False) for of in peers_table.REFERENCE if of[0] == pass_
        for n in LENGTHS
    }  # fmt: skip
    changed = {(pass_, 64, False, int(n[1:])): peers_table.Ratio(x, "fa4", False) for n, x in others.items()}
    return found | changed


@pytest.mark.parametrize(
    ("pass_", "ratio", "others", "mean", "under"),
    [
        ("fwd", 1.05, {}, "1.0500 of 36 cells", "none"),
        ("fwd", 1.05, {"n512": 0.88, "n1024": 0.95}, "reached", "none"),
        ("fwd", 1.05, {"n512": 0.87, "n1024": 0.94}, "reached",
         "0.8700 (d=64 full at 512), 0.9400 (d=64 full at 1024)"),
        ("fwd", 1.05, {"n16384": 0.9}, "reached", "0.9000 (d=64 full at 16384)"),
        ("fwd", 1.019, {}, "bar 1.02: missed", "none"),
        ("bwd", 0.93, {"n1024": 0.5},
         "0.9141 of 36 cells, least 0.5000 (d=64 full at 1024); bar 0.92: missed", None),
        ("bwd", 0.93, {"n1024": 0.7},
         "0.9227 of 36 cells, least 0.7000 (d=64 full at 1024); bar 0.92: reached", None),
    ],
)  # fmt: skip
def test_a_pass_is_held_to_the_bar_of_its_mean_and_each_cell_to_that_of_its_length(
    pass_: str, ratio: float, others: dict[str, float], mean: str, under: str | None
) -> None:
    text = peers_table.render(whole(pass_, ratio, **others))
    assert mean in text
    said = [line.partition("): ")[2] for line in text.splitlines() if line.startswith("- cells under")]
    assert said == ([] if under is None else [under])


@pytest.mark.parametrize("ratio", [2.0, 0.5])
@pytest.mark.parametrize(
    ("scaled", "said"), [(0, ""), (1, " by scaled figures in 1 of 36"), (36, " by scaled figures")]
)
def test_a_verdict_says_how_many_cells_it_has_by_scaled_figures(scaled: int, said: str, ratio: float) -> None:
    found = whole("bwd", ratio)
    found |= {key: one._replace(scaled=True) for key, one in list(found.items())[:scaled]}
    verdict = "reached" if ratio > 1 else "missed"
    assert f"bar 0.92: {verdict}{said}\n" in peers_table.render(found)


def test_flagged_rows_are_counted_by_flag_where_they_have_a_time() -> None:
    rows = [
        record("flash", 2.0, 512, flags=("drift", "multimodal")), record("fa4", 2.0, 512, flags=("drift",)),
        record("sdpa-cudnn", 2.0, 512), record("fa3", 2.0, 512, "failed"),
    ]  # fmt: skip
    told = "- rows with a time that are flagged: {}"
    assert peers_table.flagged(rows) == told.format("2 of 3 (2 drift, 1 multimodal)")
    assert peers_table.flagged(rows[2:]) == told.format("0 of 1")


RAN = [record(name, 2.0, n) for n in (512, 1024) for name in ("flash", "sdpa-cudnn", "fa4")]


def written(path: Path, records: list[Record]) -> Path:
    cells = [one.cell for one in records]
    head = runfile.header(argv=["run"], options={}, environment={"device_name": "card"}, cells=cells)
    with runfile.create(path, head) as writer:
        for one in records:
            writer.append(one)
    return path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The tool with arguments: its exit code and what it prints to stdout and stderr."""

    def run(*arguments: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["peers_table.py", *map(str, arguments)])
        try:
            peers_table.main()
        except SystemExit as stopped:
            return stopped.code, *capsys.readouterr()
        return 0, *capsys.readouterr()

    return run


def test_a_file_is_tabulated(asked: Any, tmp_path: Path) -> None:
    code, out, err = asked(written(tmp_path / "r.jsonl", RAN))
    assert (code, err) == (0, "")
    assert "| fwd | 64 | full | 1.00 | 1.00 | – | – | – | – |" in out
    assert out.endswith("\n- rows with a time that are flagged: 0 of 6\n")


def test_a_last_line_that_was_torn_off_is_said_below_the_table(asked: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", RAN)
    path.write_bytes(path.read_bytes()[:-20])
    code, out, _ = asked(path)
    assert code == 0
    assert "| fwd | 64 | full | 1.00 | 1.00* | – | – | – | – |" in out
    assert out.endswith(f"\n- {path}: the last line was torn off in the middle of a write and is ignored\n")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), "does not exist; a results file is wanted"),
        (lambda path: (path.unlink(), path.mkdir()), "is a folder; a results file is wanted"),
        (lambda path: path.write_text("no JSON\n"), ", line 1: not JSON"),
        (lambda path: path.write_text(""), "is empty; a results file begins with a header"),
        (lambda path: edit(path, 3, '"status"', '"status'), ", line 3: not JSON"),
        (lambda path: edit(path, 3, "2.0", "1.0"), ", line 3: not as written, by the checksum"),
    ],
    ids=["nowhere", "folder", "no JSON", "empty", "damaged", "edited"],
)
def test_what_is_not_a_file_as_it_was_written_has_a_line(
    asked: Any, tmp_path: Path, damage: Any, said: str
) -> None:
    path = written(tmp_path / "r.jsonl", RAN)
    damage(path)
    code, out, err = asked(path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(str(path))
    assert said in err


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([], "no row of flash or sdpa-cudnn, of"),
        ([one for one in RAN if one.cell.implementation != "flash"], "no row of flash, of"),
        ([one for one in RAN if one.cell.implementation == "flash"], "no row of sdpa-cudnn, of"),
        ([record("flash", 2.0, 512), record("sdpa-cudnn", 2.0, 512, "failed")], "no cell of the grid has"),
        (
            [record("flash", 2.0, 500), record("sdpa-cudnn", 2.0, 500)],
            "no cell of the grid has times of flash",
        ),
    ],
)
def test_a_file_without_a_cell_of_the_table_has_a_line(
    asked: Any, tmp_path: Path, records: list[Record], said: str
) -> None:
    code, out, err = asked(written(tmp_path / "r.jsonl", records))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_help_is_usage_and_so_is_what_is_asked_for_wrongly(asked: Any) -> None:
    code, out, _ = asked("--help")
    assert code == 0
    assert out.startswith("usage: ")
    for arguments in ([], ["--write", "r.jsonl"], ["a", "b"], ["--wrote"]):
        code, out, err = asked(*arguments)
        assert (code, out, err.partition(":")[0]) == (2, "", "usage")


def test_a_pass_that_lacks_cells_is_not_said_to_reach_its_bar() -> None:
    found = whole("bwd", 2.0)
    del found["bwd", 256, True, 512]
    assert "bar 0.92: not judged by 35 of 36" in peers_table.render(found)


def test_the_docs_show_the_committed_run_which_reaches_both_bars_in_all_cells() -> None:
    part = peers_table.part()
    assert f"\n{part}\n" in peers_table.PAGE.read_text(encoding="utf-8"), (
        "python tools/peers_table.py --write"
    )
    assert "bar 1.02: reached" in part
    assert "bar 0.92: reached" in part
    assert part.count("FlashAttention-4: measured in 36 cells, scaled by cuDNN (*) in 0") == 2
