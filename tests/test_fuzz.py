"""No command line and no file brings flashbench down: every answer is one of the documented ones.

A few examples of each in the fast tier, always the same; with FLASHBENCH_FUZZ_S (``make fuzz``) as many as
fit in that many seconds, in rounds of another seed each, whose numbers are told.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import fuzz_sealed
import pytest
import typer
from fuzz_files import READERS, good, mutated
from fuzzing import check, nothing_measured
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from flashbench import runfile, sweep
from flashbench._cli import joined
from flashbench._runfile import lines
from flashbench.cli import app
from flashbench.console import printable
from flashbench.errors import FlashbenchError, RunFileError
from flashbench.kernels import Target

BUDGET_S = float(os.environ.get("FLASHBENCH_FUZZ_S", "0"))
ROUND, ROUND_FILES = 500, 100
SHORT_LINES, SHORT_FILES, SHORT_SEALED = 60, 3, 40
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


def rounds(
    test: Callable[..., None], strategy: st.SearchStrategy[Any], short: int, share: float, size: int = ROUND
) -> None:
    """Hold the test to examples of the strategy: ``short`` of them, or for a share of the budget."""
    number, end = FIRST_SEED, time.monotonic() + BUDGET_S * share
    done = 0

    def counted(example: Any) -> None:
        nonlocal done
        done += 1
        test(example)

    while True:
        examples = size if BUDGET_S else short
        phases = [Phase.generate, Phase.shrink] if BUDGET_S else [Phase.generate]
        held = settings(
            max_examples=examples, database=None, deadline=None, phases=phases,
            suppress_health_check=list(HealthCheck),
        )(given(strategy)(counted))  # fmt: skip
        seed(number)(held)()
        if time.monotonic() >= end:
            break
        number += 1
    if BUDGET_S:
        print(f"{done} examples, seeds {FIRST_SEED} to {number}")


def _commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from _commands(inner, (*path, name))
    else:
        yield path, command


COMMANDS = dict(_commands(typer.main.get_command(app)))

PLAUSIBLE = {
    "--seqlens": ("16", "64,128", "1k"), "--seqlens-k": ("16", "128"), "--head-dims": ("16", "64,128"),
    "--head-dims-v": ("32",), "--dtypes": ("fp32", "bf16,fp16", "fp8"), "--dtype": ("bf16", "fp8"),
    "--impls": ("naive", "naive,sdpa", "flash", "flash-v1,flash-v2"), "--impl": ("mine.py:f",),
    "--causal": ("both", "yes"),
    "--passes": ("fwd", "fwd,bwd"), "--batch": ("1", "4"), "--tokens": ("16k",), "--heads": ("2", "8"),
    "--hidden": ("2048",), "--kv-heads": ("1", "2"), "--model": ("llama-3-8b",), "--window": ("64", "64,0"),
    "--softcap": ("30",), "--bias": ("bhqk", "1hqk"), "--dropout": ("0.1",), "--block-mask": ("causal",
    "random:0.5", "mask.npz"),
    "--varlen": ("64,128", "16x32,0x5"), "--layout": ("bshd",), "--fp8-scale": ("head",),
    "--device": ("cpu",),
    "--cache": ("hot",), "--timing": ("events",), "--load": ("burst",), "--seed": ("7",),
    "--tuned": ("tuned.json",),
    "--config": ("sweep.toml", "grids.toml", "plan.toml"), "--time-budget": ("5m",),
    "--cell-timeout": ("1m",),
    "--gpu": ("h100-sxm", "card.toml", "a100-sxm-80gb,h100-sxm", "auto"), "--models": ("flash",
    "standard,flash-v2", "all"),
    "--mode": ("decode", "prefill"), "--sram": ("192KB",), "--sweep-sram": ("16KB-64KB",),
    "--sweep-block": ("64,128",),
    "--html": ("o.html",), "--splits": ("4", "auto"), "--page-size": ("16",), "--density": ("0.5",),
    "--block-q": ("64",),
    "--block-k": ("32",), "--alignment": ("top-left",), "--lengths": ("64,128",), "--pack-gqa": ("yes",),
    "--layers": ("4",),
    "--head-dim": ("64",), "--head-dim-v": ("32",), "--windowed-layers": ("2",), "--latent-dim": ("512",),
    "--rope-dim": ("64",),
    "--scale-bytes": ("2",), "--tp": ("2",), "--weights": ("16GB",), "--memory-fraction": ("0.9",),
    "--kv-lens": ("64",),
    "--queries": ("2",), "--out": ("new", "o.json", "here"), "--candidates": ("3",), "--budget": ("1m",),
    "--ranges": ("plain",),
    "--baseline": ("b", "store"), "--store": ("store",), "--metric": ("time_s", "peak_extra_bytes"),
    "--warn": ("1%",),
    "--fail": ("5%",), "--noise": ("1%", "noise.json"), "--floor": ("1e-6",), "--allow": ("device,missing",),
    "--fail-on": ("changed",), "--by": ("pass",), "--output": ("json=o", "junit=o.xml", "markdown=m"),
    "--cells": ("*",),
    "--base": ("other.jsonl",), "--runs": ("2",), "--import": ("ncu.csv",), "--arch": ("sm_90",),
    "--trace-limit": ("9",),
    "--world-size": ("2", "4"), "--link": ("pcie", "network"), "--cp": ("2",),
    "--name": ("b",), "--commit": ("abc",), "--preset": ("x",),
}  # fmt: skip
"""Values that an option takes, so that a line comes further than its first option."""
ARGUMENTS = {
    "file": ("mine.py", "new.py"), "runs": ("results.jsonl", "store", "other.jsonl"),
    "base": ("other.jsonl", "results.jsonl"),
    "new": ("results.jsonl", "other.jsonl"), "files": ("results.jsonl", "cpu.jsonl"),
    "command": ("x {out}", "x"),
    "subject": ("devices", "metrics", "models"), "name": ("b", "c"), "to": ("c",),
}  # fmt: skip
NUMBERS = ("0", "1", "2", "16", "64", "100", "128", "-1", "1k", "64k", "1.5", "1e3", "nan", "inf", "1e999",
"9" * 400,
           "2147483648", "18446744073709551616", "0x10", "１", "٣", "1_0", "+1", " 1 ", "-0",
           "00")  # fmt: skip
AXES = (
    "16",
    "16,32",
    "64-256",
    "1-4096+1",
    "128,64",
    "1k-3k",
    "1k,1k",
    ",",
    "1,,2",
    "2-1",
    "1-1",
    "1m-16m",
    "16-9k",
)
SHARES = ("0.5", "1", "0", "3%", "100%", "-1%", "1e-400", ".5", "0.9999999999", "1e309%", "%")
NAMES = (
    "naive", "sdpa", "naive,sdpa", "flash", "flash-v2", "flash-decode", "nothing", "fp32", "bf16", "fp8",
    "fp16,fp32",
    "fwd", "bwd", "fwd,bwd", "yes", "no", "both", "top-left", "cpu", "cuda", "cuda:0", "cuda:99999", "hot",
    "cold",
    "auto", "events", "burst", "llama-3-8b", "llama-3-70b", "deepseek-v3", "h100-sxm", "h100-sxm,a100-sxm",
    "mi300x",
    "standard", "flash-v1", "linformer", "linformer:rank=3", "mamba,reformer", "all", "time_s",
    "flops_per_s,time_s",
    "causal", "random:0.5", "random:nan", "bhqk", "1hqk", "64,0", "-1,64", "128:64,3", "1:0", "100x200",
    "bshd", "tensor",
    "block", "plain", "outliers", "prefill", "decode", "train", "192KB", "16KB-64KB", "5m", "1h30m", "0s",
    "1e9h",
    "slower", "missing", "device", "implementation,pass", "json=o", "junit=o.xml", "x=y", "csv=", "sm_90",
    "sm_90,sm_1",
    "devices", "metrics", "presets", "v100-sxm:1", "b", "c", "HEAD", "new.py", "nothing:here", "mine.py:f",
    ":", "a:",
)  # fmt: skip
PATHS = (*READERS, "other.jsonl", "folder", "nothing", "new.json", "folder/x", "results.jsonl/x", ".",
"store", "*.jsonl", "**",
         "[", "a" * 300, "results.jsonl,other.jsonl", "-", "--", "x.toml", "x.npz")  # fmt: skip
ANYTHING = st.text(st.characters(exclude_characters="/\0"), max_size=12) | st.text(
    "0123456789kmx-+,.:e% ", max_size=8
)
"""No slash: what is written stays in the folder."""
VALUES = st.one_of(*map(st.sampled_from, (NUMBERS, AXES, SHARES, NAMES, PATHS)), ANYTHING)


@st.composite
def command_lines(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """A command with some of its options, now and then with a value of another; and the words that name
    a file or belong to no option."""
    path = draw(st.sampled_from(sorted(COMMANDS)))
    line: list[str] = list(path)
    params = COMMANDS[path].params
    options = [row for row in params if row.param_type_name == "option"]
    for row in params:
        if row.param_type_name == "argument" and draw(st.integers(0, 9)):
            given_ = st.sampled_from(ARGUMENTS[row.name]) if draw(st.integers(0, 3)) else VALUES
            line += draw(st.lists(given_, min_size=1, max_size=2 if row.nargs < 0 else 1))
    plain = line[len(path) :]
    for row in draw(st.lists(st.sampled_from(options), max_size=6)):
        line.append(draw(st.sampled_from([*row.opts, *row.secondary_opts])))
        if not row.is_flag and draw(st.integers(0, 19)):
            known = PLAUSIBLE.get(row.opts[0], ())
            line.append(draw(st.sampled_from(known) if known and draw(st.integers(0, 3)) else VALUES))
            if re.search("FILE|DIR|BASE", row.metavar or ""):
                plain.append(line[-1])
    if draw(st.integers(0, 9)) == 0:
        plain.append(draw(ANYTHING))
        line.insert(draw(st.integers(0, len(line))), plain[-1])
    return [word for word in line if word != "--debug"], plain


def _said(words: Iterable[str]) -> Iterator[str]:
    """How an error may quote them, or a part of a comma list of them."""
    for word in words:
        for part in filter(None, (word or ".", *word.split(","))):
            yield from (part, repr(part)[1:-1], " ".join(printable(part).split()))
            yield " ".join(printable(part.strip()).split())
            yield printable(" ".join(part.split()))


def test_command_lines(world: Callable[..., None]) -> None:
    def holds(example: tuple[list[str], list[str]]) -> None:
        argv, plain = example
        world()
        check(argv, (*_said(plain), *ANY_NAME))

    rounds(holds, command_lines(), SHORT_LINES, 0.5)


PARENTS = {name: [str(path) for path in Path(name).parents if path.name] for name in READERS}
ANY_NAME = (
    "FILE", "RUNS", "BASE", "NEW", "COMMAND", "SUBJECT", "subject", "name", "files", "is not a command",
    "baseline '", "claims file '", "claim ", "calibration '", "timeline", "model '", "path '", "argument",
    "flashbench --help", "is not an option of", "in the header of ",
)  # fmt: skip
"""How an error calls what a line has beside options."""


@pytest.mark.parametrize("name", READERS)
def test_files(name: str, world: Callable[..., None]) -> None:
    def holds(example: tuple[str, bytes]) -> None:
        line, data = example
        world(**{name: data})
        check(line.split(), (name, Path(name).stem, *PARENTS[name], *ANY_NAME))

    strategy = st.tuples(st.sampled_from(READERS[name]), mutated(name))
    rounds(holds, strategy, SHORT_FILES, 0.25 / len(READERS), ROUND_FILES)


def test_files_sealed_again(world: Callable[..., None]) -> None:
    """Whose checksums fit, so that nothing but their shape is between them and what reads them."""
    data = good()[fuzz_sealed.NAME]

    def holds(example: tuple[str, int]) -> None:
        line, number = example
        edited = fuzz_sealed.changed(data, number)
        world(**{fuzz_sealed.NAME: edited, **({"results.jsonl": edited} if "--resume" in line else {})})
        if line == JOINED:
            _show_joined()
        else:
            check(line.split(), (fuzz_sealed.NAME, "results.jsonl", *ANY_NAME))

    strategy = st.tuples(st.sampled_from((*fuzz_sealed.READERS, JOINED)), st.integers(0, 2**40))
    rounds(holds, strategy, SHORT_SEALED, 0.25, ROUND_FILES)


JOINED = "joined"
"""For a line: the table of ``profile --counters --trace``, which a GPU's run ends with."""


