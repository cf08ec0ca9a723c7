"""stdout holds the result and nothing else; no value, encoding or width makes it crash or lie."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
import subprocess
import sys
from typing import Any

import pytest

from flashbench import console, units
from flashbench.console import Column
from flashbench.errors import SpecError

COLUMNS = [
    Column(name="name", header="Name"),
    Column(name="time_s", header="time", format=units.format_seconds, justify="right"),
    Column(name="flags", header="flags", format=" ".join),
]
ROWS: list[dict[str, Any]] = [
    {"name": "a" * 300, "time_s": 0.00123, "flags": ["drift"], "unseen": 1},
    {"name": 'β, "q"\n2', "time_s": math.nan, "flags": []},
    {"name": None, "time_s": math.inf},
]


def shown(capsys: pytest.CaptureFixture[str], **options: Any) -> tuple[str, str]:
    console.show_table(COLUMNS, ROWS, **options)
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_table_off_a_terminal_is_neither_cut_nor_wrapped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    out, err = shown(capsys, title="The title", notes=["one\nline"])
    assert "a" * 300 in out
    assert "The title" in out
    assert "1.23 ms" in out
    assert "…" not in out
    assert err == "note: one line\n"


def test_columns_is_respected_and_still_nothing_is_lost(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out, _ = shown(capsys)
    assert max(map(len, out.splitlines())) <= 60
    assert out.count("a") >= 300
    assert "…" not in out


def test_json_is_strict_and_raw(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = shown(capsys, json=True)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(out, parse_constant=refuse) == [
        {"name": "a" * 300, "time_s": 0.00123, "flags": ["drift"]},
        {"name": 'β, "q"\n2', "time_s": None, "flags": []},
        {"name": None, "time_s": None, "flags": None},
    ]


def test_csv_is_raw_and_empty_where_missing(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = shown(capsys, csv=True)
    rows = list(csv.reader(io.StringIO(out)))
    assert rows[0] == ["name", "time_s", "flags"]
    assert rows[1] == ["a" * 300, "0.00123", "drift"]
    assert rows[2] == ['β, "q"\n2', "", ""]
    assert rows[3] == ["", "", ""]


@pytest.mark.parametrize("columns", [0, 1])
def test_empty_tables(capsys: pytest.CaptureFixture[str], columns: int) -> None:
    console.show_table(COLUMNS[:columns], [], json=True)
    assert json.loads(capsys.readouterr().out) == []
    console.show_table(COLUMNS[:columns], [])
    console.show_table(COLUMNS[:columns], [], csv=True)


def test_numpy_and_pandas_values_become_python(capsys: pytest.CaptureFixture[str]) -> None:
    numpy, pandas = pytest.importorskip("numpy"), pytest.importorskip("pandas")
    values = [
        numpy.float64(1.5),
        numpy.int64(3),
        numpy.bool_(True),
        numpy.float32("nan"),
        pandas.NA,
        pandas.NaT,
    ]
    assert console.raw_value(values) == [1.5, 3, True, None, None, None]


def test_error_is_one_line_and_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    console.error(SpecError("--x 'a\nb': bad", hint="do\nthis"))
    captured = capsys.readouterr()
    assert captured.err == "error: --x 'a b': bad\nhint: do this\n"
    assert captured.out == ""


def test_markup_in_values_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    console.show_table([Column(name="a", header="[bold]h")], [{"a": "[red]x[/red] :smile:"}], title="[b]t")
    out = capsys.readouterr().out
    assert "[red]x[/red] :smile:" in out
    assert "[bold]h" in out
    assert "[b]t" in out


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "cp1252"},
        {"PYTHONIOENCODING": "ascii:strict"},
        {"LC_ALL": "C", "PYTHONUTF8": "0"},
    ],
    ids=["cp1252", "ascii", "C"],
)
@pytest.mark.parametrize("options", ["", "json=True", "csv=True"])
def test_no_encoding_crashes_it(environment: dict[str, str], options: str) -> None:
    code = (
        "from flashbench import console\n"
        "from flashbench.console import Column\n"
        "columns, rows = [Column(name='a', header='\\u03bc\\u00d7')], [{'a': '\\u03bb\\u2192\\u00e9'}]\n"
        f"console.show_table(columns, rows, title='\\u03c4', notes=['\\u03bd'], {options})\n"
        "console.warn('\\u2264')\n"
    )
    env = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert b"a" in done.stdout or b"?" in done.stdout
    if options == "json=True":
        assert json.loads(done.stdout.decode("cp1252")) == [{"a": "λ→é"}]


@pytest.mark.parametrize("options", ["json=True", "csv=True"])
def test_raw_formats_do_without_rich(options: str) -> None:
    code = (
        "import sys\nfrom flashbench import console\nfrom flashbench.console import Column\n"
        f"console.show_table([Column(name='a', header='a')], [{{'a': 1}}], {options})\n"
        "assert 'rich' not in sys.modules\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_progress_is_silent_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress(3) as tick:
        tick(1, "x")
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_long_work_off_a_terminal_has_a_note_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    for quiet in (False, True):
        now = 1000.0
        with console.progress(100, quiet=quiet) as tick:
            for done in range(100):
                now += 1.0
                tick(done, f"cell {done}")
    assert capsys.readouterr().err.splitlines() == [
        "note: 29 of 100 done after 30.0 s; next: cell 29",
        "note: 59 of 100 done after 60.0 s; next: cell 59",
        "note: 89 of 100 done after 90.0 s; next: cell 89",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_draws_on_stderr_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    with console.progress(3) as tick:
        tick(1, "[cell]")
    assert "1/3" in terminal.getvalue()
    assert "[cell]" in terminal.getvalue()
    silent = Terminal()
    monkeypatch.setattr(sys, "stderr", silent)
    with console.progress(3, quiet=True) as tick:
        tick(1, "x")
    assert silent.getvalue() == ""


@pytest.mark.parametrize("no_color", [True, False])
def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch, no_color: bool) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    else:
        monkeypatch.delenv("NO_COLOR", raising=False)
    console.warn("x")
    assert ("\x1b" in terminal.getvalue()) is not no_color


@pytest.mark.parametrize("quiet", [True, False])
def test_what_lower_layers_log_is_a_warning(capsys: pytest.CaptureFixture[str], quiet: bool) -> None:
    console.listen(quiet=quiet)
    try:
        logging.getLogger("flashbench").warning("no %s", "clocks")
    finally:
        logging.getLogger("flashbench").handlers = []
        logging.getLogger("flashbench").propagate = True
    assert capsys.readouterr().err == ("" if quiet else "warning: no clocks\n")
