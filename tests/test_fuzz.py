"""No command line and no file brings flashbench down: every answer is one of the documented ones.

A few examples of each in the fast tier, always the same; with FLASHBENCH_FUZZ_S (``make fuzz``) as many as fit
in that many seconds, in rounds of another seed each, whose numbers are told.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from fuzz_files import READERS, good, mutated
from fuzzing import check, nothing_measured
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from flashbench import kernels
from flashbench.cli import app

BUDGET_S = float(os.environ.get("FLASHBENCH_FUZZ_S", "0"))
ROUND = 500
SHORT_LINES, SHORT_FILES = 100, 8
FIRST_SEED = int(os.environ.get("FLASHBENCH_FUZZ_SEED", "1"))

assert nothing_measured  # a fixture


@pytest.fixture
def world(nothing_measured: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A folder with the good files, in which lines run; calling it puts them there anew."""
    folder = tmp_path / "a" / "b"
    for name in good():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / "folder").mkdir()
    monkeypatch.chdir(folder)
    before: dict[str, int] = {}

    def fresh(**changed: bytes) -> None:
        for path in [path for path in folder.rglob("*") if path.is_file()]:
            if path.relative_to(folder).as_posix() not in good():
                path.unlink()
        for name, data in good().items():
            path, wanted = folder / name, changed.get(name, data)
            stamp = path.stat().st_mtime_ns if path.exists() else -1
            if before.get(name) != stamp or name in changed:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(wanted)
                before[name] = -2 if name in changed else path.stat().st_mtime_ns

    return fresh


def rounds(test: Callable[..., None], strategy: st.SearchStrategy[Any], short: int, share: float) -> None:
    """Hold the test to examples of the strategy: ``short`` of them, or for a share of the budget."""
    number, end = FIRST_SEED, time.monotonic() + BUDGET_S * share
    while True:
        examples = ROUND if BUDGET_S else short
        phases = [Phase.generate, Phase.shrink] if BUDGET_S else [Phase.generate]
        held = settings(
            max_examples=examples, database=None, deadline=None, phases=phases,
            suppress_health_check=list(HealthCheck),
        )(given(strategy)(test))  # fmt: skip
        seed(number)(held)()
        if time.monotonic() >= end:
            break
        number += 1
    if BUDGET_S:
        print(f"{(number - FIRST_SEED + 1) * ROUND} examples, seeds {FIRST_SEED} to {number}")


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from _commands(inner, (*path, name))
    else:
        yield path, command


COMMANDS = dict(_commands(typer.main.get_command(app)))

NUMBERS = ("0", "1", "2", "16", "64", "100", "128", "-1", "1k", "64k", "1.5", "1e3", "nan", "inf", "1e999", "9" * 400,
           "2147483648", "18446744073709551616", "0x10", "１", "٣", "1_0", "+1", " 1 ", "-0", "00")  # fmt: skip
AXES = ("16", "16,32", "64-256", "1-4096+1", "128,64", "1k-3k", "1k,1k", ",", "1,,2", "2-1", "1-1", "1m-16m", "16-9k")
SHARES = ("0.5", "1", "0", "3%", "100%", "-1%", "1e-400", ".5", "0.9999999999", "1e309%", "%")
NAMES = (
    "naive", "sdpa", "naive,sdpa", "flash", "flash-v2", "flash-decode", "nothing", "fp32", "bf16", "fp8", "fp16,fp32",
    "fwd", "bwd", "fwd,bwd", "yes", "no", "both", "top-left", "cpu", "cuda", "cuda:0", "cuda:99999", "hot", "cold",
    "auto", "events", "burst", "llama-3-8b", "llama-3-70b", "deepseek-v3", "h100-sxm", "h100-sxm,a100-sxm", "mi300x",
    "standard", "flash-v1", "linformer", "linformer:rank=3", "mamba,reformer", "all", "time_s", "flops_per_s,time_s",
    "causal", "random:0.5", "random:nan", "bhqk", "1hqk", "64,0", "-1,64", "128:64,3", "1:0", "100x200", "bshd", "tensor",
    "block", "plain", "outliers", "prefill", "decode", "train", "192KB", "16KB-64KB", "5m", "1h30m", "0s", "1e9h",
    "slower", "missing", "device", "implementation,pass", "json=o", "junit=o.xml", "x=y", "csv=", "sm_90", "sm_90,sm_1",
    "devices", "metrics", "presets", "v100-sxm:1", "b", "c", "HEAD", "new.py", "nothing:here", "mine.py:f", ":", "a:",
)  # fmt: skip
PATHS = (*READERS, "other.jsonl", "folder", "nothing", "new.json", "folder/x", "results.jsonl/x", ".", "store", "*.jsonl", "**",
         "[", "a" * 300, "results.jsonl,other.jsonl", "-", "--", "x.toml", "x.npz")  # fmt: skip
ANYTHING = st.text(st.characters(exclude_characters="/"), max_size=12) | st.text("0123456789kmx-+,.:e% ", max_size=8)
"""No slash: what is written stays in the folder."""
VALUES = st.one_of(*map(st.sampled_from, (NUMBERS, AXES, SHARES, NAMES, PATHS)), ANYTHING)


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """A command with some of its options, most with values that others would take, now and then a stranger; and
    its words that belong to no option."""
    path = draw(st.sampled_from(sorted(COMMANDS)))
    line: list[str] = list(path)
    params = COMMANDS[path].params
    options = [row for row in params if row.param_type_name == "option"]
    for row in params:
        if row.param_type_name == "argument" and draw(st.integers(0, 9)):
            line += draw(st.lists(st.sampled_from(PATHS) | VALUES, min_size=1, max_size=2 if row.nargs < 0 else 1))
    plain = line[len(path) :]
    for row in draw(st.lists(st.sampled_from(options), max_size=6)):
        line.append(draw(st.sampled_from([*row.opts, *row.secondary_opts])))
        if not row.is_flag and draw(st.integers(0, 19)):
            line.append(draw(VALUES))
    if draw(st.integers(0, 9)) == 0:
        plain.append(draw(ANYTHING))
        line.insert(draw(st.integers(0, len(line))), plain[-1])
    return [word for word in line if word != "--debug"], plain


def test_command_lines(world: Callable[..., None]) -> None:
    def holds(example: tuple[list[str], list[str]]) -> None:
        argv, plain = example
        world()
        check(argv, (*filter(None, (repr(word)[1:-1] for word in plain)), *plain, *ANY_NAME))

    rounds(holds, command_lines(), SHORT_LINES, 0.5)


ANY_NAME = ("FILE", "RUNS", "BASE", "NEW", "COMMAND", "SUBJECT", "subject", "name", "files", "is not a command",
            "two sides", "path", "flashbench --help")  # fmt: skip
"""How an error calls what a line has beside options."""


@pytest.mark.parametrize("name", READERS)
def test_files(name: str, world: Callable[..., None]) -> None:
    def holds(example: tuple[str, bytes]) -> None:
        line, data = example
        world(**{name: data})
        check(line.split(), (name, Path(name).stem, *ANY_NAME))

    strategy = st.tuples(st.sampled_from(READERS[name]), mutated(name))
    rounds(holds, strategy, SHORT_FILES, 0.5 / len(READERS))


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_the_good_files_are_read(name: str, world: Callable[..., None]) -> None:
    """Else mutations would be refused at the door."""
    for line in READERS[name]:
        world()
        found = check(line.split(), (name, *ANY_NAME))
        assert found.code not in (2, 4), found.err
