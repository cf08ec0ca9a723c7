"""A hook of mkdocs: links from docs/ to the rest of the repository lead to where it is hosted."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")


def on_page_markdown(text: str, *, page, config, files) -> str:
    """``](../README.md)`` becomes the file's page at repo_url; what is not there is left, and is an error."""

    def hosted(link: re.Match[str]) -> str:
        target = link[1].rstrip("/")
        if not (ROOT / target).exists() or target.startswith("docs/"):
            return link[0]
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"]({config.repo_url}/{kind}/main/{target}"

    return OUTSIDE.sub(hosted, text)
