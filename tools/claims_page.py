"""The tables of docs/claims.md anew, from the results files that they name.

python tools/claims_page.py [--write]

Each stands between ``<!-- claims OPTIONS -->`` and ``<!-- /claims -->``, and is what ``flashbench claims``
prints with these options and --markdown. Without --write nothing is changed; exit code 1 says that the page
would be.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from flashbench import claims  # noqa: E402

TABLE = re.compile(r"(<!-- claims ?([^>]*?) ?-->\n).*?(\n<!-- /claims -->)", flags=re.DOTALL)


def tables(text: str, root: Path = ROOT) -> str:
    """A page with its tables made anew."""
    return TABLE.sub(lambda found: found[1] + _table(found[2].split(), root) + found[3], text)


def _table(given: list[str], root: Path) -> str:
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", default="reports/h100-sxm")
    parser.add_argument("--measured", action="store_true")
    options = parser.parse_args(given)
    judged = claims.judge(claims.load(), root / options.results, options.results)
    return claims.markdown(one for one in judged if one.of_a_card or not options.measured)


def main(argv: list[str] | None = None, page: Path = ROOT / "docs" / "claims.md") -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="change the page")
    write = parser.parse_args(argv).write
    old = page.read_text(encoding="utf-8")
    if (new := tables(old)) == old:
        return 0
    if write:
        page.write_text(new, encoding="utf-8")
        return 0
    print(f"{page} would change; --write changes it", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
