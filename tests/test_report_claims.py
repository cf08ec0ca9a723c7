"""The report's section of the literature's claims: from a run's own cells, or from a folder's results."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import synthetic

from flashbench import claims, report, runfile, table
from flashbench._cli.report import results_of
from flashbench.cli import main
from flashbench.report.data import Results
from flashbench.report.sections import SECTIONS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "reports" / "h100-sxm"
[SECTION] = [section for section in SECTIONS if section.key == "claims"]
OVER_EAGER = "Attention is 2 to 4 times as fast as eager attention, forward"


def shown(results: Results) -> dict[str, Any]:
    return {row.says: row for row in SECTION.data(results).itertuples() if row.judged}


def of(*files: Any) -> Results:
    return Results(table=table.build(files), headers=table.headers(files))


def a_run(names: tuple[str, ...], path: str = "a.jsonl") -> Any:
    records = [synthetic.record(name, n) for n in (1024, 2048, 4096) for name in names]
    return synthetic.run_file(records, path=path)


def test_a_runs_own_cells_are_held_to_the_claims_that_are_about_them() -> None:
    file = a_run(("naive", "flash"))
    time = {(one.cell.implementation, one.cell.problem.seqlen_q): statistics.median(one.samples.samples_s)
            for one in file.records}  # fmt: skip
    ratios = [time["naive", n] / time["flash", n] for n in (1024, 2048, 4096)]
    found = shown(of(file))
    row = found[OVER_EAGER]
    assert row.shown.startswith(f"{min(ratios):.3g} to {max(ratios):.3g}, median ")
    assert "of 3 cells; spread ≤ " in row.shown
    assert min(ratios) > 4
    assert row.verdict == "more than claimed"
    assert row.cards == synthetic.H100
    assert "Memory grows linearly with the sequence length" in found
    assert not [
        says for says, one in found.items() if one.verdict in ("not measured", "can't be tested here")
    ]


def test_what_these_cells_do_not_judge_is_listed_with_what_would() -> None:
    """Every claim about cells is in the table or below it; data sheets and training runs are in neither."""
    results = of(a_run(("naive", "flash")))
    known = {one.says: one for one in claims.load()}
    others = {row.says: row for row in SECTION.data(results).itertuples() if not row.judged}
    of_cells = {says for says, one in known.items() if one.of_cells}
    assert set(others) == of_cells - set(shown(results))
    gpt2 = next(one for one in known.values() if one.name == "gpt2-3x")
    command = gpt2.command.replace(claims.FOLDER, "DIR")
    assert others[gpt2.says].shown == f"no such cells here: `{command}`"
    [body] = [part for part in report.of(results).split("<section ") if part.startswith('id="claims"')]
    table_, _, below = body.partition("<details ")
    assert below.count("<li>") == len(others)
    assert f"no such cells here: <code>{command}</code>" in below
    assert table_.count("<tr>") == 1 + len(shown(results))


def test_what_no_cell_bears_on_is_said_to_be_nowhere() -> None:
    results = of(synthetic.run_file([synthetic.record("sdpa", 1024)]))
    assert SECTION.data(results).empty
    page = report.of(results)
    assert "report --claims DIR" in page


def test_runs_are_not_set_beside_each_other() -> None:
    apart = shown(of(a_run(("naive",)), a_run(("flash",), "b.jsonl")))
    assert OVER_EAGER not in apart
    found = SECTION.data(of(a_run(("naive", "flash")), a_run(("flash",), "b.jsonl")))
    assert set(found["run"][found["judged"].astype(bool)]) == {"a", "b"}


def test_what_an_interrupted_run_did_not_reach_is_said_by_its_claims() -> None:
    records = [synthetic.record(name, n) for n in (1024, 2048, 4096) for name in ("naive", "flash")]
    file = synthetic.run_file(records[:4], cells=[one.cell.key for one in records])
    row = shown(of(file))[OVER_EAGER]
    assert row.shown.endswith("; 1 of 3 cells was not begun: at 4k; not reached by the run")


@pytest.mark.parametrize(("naive_s", "verdict"), [(3.2e-3, "holds"), (2.0e-3, "does not hold")])
def test_layers_count(naive_s: float, verdict: str) -> None:
    file = synthetic.run_file([])
    rows = [
        {"model": "gpt2-medium", "mode": "train", "batch": 32, "seqlen": 1024, "layers": 4, "dtype": "bf16",
         "implementation": name, "status": "ok", "time_s": time_s, "samples_s": [time_s] * 5}
        for name, time_s in (("naive", naive_s), ("flash", 1e-3))
    ]  # fmt: skip
    results = Results(table=table.build([file]), headers=table.headers([file]), blocks={"synthetic": rows})
    [row] = shown(results).values()
    assert row.says.startswith("GPT-2 trains")
    assert (row.shown, row.verdict) == (f"{naive_s / 1e-3:.4g}", verdict)


def test_a_folder_answers_for_all_of_them() -> None:
    results = results_of([runfile.load(str(ROOT / "reports" / "cpu" / "results.jsonl"))], claims=str(RESULTS))
    found, known = shown(results), claims.load()
    assert list(found) == [claim.says for claim in known]
    assert {row.verdict for row in found.values()} >= {"holds", "not measured", "can't be tested here"}
    assert found["A paged cache costs 5 to 10 % in a decode step"].cards == synthetic.H100
    page = report.of(results)
    [body] = [part for part in page.split("<section ") if part.startswith('id="claims"')]
    assert body.count("<tr>") == 1 + len(known)
    assert "no results of <code>detail/results.jsonl</code>: <code>flashbench profile --counters" in body


def test_a_card_is_named_as_text() -> None:
    file = a_run(("naive", "flash"))
    hostile = [
        one.__class__(**{**vars(one), "environment": {"device_name": "<img src=x>"}}) for one in file.records
    ]
    page = report.of(of(synthetic.run_file(hostile)))
    assert "&lt;img src=x&gt;" in page
    assert "<img" not in page


def test_a_folder_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["report", str(RESULTS / "energy"), "-o", str(tmp_path / "r.html"), "--claims", "nowhere"])
    assert stop.value.code == 2
    assert (
        "--claims 'nowhere': no such folder; accepted: a folder of results files" in capsys.readouterr().err
    )
    assert not (tmp_path / "r.html").exists()
