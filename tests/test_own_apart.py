"""A function of one's own takes no other cell with it, and no results file has one imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_own import GRID, RIGHT, flashbench_, here, rows, write

from flashbench import environment, kernels, runfile
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


HOSTILE = {
    "raise BaseException('x')": "importing it raised BaseException: x (mine.py:1)",
    "raise GeneratorExit": "importing it raised GeneratorExit: no message (mine.py:1)",
    "def __getattr__(name): raise RuntimeError(name)":
        "importing it raised RuntimeError: attention (mine.py:1)",
    "import os; os._exit(0)": "importing it called os._exit(0)",
}  # fmt: skip


def test_modules_that_raise_anything_at_import_are_one_line_each() -> None:
    said, line = {}, ["list", "implementations", "--json"]
    for number, (text, why) in enumerate(HOSTILE.items()):
        spec = write(text, f"mine{number}.py")
        said[spec] = f"--impl {spec!r}: {why.replace('mine.py', f'mine{number}.py')}"
        line += ["--impl", spec]
    done = started(*line)
    assert (done.returncode, done.stderr) == (0, "")
    why_not = {row["name"]: row["why_not"] for row in json.loads(done.stdout)}
    assert said.items() <= why_not.items()
    assert why_not["naive"] is None
    spec = max(said)  # the one that would exit with code 0
    done = started("run", "--impl", spec, *GRID, "--out", "o")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {said[spec]}\n")
    assert not Path("o").exists()


def test_an_installed_package_that_raises_anything_is_a_row_beside_the_others() -> None:
    Path("evil.py").write_text("raise BaseException('boo')\n")
    about = Path("evil-1.0.dist-info")
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[flashbench.implementations]\nevil = evil:attention\n")
    path = os.pathsep.join((environment.for_child()["PYTHONPATH"], os.getcwd()))
    done = started("list", "implementations", "--json", PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (0, "")
    why = {row["name"]: row["why_not"] for row in json.loads(done.stdout)}
    assert why["evil"] == (
        "--impls evil (entry point 'evil:attention'): importing it raised BaseException: boo"
    )
    assert why["naive"] is None


@pytest.mark.parametrize("text", ["sys.stdout.close(); sys.stderr.close()", "os.close(1); os.close(2)"])
def test_a_module_that_closes_the_streams_takes_no_word_away(text: str) -> None:
    write(f"import os, sys; {text}\n{RIGHT}")
    done = started("run", "--impl", "mine.py:attention", "--impl", "mine.py:none", *GRID, "--out", "o")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --impl 'mine.py:none': mine.py has no 'none'; ")


def started(*line: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flashbench", *line], env=environment.for_child() | more,
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