def _show_joined() -> None:
    try:
        records = runfile.load(fuzz_sealed.NAME).records
    except FlashbenchError:
        return
    target = Target(device="cuda:0", name="NVIDIA H200")
    with contextlib.redirect_stdout(io.StringIO()):
        for as_json in (True, False):
            joined.show(records, target, kernels=True, detail=True, json=as_json)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_the_good_files_are_read(name: str, world: Callable[..., None]) -> None:
    """Else mutations would be refused at the door."""
    for line in READERS[name]:
        world()
        found = check(line.split(), (name, *ANY_NAME))
        assert found.code not in (2, 4), found.err


@pytest.mark.slow
@pytest.mark.parametrize("line", fuzz_sealed.READERS)
def test_the_good_sealed_file_is_read(line: str, world: Callable[..., None]) -> None:
    world()
    found = check(line.split(), (fuzz_sealed.NAME, *ANY_NAME))
    assert found.code not in (2, 4), found.err


@pytest.mark.parametrize("kind", ["flag", "text", "number", "surrogate"])
def test_every_option_of_a_sealed_header_is_held_to_its_type(kind: str, world: Callable[..., None]) -> None:
    head, *rows = [json.loads(line) for line in good()[fuzz_sealed.NAME].splitlines()]
    value = {"flag": True, "text": "x", "number": 3, "surrogate": "\ud800"}[kind]
    for name, option in {**sweep.OPTIONS, "pairs": None}.items():
        flag = option is None or option.parse is None
        sealed = [{**head, "options": {**head["options"], name: value}}, *rows]
        world(**{"results.jsonl": b"".join(map(lines.seal, sealed))})
        if kind in (("flag",) if flag else ("text", "surrogate")):
            runfile.load("results.jsonl")
        else:
            with pytest.raises(RunFileError, match=rf"line 1: options\.{name} is .*(text|false) is wanted"):
                runfile.load("results.jsonl")
        line = ["run", "--resume", "--out", ".", "--dry-run", "--device", "cpu"]
        found = check(line, ("results.jsonl", "header", *ANY_NAME))
        assert name != "tuned" or kind != "surrogate" or "not a path" in found.err
