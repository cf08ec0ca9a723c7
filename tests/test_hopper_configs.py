"""flash-v3's tables of configurations have, for what was measured on an H100, what was fastest there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

from flashbench import hopper_configs
from flashbench.hopper_configs import BackwardTiles, Tiles

REPORTS = Path(__file__).resolve().parent.parent / "reports"
TUNING = REPORTS / "h100-sxm" / "tuning"
GUARDED = REPORTS / "h200-sxm" / "tuning" / "flash-v3-fp8-guarded.json"
"""flash-v3-fp8 at head dim 128 from 4k keys on, whose kernel is younger than the files of the H100."""
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
    if name == "flash-v3-fp8":
        found = {cell: of for cell, of in found.items() if cell[0] != 128 or cell[2] < 4096}
        found |= cells_of(name, GUARDED) if GUARDED.exists() else {}
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


def measured() -> Iterator[Any]:
    for name in CHOICES:
        for dim, causal, seqlen in cells(name):
            mask = "causal" if causal else "full"
            yield pytest.param(name, (dim, causal, seqlen), id=f"{name} d{dim} {mask} {seqlen}")


@pytest.mark.parametrize(("name", "cell"), list(measured()))
def test_the_table_has_what_was_measured_to_be_fastest_within_2_percent(
    name: str, cell: tuple[int, bool, int]
) -> None:
    dim, causal, seqlen = cell
    speed, kept = cells(name)[cell]
    chosen = CHOICES[name][1](dim, dim, causal, seqlen).name
    assert speed[chosen] >= 0.98 * max(speed[form] for form in kept & set(speed)), speed


@pytest.mark.skipif(not GUARDED.exists(), reason=f"{GUARDED.name} is still to be measured")
def test_bases_that_sums_guard_are_faster_than_maxima_in_every_cell_that_has_them() -> None:
    found = cells_of("flash-v3-fp8", GUARDED)
    assert set(found) == {(128, causal, keys) for causal in (False, True) for keys in (4096, 8192, 16384)}
    for (dim, causal, keys), (speed, _) in found.items():
        chosen = hopper_configs.choose_fp8(dim, dim, causal, keys)
        assert chosen.promote
        assert speed[chosen.name] > max(of for form, of in speed.items() if ".p" not in form)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_no_form_of_the_forward_that_was_dropped_was_faster_over_all_lengths(dim: int, causal: bool) -> None:
    of = {cell[2]: speed for cell, (speed, _) in cells("flash-v3").items() if cell[:2] == (dim, causal)}
    assert len(of) == 6
    mean = {form: geometric_mean(speed[form] for speed in of.values()) for form in next(iter(of.values()))}
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
            assert plain[chosen.name] >= 0.98 * max(plain.values()), (seqlen, plain)


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
