"""Times that were measured on a card and are committed: sweeps, counted calls, and flash-v3's variants.

Read by ``tools/time_model.py``. A sweep is any ``reports/<card>/results.jsonl`` of a GPU; which kernels a row
of ``flash`` ran, the row says itself (``io_model``).
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from flashbench import hopper_configs, kernels, runfile
from flashbench.devices import Device, find, match
from flashbench.iomodel import Estimate, estimate
from flashbench.problem import Problem
from flashbench.record import Record

REPORTS = Path(__file__).resolve().parent.parent / "reports"
SHORTEST = 1024
"""Queries from which on a time counts: below, launches decide."""
TUNED_FWD = ("flash-v3.json", "flash-v3-exps-64.json", "flash-v3-exps-128.json")
FORWARD_THEN = {
    64: {
        False: [(math.inf, "3w.n128.s2.q1.pingpong.hold.max3")],
        True: [(4096, "2w.n128.s2.q2.max3.e4"), (8192, "3w.n128.s2.q2"), (math.inf, "3w.n128.s2.q2.max3")],
    },
    128: {
        False: [(math.inf, "2w.n128.s2.q1.pingpong.max3")],
        True: [(1024, "2w.n128.s2.q2"), (math.inf, "2w.n128.s2.q2.max3")],
    },
}
"""What ran up to so many keys, by head dim and mask, when ``flash-v3``'s forward had row maxima everywhere.

So it was counted, and timed in the sweeps and beside fp8: ``gluon``'s constants are of that kernel.
"""
TUNED_BWD = ("flash-v3-backward.json", "flash-v3-backward-2.json", "flash-v3-backward-wide.json")
BESIDE = ("flash-v3-fp8.json", "flash-v3-exps-fp8.json")
"""Tables of fp8's variants, with ``flash-v3`` in bf16 beside them."""
GUARDED = "flash-v3-fp8-guarded.json"
"""Of an H200: fp8's variants at head dim 128 from 4k keys on, whose kernel is younger than the others."""
COUNTED = ("sweep", "sweep-128")
WIDE = "scores-first"
"""The form of the backward of head dims over 128 that was kept."""


SUSTAINED = 0.89
"""Of the products' rate, what the power cap leaves under sustained load: one number for both passes and all
head dims, fitted with the constants of ``gluon`` (``time_model.py --fit gluon``)."""


class Time(NamedTuple):
    """One measured median. kernels: the implementation whose kernels ran; card: the row of the card.

    sustained: under load that a power cap holds down, where others are short and cool.
    """

    card: Device
    name: str
    kernels: str
    row: Estimate
    seconds: float
    source: str
    sustained: bool = False

    def on(self, share: float = SUSTAINED) -> Device:
        """The card as it ran."""
        if not self.sustained:
            return self.card
        peaks = {dtype: peak and peak * share for dtype, peak in self.card.peak_flops_per_s.items()}
        return replace(self.card, peak_flops_per_s=peaks)


def sweeps(folder: Path = REPORTS) -> dict[str, list[Time]]:
    """Of every card that has one, by the name of its folder: the sweep's times at N >= SHORTEST.

    Raises ValueError for a sweep of a card that has no row.
    """
    found: dict[str, list[Time]] = {}
    for path in sorted(folder.glob("*/results.jsonl")):
        records = [record for record in runfile.load(path).records if record.device_type == "cuda"]
        if records:
            found[path.parent.name] = [time for record in records if (time := _swept(record, path))]
    return found


def _swept(record: Record, path: Path) -> Time | None:
    cell = record.cell
    model = record.io_model if cell.implementation == "flash" else kernels.get(cell.implementation).io_model
    if record.samples is None or model is None or cell.problem.seqlen_q < SHORTEST:
        return None
    card = match(record.environment["device_name"])
    if card is None:
        raise ValueError(f"{path}: {record.environment['device_name']} has no row in flashbench/devices.py")
    row = estimate(model, cell.problem, cell.pass_, tiles=_tiles(record), device=card)
    return Time(card, cell.implementation, ran(record), row, record.samples.median_s, path.parent.name)


def ran(record: Record) -> str:
    """Whose kernels the row says that it ran: of ``flash``, flash-v2's or flash-v3's."""
    of_model = {"flash": "flash-v2", "flash-v3-gluon": "flash-v3"}
    named = record.cell.implementation
    return of_model.get(record.io_model or "", named) if named == "flash" else named


def _tiles(record: Record) -> dict[str, int] | None:
    """Tiles of the configuration that ran; of the model's own choice where the row has none."""
    return {name: n for name, n in record.config.items() if isinstance(n, int)} or None


