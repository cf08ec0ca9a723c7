"""Times that were measured on a card and are committed: sweeps, counted calls, and flash-v3's variants.

Read by ``tools/time_model.py``. A sweep is any ``reports/<card>/results.jsonl`` of a GPU; which kernels a row
of ``flash`` ran, the row says itself (``io_model``). All rows are here; ``of_today`` says which
of them count.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from flashbench import hopper_configs, kernels, runfile
from flashbench.devices import Device, find, match
from flashbench.iomodel import Estimate, estimate
from flashbench.problem import Problem
from flashbench.record import Record

REPORTS = Path(__file__).resolve().parent.parent / "reports"
SHORTEST = 1024
"""Queries from which on a time counts: below, launches decide."""
TUNED_FWD = ("flash-v3-guarded.json",)
"""Of an H200; of today's forward an H100's do not tell."""
TUNED_BWD = ("flash-v3-backward.json", "flash-v3-backward-2.json", "flash-v3-backward-wide.json")
BESIDE = ("flash-v3-fp8.json", "flash-v3-exps-fp8.json")
"""Tables of fp8's variants, with ``flash-v3`` in bf16 beside them."""
GUARDED = "flash-v3-fp8-guarded.json"
"""Of an H200: fp8's variants at head dim 128 from 4k keys on, whose kernel is younger than the others, each
under its own sustained load."""
COUNTED = ("sweep", "sweep-128")
"""Folders of ``reports/<card>/counters`` whose calls are those of a sweep."""
WIDE = "scores-first"
"""The form of the backward of head dims over 128 that was kept."""


SUSTAINED = 0.9
"""Of the products' rate, what the power cap leaves under sustained load: one number for both passes and all
head dims, fitted with the constants of ``gluon`` (``time_model.py --fit gluon``). Short calls of
today's forward are in an H200's sweep, which is not fitted: until they are counted, the backward's alone tell
it from the rest."""


class Time(NamedTuple):
    """One measured median. kernels: the implementation whose kernels ran; card: the row of the card.

    config: what the row says of the kernels' configuration. sustained: under load that a power cap holds
    down and that is not in its family's constants, where others are short and cool.
    """

    card: Device
    name: str
    kernels: str
    row: Estimate
    seconds: float
    source: str
    config: Mapping[str, Any]
    sustained: bool = False

    def on(self, share: float = SUSTAINED) -> Device:
        """The card as it ran."""
        if not self.sustained:
            return self.card
        peaks = {dtype: peak and peak * share for dtype, peak in self.card.peak_flops_per_s.items()}
        return replace(self.card, peak_flops_per_s=peaks)


def of_today(time: Time) -> bool:
    """Whether the kernel that ran is the one that ``flash-v3``'s tables have for the problem today.

    Only those count, for the fit and for what is said of errors. All other implementations' do. A forward is
    known by its form's name. Rows that name none are older than the names: those that were counted divided
    between tiles of queries, which no form does now, and of ``flash-v3`` beside fp8 the form was not written
    down. A backward is known by its numbers: its table of forms is older than the first row.
    """
    if time.kernels != "flash-v3":
        return True
    p = time.row.problem
    if time.row.pass_ == "fwd":
        own = hopper_configs.choose(p.head_dim, p.head_dim_v, p.causal, p.seqlen_k, fp16=p.dtype == "fp16")
        return time.config.get("fwd_cut") == own.name
    if hopper_configs.wide(p.head_dim, p.head_dim_v):
        numbers = hopper_configs.described_wide()
    else:
        backward = hopper_configs.choose_backward(p.head_dim, p.head_dim_v, p.causal, p.seqlen_k)
        numbers = hopper_configs.described_backward(backward)
    return numbers.items() <= time.config.items()


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
    card = _card(record, path)
    row = estimate(model, cell.problem, cell.pass_, tiles=_tiles(record), device=card)
    seconds = record.samples.median_s
    return Time(card, cell.implementation, ran(record), row, seconds, path.parent.name, record.config)


