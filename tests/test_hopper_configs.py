"""flash-v3's tables of configurations have, for what was measured on a card, what was fastest there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import pytest

from flashbench import hopper_configs
from flashbench.hopper_configs import BackwardTiles, Tiles

REPORTS = Path(__file__).resolve().parent.parent / "reports"
TUNING = REPORTS / "h100-sxm" / "tuning"
GUARDED = REPORTS / "h200-sxm" / "tuning" / "flash-v3-fp8-guarded.json"
"""flash-v3-fp8 at head dim 128 from 4k keys on, whose kernel is younger than the files of the H100."""
GUARDED_16 = GUARDED.with_name("flash-v3-guarded.json")
"""flash-v3 in fp16, every cell."""
WITH_MAXIMA = {(64, True): 1024, (128, False): 512, (128, True): 1024}
"""Up to how many keys the H100's files of head dims 64 and 128 tell what is fastest: with maxima, as then."""
Cut = Tiles | BackwardTiles
CHOICES: dict[str, tuple[Cut, Callable[[int, int, bool, int], Cut], dict[str, set[int]]]] = {
    "flash-v3": (
        Tiles(), partial(hopper_configs.choose, fp16=True),
        {"flash-v3": {256}, "flash-v3-exps-64": {64}, "flash-v3-exps-128": {128}},
    ),
    "flash-v3-backward": (
        BackwardTiles(64), hopper_configs.choose_backward, {"flash-v3-backward": {64, 128}},
    ),
    "flash-v3-fp8": (Tiles(), hopper_configs.choose_fp8, {"flash-v3-fp8": {64}, "flash-v3-exps-fp8": {128}}),
}  # fmt: skip
"""One that the table could have, what chooses from it, and the files with the head dims they are for."""

OTHERS = "sdpa-cudnn", "flash-v2", "flash-v3 bf16", "flash-v2-fp8"
WIDE = "scores-first"
"""The form of the backward of head dims over 128 that was kept."""


@cache
def cells(name: str) -> dict[tuple[int, bool, int], tuple[Mapping[str, float], frozenset[str]]]:
    """By head dim, mask and length: TFLOP/s of each form, and which of the forms the kernel still has."""
    found = {}
    for file, dims in CHOICES[name][2].items():
        found |= {cell: of for cell, of in cells_of(name, TUNING / f"{file}.json").items() if cell[0] in dims}
    if name == "flash-v3":
        found = {
            cell: of
            for cell, of in found.items()
            if cell[2] <= WITH_MAXIMA.get(cell[:2], 16384 * (cell[0] == 256))
        }
    if name == "flash-v3-fp8":
        found = {cell: of for cell, of in found.items() if cell[0] != 128 or cell[2] < 4096}
        found |= cells_of(name, GUARDED)
    return found


def cells_of(
    name: str, path: Path
) -> dict[tuple[int, bool, int], tuple[Mapping[str, float], frozenset[str]]]:
    """Those of one file."""
    found = {}
    one = CHOICES[name][0]
    there = {field.name for field in fields(one)}
    document = json.loads(path.read_text(encoding="utf-8"))
    forms = {
        form: replace(one, **{key: value for key, value in of.items() if key in there}).name
        for form, of in document["configurations"].items()
    }
    kept = frozenset(form for form, own in forms.items() if form == own)  # one that was dropped says more
    for row in document["rows"]:
        speed = {form: tflops for form, tflops in row["tflops"].items() if form not in OTHERS}
        found[row["head_dim"], row["causal"], row["seqlen"]] = speed, kept
    return found


def guarded_16() -> dict[tuple[int, bool, int], tuple[Mapping[str, float], frozenset[str]]]:
    return cells_of("flash-v3", GUARDED_16)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["rows"]


def measured() -> Iterator[Any]:
    tables = [*((name, "", cells(name)) for name in CHOICES), ("flash-v3", " H200", guarded_16())]
    for name, where, found in tables:
        for (dim, causal, seqlen), of in found.items():
            mask = "causal" if causal else "full"
            told = f"{name} d{dim} {mask} {seqlen}{where}"
            yield pytest.param(name, (dim, causal, seqlen), *of, id=told)


@pytest.mark.parametrize(("name", "cell", "speed", "kept"), list(measured()))
def test_the_table_has_what_was_measured_to_be_fastest_within_2_percent(
    name: str, cell: tuple[int, bool, int], speed: Mapping[str, float], kept: frozenset[str]
) -> None:
    dim, causal, seqlen = cell
    chosen = CHOICES[name][1](dim, dim, causal, seqlen).name
    assert speed[chosen] >= 0.98 * max(speed[form] for form in kept & set(speed)), speed


