"""What ``flashbench io-model`` is asked: the line's options as problems, models, cards and a variant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flashbench._cli import gpu, io_sweep, options
from flashbench.errors import SpecError, UsageError

if TYPE_CHECKING:
    from flashbench.devices import Device
    from flashbench.iomodel import Choice, Variant
    from flashbench.problem import Problem

DEFAULTS = {
    "seqlens": "1k-64k",
    "head_dims": "128",
    "dtypes": "bf16",
    "causal": "no",
    "passes": "fwd",
    "tokens": "16k",
    "hidden": "2048",
}
"""What an axis is where the line does not say, as it would be typed; the papers' convention."""

DECODE = {"seqlens": "1", "seqlens_k": DEFAULTS["seqlens"], "batch": "1"}
"""The same for a decode step: one query per sequence over a cache of seqlens_k keys."""

WORKLOAD_MODELS = "standard-minimal,standard,flash-v1,flash-v1-cuda,flash-v2"
"""The models of a published workload, where the line does not say: every counting that it may mean."""

AXES = (*DEFAULTS, "seqlens_k", "head_dims_v", "batch", "heads", "kv_heads")
MODES = ("prefill", "decode")
PACK = {"auto": None, "yes": True, "no": False}


@dataclass(frozen=True, kw_only=True)
class Request:
    """problems and passes in the order of the rows; names as typed; one choice per card, and
    of a sweep per size and tile.

    kernels: of the names, those of bundled implementations, each with the model that describes it.
    mode: prefill or decode. printed: what a published workload's source says of it; remark:
    what a preset's heads do not say of it; or empty.
    """

    problems: list[Problem]
    passes: tuple[str, ...]
    names: tuple[str, ...]
    kernels: Mapping[str, str]
    choices: list[Choice]
    mode: str
    printed: str = ""
    remark: str = ""


def read(line: Mapping[str, str | None]) -> Request:
    """The request of a line of options. Raises SpecError, UnknownName and UsageError for bad ones."""
    from flashbench import presets, sweep, units

    mode = units.parse_choice(line.get("mode") or MODES[0], "--mode", MODES)
    workload = presets.workload(line["preset"] or "", "--preset") if line.get("preset") is not None else None
    typed = options.given({name: line.get(name) for name in (*AXES, "model")})
    typed = presets.expand(typed, options.on_line)
    if line.get("lengths") is not None:
        typed = _packed(typed, str(line["lengths"]))
    elif mode == "decode":
        typed = _decode(typed)
    preset = {name: text for name, text in workload.options.items() if name in AXES} if workload else {}
    layers: list[Mapping[str, str | bool]] = [typed, preset, DEFAULTS]
    if mode == "decode" and line.get("lengths") is None:
        layers.insert(2, DECODE)
    joined = sweep.combine(*(sweep.parse(layer, options.on_line, ()) for layer in layers))
    problems = [_with_options(problem, line) for problem in sweep.Sweep(impls=(), **joined).problems()]
    asked = line.get("models")
    names, kernels = _models(WORKLOAD_MODELS if workload and asked is None else asked)
    cards = line.get("gpu")
    devices = gpu.choose(cards) if cards is not None else []
    variant = _variant(line, mode, problems)
    choices = io_sweep.swept(line, _choices(line, devices, variant))
    count = len(problems) * len(joined["passes"]) * len(names) * len(choices)
    if count > sweep.MAX_CELLS:
        raise SpecError(f"the axes multiply to {count} rows; accepted: at most {sweep.MAX_CELLS}")
    return Request(
        problems=problems,
        passes=joined["passes"],
        names=names,
        kernels=kernels,
        choices=choices,
        mode=mode,
        printed=workload.printed if workload else "",
        remark=presets.remark(presets.find(line["model"] or "")) if line.get("model") is not None else "",
    )


def _packed(typed: Mapping[str, str | bool], lengths: str) -> dict[str, str | bool]:
    """With --lengths there is one batch, whose sequences have those lengths."""
    for name in ("seqlens", "seqlens_k", "batch", "tokens"):
        if name in typed:
            raise UsageError(
                f"--lengths {lengths!r} and {options.on_line(name)} {str(typed[name])!r} exclude each other;"
                " accepted: one of the two"
            )
    return {**typed, "seqlens": "1", "batch": "1"}


def _decode(typed: Mapping[str, str | bool]) -> dict[str, str | bool]:
    """In a decode step --seqlens are the lengths of the cache, and there is one query per sequence."""
    if "seqlens" not in typed:
        return dict(typed)
    if "seqlens_k" in typed:
        raise UsageError(
            f"--seqlens {str(typed['seqlens'])!r} and --seqlens-k {str(typed['seqlens_k'])!r} exclude each"
            " other with --mode decode; accepted: one of the two, the length of the cache"
        )
    return {**typed, "seqlens": "1", "seqlens_k": typed["seqlens"]}


def _with_options(problem: Problem, line: Mapping[str, str | None]) -> Problem:
    """The problem with the line's mask options and, where given, lengths of its own."""
    from flashbench import units
    from flashbench.problem import ALIGNMENTS, packed

    changes: dict[str, Any] = {}
    text = line.get("window")
    if text is None:
        text = _preset_window(line)
    if text is not None:
        changes["window"] = parse_window(text)
    if (text := line.get("alignment")) is not None:
        changes["alignment"] = units.parse_choice(text, "--alignment", ALIGNMENTS)
    if (text := line.get("dropout")) is not None:
        changes["dropout_p"] = parse_share(text, "--dropout", "at least 0 and below 1", lambda p: 0 <= p < 1)
    if changes:
        problem = replace(problem, **changes)
    if (text := line.get("lengths")) is None:
        return problem
    return packed(problem, parse_lengths(text, decode=line.get("mode") == "decode"))


