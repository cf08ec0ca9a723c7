"""The KV cache: golden values, closed forms against a walk over tokens and pages, the command."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashbench import devices, kvcache, presets
from flashbench.errors import SpecError, UnknownName
from flashbench.kvcache import CACHE_BITS, Serving, estimate, pages_of
from flashbench.presets import Preset

ROOT = Path(__file__).resolve().parent.parent


def model(layers: int = 32, kv_heads: int = 8, head_dim: int = 128, **more: int) -> Preset:
    return Preset(
        name="m", layers=layers, num_heads=more.pop("num_heads", 4 * kv_heads), num_kv_heads=kv_heads,
        head_dim=head_dim, weights_bytes=0, source="test", **more,
    )  # fmt: skip


@pytest.mark.parametrize(("layers", "kv_heads", "expected"),
                         [(32, 8, 131_072), (32, 32, 524_288), (80, 8, 327_680)])  # fmt: skip
def test_golden_bytes_per_token(layers: int, kv_heads: int, expected: int) -> None:
    assert estimate(model(layers, kv_heads), seqlen=1).token_bytes == expected


def test_golden_total() -> None:
    total = estimate(model(80, 8), seqlen=32_768).total_bytes
    assert total == 10 * 2**30
    assert round(total / 1e9, 2) == 10.74


shapes = st.builds(
    lambda layers, kv, group, d, dv, window, latent: Preset(
        name="m", layers=layers, num_heads=kv * group, num_kv_heads=kv, head_dim=d, head_dim_v=dv,
        window=window, windowed_layers=layers // 2 if window else 0, latent_dim=latent,
        rope_dim=latent // 4, weights_bytes=0, source="test",
    ),
    st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9),
    st.none() | st.integers(1, 40), st.sampled_from([0, 0, 8]),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(shapes, st.integers(1, 60), st.integers(1, 3), st.sampled_from(sorted(CACHE_BITS)),
       st.integers(1, 17), st.integers(0, 4))  # fmt: skip
def test_closed_forms_are_a_walk_over_tokens(
    shape: Preset, seqlen: int, batch: int, dtype: str, page_size: int, scale_bytes: int
) -> None:
    token = pages = total = saved = flops = 0
    for layer in range(shape.layers):
        if shape.latent_dim:
            numbers, scales, dims = (
                shape.latent_dim + shape.rope_dim,
                1,
                2 * shape.latent_dim + shape.rope_dim,
            )
        else:
            numbers, scales = 0, 0
            for _ in range(shape.num_kv_heads):
                numbers += shape.head_dim + shape.head_dim_v
                scales += 2
            dims = shape.head_dim + shape.head_dim_v
        entry = (numbers * CACHE_BITS[dtype] + 7) // 8 + scales * scale_bytes
        token += entry
        used = set()
        for position in range(seqlen):
            windowed = layer < shape.windowed_layers
            if windowed and position + shape.window < seqlen:
                saved += batch * entry
                continue
            total += batch * entry
            used.add(position // page_size)
            flops += batch * shape.num_heads * 2 * dims
        pages += len(used)
    found = estimate(
        shape, seqlen=seqlen, batch=batch, dtype=dtype,
        serving=Serving(page_size=page_size, scale_bytes=scale_bytes),
    )  # fmt: skip
    assert (found.token_bytes, found.total_bytes, found.window_saved_bytes) == (token, total, saved)
    assert found.pages == pages
    assert found.card_bytes == batch * pages * found.page_bytes
    assert found.card_bytes >= found.total_bytes
    assert found.decode_read_bytes == total
    assert found.decode_flops == flops


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 64))
def test_a_window_holds_one_page_more_at_most(seqlen: int, window: int, page_size: int) -> None:
    assert pages_of(seqlen, window, page_size) <= -(-min(seqlen, window) // page_size) + 1
    assert pages_of(seqlen, None, page_size) == -(-seqlen // page_size)


@given(st.integers(1, 2000), st.sampled_from(presets.PRESETS))
def test_more_tokens_never_cost_less(seqlen: int, row: Preset) -> None:
    one, two = (estimate(row, seqlen=n) for n in (seqlen, seqlen + 1))
    assert one.total_bytes <= two.total_bytes <= one.total_bytes + one.token_bytes


def test_fp8_halves_and_scales_come_on_top() -> None:
    row = presets.find("llama-3-8b")
    full, half = (estimate(row, seqlen=100, dtype=name).total_bytes for name in ("bf16", "fp8"))
    assert full == 2 * half
    scaled = estimate(row, seqlen=100, dtype="fp8", serving=Serving(scale_bytes=4)).total_bytes
    assert scaled - half == 100 * row.layers * row.num_kv_heads * 2 * 4


@pytest.mark.parametrize(("tp", "share"), [(1, 8), (2, 4), (8, 1), (16, 1), (64, 1)])
def test_cards_share_kv_heads_until_each_has_one(tp: int, share: int) -> None:
    row = presets.find("llama-3-70b")
    one = estimate(row, seqlen=4096, serving=Serving(tp=tp))
    assert one.card_bytes * 8 == one.total_bytes * share


def test_cards_do_not_share_a_latent() -> None:
    row = presets.find("deepseek-v3")
    assert (
        estimate(row, seqlen=4096, serving=Serving(tp=8)).card_bytes == estimate(row, seqlen=4096).card_bytes
    )


def test_as_many_sequences_fit_as_the_room_holds() -> None:
    card = devices.find("h100-sxm")
    row = presets.find("llama-3-70b")
    found = estimate(row, seqlen=131_072, serving=Serving(device=card, tp=8))
    room = card.hbm_bytes * 9 // 10 - 141_100_000_000 // 8
    assert found.room_bytes == room
    assert found.sequences == room // (20 * 2**30 // 4)
    nothing = estimate(row, seqlen=131_072, serving=Serving(device=card))
    assert nothing.room_bytes < 0
    assert nothing.sequences == 0
    free = estimate(
        row, seqlen=131_072, serving=Serving(device=card, weights_bytes=0, memory_fraction=Fraction(1))
    )
    assert free.sequences == 80 // 40


def test_decode_is_bound_by_bandwidth_and_mla_nearly_by_compute() -> None:
    h100, a100 = devices.find("h100-sxm"), devices.find("a100-sxm-80gb")
    llama = estimate(presets.find("llama-3-70b"), seqlen=131_072, batch=4, serving=Serving(device=h100, tp=8))
    assert llama.limit == "bandwidth"
    assert llama.decode_s == pytest.approx(20 * 2**30 / 3350e9)
    assert llama.intensity == 8
    assert llama.tokens_per_s == pytest.approx(4 / llama.decode_s)
    mla = presets.find("deepseek-v3")
    # absorbed: 2·128·(576 + 512) FLOPs for 1152 bytes; the ridge is 295 on an H100, 153 on an A100
    assert estimate(mla, seqlen=1000).intensity == pytest.approx(241.8, abs=0.05)
    assert estimate(mla, seqlen=1000, serving=Serving(device=h100)).limit == "bandwidth"
    assert estimate(mla, seqlen=1000, serving=Serving(device=a100)).limit == "compute"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tp": 3}, "does not divide 64 query heads"),
        ({"tp": 0}, "tp 0 is out of range"),
        ({"page_size": 0}, "page_size 0"),
        ({"scale_bytes": -1}, "scale_bytes -1"),
        ({"memory_fraction": Fraction(2)}, "memory_fraction 2"),
    ],
)
def test_bad_values_are_named(change: dict, text: str) -> None:
    with pytest.raises(SpecError, match=text):
        estimate(presets.find("llama-3-70b"), seqlen=1, serving=replace(Serving(), **change))


def test_cards_that_split_a_kv_head_are_refused() -> None:
    with pytest.raises(SpecError, match="tp 4 does not fit 6 KV heads"):
        estimate(model(kv_heads=6, num_heads=24), seqlen=1, serving=Serving(tp=4))


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(UnknownName, match="'fp7'"):
        estimate(model(), seqlen=1, dtype="fp7")
    assert kvcache.CACHE_BITS["fp8"] == 8


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flashbench", "kv-cache", *arguments], capture_output=True, text=True,
        cwd=ROOT, env={**os.environ, "COLUMNS": "300"}, check=False,
    )  # fmt: skip


def test_the_command_answers_in_json() -> None:
    done = command("--model", "llama-3-70b", "--seqlens", "128k", "--batch", "4", "--dtypes", "bf16,fp8",
                   "--gpu", "h100-sxm", "--tp", "8", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    one, two = json.loads(done.stdout)
    assert (one["token_bytes"], one["total_bytes"], one["total_gib"]) == (327_680, 171_798_691_840, 160)
    assert two["total_bytes"] * 2 == one["total_bytes"]
    assert one["sequences"] == 11
    assert one["limit"] == "bandwidth"


def test_the_command_by_hand_names_its_units() -> None:
    done = command(
        "--layers", "80", "--kv-heads", "8", "--head-dim", "128", "--dtype", "bf16", "--seqlens", "32k"
    )
    assert done.returncode == 0, done.stderr
    for text in ("327,680 B", "total GB", "total GiB", "10.74", "10.00"):
        assert text in done.stdout
    assert "GB = 10^9 bytes, GiB = 2^30 bytes" in done.stderr


def test_a_card_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "card.toml"
    path.write_text('name = "half"\nbase = "h100-sxm"\nhbm_bytes = 42949672960\n')
    done = command("--model", "llama-3-8b", "--gpu", f"{path},h100-sxm", "--seqlens", "1k", "--json")
    half, full = json.loads(done.stdout)
    assert (half["gpu"], full["gpu"]) == ("half", "h100-sxm")
    assert full["room_bytes"] - half["room_bytes"] == 40 * 2**30 * 9 // 10


def test_mla_by_hand() -> None:
    done = command("--layers", "61", "--latent-dim", "512", "--rope-dim", "64", "--heads", "128", "--json")
    rows = json.loads(done.stdout)
    assert {row["token_bytes"] for row in rows} == {70_272}
    assert {row["attention"] for row in rows} == {"MLA"}
    assert rows[0]["intensity"] == pytest.approx(241.8, abs=0.05)


def test_the_command_answers_in_csv() -> None:
    done = command("--model", "gpt-oss-120b,deepseek-v3", "--seqlens", "1k,2k", "--csv", "--quiet")
    assert done.stderr == ""
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["seqlen"] for row in rows] == ["1024", "2048", "1024", "2048"]
    assert int(rows[0]["token_bytes"]) == 72 * 1024
    # 18 of 36 layers keep 128 tokens
    assert int(rows[1]["total_bytes"]) == 18 * 2048 * (2048 + 128)


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ([], ["--layers, --kv-heads, --head-dim not given", "--model NAME"]),
        (["--model", "llama"], ["--model 'llama' is not known", "did you mean"]),
        (["--model", "llama-3-8b", "--kv-heads", "4"], ["--model 'llama-3-8b' and --kv-heads '4'"]),
        (["--model", "llama-3-8b", "--dtypes", "fp9"], ["--dtypes 'fp9'", "fp8"]),
        (["--model", "llama-3-70b", "--gpu", "h100-sxm", "--tp", "3"], ["--tp '3'", "divisor of 64"]),
        (["--model", "llama-3-70b", "--weights", "3GB"], ["--weights '3GB' needs --gpu"]),
        (["--model", "llama-3-70b", "--gpu", "h100"], ["--gpu 'h100' is not known"]),
        (["--model", "llama-3-70b", "--gpu", "h200", "--memory-fraction", "90"], ["--memory-fraction '90'"]),
        (
            ["--layers", "2", "--latent-dim", "512", "--kv-heads", "3"],
            ["--latent-dim '512' and --kv-heads '3'"],
        ),
        (["--layers", "2", "--kv-heads", "3", "--head-dim", "8", "--rope-dim", "4"], ["needs --latent-dim"]),
        (["--layers", "2", "--kv-heads", "3", "--heads", "4", "--head-dim", "8"], ["--kv-heads '3'"]),
        (
            ["--layers", "2", "--kv-heads", "3", "--head-dim", "8", "--windowed-layers", "1"],
            ["needs --window"],
        ),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], texts: list[str]) -> None:
    done = command(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("hint:")]
    assert len(lines) == 1, done.stderr
    for text in texts:
        assert text in lines[0]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("name", "cp"), [("llama-3-8b", 4), ("gpt-oss-120b", 3), ("deepseek-v3", 2)])
def test_tokens_are_dealt_out_page_by_page(name: str, cp: int, page_size: int) -> None:
    preset, seqlen = presets.find(name), 1000
    how = Serving(page_size=page_size, cp=cp)
    row = kvcache.estimate(preset, seqlen=seqlen, batch=3, serving=how)
    alone = kvcache.estimate(preset, seqlen=seqlen, batch=3, serving=Serving(page_size=page_size))
    held = 0
    for layer in range(preset.layers):
        window = preset.window if layer < preset.windowed_layers else None
        first = max(0, seqlen - window) if window else 0
        pages = sorted({token // page_size for token in range(first, seqlen)})
        held += max(len(pages[card::cp]) for card in range(cp))
    assert row.card_bytes == 3 * held * row.page_bytes
    assert (
        alone.card_bytes <= cp * row.card_bytes < alone.card_bytes + 3 * preset.layers * cp * row.page_bytes
    )
    assert alone.decode_read_bytes <= cp * row.decode_read_bytes <= cp * row.card_bytes
    width = preset.latent_dim or preset.head_dim_v
    assert row.decode_link_bytes == 3 * preset.layers * (cp - 1) * preset.num_heads * (width + 1) * 4
    assert alone.decode_link_bytes == 0
    assert row.total_bytes == alone.total_bytes


def test_the_link_is_waited_for() -> None:
    card = devices.find("h100-sxm")

    def bound(link: str, tp: int = 1, seqlen: int = 4096) -> kvcache.CacheEstimate:
        how = Serving(device=card, cp=4, tp=tp, link=link)
        return kvcache.estimate(presets.find("llama-3-8b"), seqlen=seqlen, batch=64, serving=how)

    fast, slow = bound(""), bound("network")
    assert slow.decode_link_s == pytest.approx(9 * fast.decode_link_s)
    assert slow.decode_s == pytest.approx(slow.decode_bytes_s + slow.decode_link_s)
    assert slow.limit == "bandwidth"
    assert bound("network", seqlen=64).limit == "link"
    assert bound("", tp=8).decode_link_bytes * 8 == fast.decode_link_bytes
    by_hand = replace(presets.find("llama-3-8b"), num_heads=0)
    with pytest.raises(SpecError, match="query heads"):
        kvcache.estimate(by_hand, seqlen=64, serving=Serving(cp=2))