def _card(record: Record, path: Path) -> Device:
    """The row of the card that it ran on."""
    card = match(record.environment["device_name"])
    if card is None:
        raise ValueError(f"{path}: {record.environment['device_name']} has no row in flashbench/devices.py")
    return card


def ran(record: Record) -> str:
    """Whose kernels the row says that it ran: of ``flash``, flash-v2's or flash-v3's."""
    of_model = {"flash": "flash-v2", "flash-v3-gluon": "flash-v3"}
    named = record.cell.implementation
    return of_model.get(record.io_model or "", named) if named == "flash" else named


def _tiles(record: Record) -> dict[str, int] | None:
    """Tiles of the configuration that ran; of the model's own choice where the row has none."""
    return {name: n for name, n in record.config.items() if isinstance(n, int)} or None


def counted(folder: Path = REPORTS) -> Iterator[Time]:
    """Calls of flash-v3 under the counters of any card: one each, from a cold cache, at its highest clock."""
    for path in sorted(folder.glob("*/counters/*/results.jsonl")):
        for record in runfile.load(path).records if path.parent.name in COUNTED else ():
            seconds = (record.counters.get("total") or {}).get("time_s")
            if ran(record) == "flash-v3" and seconds and record.cell.problem.seqlen_q >= SHORTEST:
                assert record.io_model is not None
                cell, card = record.cell, _card(record, path)
                row = estimate(record.io_model, cell.problem, cell.pass_, tiles=_tiles(record), device=card)
                source = f"counters/{path.parent.name}"
                yield Time(card, "flash-v3", "flash-v3", row, seconds, source, record.config)


def tuned() -> Iterator[Time]:
    """Of flash-v3's variants, in fp16 and under sustained load, the one that its tables have today."""
    for pass_, names, folder, card in (
        ("fwd", TUNED_FWD, "h200-sxm", "h200"),
        ("bwd", TUNED_BWD, "h100-sxm", "h100-sxm"),
    ):
        for name in names:
            for row in _rows(name, folder):
                cut, config = _own(pass_, row)
                samples = row["samples_ms"].get(cut)
                if samples and row["seqlen"] >= SHORTEST:
                    yield _time(row, pass_, "fp16", samples, name, card, config=config)


def beside() -> Iterator[Time]:
    """flash-v3's forward in bf16 as it stood beside fp8's variants: its form of that day is not named."""
    for name in BESIDE:
        for row in _rows(name):
            samples = row["samples_ms"].get("flash-v3 bf16")
            if samples and row["seqlen"] >= SHORTEST:
                yield _time(row, "fwd", "bf16", samples, name)


def tuned_fp8() -> Iterator[Time]:
    """Of fp8's variants the one that its table has today, under load: that is in the family's constants, as
    nothing tells the share that it leaves of products from the rest."""
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


def _own(pass_: str, row: dict) -> tuple[str, dict[str, Any]]:
    """Of what runs today: its name in the tables of variants, and its configuration as a row says it."""
    dim, causal, seqlen = row["head_dim"], row["causal"], row["seqlen"]
    if pass_ == "fwd":
        tiles = hopper_configs.choose(dim, dim, causal, seqlen, fp16=True)
        return tiles.name, hopper_configs.described(tiles)
    if hopper_configs.wide(dim, dim):
        return WIDE, dict(hopper_configs.described_wide())
    own = hopper_configs.choose_backward(dim, dim, causal, seqlen)
    return own.name, dict(hopper_configs.described_backward(own))


def _time(
    row: dict, pass_: str, dtype: str, samples_ms: list[float], source: str, of: str = "h100-sxm",
    *, config: Mapping[str, Any] | None = None,
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
    estimated = estimate(model, problem, pass_, device=card)
    return Time(
        card, name, name, estimated, seconds, f"tuning/{source}", config or {}, sustained=dtype == "fp16"
    )
