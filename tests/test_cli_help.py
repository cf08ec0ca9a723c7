"""Every command helps itself: each option has a line of help; the options of the issue are all there."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import typing
from typing import Any

import pytest
import typer

from flashbench import sweep
from flashbench.cli import app, main

COMMANDS = {command.name: command.callback for command in app.registered_commands}
GRID = (
    "--seqlens --seqlens-k --head-dims --head-dims-v --dtypes --impls --impl --causal --passes --batch "
    "--heads --kv-heads --device --seed --json --csv --quiet --verbose"
)
EXPECTED = {
    "run": f"{GRID} --tokens --hidden --cache --config --out --resume --time-budget --dry-run --strict "
    "--model --tuned --cell-timeout --in-process",
    "check": GRID,
    "profile": f"{GRID.replace(' --verbose', '')} --tokens --hidden --trace --static --counters --timeline "
    "--known --import --arch --gpu --trace-limit --detail --by-kernel --tuned --config --out",
    "gate": "--config --out --quiet",
    "history": "--metric --cells --warn --noise --all --json --csv --quiet",
    "bisect": "--base --baseline --store --metric --fail --noise --allow --runs",
    "compare": "--baseline --store --metric --warn --fail --noise --floor --allow --fail-on --by --all "
    "--output --markdown --json --csv --quiet",
    "noise": "--metric --out --json --csv --quiet",
    "report": "--output --claims --quiet",
    "verify": "--json --quiet",
    "claims": "--results --measured --markdown --json",
    "new-impl": "--triton",
    "list": "--impl --json --csv",
    "doctor": "--json --csv",
    "io-model": "--seqlens --sram --world-size --link --json --csv",
    "kv-cache": "--model --layers --heads --kv-heads --head-dim --head-dim-v --window --windowed-layers "
    "--latent-dim --rope-dim --seqlens --batch --dtypes --page-size --scale-bytes --gpu --tp --cp --link "
    "--weights "
    "--memory-fraction --json --csv --quiet",
    "block": "--model --impls --modes --seqlens --batch --layers --dtype --device --seed --out --json --csv "
    "--quiet",
    "ring": "--world-size --seqlens --impls --head-dims --head-dims-v --dtypes --causal --passes --batch "
    "--tokens --heads --hidden --kv-heads --link --gpu --device --seed --cell-timeout --check --dry-run "
    "--out --json --csv --quiet",
    "decode": "--model --kv-lens --batch --queries --page-size --splits --dtype --check --counters --device "
    "--seed --tuned --out --json --csv --quiet",
    "tune": "--seqlens --seqlens-k --head-dims --head-dims-v --dtypes --impls --causal --passes --batch "
    "--tokens --heads --hidden --kv-heads --model --kv-lens --page-size --queries --candidates --budget "
    "--device --gpu --seed --out --dry-run --json --csv --quiet",
    "calibrate": "--device --out --json --csv --quiet",
}


def options(name: str) -> dict[str, str]:
    """The options of a command by long name, with their help."""
    found = {}
    for parameter in inspect.signature(COMMANDS[name], eval_str=True).parameters.values():
        for info in typing.get_args(parameter.annotation)[1:]:
            if isinstance(info, typer.models.OptionInfo):
                names = [name for name in (info.default, *(info.param_decls or ())) if isinstance(name, str)]
                declared = [name.split("/")[0] for name in names if name.startswith("--")]
                found[declared[0] if declared else "--" + parameter.name.replace("_", "-")] = info.help or ""
    return found


def help_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert not stop.value.code
    return capsys.readouterr().out


def test_the_commands_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(COMMANDS) == set(EXPECTED)
    text = help_of(["--help"], capsys)
    for name in (*COMMANDS, "--version", "--debug", "--install-completion", "--show-completion"):
        assert name in text
    assert help_of([], capsys) == text


@pytest.mark.parametrize("name", EXPECTED)
def test_help_names_every_option_and_says_what_it_is(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("TERMINAL_WIDTH", "300")
    found = options(name)
    assert set(EXPECTED[name].split()) <= set(found)
    text = " ".join(help_of([name, "--help"], capsys).split())
    for option, help_ in found.items():
        assert help_.endswith("."), f"{option} has no help, or it is no sentence"
        assert re.search(rf"{re.escape(option)}\b", text)
        assert " ".join(help_.split())[:60] in text


def test_no_option_is_named_in_capitals() -> None:
    """As Typer 0.27 does of those whose metavar is their name."""

    def names(command: Any) -> list[str]:
        own = [name for parameter in command.params for name in parameter.opts]
        return own + [name for sub in getattr(command, "commands", {}).values() for name in names(sub)]

    found = [name for name in names(typer.main.get_command(app)) if name.startswith("--")]
    assert "--device" in found
    assert found == [name.lower() for name in found]


def test_the_line_and_the_config_take_the_same_options() -> None:
    assert {name[2:].replace("-", "_") for name in options("run")} - {"config", "allow_impl"} == set(
        sweep.OPTIONS
    )


def test_the_version_is_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    from flashbench import __version__

    assert help_of(["--version"], capsys) == f"flashbench {__version__}\n"


@pytest.mark.parametrize(
    "argv", [["--help"], ["run", "--help"], ["list", "models"], ["io-model"]], ids=" ".join
)
@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "cp1252"},
        {"LC_ALL": "C", "PYTHONUTF8": "0"},
        {"TERM": "dumb"},
        {
            "PYTHONIOENCODING": "ascii",
            "COLUMNS": "20",
            "TERMINAL_WIDTH": "20",
        },  # help is cut with an ellipsis
    ],
    ids=["cp1252", "C", "dumb", "narrow ascii"],
)
def test_output_survives_any_encoding(argv: list[str], environment: dict[str, str]) -> None:
    env = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, "-m", "flashbench", *argv], capture_output=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 100
    assert b"Traceback" not in done.stderr


def test_completion_completes_the_last_name_of_a_list() -> None:
    env = {
        **os.environ,
        "_FLASHBENCH_COMPLETE": "complete_bash",
        "COMP_WORDS": "flashbench run --impls naive,sdpa-c",
        "COMP_CWORD": "3",
    }
    done = subprocess.run(
        [sys.executable, "-m", "flashbench"], capture_output=True, text=True, env=env, check=False
    )
    assert "naive,sdpa-cudnn" in done.stdout


def test_public_names_are_sorted_lazy_and_all_there() -> None:
    import flashbench

    assert flashbench.__all__ == sorted(flashbench.__all__)
    for name in flashbench.__all__:
        assert getattr(flashbench, name) is not None
        assert name in dir(flashbench)
    with pytest.raises(AttributeError, match="nothing"):
        _ = flashbench.nothing
    code = (
        "import sys; before = set(sys.modules); import flashbench\n"
        "new = {name for name in set(sys.modules) - before if name.startswith('flashbench.')}\n"
        "assert not new, new"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
