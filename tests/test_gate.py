"""The exact gate: its config, its file, how that is compared, and what holds this repository to it."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gates import BASELINE, ROOT, with_baseline
from judging import run

from flashbench import cli, configfile, gating
from flashbench._cli import gate as command
from flashbench.errors import EXIT_GATE, EXIT_UNDECIDED, EXIT_UNREADABLE, EXIT_USAGE

SMALL = """
[model]
arch = "sm_90"
seqlens = "1k"

[check]
impls = "naive"
seqlens = 7
head-dims = 16
dtypes = "fp32"
"""


def measured(capsys: pytest.CaptureFixture[str], config: Path, out: Path) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        cli.main(["gate", "--config", str(config), "--out", str(out)])
    return int(stop.value.code or 0), capsys.readouterr().err


@pytest.fixture
def small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A file of the parts that need no Triton."""
    (tmp_path / "small.toml").write_text(SMALL)
    code, err = measured(capsys, tmp_path / "small.toml", tmp_path / "gate.json")
    assert code == 0, err
    return tmp_path / "gate.json"


def changed(path: Path, part: str, index: int, **values: Any) -> str:
    """A copy of the file with another row."""
    document = json.loads(path.read_text())
    document[part][index] |= values
    copy = path.with_name("changed.json")
    copy.write_text(command.text_of(document))
    return str(copy)


def test_an_interrupt_is_told_and_leaves_no_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    monkeypatch.setattr(gating, "document", lambda *_: signal.raise_signal(signal.SIGTERM))
    code, err = measured(capsys, tmp_path / "small.toml", tmp_path / "gate.json")
    assert (code, err) == (130, f"warning: interrupted; {tmp_path / 'gate.json'} is not written\n")
    assert not (tmp_path / "gate.json").exists()


