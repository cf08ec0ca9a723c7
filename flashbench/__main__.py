"""``python -m flashbench``."""

from __future__ import annotations

from flashbench.cli import main

if __name__ == "__main__":
    main()
