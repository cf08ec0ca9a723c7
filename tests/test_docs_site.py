"""The docs are the pages of the site's contents, and every relative link and anchor leads somewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *ROOT.glob("*.md"), ROOT / "reports" / "README.md"])
LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """A page without its code, in which brackets mean something else."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "`code`", text)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and mkdocs make them; of equal ones the later are numbered."""
    found, seen = set(), Counter[str]()
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+ +(.+?) *$", text, flags=re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", heading).lower()).replace(" ", "-")
        found.add(f"{plain}-{seen[plain]}" if seen[plain] else plain)
        seen[plain] += 1
    return found


def test_contents_are_the_pages_that_there_are() -> None:
    def pages(entries: list) -> list[str]:
        return [one for entry in entries for value in entry.values()
                for one in (pages(value) if isinstance(value, list) else [value])]  # fmt: skip

    contents = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(contents) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_ci_builds_the_site_and_hears_its_warnings() -> None:
    """With --quiet mkdocs does not count warnings, and --strict fails for none."""
    assert "make docs" in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    [build] = re.findall(r"mkdocs build.*", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert build.split()[2:] == ["--strict"]


def test_the_reference_is_what_the_code_says() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools" / "reference.py"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), f"{done.stdout}: python tools/reference.py --write"


@pytest.mark.skipif(shutil.which("man") is None, reason="no man here")
def test_the_manual_page_is_one() -> None:
    """groff warns of what it does not know; the text is that of the page."""
    command = ["man", "--warnings", "-E", "UTF-8", "-l", ROOT / "docs" / "flashbench.1"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "MANWIDTH": "200"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "flashbench report [OPTIONS] FILES…" in done.stdout
    assert "EXIT STATUS" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(target), link


def test_linked_files_are_kept_in_git() -> None:
    """What lies here only, as a build, would be a dead link for everyone else."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a clone")
    kept = {ROOT / name for name in listed.stdout.splitlines()}
    folders = {parent for path in kept for parent in path.parents}
    for page in PAGES:
        links = [
            link.partition("#")[0] for link in LINK.findall(prose(page)) if not re.match("[a-z]+:", link)
        ]
        assert {(page.parent / name).resolve() for name in links if name} <= kept | folders, page.name


def test_the_kernels_page_opens_with_what_is_there() -> None:
    """Before any table, in words, with files and functions that exist."""
    opening = (DOCS / "kernels.md").read_text(encoding="utf-8").partition("## Which there are")[0]
    assert len(opening.splitlines()) < 80
    assert not re.search(r"^\|", opening, flags=re.MULTILINE)
    named = re.findall(r"`(_\w+)\.(\w+)`", opening)
    assert len(named) > 15
    for file, what in named:
        source = (ROOT / "flashbench" / "kernels" / f"{file}.py").read_text(encoding="utf-8")
        assert what == "py" or re.search(rf"^def {what}\(", source, flags=re.MULTILINE), f"{file}.{what}"
    (inside,) = re.findall(r"`_flash_kernels.forward` these are ([^.]*)", opening)
    forward = (ROOT / "flashbench" / "kernels" / "_flash_kernels.py").read_text(encoding="utf-8")
    assert all(f" {name} = " in forward for name in re.findall(r"`(\w+)`", inside))
