"""The report's section of decode steps: what the committed files hold, alone and beside others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import synthetic
from judging import written

from flashbench import cli, runfile
from flashbench._cli.report import results_of
from flashbench.report import decoded, tabled, words
from flashbench.units import format_length, format_rate

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "reports").glob("*/decode/*.json"))
H200 = [path for path in FILES if path.parts[-3] == "h200-sxm"]
ROW: dict[str, Any] = {
    "model": "llama-3-8b", "dtype": "bf16", "batch": 1, "queries": 1, "kv_len": 1024, "page_size": 0,
    "splits": 4, "status": "ok", "time_s": 2e-5, "samples_s": [2e-5, 2e-5], "flags": [], "bytes_per_s": 2e11,
    "copy_fraction": 0.1, "model_s": 1e-5, "bound_s": 5e-6,
}  # fmt: skip


def flashbench(*line: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(line))
    return int(stop.value.code or 0)


def document(path: Path, *rows: dict[str, Any], **changes: Any) -> str:
    """A file of such rows; None takes a field out."""
    whole = {
        "type": "decode", "schema": 1, "created_at": "2026-01-01T00:00:00Z",
        "environment": {"device_name": "NVIDIA H200"}, "copy": {"value": 4e12}, "rows": list(rows), **changes,
    }  # fmt: skip
    path.write_text(json.dumps({name: value for name, value in whole.items() if value is not None}))
    return str(path)


def section(page: Path) -> str:
    return page.read_text(encoding="utf-8").partition('id="decode"')[2].partition("<section")[0]


def test_every_step_of_the_committed_files_is_shown(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert flashbench("report", *map(str, FILES), "-o", str(page), "-q") == 0
    shown = section(page)
    rows = [row for path in FILES for row in json.loads(path.read_text())["rows"]]
    assert len(rows) >= 46
    assert shown.count("<tr>") - shown.count("<thead>") == len(rows)
    for row in rows:
        cache = f"pages of {row['page_size']}" if row["page_size"] else "contiguous"
        status = '<span class="status ok">ok</span>'
        first = format_length(row["kv_len"]), cache, status, row["splits"], words.seconds(row["time_s"])
        line = f"<tr>{''.join(f'<td>{cell}</td>' for cell in first)}"
        rest = (
            f"<td>{format_rate(row['bytes_per_s'], 'B/s')}</td><td>{words.percent(row['copy_fraction'])}</td>"
            f"<td>{words.seconds(row['model_s'])}</td><td>{words.times(row['time_s'] / row['model_s'])}</td>"
            f"<td>{words.seconds(row['bound_s'])}</td>"
        )
        assert any(rest in after.partition("</tr>")[0] for after in shown.split(line)[1:]), row["kv_len"]
    for card in ("H200", "H100 80GB HBM3"):
        for batch in (1, 16):
            assert f"llama-3-8b on NVIDIA {card}: batch {batch}, 1 query, bf16 cache" in shown
    whole = page.read_text(encoding="utf-8")
    assert 'id="latency"' not in whole, "a file without cells has no empty sections"
    assert "NVIDIA H200" in whole.partition('id="environment"')[2]


def test_pages_and_few_splits_are_over_the_fastest_contiguous_cache() -> None:
    frame = decoded.data(results_of([runfile.load(path, documents=True) for path in H200]))
    at = frame[(frame["batch"] == 1) & (frame["kv_len"] == 2**16)].set_index(["page_size", "splits"])
    best = at.loc[(0, 16), "time_s"]
    for key in ((0, 16), (0, 1), (16, 32)):
        assert at.loc[key, "over_contiguous"] == at.loc[key, "time_s"] / best
    assert at.loc[(0, 1), "over_contiguous"] > 10
    alone = decoded.data(results_of([runfile.load(H200[1], documents=True)]))
    assert set(alone["page_size"]) == {16}
    assert alone["over_contiguous"].isna().all()


def test_another_card_step_or_cache_is_no_base(tmp_path: Path) -> None:
    paged = {**ROW, "page_size": 16, "time_s": 3e-5}
    changes = {"batch": 2, "queries": 2, "dtype": "fp8", "kv_len": 2048, "model": "gpt2-small"}
    others = [{**ROW, name: value} for name, value in changes.items()]
    here = document(tmp_path / "a.json", paged, *others)
    there = document(tmp_path / "b.json", ROW, environment={"device_name": "NVIDIA L4"})
    files = [runfile.load(path, documents=True) for path in (here, there)]
    frame = decoded.data(results_of(files))
    assert frame[frame["page_size"] == 16]["over_contiguous"].isna().all()


def test_it_stands_beside_cells_and_in_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = written(tmp_path / "results.jsonl", [synthetic.record("flash", 1024)])
    page = tmp_path / "page.html"
    assert flashbench("report", str(cells), str(H200[0]), "-o", str(page), "-q") == 0
    text = page.read_text(encoding="utf-8")
    assert 'id="plot-latency"' in text
    assert "pages of" not in section(page)
    assert "llama-3-8b on NVIDIA H200" in section(page)
    assert flashbench("report", str(cells), "-o", str(page), "-q") == 0
    assert "No decode step was measured (&#x27;decode --out&#x27;)." in section(page)
    capsys.readouterr()
    assert flashbench("report", *map(str, H200), "--markdown") == 0
    said = capsys.readouterr().out
    assert said.startswith("## Attention on NVIDIA H200\n")
    assert "| 64k | pages of 16 | ok | 32 | 75.7 µs |" in said


def test_rows_that_were_not_timed_and_what_a_file_calls_itself(tmp_path: Path) -> None:
    skipped = {**ROW, "status": "skipped", "reason": "no <room>", "time_s": None, "samples_s": None}
    checked = {**ROW, "kv_len": 65, "time_s": None, "samples_s": None, "max_abs_error": 1e-4, "budget": 1e-2}
    few = {**ROW, "kv_len": 7, "model": "<b>x", "queries": 3, "splits": None}
    path = document(tmp_path / "a.json", skipped, checked, few, environment={}, copy=None)
    page = tmp_path / "page.html"
    assert flashbench("report", path, "-o", str(page), "-q") == 0
    shown = section(page)
    assert 'class="status skipped" title="no &lt;room&gt;"' in shown
    assert "<td>1.0e-04</td>" in shown
    assert "&lt;b&gt;x on a card: batch 1, 3 queries, bf16 cache" in shown
    assert "A copy reached" not in shown
    frame = decoded.data(results_of([runfile.load(path, documents=True)]))
    [line] = [line for one in decoded.tables(frame) for line in tabled.markdown(one) if "skipped" in line]
    assert line.startswith("| 1k | contiguous | skipped: no &lt;room&gt; |")


def test_a_document_that_an_editor_has_indented_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(json.loads(H200[0].read_text()), indent=2))
    ours = runfile.load(path, documents=True)
    assert ours.decode == runfile.load(H200[0], documents=True).decode


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schema": 2}, "schema 2; this flashbench reads 1"),
        ({"rows": None}, "the field 'rows' is missing"),
        ({"rows": [{**ROW, "kv_len": None}]}, "rows[0]: the field 'kv_len' is missing"),
        ({"rows": [ROW, {**ROW, "batch": "two"}]}, "rows[1].batch is 'two'; a whole number"),
        ({"rows": {}}, "rows is '{}'; a list is wanted"),
        ({"rows": [3]}, "rows[0] is '3'; an object is wanted"),
        ({"rows": [None]}, "rows[0] is null; an object is wanted"),
        ({"copy": {"value": "fast"}}, "copy.value is 'fast'; a number"),
        ({"covered": [], "points": 3}, "what 'decode --check --pairs' found"),
    ],
)  # fmt: skip
def test_a_document_that_cannot_be_shown_is_refused_in_one_line(
    changes: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = document(tmp_path / "a.json", ROW, **changes)
    assert flashbench("report", path) == 4
    err = capsys.readouterr().err
    assert err.startswith(f"error: {path}: ")
    assert said in err
    assert err.count("\n") == 1


def test_a_torn_document_and_other_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = Path(document(tmp_path / "a.json", ROW))
    torn = tmp_path / "b.json"
    torn.write_bytes(whole.read_bytes()[:-40])
    assert flashbench("report", str(torn)) == 4
    assert "not JSON" in capsys.readouterr().err
    assert flashbench("compare", str(whole), str(whole)) == 4
    assert "JSON of no known format" in capsys.readouterr().err
    assert flashbench("report", str(ROOT / "reports/h200-sxm/check/decode-pairs/results.json")) == 4
