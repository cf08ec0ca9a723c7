"""Options and config files become the same cells, in the same order, or an error that says why."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from flashbench import configfile, sweep
from flashbench.errors import FlashbenchError, SpecError, UsageError
from flashbench.sweep import Sweep

IMPLS = ("naive", "sdpa", "flash")


def small(**changes: object) -> Sweep:
    axes: dict[str, object] = {
        "seqlens": (512, 256), "head_dims": (64, 32), "dtypes": ("fp32", "bf16"), "impls": ("naive", "flash"),
        "causal": (False, True), "passes": ("fwd", "bwd"), "batch": 1, "heads": 4,
    }  # fmt: skip
    return Sweep(**{**axes, **changes})  # type: ignore[arg-type]


def test_cells_come_in_the_stated_order() -> None:
    found = [
        (c.problem.dtype, c.problem.head_dim, c.problem.causal, c.problem.seqlen_q, c.pass_, c.implementation)
        for c in small().cells()
    ]
    expected = itertools.product(
        ("fp32", "bf16"), (64, 32), (False, True), (512, 256), ("fwd", "bwd"), ("naive", "flash")
    )
    assert found == list(expected)


def test_batch_and_heads_follow_from_tokens_and_hidden() -> None:
    cells = small(batch=None, tokens=1024, heads=None, hidden=2048, seqlens=(256, 512, 4096)).cells()
    seen = {(c.problem.seqlen_q, c.problem.batch, c.problem.head_dim, c.problem.num_heads) for c in cells}
    assert {(n, b) for n, b, _, _ in seen} == {(256, 4), (512, 2), (4096, 1)}
    assert {(d, h) for _, _, d, h in seen} == {(64, 32), (32, 64)}


def test_hidden_smaller_than_the_head_dim_gives_one_head() -> None:
    assert small(heads=None, hidden=16).cells()[0].problem.num_heads == 1


def test_unset_axes_follow_their_partner() -> None:
    problem = small().cells()[0].problem
    assert (problem.seqlen_k, problem.head_dim_v, problem.num_kv_heads) == (512, 64, 4)


def test_lengths_cross() -> None:
    pairs = {(c.problem.seqlen_q, c.problem.seqlen_k) for c in small(seqlens_k=(1, 7)).cells()}
    assert pairs == {(512, 1), (512, 7), (256, 1), (256, 7)}


def test_indivisible_heads_name_both_numbers() -> None:
    with pytest.raises(
        SpecError, match=r"--kv-heads '3': 4 query heads \(--heads 4\) are not divisible by 3"
    ):
        small(kv_heads=(3,)).cells()
    with pytest.raises(SpecError, match=r"16 query heads \(--hidden 1024 // head dim 64\) .* by 5"):
        small(heads=None, hidden=1024, kv_heads=(5,)).cells()


def test_the_same_cell_twice_is_an_error() -> None:
    with pytest.raises(SpecError, match="occurs twice"):
        small(seqlens=(256, 256)).cells()


def test_too_many_cells_are_refused_before_they_are_made() -> None:
    with pytest.raises(SpecError, match="multiply to 32000000 cells"):
        small(seqlens=tuple(range(1, 1001)), seqlens_k=tuple(range(1, 1001))).cells()


@pytest.mark.parametrize("changes", [{"tokens": 512}, {"hidden": 512}, {"batch": None}, {"heads": None}])
def test_a_sweep_needs_one_of_each_pair(changes: dict[str, object]) -> None:
    with pytest.raises(SpecError, match="either"):
        small(**changes)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_defaults_make_a_sweep(device: str) -> None:
    cells = sweep.sweep_of(sweep.defaults(device)).cells()
    assert len(cells) == len({c.key for c in cells})


def test_gpu_default_is_the_papers_grid() -> None:
    cells = sweep.sweep_of(sweep.defaults("cuda")).cells()
    assert len(cells) == 7 * 2 * 1 * 2 * 2 * 5
    assert cells[0].key == "naive fwd b16 h32 n1024 d64 bf16 full"
    assert all(c.problem.batch * c.problem.seqlen_q == max(16384, c.problem.seqlen_q) for c in cells)


def parsed(layer: dict[str, str | bool], where: str = "--") -> dict[str, object]:
    return sweep.parse(layer, lambda name: where + name, IMPLS)


def test_the_line_wins_over_the_file_and_the_file_over_the_defaults() -> None:
    line, file = parsed({"seqlens": "1k"}), parsed({"seqlens": "2k", "head_dims": "32"})
    joined = sweep.combine(line, file, sweep.defaults("cpu"))
    assert joined["seqlens"] == (1024,)
    assert joined["head_dims"] == (32,)
    assert joined["dtypes"] == sweep.defaults("cpu")["dtypes"]


@pytest.mark.parametrize(("one", "other"), [("batch", "tokens"), ("heads", "hidden"), ("tokens", "batch")])
def test_one_of_a_pair_replaces_the_other_of_a_lower_layer(one: str, other: str) -> None:
    joined = sweep.combine(parsed({one: "3"}), parsed({other: "5"}), sweep.defaults("cuda"))
    assert joined[one] == 3
    assert other not in joined
    assert sweep.sweep_of(joined)


@pytest.mark.parametrize(("one", "other"), sweep.EXCLUSIVE)
def test_both_of_a_pair_in_one_layer_is_an_error(one: str, other: str) -> None:
    value: str | bool = True if sweep.OPTIONS[one].parse is None else "2"
    with pytest.raises(UsageError, match=rf"{one} .*{other} .*accepted: one of the two"):
        parsed({one: value, other: value})


def test_a_flag_that_is_off_excludes_nothing() -> None:
    assert sweep.combine(parsed({"json": False}), parsed({"csv": True})) == {"json": False, "csv": True}
    assert sweep.combine(parsed({"csv": True}), parsed({"json": True})) == {"csv": True}


def load(tmp_path: Path, text: str | bytes) -> dict[str, str | bool]:
    path = tmp_path / "x.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return sweep.load_config(path)


def test_config_takes_every_option_in_every_spelling(tmp_path: Path) -> None:
    raw = load(
        tmp_path,
        'seqlens = "1k-4k"\nhead-dims = [64, "128"]\nhead_dims_v = 32\ndtypes = ["bf16"]\ncausal = true\n'
        'tokens = "16k"\nheads = 4\nresume = false\ntime-budget = "5m"\nimpls = "naive,sdpa"\n'
        "kv_heads = [1, 2]\n",
    )
    options = parsed(raw)
    assert options == {
        "seqlens": (1024, 2048, 4096), "head_dims": (64, 128), "head_dims_v": (32,), "dtypes": ("bf16",),
        "causal": (True,), "tokens": 16384, "heads": 4, "resume": False, "time_budget": 300.0,
        "impls": ("naive", "sdpa"), "kv_heads": (1, 2),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seqlen = '1k'", "key 'seqlen' is not known; did you mean 'seqlens'"),
        ("zzz = 1", "key 'zzz' is not known .accepted: seqlens"),
        ("[grid]\nseqlens = 1", "key 'grid' is not known"),
        ("seqlens = 1.5", "seqlens = '1.5' is a float; accepted: lengths"),
        ("batch = 1e3", "batch = '1000.0' is a float; accepted: a whole number"),
        ("batch = true", "batch = 'True' is a boolean"),
        ("batch = [1]", "batch = .* is a list"),
        ("dtypes = 16", "dtypes = '16' is a number; accepted: names"),
        ("dtypes = [16]", "dtypes = .* is a list"),
        ("seqlens = [1.5]", "seqlens = .* is a list"),
        ("seqlens = {a = 1}", "seqlens = .* is a table"),
        ("causal = 1", "causal = '1' is a number; accepted: 'yes'"),
        ("resume = 'yes'", "resume = 'yes' is text; accepted: true or false"),
        ("time_budget = 5", "time_budget = '5' is a number; accepted: a time"),
        ("seed = 2020-01-01", "seed = .* is a date"),
        ("kv-heads = 1\nkv_heads = 1", "stands twice"),
        ("seqlens = ", "not TOML"),
        ("a = 1\na = 2", "not TOML"),
        (b"\xff\xfe", "not UTF-8"),
        ("config = 'x.toml'", "key 'config' is not known"),
        ("a = " + "[" * 5000, "accepted: a TOML file"),
        ("#" * (configfile.MAX_CONFIG_BYTES + 1), "too large"),
    ],
)
def test_bad_config_names_file_key_value_and_what_is_accepted(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load(tmp_path, text)
    assert str(caught.value).startswith("--config '")
    assert "x.toml" in str(caught.value)


@pytest.mark.parametrize("path", ["", "missing.toml", "/", "a\0b", "/proc/self/mem"])
def test_a_config_that_cannot_be_read(path: str) -> None:
    with pytest.raises(UsageError, match=r"--config '.*accepted: a TOML file"):
        sweep.load_config(path)


def test_bad_values_of_a_config_are_named_like_those_of_the_line(tmp_path: Path) -> None:
    raw = load(tmp_path, "seqlens = '1k-3k'")
    with pytest.raises(FlashbenchError, match=r"^x: seqlens '1k-3k': doubling"):
        sweep.parse(raw, lambda name: f"x: {name}", IMPLS)


@pytest.mark.parametrize(
    "text", ["gpu", "cuda:", "cuda:-1", "CPU", "cpu:0", "cuda:0,1", "", "cuda:99999", "mps"]
)
def test_bad_devices(text: str) -> None:
    with pytest.raises(SpecError, match=r"--device .*accepted: cpu, cuda or cuda:N"):
        parsed({"device": text})
