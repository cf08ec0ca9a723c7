"""What all tests share: GPU tests skip without one, memory that nobody wrote is NaN on request, and
Hypothesis draws the same examples each time, however long one takes on a busy machine.

``--hypothesis-profile=others`` draws others.
"""

from __future__ import annotations

import os
import random
import signal
import sys

# With several test processes on few cores, torch's own threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Parallel test workers are given a terminal width; output off a terminal is tested as users see it.
os.environ.pop("COLUMNS", None)
# A background job of a shell ignores Ctrl-C, and so would commands that are run in this process or by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import pytest

from flashbench import environment, kernels

# Triton compiles or interprets for the life of a process, as decided when it is first imported, and any
# test may import it: without a GPU it is settled here, so that the kernels' tests find an interpreter.
if environment.gpu_status().kind != "ok":
    kernels.get("flash").why_unavailable(kernels.Target())

patient = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("others", patient)
hypothesis.settings.register_profile("same", patient, derandomize=True, database=None)
hypothesis.settings.load_profile("same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    from flashbench.environment import gpu_status

    status = gpu_status()
    if status.kind != "ok":
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {status.message}"))


def pytest_runtest_setup() -> None:
    """Numbers that a test draws without a seed are the same ones, whatever ran before it in its process."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """On a GPU the log says of what it is, so that it can be kept (reports/)."""
    if environment.gpu_status().kind != "ok" or hasattr(terminalreporter.config, "workerinput"):
        return
    about = environment.collect(environment.target("cuda"))
    names = ("device_name", "driver", "torch", "triton", "source_hash", "git_commit")
    terminalreporter.write_line("ran on " + ", ".join(f"{name} {about[name]}" for name in names))


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty and its relatives return NaN (the largest integer): a result never written shows."""
    import torch

    def poison(make):
        def poisoned_make(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
            elif tensor.dtype != torch.bool and not tensor.is_complex():
                tensor.fill_(torch.iinfo(tensor.dtype).max)
            return tensor

        return poisoned_make

    for owner, name in (
        (torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"),
        (torch.Tensor, "new_empty"), (torch.Tensor, "new_empty_strided"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))
