"""What ``run`` shows while it measures: counts, what is left by the forecast, the latest results."""

from __future__ import annotations

import io
import sys
from dataclasses import replace

import pytest
import synthetic

from flashbench import console
from flashbench._cli import live

RECORDS = [synthetic.record("flash", n) for n in (1024, 2048, 4096, 8192)]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def reconfigure(self, **_: object) -> None:
        """As a real stream has it."""


def test_what_is_left_follows_the_forecast_at_the_pace_of_what_is_done() -> None:
    now = 0.0
    board = live.Board({one.cell: float(2**at) for at, one in enumerate(RECORDS)}, clock=lambda: now)
    assert board.left_s is None
    board.begin(RECORDS[0].cell)
    assert board.line == RECORDS[0].cell.key
    board.keep(RECORDS[0])
    board.keep(RECORDS[1])
    now = 6.0  # 3 seconds were expected: twice as long
    assert board.counts == (2, 4)
    assert board.left_s == 2 * (4 + 8)
    assert board.line.endswith(", about 24 s left")


def test_results_are_shown_with_clock_and_flags_or_their_reason() -> None:
    board = live.Board({one.cell: 1.0 for one in RECORDS})
    hot = replace(RECORDS[0], timing={"rounds": [{"sm_clock_mhz": 1980}, {"sm_clock_mhz": 1410.0}]},
                  flags=("throttled",))  # fmt: skip
    failed = synthetic.record("naive", 65536, status="oom", reason="needs 275 GB" + "x" * 99)
    board.keep(hot)
    board.keep(failed)
    first, second = board.rows()
    assert first[0] == hot.cell.key
    assert first[1].endswith(" ± 1.0%")
    assert first[2] == "1410 MHz, throttled"
    assert second[1].startswith("oom: needs 275 GB")
    assert len(second[1]) < 60
    for one in RECORDS * 2:
        board.keep(one)
    assert len(board.rows()) == live.LATEST


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(7.2, "7 s"), (89, "89 s"), (91, "2 min"), (3599, "1 h 00 min"), (3900, "1 h 05 min")],
)
def test_durations_are_as_rough_as_the_forecast(seconds: float, said: str) -> None:
    assert live.duration(seconds) == said


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}, {"CI": "true"}, {"TERM": "dumb"}])
def test_the_block_is_drawn_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    from rich.default_styles import DEFAULT_STYLES

    for style in DEFAULT_STYLES.values():  # rich keeps what a style was first drawn as, by whatever test
        monkeypatch.setattr(style, "_ansi", None)
    for name in ("NO_COLOR", "CI", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    hostile = synthetic.record("flash", 1024, status="failed", reason="a\x1b[2Jb")
    with live.board({one.cell: 1.0 for one in RECORDS}) as board:
        for one in (*RECORDS[:2], hostile):
            board.begin(one.cell)
            board.keep(one)
    text = stream.getvalue()
    if "CI" in environment or "TERM" in environment:
        assert text == ""  # notes come every 30 s
        return
    assert "2/4" in text
    assert RECORDS[1].cell.key in text
    assert "\x1b[2J" not in text
    colours = "\x1b[38;" in text or "\x1b[3" in text.replace("\x1b[?", "")
    assert colours == ("NO_COLOR" not in environment)


def test_off_a_terminal_notes_tell_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "NOTE_EVERY_S", 0.0)
    with live.board({one.cell: 1.0 for one in RECORDS}) as board:
        board.keep(RECORDS[0])
        board.begin(RECORDS[1].cell)
    assert f"next: {RECORDS[1].cell.key}, about " in capsys.readouterr().err