def _preset_window(line: Mapping[str, str | None]) -> str | None:
    """The window of a model of which every layer has it, as it would be typed."""
    if line.get("model") is None:
        return None
    from flashbench import presets

    preset = presets.find(line["model"] or "")
    return f"tokens={preset.window}" if preset.window and preset.windowed_layers == preset.layers else None


def parse_window(text: str) -> tuple[int, int]:
    """(left, right) of a window: "128,0", "128" (both sides), "tokens=128" (left 127, right 0), -1 none."""
    from flashbench import units

    accepted = "keys beside the query's own as LEFT,RIGHT or one number for both (-1: unlimited), or tokens=N"
    head, equals, count = text.partition("=")
    if equals and head.strip() == "tokens":
        return units.parse_int(count, f"--window {units.quoted(text)}: tokens") - 1, 0
    sides = [side.strip() for side in text.split(",")]
    try:
        if len(sides) > 2 or equals:
            raise SpecError("")
        values = [-1 if side == "-1" else units.parse_int(side, "", minimum=0) for side in sides]
    except SpecError:
        raise SpecError(f"--window {units.quoted(text)}: not a window; accepted: {accepted}") from None
    return values[0], values[-1]


def parse_lengths(text: str, *, decode: bool = False) -> list[tuple[int, int]]:
    """Sequences of a packed batch: "512,1k,3k", queries x keys "1x512,1x3k", repeated "4*512"; k = 1024."""
    from flashbench import units

    lengths: list[tuple[int, int]] = []
    for item in text.split(","):
        label = f"--lengths {units.quoted(text)}:"
        count, star, shape = item.rpartition("*")
        queries, cross, keys = shape.partition("x")
        repeat = units.parse_int(count, label, maximum=2**20) if star else 1
        rows = units.parse_int(queries, label)
        lengths += [(rows, units.parse_int(keys, label)) if cross else (1 if decode else rows, rows)] * repeat
    return lengths


def parse_share(text: str, option: str, accepted: str, allowed: Callable[[float], bool]) -> float:
    """A decimal number within bounds. Raises SpecError."""
    from flashbench import units

    try:
        value = float(text)
    except ValueError:
        raise SpecError(
            f"{option} {units.quoted(text)}: not a number; accepted: a number {accepted}"
        ) from None
    if not allowed(value):
        raise SpecError(f"{option} {units.quoted(text)}: out of range; accepted: a number {accepted}")
    return value


def _variant(line: Mapping[str, str | None], mode: str, problems: Sequence[Problem]) -> Variant:
    from flashbench import units
    from flashbench._iomodel.variant import AUTO, DEFAULT, MAX_SPLITS
    from flashbench.iomodel import Variant

    values: dict[str, Any] = {}
    if mode == "decode" and any(problem.group > 1 for problem in problems):
        values["pack_gqa"] = True
    if (text := line.get("pack_gqa")) is not None:
        values["pack_gqa"] = PACK[units.parse_choice(text, "--pack-gqa", PACK)]
    if (text := line.get("splits")) is not None:
        if text.strip() == "auto":
            if line.get("gpu") is None:
                raise UsageError("--splits 'auto' depends on the card; accepted: with --gpu, or a number")
            values["num_splits"] = AUTO
        else:
            values["num_splits"] = _splits(text, MAX_SPLITS)
    if (text := line.get("page_size")) is not None:
        values["page_size"] = units.parse_int(text, "--page-size", maximum=2**20)
    if (text := line.get("density")) is not None:
        values["density"] = parse_share(text, "--density", "above 0 and at most 1", lambda s: 0 < s <= 1)
    return Variant(**values) if values else DEFAULT


def _splits(text: str, maximum: int) -> int:
    from flashbench import units

    try:
        return units.parse_int(text, "--splits", maximum=maximum)
    except SpecError as error:
        raise SpecError(f"{error}, or auto with --gpu") from None


def _choices(line: Mapping[str, str | None], devices: Sequence[Device], variant: Variant) -> list[Choice]:
    """What decides tiles and variant, per card: M is --sram, else the card's, else the paper's."""
    from flashbench import units
    from flashbench.iomodel import DEFAULT_SRAM_BYTES, Choice

    tiles = {
        name: units.parse_int(text, options.on_line(name))
        for name in ("block_q", "block_k")
        if (text := line.get(name)) is not None
    }
    cards: Sequence[Device | None] = devices or [None]
    text = line.get("sram")
    sram = units.parse_bytes(text, "--sram") if text is not None else None
    return [
        Choice(
            sram_bytes=sram or (device.smem_per_sm_bytes if device else DEFAULT_SRAM_BYTES),
            tiles=tiles,
            device=device,
            variant=variant,
        )
        for device in cards
    ]


def _models(text: str | None) -> tuple[tuple[str, ...], dict[str, str]]:
    """The names in order, and of them the bundled kernels with the model that describes each."""
    from flashbench.iomodel import MODELS

    if text is None:
        return tuple(row.name for row in MODELS if row.shown), {}
    from flashbench import kernels
    from flashbench._iomodel import alternatives

    models = [row.name for row in MODELS if not row.bundled]
    # an unknown name may be an implementation's; asking for all of them takes a while
    foreign = any(name.strip() not in models for name in text.split(","))
    bundled = {  # a model of the same name is meant first; the kernels' own then goes by its model's name
        row.io_model if row.name in models and row.io_model not in models else row.name: row.io_model
        for row in (kernels.registry().values() if foreign else ())
        if row.io_model is not None and row.io_model != "standard"
    }
    names = alternatives.parse_names(text, "--models", [*models, *bundled])
    return names, {name: bundled[name] for name in names if name in bundled}
