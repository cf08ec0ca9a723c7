"""Presets: what each model's cache costs by the published numbers, and how --model becomes options."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashbench import kvcache, presets, sweep
from flashbench._cli.options import on_line
from flashbench.cli import main
from flashbench.errors import UnknownName, UsageError
from flashbench.presets import PRESETS

PUBLISHED = {
    "llama-3-8b": 128, "llama-3-70b": 320, "llama-3-405b": 504, "mistral-7b": 128, "mixtral-8x7b": 128,
    "qwen2.5-7b": 56, "qwen2.5-32b": 256, "qwen2.5-72b": 320, "qwen3-8b": 144, "qwen3-32b": 256,
    "qwen3-235b-a22b": 188, "gpt-oss-120b": 72, "deepseek-v2": 67.5, "deepseek-v3": 68.625,
    "gpt2-small": 36, "gpt2-medium": 96, "gpt2-large": 180, "gpt2-xl": 300, "bert-large": 96,
}  # fmt: skip
"""KiB of K and V per token in 16 bit, all layers."""


def test_every_model_caches_what_is_published() -> None:
    assert {row.name for row in PRESETS} == set(PUBLISHED)
    for row in PRESETS:
        assert kvcache.estimate(row, seqlen=1, dtype="bf16").token_bytes == PUBLISHED[row.name] * 1024, (
            row.name
        )


def test_mla_caches_as_much_as_gqa_with_two_and_a_quarter_groups() -> None:
    # DeepSeek-V2 (arXiv:2405.04434), table 1: MLA's cache equals GQA with 2.25 groups of head dim 128
    assert kvcache.layer_token_bytes(presets.find("deepseek-v2"), "bf16") == 2.25 * 2 * 128 * 2


@pytest.mark.parametrize("row", PRESETS, ids=lambda row: row.name)
def test_rows_are_consistent(row: presets.Preset) -> None:
    assert row.num_heads % row.num_kv_heads == 0
    assert row.source
    assert (row.window is None) == (row.windowed_layers == 0)
    assert row.windowed_layers <= row.layers
    assert row.kind == ("MLA" if row.latent_dim else "MHA" if row.num_kv_heads == row.num_heads else "GQA")


@pytest.mark.parametrize("row", PRESETS, ids=lambda row: row.name)
def test_a_model_becomes_one_problem(row: presets.Preset) -> None:
    raw = presets.expand({"model": row.name, "seqlens": "1k", "batch": "2"}, on_line)
    rest = {"dtypes": "bf16", "causal": "yes", "passes": "fwd"}
    parsed = sweep.parse({**rest, **raw}, on_line, ())
    (problem,) = sweep.Sweep(impls=(), **parsed).problems()
    heads = (problem.num_heads, problem.num_kv_heads, problem.head_dim, problem.head_dim_v)
    assert heads == (row.num_heads, row.num_kv_heads, row.head_dim, row.head_dim_v)


def test_mla_is_not_absorbed_in_a_prefill() -> None:
    row = presets.find("deepseek-v3")
    assert (row.num_kv_heads, row.head_dim, row.head_dim_v) == (128, 192, 128)


@pytest.mark.parametrize("name", ["heads", "kv_heads", "head_dims", "head_dims_v", "hidden"])
def test_a_model_excludes_what_it_sets(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        presets.expand({"model": "llama-3-8b", name: "4"}, on_line)
    text = str(caught.value)
    assert "--model 'llama-3-8b'" in text
    assert f"{on_line(name)} '4'" in text
    assert "accepted" in text
    assert "\n" not in text


def test_what_heads_do_not_say_is_remarked() -> None:
    assert presets.remark(presets.find("llama-3-8b")) == ""
    assert "18 of its 36 layers see 128 keys" in presets.remark(presets.find("gpt-oss-120b"))
    assert "--kv-heads 1 --head-dims 576 --head-dims-v 512" in presets.remark(presets.find("deepseek-v3"))
    assert "no causal mask" in presets.remark(presets.find("bert-large"))


@pytest.mark.parametrize(
    "argv",
    [
        ["io-model", "--model", "gpt-oss-120b", "--seqlens", "1k"],
        ["run", "--model", "gpt-oss-120b", "--seqlens", "16", "--device", "cpu", "--dry-run"],
    ],
    ids=lambda argv: argv[0],
)
def test_the_commands_say_the_remark(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for more, said in (([], True), (["--quiet"], False)):
        with pytest.raises(SystemExit) as stop:
            main([*argv, *more])
        captured = capsys.readouterr()
        assert not stop.value.code, captured.err
        assert ("18 of its 36 layers see 128 keys" in captured.err) is said


def test_a_config_file_may_name_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.toml"
    config.write_text('model = "llama-3-8b"\nseqlens = 16\nbatch = 1\nimpls = "naive"\ndevice = "cpu"\n')
    for more, heads in (([], "h32/8"), (["--heads", "16"], "h16/8")):
        with pytest.raises(SystemExit) as stop:
            main(["run", "--config", str(config), "--dry-run", *more])
        captured = capsys.readouterr()
        assert not stop.value.code, captured.err
        assert heads in captured.out
    config.write_text('model = "llama-3-8b"\nkv-heads = 4\n')
    with pytest.raises(SystemExit) as stop:
        main(["run", "--config", str(config), "--dry-run"])
    assert stop.value.code == 2
    assert "model 'llama-3-8b'" in capsys.readouterr().err


def test_without_a_model_nothing_changes() -> None:
    assert presets.expand({"heads": "4"}, on_line) == {"heads": "4"}


def test_an_unknown_model_offers_the_nearest() -> None:
    with pytest.raises(UnknownName, match="--model 'llama-8b' is not known; did you mean 'llama-3-8b'"):
        presets.expand({"model": "llama-8b"}, on_line)
    with pytest.raises(UnknownName, match=r"--preset 'fa1-fig1'.*fa1-fig2"):
        presets.workload("fa1-fig1")


def test_the_paper_s_workload() -> None:
    row = presets.workload("fa1-fig2")
    parsed = sweep.parse(row.options, on_line, ())
    (problem,) = sweep.Sweep(impls=(), **parsed).problems()
    assert problem.key == "b64 h16 n1024 d64 fp16 full"
    assert parsed["passes"] == ("fwd+bwd",)
    assert "cannot reproduce" in row.printed
