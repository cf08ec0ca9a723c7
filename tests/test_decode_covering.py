"""Every feature of a decode alone and every pair: the array has them, the kernels pass it, to the byte."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from tiers import tiers

from flashbench import covering, decode_cases, decode_configs, decoding, environment, iomodel
from flashbench._profilers import trace as tracing
from flashbench.cli import main
from flashbench.decode_cases import DECODING, FACTORS, SCALES, TILES, Case, array, point
from flashbench.errors import SpecError
from flashbench.iomodel import Append, Variant
from flashbench.kernels import _triton
from flashbench.problem import DTYPES

ALTERNATIVES = (
    decode_cases.QUERY_DTYPES,
    tuple(decode_cases.SPLITS),
    ("pages of 1", "pages of 16", "odd pages", "pages of tiles"),
    ("fp8 cache, a scale per tensor", "fp8 cache, a scale per head"),
    ("gqa", "mqa"),
    ("append", "no keys"),
)
EXCLUDE = {frozenset(pair) for names in ALTERNATIVES for pair in combinations(names, 2)}
"""Pairs that no case has."""


@pytest.mark.parametrize("scale", SCALES)
def test_each_factor_and_each_pair_is_there_at_as_many_points(scale: str) -> None:
    found = array(lambda _: True, SCALES[scale])
    at: dict[frozenset[str], set[Any]] = {one: set() for one in covering.sets(FACTORS) if one not in EXCLUDE}
    alone: dict[str, int] = dict.fromkeys(FACTORS, 0)
    for case in found.problems:
        names = DECODING.shown(case)
        for one in covering.sets(names):
            at[one].add((case.head_dim, case.dtype, point(case)))
        for name in names:
            alone[name] += names <= {name, case.dtype, *decode_cases.SPLITS}
    assert min(map(len, at.values())) >= SCALES[scale].points == found.points
    assert min(alone.values()) >= found.points
    assert found.covered == at.keys()
    assert SCALES["cuda"].points == 3


def test_the_values_that_are_asked_for_are_in_the_array_of_a_gpu() -> None:
    cases = array(lambda _: True, SCALES["cuda"]).problems
    assert {case.splits for case in cases} == {0, 1, 2, 7}
    assert {case.page_size for case in cases} >= {0, 1, 3, 16, 33, 128, 256}
    assert {case.head_dim for case in cases} >= {1, 16, 64, 80, 128, 192, 256}
    assert {len({*case.lengths}) > 1 for case in cases} == {True, False}
    assert {case.num_heads // case.num_kv_heads for case in cases} >= {1, 2, 3, 5, 8}


def test_the_array_is_fixed_and_holds_nothing_that_is_not_taken() -> None:
    def takes(case: Case) -> bool:
        return not case.fp8 and not (case.page_size and case.new)

    found = array(takes, SCALES["cuda"], dtypes=("fp16", "bf16"))
    assert found == array(takes, SCALES["cuda"], dtypes=("fp16", "bf16"))
    assert all(map(takes, found.problems))
    assert {case.dtype for case in found.problems} == {"fp16", "bf16"}
    assert frozenset(("odd pages", "append")) not in found.covered
    assert frozenset(("odd pages", "ragged")) in found.covered
    keys = [case.key for case in found.problems]
    assert len({*keys}) == len(keys)


def test_a_case_that_appends_more_than_a_sequence_has_is_refused() -> None:
    with pytest.raises(SpecError, match=r"new 4 is out of range.*at most"):
        Case(num_heads=1, num_kv_heads=1, head_dim=16, head_dim_v=16, lengths=(9, 3), dtype="fp16", new=4)


if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

TARGET = environment.target(None)


def array_here(points: int) -> covering.Array[Case]:
    """The array of this machine, at so many points."""
    scale = replace(SCALES[TARGET.type], points=points)
    return array(lambda case: decoding.why_not(case, TARGET) is None, scale)


WHOLE = array_here(1)
FAST = WHOLE.problems
MORE = [case for case in array_here(3).problems if case not in FAST]


@pytest.mark.parametrize("case", tiers(FAST, MORE), ids=lambda case: case.key)
def test_output_lse_and_cache_are_right_and_every_byte_is_in_the_model(case: Case) -> None:
    rows: list[dict[str, Any]] = []
    if TARGET.type == "cuda":
        rows.append(decoding.check_case(case, TARGET))
        assert rows[0]["status"] == "ok", rows[0]["reason"]
        return
    launches = tracing.trace(lambda: rows.append(decoding.check_case(case, TARGET)))
    [row] = rows
    assert row["status"] == "ok", row["reason"]
    assert row["max_abs_error"].keys() == row["budget"].keys() == {"o", "lse", "cache"}
    steps = modelled(case, row["split_keys"])
    assert [launch.kernel for launch in launches] == [step.name for step in steps]
    for launch, step in zip(launches, steps, strict=True):
        # the interpreter computes bf16 in fp32, as which it is read and written
        wide = {"q", "o"} | (set() if case.fp8 else {"k", "v"}) if case.dtype == "bf16" else set()
        wide = set() if launch.kernel == "append" else wide
        for kind, counted in (
            ("read", "loaded_bytes"),
            ("write", "stored_bytes"),
            ("atomic", "atomic_bytes"),
        ):
            traced = {name.lower(): getattr(one, counted) for name, one in launch.arguments.items()}
            said = {name: count * (2 if name in wide else 1) for name, count in getattr(step, kind).items()}
            assert nonzero(traced) == nonzero(said), (launch.kernel, kind)
        assert launch.flops == step.flops
        assert launch.kernel == "merge" or launch.programs == step.ctas


def nonzero(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


def modelled(case: Case, split_keys: int) -> list[Any]:
    """The steps of the model of what a case launches."""
    element = DTYPES[case.dtype].bytes
    steps: list[Any] = []
    if case.new:
        asked = Append(
            used=tuple(n - case.new for n in case.lengths), new=case.new, capacity=max(case.lengths),
            num_kv_heads=case.num_kv_heads, head_dim=case.head_dim, head_dim_v=case.head_dim_v,
            dtype_bytes=4 if case.fp8 else element,  # an fp8 cache is given fp32 in the interpreter
            cache_bytes=1 if case.fp8 else element, page_size=case.page_size,
        )  # fmt: skip
        steps.append(iomodel.append(asked))
    group = case.num_heads // case.num_kv_heads
    block_q = decode_configs.block_q(group * case.queries, case.shape.math)
    tiles = {"fwd_block_q": block_q, "fwd_block_k": TILES.block_k, "split_block_q": block_q,
             "split_block_k": split_keys}  # fmt: skip
    variant = Variant(page_size=case.page_size, cache_bytes=int(bool(case.fp8)), announced=case.announced)
    problem = replace(case.problem, dtype=case.dtype)
    row = iomodel.estimate("flash-decode", problem, "fwd", tiles=tiles, variant=variant)
    return [*steps, *row.steps]


def smallest(factor: str) -> Case:
    """Of the cases of FAST that show the factor, the one with the least to do; contiguous where there is one:
    a fault may look up a page that no table has.
    """
    showing = (case for case in FAST if factor in DECODING.shown(case))
    return min(showing, key=lambda case: (case.page_size > 0, sum(case.lengths)))


def with_cache(**changed: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """launches of a cache of which fields are changed so."""

    def fault(real: Any) -> Any:
        def wrong(q: Any, cache: Any, call: Any) -> Any:
            fields = {name: change(getattr(cache, name)) for name, change in changed.items()}
            return real(q, replace(cache, **fields), call)

        return wrong

    return fault


def without_the_last_split(real: Any) -> Any:
    def wrong(q: Any, cache: Any, call: Any) -> Any:
        o, lse, (first, merge) = real(q, cache, call)
        at = merge.kernel.arg_names.index("num_splits")
        args = (*merge.args[:at], merge.args[at] - 1, *merge.args[at + 1 :])
        return o, lse, (first, replace(merge, args=args))

    return wrong


def unwritten(real: Any) -> Any:
    return lambda *args: (*real(*args)[:2], ())


def base_two(real: Any) -> Any:
    def wrong(*args: Any) -> Any:
        o, lse, launches = real(*args)

        class Last:
            def run(self) -> None:
                lse.mul_(math.log2(math.e))

        return o, lse, (*launches, Last())

    return wrong


def not_causal(real: Any) -> Any:
    return lambda q, cache, call: real(q, cache, replace(call, causal=False))


def late(real: Any) -> Any:
    return lambda cache, k, v: real(replace(cache, seqused_k=cache.seqused_k + 1), k, v)


def over(real: Any) -> Any:
    """One number of another row of the cache is overwritten."""

    def wrong(cache: Any, k: Any, v: Any) -> None:
        real(cache, k, v)
        cache.v[-1, -1, -1, -1] = 0.0

    return wrong


FAULTS: dict[str, tuple[str, str, Callable[[Any], Any], str]] = {
    "a row past the end is read": ("launches", "fp16", with_cache(seqused_k=lambda x: x + 1), "o"),
    "pages in another order": ("launches", "pages of 1", with_cache(v=lambda x: x.roll(1, 0)), "o"),
    "keys of another head": ("launches", "gqa", with_cache(k=lambda x: x.roll(1, 1)), "lse"),
    "scales of another cache": (
        "launches", "fp8 cache, a scale per head",
        with_cache(k_descale=lambda x: x * 2, v_descale=lambda x: x * 2), "o",
    ),
    "one split is not merged": ("launches", "7 splits", without_the_last_split, "lse"),
    "outputs are not written": ("launches", "bf16", unwritten, "o"),
    "lse to base 2": ("launches", "fp32", base_two, "lse"),
    "later tokens are seen": ("launches", "queries", not_causal, "o"),
    "new keys one row too late": ("append", "append", late, "cache"),
    "another row is overwritten": ("append", "append", over, "cache"),
}  # fmt: skip
"""What goes wrong: in which function, in a case that shows which factor, and the tensor that is named."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught_by_a_case_that_shows_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, factor, fault, tensor = FAULTS[name]
    decode = kernels_of()
    case = smallest(factor)
    assert decoding.check_case(case, TARGET)["status"] == "ok"
    monkeypatch.setattr(decode, where, fault(getattr(decode, where)))
    row = decoding.check_case(case, TARGET)
    assert row["status"] == "wrong", row
    assert f"{tensor} is off by" in row["reason"]


