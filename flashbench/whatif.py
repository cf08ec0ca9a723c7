"""The model over ranges: lengths, on-chip memory, block sizes, cards; as typed rows or a data frame.

io_table(models="standard,flash-v2", seqlens="1k-64k", gpus="h100-sxm") -> IoTable
io_table(seqlens=4096, sram="16KB-512KB").frame() -> pandas.DataFrame
study(problems, passes, models, devices) -> Study, what the page of ``io-model --html`` shows
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

from flashbench import crossover, devicefile, devices, features, iomodel, presets, sweep, units
from flashbench._iomodel import alternatives, paper
from flashbench._iomodel.time import Prediction, predict
from flashbench._iomodel.variant import AUTO, DEFAULT, Variant
from flashbench.crossover import Crossover
from flashbench.devices import Device
from flashbench.errors import FlashbenchError, SpecError
from flashbench.iomodel import Estimate
from flashbench.problem import PASSES, Problem

if TYPE_CHECKING:
    from pandas import DataFrame

AXES = {
    "seqlens": "1k-64k", "head_dims": "128", "dtypes": "bf16", "causal": "no", "passes": "fwd",
    "tokens": "16k", "hidden": "2048",
}  # fmt: skip
"""What an axis is where it is not given, as ``io-model`` takes it."""

SRAM = "16KB-512KB"
BLOCKS = "16-256"
"""Ranges of the page; both double, and are drawn with more points in between."""


@dataclass(frozen=True, kw_only=True)
class IoRow:
    """One estimate, what it was asked for, and what a card makes of it.

    sram_bytes: M where it decides the tiles, else None. block: rows of a square tile that was set,
    else None. device, prediction: None without a card, or where its constants do not cover the case.
    """

    estimate: Estimate
    sram_bytes: int | None = None
    block: int | None = None
    device: Device | None = None
    prediction: Prediction | None = None

    def record(self) -> dict[str, Any]:
        """Flat values by name, with the unit in the name; sizes in bytes, times in seconds."""
        e, p, said = self.estimate, self.estimate.problem, self.prediction
        return {
            "model": e.model, "pass": e.pass_, "dtype": p.dtype, "causal": p.causal, "batch": p.batch,
            "num_heads": p.num_heads, "num_kv_heads": p.num_kv_heads, "seqlen_q": p.seqlen_q,
            "seqlen_k": p.seqlen_k, "head_dim": p.head_dim, "head_dim_v": p.head_dim_v,
            "gpu": self.device.name if self.device else None, "sram_bytes": self.sram_bytes,
            "sram_elements": e.sram_elements, "block": self.block, "tiles": dict(e.tiles) or None,
            "tile_source": e.tile_source or None, "tiles_fit": e.tiles_fit,
            "flops": e.flops, "done_flops": e.done_flops, "exps": e.exps,
            "requested_read_bytes": e.requested.read_bytes, "requested_write_bytes": e.requested.write_bytes,
            "requested_atomic_bytes": e.requested.atomic_bytes,
            "compulsory_read_bytes": e.compulsory.read_bytes,
            "compulsory_write_bytes": e.compulsory.write_bytes,
            "saved_bytes": e.saved_bytes, "extra_bytes": e.extra_bytes,
            "intensity_requested": e.intensity, "intensity_compulsory": e.intensity_compulsory,
            "dram_read_bytes": said.dram_read.value if said else None,
            "dram_write_bytes": said.dram_write.value if said else None,
            "dram_low_bytes": said.dram.low if said else None,
            "dram_high_bytes": said.dram.high if said else None,
            "time_s": said.time_s if said else None, "limiting": said.limiting if said else None,
        }  # fmt: skip


@dataclass(frozen=True)
class IoTable:
    """Rows of the model, in the order asked for."""

    rows: tuple[IoRow, ...]
    variant: Variant = DEFAULT

    def __iter__(self) -> Iterator[IoRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def records(self) -> list[dict[str, Any]]:
        """Every row flat, for JSON or CSV."""
        return [row.record() for row in self.rows]

    def to_pandas(self) -> DataFrame:
        """Every row flat, as a data frame."""
        return self.frame()

    def frame(self) -> DataFrame:
        """As ``to_pandas``."""
        import pandas as pd

        return pd.DataFrame(self.records())


def io_table(
    models: str | Sequence[str] = "standard,flash-v1,flash-v2",
    *,
    gpus: str | Device | Sequence[str | Device] = (),
    sram: str | int | Sequence[int] = (),
    blocks: str | int | Sequence[int] = (),
    variant: Variant = DEFAULT,
    problems: Sequence[Problem] | None = None,
    **axes: Any,
) -> IoTable:
    """The model over axes, in one call.

    models: names, as ``io-model --models`` takes them (``linformer:rank=128`` too). gpus: cards, one
    row each, with DRAM traffic and time. sram: sizes of M in bytes, or text such as "16KB-512KB", from
    which tiles are derived; blocks: rows of square tiles. problems: the problems themselves, with
    passes beside them, instead of axes; axes: seqlens, seqlens_k, head_dims, head_dims_v, dtypes,
    causal, passes, batch or tokens, heads or hidden, kv_heads, model (a preset) or preset (a workload),
    as text, a number or a sequence. Order: problem, pass, size, block, model, card.

    Raises SpecError, UnknownName or UsageError, naming the argument.
    """
    text = models if isinstance(models, str) else ",".join(models)
    names = alternatives.parse_names(text, "models", [row.name for row in iomodel.MODELS])
    if problems is None:
        problems, passes = _problems(axes)
    else:
        if unknown := sorted(set(axes) - {"passes"}):
            raise SpecError(f"{unknown[0]} beside problems; accepted: passes")
        passes = units.parse_names(_text(axes.get("passes", "fwd")), "passes", PASSES)
    return evaluate(
        problems,
        passes,
        names,
        devices=cards(gpus),
        sram=_sizes(sram),
        blocks=_blocks(blocks),
        variant=variant,
    )


def evaluate(
    problems: Sequence[Problem],
    passes: Sequence[str],
    names: Sequence[str],
    *,
    devices: Sequence[Device] = (),
    sram: Sequence[int] = (),
    blocks: Sequence[int] = (),
    variant: Variant = DEFAULT,
) -> IoTable:
    """Every combination, the card innermost. Without sram, tiles are those that ``estimate`` chooses."""
    sizes = {units.PROBLEMS: len(problems), "--passes": len(passes), "--models": len(names),
             "--gpu": len(devices) or 1, "--sram": len(sram) or 1, "--block-q": len(blocks) or 1}  # fmt: skip
    units.limit(sizes, sweep.MAX_CELLS, "rows")
    found = []
    for problem, pass_, size, block, name, device in product(
        problems, passes, sram or (None,), blocks or (None,), names, devices or (None,)
    ):
        tiles = {} if block is None else {"block_q": block, "block_k": block}
        takes = iomodel.find(name).takes if iomodel.known(name) else ()
        estimate = iomodel.estimate(
            name, problem, pass_, sram_bytes=size, tiles=tiles, device=device, variant=variant.only(takes)
        )
        found.append(
            IoRow(
                estimate=estimate, sram_bytes=size, block=block, device=device,
                prediction=None if device is None else _predict(estimate, device),
            )
        )  # fmt: skip
    return IoTable(tuple(found), variant)


def _predict(estimate: Estimate, device: Device) -> Prediction | None:
    """What the card makes of it; None for what the time model does not cover."""
    if alternatives.is_one(estimate.model):
        return None
    try:
        return predict(estimate, device)
    except FlashbenchError:
        return None


@dataclass(frozen=True, kw_only=True)
class Study:
    """What the page shows: the model over lengths, over M and over block sizes, and where things cross.

    by_length: tiles as shipped, one row per card. by_sram, by_block: the models of STUDIED on no card,
    at MOST_LENGTHS lengths at most. views: the paper's view of these problems, with the crossovers by
    M; lengths: where the alternatives among the models cross flash-v2, by length.
    """

    devices: tuple[Device, ...]
    models: tuple[str, ...]
    by_length: IoTable
    by_sram: IoTable
    by_block: IoTable
    views: tuple[paper.PaperView, ...]
    lengths: tuple[Crossover, ...]


MOST_LENGTHS = 8
"""Lengths at which the page shows the model over M and over block sizes."""

STUDIED = ("standard", "flash-v1", "flash-v2")
"""Models whose traffic depends on M or on the block in closed form, and the one that does not."""


def study(
    problems: Sequence[Problem],
    passes: Sequence[str],
    names: Sequence[str],
    devices: Sequence[Device] = (),
    *,
    sram: Sequence[int] = (),
    blocks: Sequence[int] = (),
    variant: Variant = DEFAULT,
) -> Study:
    """The model over everything that the page draws. sram, blocks: their points; default: SRAM, BLOCKS.

    Raises as ``evaluate`` does.
    """
    sizes = tuple(sram) or between(units.parse_byte_axis(SRAM, "sram"))
    rows = tuple(blocks) or tuple(range(16, 257, 16))
    exact = [name for name in STUDIED if name in names] or ["flash-v2"]
    exact = [name for name in exact if all(iomodel.find(name).refuses(p) is None for p in problems)]
    tiled = [name for name in exact if name != "standard"]
    few = _few(problems)
    one = tuple(devices[:1]) if variant.num_splits == AUTO else ()  # which the heuristic needs
    return Study(
        devices=tuple(devices),
        models=tuple(names),
        by_length=evaluate(problems, passes, names, devices=devices, variant=variant),
        by_sram=evaluate(few, passes, exact, devices=one, sram=sizes, variant=variant),
        by_block=evaluate(few, passes, tiled, devices=one, blocks=rows, variant=variant),
        views=tuple(
            paper.paper_view(p, iomodel.DEFAULT_SRAM_BYTES) for p in few if not (p.lengths or p.block_mask)
        ),
        lengths=tuple(_length_crossovers(problems[0], [n for n in names if alternatives.is_one(n)])),
    )


def _few(problems: Sequence[Problem]) -> list[Problem]:
    """Those of the problems at the ends of the lengths and evenly between."""
    found = sorted({problem.seqlen_k for problem in problems})
    if len(found) > MOST_LENGTHS:
        step = (len(found) - 1) / (MOST_LENGTHS - 1)
        found = [found[round(index * step)] for index in range(MOST_LENGTHS)]
    return [problem for problem in problems if problem.seqlen_k in found]


def _length_crossovers(problem: Problem, names: Sequence[str]) -> Iterator[Crossover]:
    for name in names:
        for quantity in crossover.QUANTITIES:
            yield crossover.length(name, problem, quantity)


def between(sizes: Sequence[int], parts: int = 4) -> tuple[int, ...]:
    """The sizes, with parts - 1 more between neighbours, evenly on a log axis and rounded."""
    found = dict.fromkeys(
        round(low * (high / low) ** (part / parts)) for low, high in pairwise(sizes) for part in range(parts)
    )
    return (*found, sizes[-1])


def cards(gpus: str | Device | Sequence[str | Device]) -> tuple[Device, ...]:
    """Cards by name, from a TOML file, or as they are. Raises UnknownName or SpecError."""
    if isinstance(gpus, Device):
        return (gpus,)
    listed = [part.strip() for part in gpus.split(",")] if isinstance(gpus, str) else list(gpus)
    return tuple(_card(item) if isinstance(item, str) else item for item in listed)


def _card(name: str) -> Device:
    return devicefile.load(name) if name.endswith(".toml") else devices.find(name)


def _problems(axes: Mapping[str, Any]) -> tuple[list[Problem], tuple[str, ...]]:
    workload = presets.workload(axes["preset"], "preset").options if "preset" in axes else {}
    typed = {name: _text(value) for name, value in axes.items() if name != "preset"}
    known = (*sweep.AXES, "model")
    for name in typed:
        if name not in known or name == "impls":
            raise SpecError(f"{name!r} is no axis; accepted: {', '.join(n for n in known if n != 'impls')}")
    layers = (presets.expand(typed, str), workload, AXES)
    joined = sweep.combine(*(sweep.parse(layer, str, ()) for layer in layers))
    problems = list(sweep.Sweep(impls=(), **joined).problems())
    features.check_not_empty(problems, str, typed)
    return problems, joined["passes"]


def _text(value: Any) -> str:
    """An axis as it would be typed."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str | int):
        return str(value)
    return ",".join(map(str, value))


def _sizes(sram: str | int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(sram, str):
        return units.parse_byte_axis(sram, "sram")
    return (sram,) if isinstance(sram, int) else tuple(sram)


def _blocks(blocks: str | int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(blocks, str):
        return units.parse_axis(blocks, "blocks")
    return (blocks,) if isinstance(blocks, int) else tuple(blocks)