def test_every_cell_of_the_forward_was_measured_on_an_h200() -> None:
    lengths = {2**n for n in range(9, 15)}
    assert set(guarded_16()) == set(product((64, 128, 256), (False, True), lengths))


def test_the_docs_show_the_tables_speed_beside_cudnns() -> None:
    text = (REPORTS.parent / "docs" / "kernels.md").read_text(encoding="utf-8")
    of = {(row["head_dim"], row["causal"], row["seqlen"]): row["tflops"] for row in rows_of(GUARDED_16)}
    for dim, causal in product((64, 128, 256), (False, True)):
        told = []
        for keys in (512, 1024, 2048, 4096, 8192, 16384):
            speed, chosen = of[dim, causal, keys], hopper_configs.choose(dim, dim, causal, keys, fp16=True)
            told.append(f"{speed[chosen.name]:.0f} ({speed['sdpa-cudnn']:.0f})")
        head = f"{dim}, causal" if causal else f"head dim {dim}"
        assert f"| {head} | {' | '.join(told)} |" in text


def test_the_docs_say_what_fp8_is_over_bf16_and_what_its_preparation_takes() -> None:
    text = (REPORTS.parent / "docs" / "kernels.md").read_text(encoding="utf-8")
    of = {(row["causal"], row["seqlen"]): row for row in rows_of(GUARDED)}
    bursts = {
        (row["causal"], row["seqlen"]): row for row in rows_of(GUARDED.with_name("flash-v3-fp8-burst.json"))
    }
    lengths = 4096, 8192, 16384

    def over(row: Mapping[str, Any], form: str = "") -> float:
        chosen = hopper_configs.choose_fp8(128, 128, row["causal"], row["seqlen"]).name
        return row["tflops"][form or chosen] / row["tflops"]["flash-v3 bf16"]

    burst = {}
    for causal, head in ((False, "head dim 128"), (True, "128, causal")):
        rows = [of[causal, keys] for keys in lengths]
        own = [hopper_configs.choose_fp8(128, 128, causal, keys).name for keys in lengths]
        speeds = " | ".join(f"{row['tflops'][form]:.0f}" for row, form in zip(rows, own, strict=True))
        held = ", ".join(f"{over(row):.2f}" for row in rows)
        maxima = [over(row, form) for row in rows for form in row["tflops"] if "max3" in form]
        assert f"| {head} | {speeds} | {held} | {min(maxima):.2f} to {max(maxima):.2f} |" in text
        of_bursts = [over(bursts[causal, keys]) for keys in lengths]
        burst[causal] = f"{min(of_bursts):.2f}", f"{max(of_bursts):.2f}"
        assert min(map(over, rows)) >= 1.25
    (low, high), (low_causal, high_causal) = burst[False], burst[True]
    assert f"it is {low} to {high} times as fast, causal {low_causal} or {high_causal} (" in text

    def took(what: str, rows: dict[Any, dict[str, Any]] = of) -> set[str]:
        return {f"{median(row['preparation_ms'][what]):.1f}" for row in rows.values()}

    assert f"On an H200 it takes {min(took('all'))} to {max(took('all'))} ms for q, k and v of 16k" in text
    assert f"of which v {min(took('v'))} or {max(took('v'))} (" in text
    before, (before_v,) = took("all", bursts), took("v", bursts)
    assert f"In torch's operations it took {min(before)} or {max(before)} ms, of which v {before_v} (" in text


def test_a_loop_of_its_own_for_tiles_without_a_mask_is_worth_it_to_guarded_forms_alone() -> None:
    """From 4k keys on; with maxima over all cells."""
    inner = cells_of("flash-v3", GUARDED_16.with_name("flash-v3-inner.json"))
    pairs = [
        (speed[form], speed[f"{form}.one-loop"])
        for (dim, _, keys), (speed, _) in inner.items()
        for form in speed
        if dim < 256 and keys >= 4096 and f"{form}.one-loop" in speed
    ]
    assert len(pairs) == 8
    assert all(own > one for own, one in pairs)
    lost = [
        speed[f"{form}.inner"] / speed[form]
        for speed, _ in guarded_16().values()
        for form in speed
        if f"{form}.inner" in speed
    ]
    assert len(lost) >= 30
    assert geometric_mean(lost) < 1


