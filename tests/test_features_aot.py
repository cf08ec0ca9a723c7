"""Every kernel compiles for NVIDIA's and AMD's GPUs, plain and with each feature, and spills no register.

No GPU is needed: Triton compiles for an architecture by name. Shared memory is test_flash_aot's.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
from attention import FEATURES, problem
from test_flash_aot import LIMITS

from flashbench import kernels
from flashbench._profilers import sass
from flashbench.kernels import Target, _compile
from flashbench.problem import Problem

triton = pytest.importorskip("triton")

ARCHITECTURES: dict[str, dict[str, Any]] = {
    **{
        f"sm_{10 * x + y}": {"capability": (x, y), "limit": LIMITS[x, y]}
        for x, y in ((8, 0), (9, 0), (10, 0))
    },
    "gfx942": {"capability": (9, 4), "limit": 65536, "gpu": "gfx942"},
}
"""Compute capability as torch has it and shared memory per block in bytes (gfx942: CDNA 3 ISA guide)."""

SPILLS: dict[tuple[str, str, int], int] = {
    ("fwd", "sm_80", 64): 128,
    ("dq", "sm_80", 64): 31,
    ("dkdv", "sm_80", 64): 241,
    ("atomic", "sm_80", 64): 2,
    ("dq", "sm_90", 64): 24,
    ("dkdv", "sm_90", 64): 152,
    ("fwd", "sm_90", 128): 28,
    ("dq", "sm_90", 128): 4,
    ("dkdv", "sm_90", 128): 198,
    ("fwd", "sm_100", 64): 853,
    ("delta", "sm_100", 64): 10,
    ("dkdv", "sm_100", 64): 251,
    ("atomic", "sm_100", 64): 130,
    ("dkdv", "gfx942", 64): 11,
    ("atomic", "gfx942", 64): 9,
    ("v1_fwd", "gfx942", 64): 85,
    ("v1_bwd", "gfx942", 64): 51,
}
"""Kernel, architecture, head dim → the most instructions (gfx942: registers) that any variant spills.

As Triton 3.9 compiles them, for four query heads per K/V head. What is not listed spills nothing.
"""

PLAIN_SPILLS: dict[tuple[str, str, int], int] = {
    ("dq", "sm_80", 64): 6, ("dkdv", "sm_80", 64): 136, ("atomic", "sm_80", 64): 2,
    ("dq", "sm_90", 64): 10, ("dkdv", "sm_90", 64): 79, ("dkdv", "sm_90", 128): 150,
    ("delta", "sm_100", 64): 10, ("dkdv", "sm_100", 64): 93, ("atomic", "sm_100", 64): 130,
    ("dkdv", "gfx942", 64): 4, ("atomic", "gfx942", 64): 9,
    ("v1_fwd", "gfx942", 64): 85, ("v1_bwd", "gfx942", 64): 51,
}  # fmt: skip
"""The same of variants without a feature but a causal mask, which are most runs."""

SPARSE_SPILLS = SPILLS | {("fwd", "sm_90", 128): 34, ("dq", "sm_90", 128): 6, ("dkdv", "gfx942", 64): 58}
"""The same with a block mask, whose bits are looked at beside the scores."""

HIGH_CAP_SPILLS = SPILLS | {("dkdv", "sm_90", 64): 179}
"""The same where the softcap is high."""

CANNOT = {("dkdv", "gfx942", "dropout")}
"""What Triton 3.9 does not compile: its AMD backend puts a mask of one bit per element in shared memory."""

LONG = {
    "varlen": {"batch": 3, "lengths": ((4096, 4096), (0, 3), (1000, 2000))},
    "high cap": {"softcap": 1000.0},
}
"""Features whose values are other ones where sequences are long, and a softcap whose tanh takes longer."""


def asked(head_dim: int, feature: str) -> Problem:
    shape = {"num_heads": 16, "num_kv_heads": 4, "seqlen_q": 4096, "seqlen_k": 4096, "dtype": "bf16",
             "head_dim": head_dim, "head_dim_v": head_dim, "causal": feature != "plain"}  # fmt: skip
    return problem(**{**shape, **(LONG.get(feature) or FEATURES.get(feature, {}))})


def tasks() -> list[tuple[_compile.Task, str, str]]:
    """(task, architecture, feature) of all that each implementation launches for what it takes, each once."""
    found: dict[Any, tuple[_compile.Task, str, str]] = {}
    everything = itertools.product(
        ("flash-v2", "flash-v1", "flash-v2-atomic"),
        ARCHITECTURES,
        (64, 128),
        ("plain", "causal", "high cap", *FEATURES),
    )
    for name, architecture, head_dim, feature in everything:
        card, p = ARCHITECTURES[architecture], asked(head_dim, feature)
        target = Target(device="cuda", capability=card["capability"])
        if kernels.get(name).why_unsupported(p, "bwd", target) or (head_dim > 64 and architecture != "sm_90"):
            continue
        whole = _compile.Task("", p, implementation=name, **card)
        for one in _compile.rehearse(whole, "bwd"):
            task = replace(whole, kernel=one.name), architecture, feature
            found.setdefault((architecture, one.key), task)
    return list(found.values())


def spills(done: _compile.Compiled) -> int:
    """Instructions that spill, of an AMD GPU registers."""
    if done.task.gpu:
        return sum(map(int, re.findall(r"\.vgpr_spill_count:\s+(\d+)", done.sass)))
    return sass.count(done.sass).spills


def assert_compiled(done: _compile.Compiled, architecture: str) -> None:
    task = done.task
    assert not done.error
    assert done.shared_bytes <= (task.limit or 0)
    assert done.sass or done.unread
    if done.sass and triton.__version__.startswith("3.9."):
        p = task.problem
        known = SPARSE_SPILLS if p.block_mask else SPILLS if p.options else PLAIN_SPILLS
        known = HIGH_CAP_SPILLS if p.softcap == LONG["high cap"]["softcap"] else known
        assert spills(done) <= known.get((task.kernel, architecture, task.problem.head_dim), 0)


@pytest.mark.slow
def test_every_kernel_compiles_for_an_amd_gpu() -> None:
    """The plain ones: features are the slow test's."""
    found = [
        task for task, architecture, feature in tasks() if (architecture, feature) == ("gfx942", "plain")
    ]
    card, step = ARCHITECTURES["gfx942"], replace(asked(128, "plain"), seqlen_q=1)
    found += [
        _compile.Task(name, step, implementation="flash-decode", **card) for name in ("decode", "merge")
    ]
    fp8 = replace(asked(64, "causal"), dtype="fp8")
    found.append(_compile.Task("fwd", fp8, implementation="flash-v2-fp8", **card))
    every = {"fwd", "delta", "dq", "dkdv", "v1_fwd", "v1_bwd", "atomic", "decode", "merge"}
    assert every <= {task.kernel for task in found}
    for done in _compile.compile_all(found, inspect=True):
        assert_compiled(done, "gfx942")
        assert "gfx942" in done.sass


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_variant_compiles_and_spills_no_more_than_known(architecture: str) -> None:
    found = [
        (task, feature)
        for task, where, feature in tasks()
        if where == architecture and (task.kernel, where, feature) not in CANNOT
    ]
    assert {feature for _, feature in found} >= {
        "window",
        "softcap",
        "high cap",
        "alibi",
        "bias",
        "dropout",
        "sinks",
        "varlen",
        "block-mask",
    }
    for done in _compile.compile_all([task for task, _ in found], inspect=True):
        assert_compiled(done, architecture)
