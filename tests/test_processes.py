"""The watch over processes that may hang."""

from __future__ import annotations

import os
import sys
import time

import processes

STEPS = "import time\nfor n in range(6):\n    time.sleep(0.5)\n    print(n, flush=True)\n"


def test_a_process_that_gets_on_may_take_longer_than_one_step() -> None:
    code, said = processes.watched([sys.executable, "-c", STEPS + "raise SystemExit(3)"], os.environ, 2.5)
    assert (code, said.split()) == (3, [*"012345"])


def test_a_process_that_goes_silent_is_ended() -> None:
    start = time.monotonic()
    hangs = STEPS.replace("0.5", "0.01") + "time.sleep(60)"
    code, said = processes.watched([sys.executable, "-c", hangs], os.environ, 2.5)
    assert (code, said.split()) == (None, [*"012345"])
    assert time.monotonic() - start < 30
