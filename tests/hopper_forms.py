"""Forms of flash-v3's forward that its table does not have, compiled for sm_90 in processes of their own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from flashbench import hopper_configs
from flashbench.hopper_configs import Tiles
from flashbench.kernels import _compile

Asked = tuple[_compile.Task, Tiles]


def compile_form(asked: Asked) -> _compile.Compiled:
    """Compile in this process, which takes the tiles for the table's from then on."""
    task, tiles = asked
    hopper_configs.choose = lambda *_, **__: tiles  # type: ignore[assignment]
    return _compile.compile_one(task, inspect=True)


def compile_forms(asked: Sequence[Asked]) -> dict[Asked, _compile.Compiled]:
    """What becomes of each, of which a process compiles one: a task's launch is remembered."""
    workers = min(len(asked), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(
        workers, get_context("spawn"), _compile._begin_worker, max_tasks_per_child=1
    ) as pool:
        return dict(zip(asked, pool.map(compile_form, asked), strict=True))
