"""Every feature alone and every pair of features: the array has them, and the bundled kernels pass it."""

from __future__ import annotations

import importlib.util
import re
from itertools import combinations
from typing import Any

import pytest

from flashbench import covering, environment, kernels, runner
from flashbench.cli import main
from flashbench.covering import FACTORS, SCALES, array, point, shown
from flashbench.kernels import Implementation
from flashbench.problem import DTYPES, FEATURES, Cell, Problem

EXCLUDE = {
    *(frozenset(pair) for pair in combinations(DTYPES, 2)),
    *(
        frozenset((name, dtype))
        for name in ("fp8-scale", "hadamard")
        for dtype in DTYPES
        if "fp8" not in dtype
    ),
    *map(frozenset, (("causal", "top-left"), ("bias", "varlen"), ("block-mask", "varlen"))),
}
"""Pairs that no problem has."""


@pytest.mark.parametrize("scale", SCALES)
def test_each_factor_and_each_pair_is_there_at_as_many_points(scale: str) -> None:
    found = array(lambda _: True, SCALES[scale])
    at: dict[frozenset[str], set[Any]] = {one: set() for one in covering.sets(FACTORS) if one not in EXCLUDE}
    alone: dict[str, int] = dict.fromkeys(FACTORS, 0)
    for p in found.problems:
        names = shown(p)
        for one in covering.sets(names):
            at[one].add((p.head_dim, p.dtype, point(p)))
        for name in names:
            alone[name] += names <= {name, p.dtype}
    assert min(map(len, at.values())) >= SCALES[scale].points == found.points
    assert alone.pop("fp8-scale") + alone.pop("hadamard") >= 2 * found.points
    assert min(alone.values()) >= found.points
    assert found.covered == at.keys()


def test_what_a_problem_shows_is_what_it_asks_of_an_implementation() -> None:
    assert set(FEATURES.values()) <= FACTORS.keys()
    for p in array(lambda _: True, SCALES["cuda"]).problems:
        assert p.features - {"fp8"} == shown(p) & set(FEATURES.values()), p.key


def test_the_array_is_fixed_and_holds_nothing_that_is_not_taken() -> None:
    def takes(p: Problem) -> bool:
        return not p.sinks and p.dtype != "fp8" and not (p.alibi and p.causal)

    found = array(takes, SCALES["cuda"], dtypes=("fp16", "fp8"))
    assert found == array(takes, SCALES["cuda"], dtypes=("fp16", "fp8"))
    assert all(map(takes, found.problems))
    assert {p.dtype for p in found.problems} == {"fp16"}
    assert not any("sinks" in one or {"alibi", "causal"} <= one for one in found.covered)
    assert frozenset(("alibi", "top-left")) not in found.covered
    assert frozenset(("alibi", "window")) in found.covered


def test_a_limit_on_a_size_alone_leaves_no_pair_out() -> None:
    """As of flash-v3: odd head dims above 128 alone, and v no wider than q and k."""

    def takes(p: Problem) -> bool:
        return p.head_dim in (64, 192, 224) and p.head_dim_v <= 64

    found = array(takes, SCALES["cuda"], dtypes=("fp16",))
    assert frozenset(("odd head dim", "head_dim_v")) in found.covered
    assert all(map(takes, found.problems))


if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

TARGET = environment.target(None)
PASSES = {
    "flash-v2": "bwd",
    "flash-v1": "bwd",
    "flash-v2-atomic": "bwd",
    "flash-fp8": "fwd",
    "flash-decode": "fwd",
}


def cells() -> list[Cell]:
    """The small array of every bundled implementation."""

    def of(row: Implementation, pass_: str) -> list[Cell]:
        assert row.why_unavailable(TARGET) is None
        found = array(lambda p: row.why_unsupported(p, pass_, TARGET) is None, SCALES["cpu"])
        return [Cell(implementation=row.name, problem=p, pass_=pass_) for p in found.problems]

    return [cell for name, pass_ in PASSES.items() for cell in of(kernels.get(name), pass_)]


@pytest.mark.parametrize("cell", cells(), ids=lambda cell: cell.key)
@pytest.mark.usefixtures("poisoned")
def test_output_gradients_and_lse_are_within_the_budget(cell: Cell) -> None:
    records: list[Any] = []
    options = runner.RunOptions(time=False, environment={})
    runner.run_cells([cell], TARGET, options, records.append)
    [record] = records
    assert record.status == "checked", record.reason
    gradients = {f"d{name}" for name in ("q", "k", "v")} if cell.pass_ == "bwd" else set()
    gradients |= {f"d{name}" for name in ("bias", "sinks") if getattr(cell.problem, name) and gradients}
    assert record.accuracy.max_abs_error.keys() == {"o", "lse", *gradients}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--seqlens 64", "error: --seqlens: has no meaning with --pairs; accepted: --impls, --dtypes"),
        ("--softcap 3", "error: --softcap: has no meaning with --pairs"),
        ("--impls flash-fp8 --dtypes fp32", "error: --pairs: no implementation takes any of these dtypes"),
    ],
)
def test_bad_input_is_one_line(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["check", "--pairs", "--device", "cpu", *line.split()])
    assert left.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(said)


def test_the_command_checks_the_array_and_says_what_it_covers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["check", "--pairs", "--device", "cpu", "--impls", "naive", "--dtypes", "bf16"])
    out, err = capsys.readouterr()
    assert left.value.code == 0, err
    assert re.search(
        r"note: naive: \d+ features and \d+ pairs of them in \d+ problems, each at 1 or more", err
    )
    assert {"dbias", "dsinks"} <= set(re.findall(r"\w+", out))