def test_bases_that_sums_guard_are_faster_than_maxima_in_every_cell_that_has_them() -> None:
    found = cells_of("flash-v3-fp8", GUARDED)
    assert set(found) == {(128, causal, keys) for causal in (False, True) for keys in (4096, 8192, 16384)}
    for (dim, causal, keys), (speed, _) in found.items():
        chosen = hopper_configs.choose_fp8(dim, dim, causal, keys)
        assert chosen.promote
        assert speed[chosen.name] > max(of for form, of in speed.items() if ".p" not in form)


def test_fp8_is_1_25_times_as_fast_as_bf16_under_its_own_load_in_every_cell() -> None:
    assert json.loads(GUARDED.read_text(encoding="utf-8"))["load"] == "sustained"
    found = {(row["causal"], row["seqlen"]): row["tflops"] for row in rows_of(GUARDED)}
    assert set(found) == set(product((False, True), (4096, 8192, 16384)))
    over = {
        cell: speed[hopper_configs.choose_fp8(128, 128, *cell).name] / speed["flash-v3 bf16"]
        for cell, speed in found.items()
    }
    assert min(over.values()) >= 1.25, over


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_no_form_of_the_forward_that_was_dropped_was_faster_over_all_lengths(dim: int, causal: bool) -> None:
    of = {cell[2]: speed for cell, (speed, _) in guarded_16().items() if cell[:2] == (dim, causal)}
    assert len(of) == 6
    everywhere = set.intersection(*(set(speed) for speed in of.values()))
    mean = {form: geometric_mean(speed[form] for speed in of.values()) for form in everywhere}
    chosen = [of[seqlen][hopper_configs.choose(dim, dim, causal, seqlen, fp16=True).name] for seqlen in of]
    assert geometric_mean(chosen) >= 0.98 * max(mean.values()), mean


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_bf16_has_the_fastest_form_without_emulated_exponentials_within_2_percent(
    dim: int, causal: bool
) -> None:
    for (d, mask, seqlen), (speed, kept) in cells("flash-v3").items():
        if (d, mask) == (dim, causal):
            plain = {form: speed[form] for form in kept & set(speed) if ".e" not in form}
            chosen = hopper_configs.choose(dim, dim, causal, seqlen, fp16=False)
            assert not chosen.emulated
            assert not chosen.guarded
            assert plain[chosen.name] >= 0.98 * max(plain.values()), (seqlen, plain)


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_bf16_is_guarded_where_fp16_is(dim: int) -> None:
    for causal, keys in product((False, True), (512, 513, 1024, 1025, 100_000)):
        fp16, bf16 = (hopper_configs.choose(dim, dim, causal, keys, fp16=half) for half in (True, False))
        assert bool(fp16.guarded) == (
            dim <= 128 and keys > WITH_MAXIMA.get((64 if dim == 64 else 128, causal), 0)
        )
        assert not fp16.guarded or bf16 == fp16


def test_exponentials_are_emulated_beside_maxima_that_carry_nan_or_sums_that_do_alone() -> None:
    rows = [cut for row in hopper_configs.TABLE for cut in (row.tiles, row.fp16) if cut]
    for cut in (*rows, *(row.tiles for row in hopper_configs.FP8_TABLE)):
        assert cut.max3 or cut.promote or not cut.emulated


def test_the_one_form_for_wide_heads_was_the_fastest_within_2_percent_over_all_cells() -> None:
    path = TUNING / "flash-v3-backward-wide.json"
    rows = [row["tflops"] for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    rows = [row for row in rows if WIDE in row]
    assert len(rows) == 12
    forms = [name for name in rows[0] if name not in OTHERS]
    speed = {name: geometric_mean(row[name] for row in rows) for name in forms}
    assert speed[WIDE] >= 0.98 * max(speed.values()), speed
    assert all(row[WIDE] > max(row[name] for name in OTHERS if name in row) for row in rows)


@pytest.mark.parametrize(
    ("version", "held"), [("3.7.1", True), ("3.8.0", False), ("3.9.0", True), (None, True)]
)
def test_k_and_v_are_in_registers_but_on_the_triton_that_serialises_products_beside_them(
    monkeypatch: pytest.MonkeyPatch, version: str | None, held: bool
) -> None:
    monkeypatch.setattr(hopper_configs, "version_of", lambda package: version)
    choose = hopper_configs.choose_backward.__wrapped__
    assert choose(64, 64, False, 4096).held is held
    assert not choose(64, 64, True, 4096).held
