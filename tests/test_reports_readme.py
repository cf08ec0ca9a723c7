"""reports/README.md says of each file the command that its header holds, but for where it wrote to."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from flashbench import runfile
from flashbench._cli.report import results_of
from flashbench.report import data

REPORTS = Path(__file__).resolve().parent.parent / "reports"
ROWS = re.findall(r"^\| (`.+?) \| (.+) \|$", (REPORTS / "README.md").read_text(), flags=re.MULTILINE)
EXCEPTIONS = {
    "h100-sxm/features/": "made by flashbench.run in one process: the headers hold no command",
    "h200-sxm/counters/again/": "its config had another name",
}
"""Rows whose files' headers do not hold the command, by how the first name begins, and why."""

Options = dict[str, str]


def options(words: list[str]) -> Options:
    """Options and their values; a switch has none. Of a config its name counts, and not where it lay."""
    found: Options = {}
    for word, then in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--") and word not in ("--out", "--quiet"):
            found[word] = "" if then.startswith("-") else then
    if "--config" in found:
        found["--config"] = Path(found["--config"]).name
    return found


def commands(text: str) -> list[tuple[str, Options]]:
    """Each command of a row; options by themselves are those of the command before, with these instead."""
    found: list[tuple[str, Options]] = []
    for code in re.findall(r"`([^`]+)`", text):
        words = shlex.split(re.sub(r"^[A-Z_]+=\S+ ", "", code))
        if words[0] == "flashbench" and words[1] != "report":
            found.append((words[1], options(words)))
        elif found and words[0].startswith("--"):
            found.append((found[-1][0], found[-1][1] | options(words)))
    return found


def files(cell: str) -> list[Path]:
    """The results files of the first column; a further name stands beside the first."""
    first, *more = (name.rstrip("/") for name in re.findall(r"`([^`]+)`", cell))
    found: list[Path] = []
    for name in [first, *(f"{first.rpartition('/')[0]}/{name}" for name in more)]:
        for path in REPORTS.glob(re.sub(r"<[^>]+>", "*", name)):
            found += path.glob("*.jsonl") if path.is_dir() else [path] if path.suffix == ".jsonl" else []
    return found


def says(command: tuple[str, Options], argv: list[str]) -> bool:
    """Whether a header's command has all that a row's has; a value in capitals or <> stands for any."""
    given = options(argv)
    return command[0] == argv[1] and all(
        name in given and (given[name] == value or re.fullmatch(r"[A-Z]+|<.+>", value))
        for name, value in command[1].items()
    )


CHECKED = [
    (cell, text) for cell, text in ROWS
    if commands(text) and files(cell) and not any(cell.startswith(f"`{name}") for name in EXCEPTIONS)
]  # fmt: skip


@pytest.mark.parametrize(("cell", "text"), CHECKED, ids=[cell for cell, _ in CHECKED])
def test_a_row_says_what_the_headers_hold(cell: str, text: str) -> None:
    argvs = {}
    for path in files(cell):
        with path.open(encoding="utf-8") as lines:
            argvs[path.relative_to(REPORTS)] = json.loads(next(lines))["argv"]
    for path, argv in argvs.items():
        assert any(says(command, argv) for command in commands(text)), f"{path}: {shlex.join(argv)}"
    for command in commands(text):
        assert any(says(command, argv) for argv in argvs.values()), f"no file of {command}"


def test_most_rows_are_looked_at_and_exceptions_are_some() -> None:
    assert len(CHECKED) >= 20
    for name in EXCEPTIONS:
        assert [cell for cell, _ in ROWS if cell.startswith(f"`{name}")], name


def lacks() -> dict[Path, list[str]]:
    """What each file's run never began, or was interrupted before it had, in words."""
    found = {}
    for path in sorted(REPORTS.rglob("*.jsonl")):
        text = path.read_text(encoding="utf-8")
        said = []
        if runfile.NOT_STARTED[0] in text:
            said += data.not_begun(results_of([runfile.load(path)]))
        if missing := runfile.verify(path).missing:
            planned = json.loads(text.split("\n", 1)[0])["cells"]
            said.append(f"{missing} of {len(planned)} planned cells have no row")
        if said:
            found[path] = said
    return found


def test_a_row_says_what_its_files_lack() -> None:
    """Cells that a time budget or an interrupt kept from having a row: how many."""
    found = lacks()
    assert found
    for path, said in found.items():
        rows = [text for cell, text in ROWS if path in files(cell)]
        assert rows, path
        for line in said:
            assert any(line in text for text in rows), f"{path.relative_to(REPORTS)}: {line}"