def kernels_of() -> Any:
    """The module of the kernels, as this machine runs them."""
    return _triton.load(TARGET.type, "_flash_decode")


def few(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """Three cases are all that a command finds."""
    found = [smallest(name) for name in ("fp16", "append", "pages of 16")]
    monkeypatch.setattr(decode_cases, "array", lambda *_: replace(WHOLE, problems=tuple(found)))
    return found


def run(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["decode", "--pairs", *line.split()])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return int(left.value.code or 0), out, err


def test_the_command_checks_the_array_says_what_it_covers_and_keeps_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, path = few(monkeypatch), tmp_path / "pairs.json"
    code, out, err = run(f"--check --out {path}", capsys)
    assert code == 0, err
    assert re.search(
        r"note: flash-decode: 2\d features and \d+ pairs of them in 3 problems, each at \d or", err
    )
    assert re.findall(r"flash-decode +\w+ +(\w+) +\d", out)[:3] == ["o", "lse", "cache"]
    document = json.loads(path.read_text(encoding="utf-8"))
    assert (document["type"], document["seed"], document["points"]) == ("decode", 0, 1)
    assert "append + odd pages" in document["covered"]
    assert [row["case"] for row in document["rows"]] == [case.key for case in found]
    assert all(row["max_abs_error"]["cache"] == row["budget"]["cache"] == 0 for row in document["rows"])
    code, out, err = run("--check --json -q --seed 3 --dtype fp16,bf16", capsys)
    rows = json.loads(out)
    assert (code, err, len(rows)) == (0, "", 3)
    assert all(row["max_abs_error_o"] <= row["budget_o"] for row in rows)
    assert rows[0]["max_abs_error_o"] != document["rows"][0]["max_abs_error"]["o"], "another seed"
    _, out, _ = run("--check --csv -q", capsys)
    assert out.count("\n") == 1 + 3


def test_a_wrong_case_and_one_that_fails_end_the_command_with_exit_code_5(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few(monkeypatch)
    decode = kernels_of()
    monkeypatch.setattr(decode, "append", late(decode.append))
    code, out, err = run("--check", capsys)
    assert code == 5
    assert "wrong or failed" in out
    assert "error: 1 of 3 cells are wrong or failed; the first: " in err

    def broken(*_: object) -> None:
        raise RuntimeError("out of\nshared memory")

    monkeypatch.setattr(decode, "append", broken)
    code, out, err = run("--check --json", capsys)
    assert code == 5
    assert "RuntimeError: out of shared memory" in json.loads(out)[1]["reason"]


def test_a_stop_tells_what_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few(monkeypatch)
    real, done = decoding.check_case, list[Case]()

    def stopped(case: Case, *args: Any) -> Any:
        if done:
            raise KeyboardInterrupt
        done.append(case)
        return real(case, *args)

    monkeypatch.setattr(decoding, "check_case", stopped)
    code, out, err = run(f"--check --out {tmp_path / 'pairs.json'}", capsys)
    assert code == 130
    assert "interrupted; 1 of 3 cells were checked, 0 are wrong or failed" in err
    assert out.count("flash-decode") == 3
    assert len(json.loads((tmp_path / "pairs.json").read_text())["rows"]) == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "error: --pairs: is of --check, nothing is timed; accepted: --check beside it"),
        (
            "--check --kv-lens 64",
            "error: --kv-lens: has no meaning with --pairs; accepted: --dtype, --device",
        ),
        ("--check --counters x", "error: --counters: has no meaning with --pairs"),
        ("--check --dtype fp8", "error: --dtype 'fp8' is not known"),
        ("--check --seed x", "error: --seed 'x': "),
        ("--check --json --csv", "error: --json and --csv exclude each other"),
        ("--check --out no/such/folder/x", "error: --out 'no/such/folder/x': not a file in a folder"),
    ],
)
def test_bad_input_is_one_line(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(line, capsys)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(said)


def test_a_dtype_that_is_taken_nowhere_here_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if TARGET.type == "cuda":
        pytest.skip("a GPU takes every dtype")
    monkeypatch.setattr(covering, "DRAWS", 1)
    code, _, err = run("--check --dtype tf32", capsys)
    assert code == 2
    assert "error: --dtype: flash-decode takes none of tf32 here; accepted: another --dtype" in err
