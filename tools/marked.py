"""Parts of pages that a tool writes from the committed results, between marks that name the tool."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def put(page: Path, part: str) -> None:
    """Write a part, whose first and last line are its marks, in place of what stands between them."""
    begin, *_, end = part.splitlines()
    head, found, rest = page.read_text(encoding="utf-8").partition(f"{begin}\n")
    _, closed, tail = rest.partition(f"\n{end}\n")
    if not (found and closed):
        sys.exit(f"{page} has no part from {begin} to {end}")
    page.write_text(f"{head}{part}\n{tail}", encoding="utf-8")


def main(about: str | None, render: Callable[[], str], page: Path) -> None:
    """Print the part, or write it with --write. about: the tool's docstring."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"put it into {page.name}")
    if parser.parse_args().write:
        put(page, render())
    else:
        print(render())
