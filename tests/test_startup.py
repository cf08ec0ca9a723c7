"""Start-up is quick: what a shell user notices."""

from __future__ import annotations

import child
import pytest


def seconds(arguments: list[str]) -> float:
    """Least processor time of five runs of a command, each in a process of its own."""
    usages = [child.run(arguments)[1] for _ in range(5)]
    return min(usage.processor_s for usage in usages)


@pytest.mark.parametrize(
    ("arguments", "limit_s"),
    [
        (["--help"], 0.25),
        (["io-model", "--sram", "192KB"], 0.5),
        (["kv-cache", "--model", "llama-3-70b"], 0.5),
    ],
    ids=["help", "io-model", "kv-cache"],
)
def test_starts_within_its_limit(arguments: list[str], limit_s: float) -> None:
    assert seconds(arguments) < limit_s
