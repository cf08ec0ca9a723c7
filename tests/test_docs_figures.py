"""Figures of the docs are drawn by a command that stands beside them, and are what it draws now."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from snippets import PAGES, ROOT, SHELL, blocks

DOCS = ROOT / "docs"
SHOWN = [
    (page, DOCS / path)
    for page in PAGES
    for path in re.findall(r"!\[[^]]+\]\((img/[^)]+)\)", page.read_text(encoding="utf-8"))
]


def test_every_picture_is_shown_and_there() -> None:
    assert {path for _, path in SHOWN} == set((DOCS / "img").glob("*.svg"))
    assert {path.stem for path in (DOCS / "img").iterdir()} == {path.stem for _, path in SHOWN}


@pytest.mark.parametrize("page", sorted({page for page, _ in SHOWN}), ids=lambda page: page.name)
def test_pictures_are_what_their_command_draws(page: Path, tmp_path: Path) -> None:
    """Their JSON and data, to the byte; the picture itself has the JSON's titles and names."""
    (line,) = [
        command
        for block in blocks(page)
        if block.language in SHELL
        for command in block.commands
        if "docs/img" in command
    ]
    words = shlex.split(line.replace("docs/img", str(tmp_path)))
    assert (words.pop(), words.pop()) == ("svg", "--format")  # needs a Chromium
    done = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, cwd=ROOT, timeout=240
    )
    assert done.returncode == 0, done.stderr
    for path in (path for where, path in SHOWN if where == page):
        for end in (".json", ".csv"):
            again = (tmp_path / path.with_suffix(end).name).read_bytes()
            assert again == path.with_suffix(end).read_bytes(), f"draw it anew: {line}"
        drawn = path.with_suffix(".json").read_text(encoding="utf-8")
        said = re.findall(r'"(?:name|text)": "([^"<&]+)"', drawn)
        assert said
        picture = path.read_text(encoding="utf-8")
        assert [one for one in said if one not in picture] == []


def test_what_the_page_says_of_them_is_what_they_show() -> None:
    """Of flash-v2 half of standard at 64k, and the memory from which flash asks for less, within a step."""
    import csv

    def values(stem: str) -> list[dict[str, str]]:
        with (DOCS / "img" / f"{stem}-fwd-bf16-128-full.csv").open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    at = {row["model"]: float(row["value"]) for row in values("traffic") if row["seqlen"] == "65536"}
    assert at["flash-v2"] / at["standard"] == pytest.approx(0.5, rel=0.01)
    by_memory = values("onchip")
    standard = {row["x"]: float(row["value"]) for row in by_memory if row["model"] == "standard"}
    for model, kib in (("flash-v1", 96), ("flash-v2", 32)):
        own = {int(row["x"]): float(row["value"]) for row in by_memory if row["model"] == model}
        assert own[kib * 1024] == pytest.approx(standard[str(kib * 1024)], rel=0.03)
        for x in own:
            assert own[x] * x == pytest.approx(own[kib * 1024] * kib * 1024, rel=0.03)
