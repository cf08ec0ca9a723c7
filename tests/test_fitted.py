"""A table on a narrow terminal: nothing is cut, no number and no word is taken apart, nothing is wider."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashbench import console, fitted
from flashbench.console import Column

ROOT = Path(__file__).parent.parent
RESULTS = [str(ROOT / "reports" / "h100-sxm" / name) for name in ("results.jsonl", "family/results.jsonl")]
COMMANDS = {
    "kv-cache": ["kv-cache", "--model", "llama-3-70b", "--seqlens", "1k-128k", "--batch", "4",
                 "--dtypes", "bf16,fp8", "--gpu", "h100-sxm", "--tp", "8"],
    "kv-cache-one": ["kv-cache", "--model", "llama-3-70b", "--seqlens", "8k", "--gpu", "h100-sxm"],
    "io-model": ["io-model", "--gpu", "h100-sxm", "--seqlens", "1k-4k"],
    "compare": ["compare", *RESULTS, "--allow", "flush,method,missing"],
}  # fmt: skip
NUMBERS = {
    "kv-cache": ["327,680 B", "1.34", "5,120", "55.6 GiB", "1,422", "50.1 us", "79.9 k"],
    "kv-cache-one": ["327,680 B", "2.68", "40,960"],
    "io-model": ["137 GFLOP", "1.34 GB", "69.2 MB", "111.6", "2.07x", "489 us", "tensor cores"],
    "compare": ["9.94 ms", "10.5 ms", "1.054", "1.025", "sdpa-flash", "n16384", "causal"],
}


def printed(command: list[str], width: int) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "flashbench", *command], capture_output=True, text=True, check=False,
        env={**os.environ, "COLUMNS": str(width), "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    assert done.returncode in (0, 5), done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", COMMANDS)
def test_tables_of_commands_fit_80_columns_with_their_numbers_whole(name: str) -> None:
    lines = printed(COMMANDS[name], 80)
    assert max(map(len, lines)) <= 80
    for number in NUMBERS[name]:
        assert any(re.search(rf"(?<!\S){re.escape(number)}(?!\S)", re.sub(",(?= )", "", line) + " ")
                   for line in lines), number  # fmt: skip


def test_a_wide_terminal_has_a_line_a_row() -> None:
    [row] = [line for line in printed(COMMANDS["kv-cache-one"], 250) if "llama-3-70b" in line]
    assert "327,680 B" in row
    assert "bandwidth" in row


def test_texts_wrap_before_anything_else_happens() -> None:
    rows = [["a", "word " * 12, "1.23 ms"], ["b", "short", "4.56 ms"]]
    found = fitted.plan(["k", "text", "time"], rows, [False, False, True], room=50)
    assert found.lines == ()
    assert found.same == ""
    assert found.widths == (1, 50 - 1 - 7 - 2 - 6, 7)


def test_what_all_rows_share_is_told_once_where_room_is_short() -> None:
    rows = [[f"cell {at}", "the same text in every row", f"{at}.0 s"] for at in range(3)]
    found = fitted.plan(["cell", "note", "time"], rows, [False, False, True], room=30)
    assert found.same == "note the same text in every row"
    assert found.columns == (0, 2)


@pytest.mark.parametrize("room", [20, 31, 40, 60])
def test_nothing_is_lost_and_nothing_is_wider(room: int, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", str(room))
    columns = [Column(name=f"c{at}", header=f"head{at}", justify="right" if at % 2 else "left")
               for at in range(8)]  # fmt: skip
    rows = [{f"c{at}": f"v{row}.{at}" * (1 + 3 * (at == 4)) for at in range(8)} for row in range(3)]
    console.show_table(columns, rows, title="A title that is longer than the terminal is wide")
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= room
    for row in rows:
        for value in row.values():
            assert value in out


def test_further_lines_of_a_row_that_hold_nothing_are_left_out() -> None:
    headers, numeric = ["name", "value", "why it is so"], [False, True, False]
    rows = [["x" * 20, "1", "a reason of some length"], ["y" * 20, "2", "-"]]
    found = fitted.plan(headers, rows, numeric, room=28)
    head, body = fitted.flowed(headers, rows, numeric, found, room=28)
    assert [line.strip() for line in body] == [
        "x" * 20 + "      1",
        "a reason of some length",
        "y" * 20 + "      2",
    ]
    assert set(head[-1]) == {"─"}


def test_a_title_is_as_wide_as_the_terminal_not_as_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    console.show_table([Column(name="a", header="a")], [{"a": "1"}], title="A title of a few words more")
    assert capsys.readouterr().out.splitlines()[0].rstrip() == "A title of a few words more"
