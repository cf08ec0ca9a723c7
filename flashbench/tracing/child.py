"""The process that interprets one cell: its question as JSON on stdin, its answer the last line of stdout.

TRITON_INTERPRET=1 python -m flashbench.tracing.child < QUESTION
"""

from __future__ import annotations

import json
import sys

from flashbench import tracing
from flashbench.problem import Cell


def main() -> None:
    """Answer with what trace_cell says of one K/V head of the cell."""
    asked = json.load(sys.stdin)
    found = tracing.trace_cell(
        Cell.from_json(asked["cell"]), asked["config"],
        limit=asked["limit"], seed=asked["seed"], one_head=True,
    )  # fmt: skip
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
