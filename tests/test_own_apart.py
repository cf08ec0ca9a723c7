"""A function of one's own takes no other cell with it, and no results file has one imported."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from test_own import GRID, RIGHT, flashbench_, here, rows, write

from flashbench import kernels, runfile
from flashbench.errors import UsageError
from flashbench.kernels import Target

pytestmark = pytest.mark.usefixtures("here")
__all__ = ["here"]

ONE = [*GRID, "--causal", "no", "--passes", "fwd"]


def forget(spec: str) -> None:
    """As in a new process."""
    for name in [name for name in sys.modules if name.startswith("flashbench_own_")]:
        del sys.modules[name]
    kernels.registry().pop(spec, None)


def test_one_that_kills_its_process_is_a_row_of_its_source_and_costs_no_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = write(
        "import os, sys\n"
        "print('RuntimeWarning: not of the cell', file=sys.stderr)\n"
        "def attention(q, k, v):\n    os._exit(7)\n"
    )
    line = ["run", "--impl", spec, "--out", "o"]
    assert flashbench_(*line, "--impls", "naive", *ONE) == 0
    before = rows("o")
    assert before["naive", "fwd"].status == "ok"
    killed = before[spec, "fwd"]
    assert (killed.status, killed.reason) == ("failed", "its process exited with code 7")
    assert killed.config["source"] == spec
    assert len(killed.config["source_sha256"]) == 16
    capsys.readouterr()
    assert flashbench_(*line, "--resume") == 0
    assert "0 cells on" in capsys.readouterr().err, "the source is the same, so that the row stays"
    assert rows("o") == before


def test_the_model_and_the_limit_of_a_cell_ask_none_of_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent of a worker that was lost goes on whatever supports() would do to it."""
    from attention import problem

    from flashbench.isolation import Bench
    from flashbench.problem import Cell
    from flashbench.runner import RunOptions

    spec = write(
        "import os\nimport flashbench\n"
        "@flashbench.implementation(supports=lambda problem, pass_: os._exit(9))\n"
        "def attention(q, k, v): ...\n"
    )
    kernels.get(spec).origin.load(Target())  # type: ignore[union-attr]
    monkeypatch.setattr("os._exit", lambda code: pytest.fail("its code was run"))
    cell = Cell(implementation=spec, problem=problem(), pass_="fwd")
    bench = Bench(Target(), RunOptions())
    assert bench._limit_s(cell) > 0
    assert bench.row(cell, {"status": "timeout", "reason": "late"}).config["source"] == spec


MARKED = "from pathlib import Path\nPath('imported').touch()\nprint('imported')\n" + RIGHT


@pytest.fixture
def kept() -> str:
    """A folder o of a run that measured a function whose import leaves a file; both are forgotten."""
    spec = write(MARKED)
    line = ["run", "--in-process", "--impl", spec, "--impls", "naive", *ONE, "-q", "--out", "o"]
    assert flashbench_(*line) == 0
    forget(spec)
    Path("imported").unlink()
    return spec


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (["run", "--resume", "--out", "o", "-q"], 2),
        (["run", "--resume", "--out", "o", "--dry-run", "-q"], 2),
        (["run", "--resume", "--out", "o", "--impls", "naive", "--in-process", "-q"], 0),
        (["report", "o/results.jsonl", "-o", "page.html"], 0),
        (["verify", "o/results.jsonl"], 0),
        (["compare", "o", "o", "-q"], 0),
        (["noise", "o", "o"], None),
        (["history", "o"], None),
    ],
    ids=lambda value: "-".join(value[:3]) if isinstance(value, list) else "",
)
def test_no_command_imports_what_a_results_file_names(
    line: list[str], code: int | None, kept: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = flashbench_(*line)
    error = capsys.readouterr().err
    assert found == code or code is None, error
    assert not Path("imported").exists()
    if code == 2:
        assert error.count("\n") == 1, error
        assert "accepted: --impl SPEC once more, or --impls NAMES for the others alone" in error
        assert kept in error


def test_from_python_neither(kept: str, capsys: pytest.CaptureFixture[str]) -> None:
    import flashbench

    with pytest.raises(UsageError, match="not imported on a file's word"):
        flashbench.run(out="o", resume=True)
    flashbench.compare("o", "o").to_pandas()
    assert not Path("imported").exists()
    again: Any = flashbench.run(kept, out="o", resume=True)
    assert [one.status for one in again.records] == ["ok", "ok"]
    assert Path("imported").exists()
    assert "imported" not in capsys.readouterr().out, "stdout is for results"


def test_a_resumed_run_without_it_keeps_its_rows(kept: str) -> None:
    before = rows("o")
    assert flashbench_("run", "--resume", "--out", "o", "--impls", "naive", "-q") == 0
    assert rows("o") == before
    assert runfile.verify("o/results.jsonl").ok