@with_baseline
def test_the_job_holds_this_repository_to_its_baseline(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """``make gate`` is of the job. Here the parts of its config that no compiler takes part in."""
    assert "make gate" in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    plan = command.plan_of(configfile.read_toml(ROOT / "configs" / "ci-static.toml"), "the config")
    fresh = gating.document(replace(plan, static=(), trace=()), lambda *_: None)
    (tmp_path / "gate.json").write_text(command.text_of(fresh))
    code, _, err = run(
        capsys, str(tmp_path / "gate.json"), "--baseline", str(BASELINE), "-q",
        "--fail-on", "changed", "--allow", "missing",
    )  # fmt: skip
    assert code == 0, f"{err}\nIf this is meant: make baseline, and commit configs/baselines"


def test_a_row_is_a_line_and_holds_no_time_path_or_machine(small: Path) -> None:
    document = json.loads(small.read_text())
    assert set(document) == {"type", "schema", "flashbench", "triton", *gating.PARTS}
    rows = sum(len(document[part]) for part in gating.PARTS)
    assert len(re.findall(r'^  \{"', small.read_text(), re.MULTILINE)) == rows == 8 + 8
    assert command.text_of(document) == small.read_text()


def test_every_part_is_compared_by_its_own_numbers(capsys: pytest.CaptureFixture[str], small: Path) -> None:
    code, out, _ = run(capsys, str(small), str(small), "--json")
    document = json.loads(out)
    counts = {one["name"]: sum(one["counts"].values()) for one in document["metrics"]}
    assert (code, counts["modelled_exps"], counts["wrong_results"]) == (0, 8, 8)
    assert not any(name.startswith(("traced", "registers")) for name in counts)


@pytest.mark.parametrize(
    ("part", "values", "says"),
    [
        (
            "model",
            {"exps": 1},
            "modelled_exps: 1 of 8 cells are worse by more than 0%, first: model flash fwd",
        ),
        ("model", {"compulsory_bytes": 1}, "modelled_compulsory_bytes: 1 of 8"),
        ("check", {"status": "wrong", "reason": "o is off"}, "0, now 1 (o is off)"),
        ("check", {"status": "failed", "reason": "boom"}, "wrong_results: 1 of 8"),
    ],
)
def test_any_other_number_fails(
    capsys: pytest.CaptureFixture[str], small: Path, part: str, values: dict[str, Any], says: str
) -> None:
    code, _, err = run(capsys, str(small), changed(small, part, 0, **values), "-q")
    assert (code, says in err) == (EXIT_GATE, True), err


def test_better_fails_only_where_every_change_does(capsys: pytest.CaptureFixture[str], small: Path) -> None:
    worse = changed(small, "check", 0, status="wrong", reason="o is off")
    assert run(capsys, worse, str(small), "-q")[0] == 0
    code, _, err = run(capsys, worse, str(small), "-q", "--fail-on", "slower,changed")
    assert code == EXIT_GATE
    assert "wrong_results: 1 of 8 cells are better or new, first: check naive fwd" in err


def test_a_cell_that_went_away_is_missing(capsys: pytest.CaptureFixture[str], small: Path) -> None:
    document = json.loads(small.read_text())
    del document["model"][3]
    fewer = small.with_name("fewer.json")
    fewer.write_text(command.text_of(document))
    assert run(capsys, str(small), str(fewer), "-q")[0] == EXIT_UNDECIDED
    assert run(capsys, str(fewer), str(small), "-q", "--fail-on", "changed")[0] == EXIT_GATE


def test_what_is_wrong_by_itself_fails_without_a_baseline(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = gating.document

    def wrong(plan: gating.Plan, tick: gating.Tick) -> dict[str, Any]:
        document = right(plan, tick)
        document["check"][2] |= {"status": "wrong", "reason": "o is off"}
        return document

    monkeypatch.setattr(gating, "document", wrong)
    (tmp_path / "small.toml").write_text(SMALL)
    code, err = measured(capsys, tmp_path / "small.toml", tmp_path / "gate.json")
    assert (code, "1 rows are wrong or failed, first: check naive" in err) == (EXIT_GATE, True)
    assert (tmp_path / "gate.json").is_file()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "asks for nothing"),
        ("[times]", "'times' is not a part; accepted: tables model, tiles, trace, check, static"),
        ("static = 3", "static is no table"),
        ("[static]\nseqlens = 3", "key 'seqlens' is not known"),
        ("[static]\nhead-dim = 3", "did you mean 'head_dims'?"),
        ("[static]\nfoo = 3", "(accepted: impls, head_dims, dtypes, causal, passes, arch)"),
        ("[static]\narchs = 'sm_90'", "did you mean 'arch'?"),
        ("[model]\nfoo = 3", ", arch)"),
        ("[tiles]\nfoo = 3", "(accepted: impls, seqlens, head_dims, dtypes, causal, passes, arch)"),
        ("[tiles]\nimpls = 'naive'", "[tiles]: impls 'naive'"),
        ("[tiles]\ncausal = 'top-left'", "causal 'top-left': tiles are those of causal"),
        ("[static]\narch = 90", "arch = 90 is no text"),
        ("[static]\narch = 'sm_70'", "--arch 'sm_70'"),
        ("[trace]\nimpls = 'flush'", "flush"),
        ("[trace]\nout = 'x'", "key 'out' is not known"),
        ("[model", "not TOML"),
    ],
)
def test_a_bad_config_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, says: str
) -> None:
    (tmp_path / "bad.toml").write_text(text)
    code, err = measured(capsys, tmp_path / "bad.toml", tmp_path / "gate.json")
    assert (code, says in err.splitlines()[0]) == (EXIT_USAGE, True), err


def test_a_bad_file_is_named(capsys: pytest.CaptureFixture[str], small: Path) -> None:
    code, err = measured(capsys, small.with_name("small.toml"), small.parent / "no" / "gate.json")
    assert (code, "--out" in err) == (EXIT_USAGE, True)
    newer = small.with_name("newer.json")
    newer.write_text(small.read_text().replace('"schema": 1', '"schema": 9'))
    code, _, err = run(capsys, str(newer), str(newer))
    assert (code, "schema 9" in err) == (EXIT_UNREADABLE, True)
