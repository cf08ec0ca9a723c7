"""Options of a problem: refused in a line where wrong, silent where off, in the key and in files where on."""

from __future__ import annotations

import json

import pytest
from attention import problem

from flashbench import kernels
from flashbench.errors import FlashbenchError
from flashbench.kernels import unsupported_features
from flashbench.kernels._inputs import alibi_slopes
from flashbench.problem import FEATURES, Cell, Problem, packed

ON = {
    "window": (4, 0), "softcap": 30.0, "alibi": True, "bias": "1hqk", "sinks": True, "dropout_p": 0.1,
    "block_mask": "random:0.3", "layout": "bshd", "deterministic": True,
}  # fmt: skip
"""A value of each option that turns it on."""


def varied() -> list[Problem]:
    fp8 = {"dtype": "fp8", "fp8_scale": "head", "hadamard": True}
    return [
        problem(), problem(alignment="top-left"), problem(**fp8), packed(problem(), [(3, 4), (5, 5)]),
        *(problem(**{name: value}) for name, value in ON.items()), problem(**ON),
    ]  # fmt: skip


@pytest.mark.parametrize("p", varied(), ids=lambda p: p.key)
def test_a_file_gives_back_what_it_was_given(p: Problem) -> None:
    cell = Cell(implementation="naive", problem=p, pass_="bwd")
    assert Cell.from_json(json.loads(json.dumps(cell.to_json()))) == cell


def test_what_is_off_is_not_in_files_and_what_is_on_makes_another_key() -> None:
    cell = Cell(implementation="naive", problem=problem(), pass_="fwd")
    assert set(cell.to_json()["problem"]) == {
        "batch", "num_heads", "num_kv_heads", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "dtype",
        "causal",
    }  # fmt: skip
    assert problem().key == "b2 h4 n16 d8 fp32 causal"
    keys = [p.key for p in varied()]
    assert len(set(keys)) == len(keys)
    assert problem(**ON).key == (
        "b2 h4 n16 d8 fp32 causal w4,0 dropout0.1 softcap30 alibi sinks deterministic bias=1hqk"
        " block_mask=random:0.3 bshd"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"softcap": -1.0}, "softcap -1.0 is out of range"),
        ({"softcap": float("nan")}, "softcap nan is out of range"),
        ({"bias": "hqk"}, "bias 'hqk' is no shape; it must be bhqk with 1"),
        ({"bias": "bkqh"}, "bias 'bkqh' is no shape"),
        ({"block_mask": "random:2"}, "density from 0 to 1"),
        ({"block_mask": "diagonal"}, "block_mask 'diagonal' is not known"),
        ({"layout": "sbhd"}, "sbhd"),
        ({"fp8_scale": "tensor"}, "fp8_scale is of fp8 alone; the dtype is fp32"),
        ({"hadamard": True, "dtype": "bf16"}, "hadamard is of fp8 alone; the dtype is bf16"),
        ({"fp8_scale": "row", "dtype": "fp8"}, "row"),
    ],
    ids=str,
)
def test_a_wrong_option_is_named(changes: dict, message: str) -> None:
    with pytest.raises(FlashbenchError, match=message) as raised:
        problem(**changes)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("option", [{"bias": "bhqk"}, {"block_mask": "causal"}])
def test_a_packed_batch_has_no_common_positions(option: dict) -> None:
    with pytest.raises(FlashbenchError, match="packed batch"):
        packed(problem(**option), [(3, 4), (5, 5)])


def test_slopes_of_alibi() -> None:
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    assert alibi_slopes(1) == (2.0**-8,)
    # of 12 heads: those of 8, then every second of 16's
    assert alibi_slopes(12) == (*alibi_slopes(8), *(2.0 ** (-i / 2) for i in (1, 3, 5, 7)))


def test_features_are_what_is_on_beyond_causal() -> None:
    assert problem().features == frozenset()
    assert problem(alignment="top-left").features == {"top-left"}
    assert problem(alignment="top-left", causal=False).features == frozenset()
    assert problem(dtype="fp8").features == {"fp8"}
    assert problem(**ON).features == set(FEATURES.values()) - {"top-left", "varlen"}
    assert packed(problem(), [(1, 1), (2, 2)]).features == {"varlen"}


def test_a_refusal_names_every_feature_that_is_missing() -> None:
    p = problem(softcap=1.0, alibi=True, layout="bshd")
    assert unsupported_features(p, {"bshd"}) == "it does not take alibi, softcap"
    assert unsupported_features(p, {"bshd", "alibi", "softcap"}) is None


@pytest.mark.parametrize("name", sorted(kernels.registry()))
@pytest.mark.parametrize("p", varied(), ids=lambda p: p.key)
def test_every_implementation_takes_a_feature_or_says_which_it_lacks(name: str, p: Problem) -> None:
    row = kernels.registry()[name]
    reason = row.why_unsupported(p, "fwd", kernels.Target())
    if reason is not None and reason.startswith("it does not take"):
        assert set(reason.removeprefix("it does not take ").split(", ")) <= p.features


def test_rows_are_those_of_all_sequences() -> None:
    assert problem(batch=3, seqlen_q=5, seqlen_k=7).rows == (15, 21)
    assert packed(problem(), [(3, 4), (0, 5), (2, 0)]).rows == (5, 9)