def counted() -> Iterator[Time]:
    """Calls of flash-v3 under the counters: one each, from a cold cache, at the card's highest clock."""
    card = find("h100-sxm")
    for name in COUNTED:
        path = REPORTS / "h100-sxm" / "counters" / name / "results.jsonl"
        for record in runfile.load(path).records:
            seconds = (record.counters.get("total") or {}).get("time_s")
            if ran(record) == "flash-v3" and seconds and record.cell.problem.seqlen_q >= SHORTEST:
                assert record.io_model is not None
                cell = record.cell
                row = estimate(record.io_model, cell.problem, cell.pass_, tiles=_tiles(record), device=card)
                yield Time(card, "flash-v3", "flash-v3", row, seconds, f"counters/{name}")


def tuned() -> Iterator[Time]:
    """Of flash-v3's variants, in fp16 and under sustained load, the one that its tables have today."""
    for pass_, names in (("fwd", TUNED_FWD), ("bwd", TUNED_BWD)):
        for name in names:
            for row in _rows(name):
                cut = _cut(pass_, row)
                samples = row["samples_ms"].get(cut)
                if samples and row["seqlen"] >= SHORTEST and not _superseded(name, row["head_dim"]):
                    yield _time(row, pass_, "fp16", samples, name, tiles=_named(cut))


def beside() -> Iterator[Time]:
    """flash-v3's forward in bf16 as it stood beside fp8's variants: its tiles of that day are not named."""
    for name in BESIDE:
        for row in _rows(name):
            samples = row["samples_ms"].get("flash-v3 bf16")
            if samples and row["seqlen"] >= SHORTEST:
                yield _time(row, "fwd", "bf16", samples, name)


def tuned_fp8() -> Iterator[Time]:
    """Of fp8's variants the one that its table has today."""
    for name, folder, card in (
        *((name, "h100-sxm", "h100-sxm") for name in BESIDE),
        (GUARDED, "h200-sxm", "h200"),
    ):
        for row in _rows(name, folder):
            dim = row["head_dim"]
            cut = hopper_configs.choose_fp8(dim, dim, row["causal"], row["seqlen"]).name if dim <= 128 else ""
            samples = row["samples_ms"].get(cut)
            if samples and row["seqlen"] >= SHORTEST:
                yield _time(row, "fwd", "fp8", samples, name, card)


def _rows(name: str, folder: str = "h100-sxm") -> list[dict]:
    return json.loads((REPORTS / folder / "tuning" / name).read_text(encoding="utf-8"))["rows"]


def _superseded(name: str, dim: int) -> bool:
    """Of the first table only head dim 256 counts: the others were timed again."""
    return name == TUNED_FWD[0] and dim != 256


def _cut(pass_: str, row: dict) -> str:
    """The name, in the tables of variants, of what runs today; forward, of what ran when they were timed."""
    dim, causal, seqlen = row["head_dim"], row["causal"], row["seqlen"]
    if pass_ == "fwd" and dim in FORWARD_THEN:
        return next(name for keys, name in FORWARD_THEN[dim][causal] if seqlen <= keys)
    if pass_ == "fwd":
        return hopper_configs.choose(dim, dim, causal, seqlen, fp16=True).name
    if hopper_configs.wide(dim, dim):
        return WIDE
    return hopper_configs.choose_backward(dim, dim, causal, seqlen).name


def _named(cut: str) -> dict[str, int] | None:
    """Tiles of a forward's name; None of a backward's."""
    if not (numbers := re.match(r"(\d)w\.n(\d+)\.s(\d)\.q(\d)", cut)):
        return None
    tiles = hopper_configs.Tiles(*map(int, numbers.groups()))
    return {key: n for key, n in hopper_configs.described(tiles).items() if isinstance(n, int)}


def _time(
    row: dict, pass_: str, dtype: str, samples_ms: list[float], source: str, of: str = "h100-sxm",
    *, tiles: dict[str, int] | None = None,
) -> Time:  # fmt: skip
    """batch · seqlen = 16k, heads · head_dim = 2048, as the tables were timed."""
    seqlen, dim = row["seqlen"], row["head_dim"]
    problem = Problem(
        batch=16384 // seqlen, num_heads=2048 // dim, num_kv_heads=2048 // dim, seqlen_q=seqlen,
        seqlen_k=seqlen, head_dim=dim, head_dim_v=dim, dtype=dtype, causal=row["causal"],
    )  # fmt: skip
    card = find(of)
    seconds = statistics.median(samples_ms) / 1e3
    name = "flash-v3-fp8" if dtype == "fp8" else "flash-v3"
    model = "flash-v3-fp8" if dtype == "fp8" else "flash-v3-gluon"
    estimated = estimate(model, problem, pass_, tiles=tiles, device=card)
    return Time(card, name, name, estimated, seconds, f"tuning/{source}", sustained=dtype == "fp16")
