"""Start-up is quick: what a shell user notices."""

from __future__ import annotations

import child
import pytest


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
    assert child.quickest(arguments, limit_s, 10)[1].processor_s < limit_s
