"""``flashbench report`` rebuilds the page from files; what it cannot read or write it says in a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from flashbench import runfile
from flashbench.cli import main
from flashbench.problem import Cell, Problem
from flashbench.record import Record, Samples


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        cells = [
            Cell(
                implementation="naive",
                pass_="fwd",
                problem=Problem(
                    batch=1, num_heads=1, num_kv_heads=1, seqlen_q=n, seqlen_k=n, head_dim=8, head_dim_v=8,
                    dtype="fp32", causal=False,
                ),
            )
            for n in (8, 16)
        ]  # fmt: skip
        environment = {"device_name": f"cpu {name}"}
        head = runfile.header(argv=[], options={}, environment=environment, cells=cells)
        with runfile.create(Path(name) / "results.jsonl", head) as writer:
            for cell in cells:
                samples = Samples(samples_s=(1e-3,), cache="hot", method="wall")
                writer.append(Record(cell=cell, status="ok", samples=samples, environment=environment))


def run(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["report", *argv])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def test_the_page_stands_beside_the_first_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["a/results.jsonl"], capsys) == (0, "a/report.html\n", "")
    assert "cpu a" in Path("a/report.html").read_text(encoding="utf-8")


def test_a_folder_is_its_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["a"], capsys) == (0, "a/report.html\n", "")
    Path("none").mkdir()
    code, _, err = run(["none"], capsys)
    assert (code, "FILE 'none': a folder without results; accepted: " in err) == (2, True)


def test_several_files_overlay(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["a/results.jsonl", "b/results.jsonl", "-o", "both.html"], capsys) == (0, "both.html\n", "")
    page = Path("both.html").read_text(encoding="utf-8")
    assert "cpu a" in page
    assert "cpu b" in page


def test_a_torn_last_line_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("a/results.jsonl")
    path.write_bytes(path.read_bytes()[:-20])
    code, _, err = run(["a/results.jsonl"], capsys)
    assert code == 0
    assert err.startswith("note: ")
    assert run(["a/results.jsonl", "--quiet"], capsys)[2] == ""


@pytest.mark.parametrize(
    "page", ["missing/page.html", "a/results.jsonl/page.html", "a", "/proc/page.html", ""]
)
def test_a_page_that_cannot_be_written(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["b/results.jsonl", "-o", page], capsys)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: --output '{page}'")
    assert "accepted: " in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("name", ["", "n" * 5000, "missing", "a/results.jsonl/x"])
def test_a_file_that_cannot_be_read(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run([name], capsys)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1


def test_markdown_goes_to_stdout_and_writes_no_page(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["a/results.jsonl", "--markdown"], capsys)
    assert (code, err) == (0, "")
    assert out.startswith("## Attention on cpu a\n")
    assert "| naive | 1.00 ms | 1.00 ms |" in out
    assert not Path("a/report.html").exists()


def test_figures_are_named_as_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["a/results.jsonl", "--figures", "figs", "--figure", "latency"], capsys)
    stem = "figs/latency-fwd-fp32-8-full"
    assert (code, out.split()) == (0, [f"{stem}.json", f"{stem}.csv"])
    assert all(Path(name).stat().st_size for name in out.split())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--markdown", "--terminal"], "--markdown and --terminal exclude"),
        (["--format", "svg"], "--format, --figure and --style are of --figures"),
        (["--figures", "f", "--format", "gif"], "--format 'gif'"),
        (["--figures", "f", "--style", "poster"], "--style 'poster'"),
        (["--figures", "f", "--figure", "latncy"], "latncy"),
        (["--figures", "/proc/none"], "--figures '/proc/none'"),
    ],
)
def test_outputs_that_cannot_be_had_are_refused_in_a_line(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(["a/results.jsonl", *options], capsys)
    assert (code, out) == (2, "")
    assert named in err
    assert err.startswith("error: ")
