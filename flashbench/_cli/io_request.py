"""What ``flashbench io-model`` is asked: the line's options as problems, models, cards and a variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

COUNTS_ALL = "flash"
"""The model that counts every option: the bundled kernel's."""

AXES = (*DEFAULTS, "seqlens_k", "head_dims_v", "batch", "heads", "kv_heads")
MODES = ("prefill", "decode")
PACK = {"auto": None, "yes": True, "no": False}


@dataclass(frozen=True, kw_only=True)
class Request:
    """problems and passes in the order of the rows; names as typed; one choice per card, and
    of a sweep per size and tile.

    kernels: of the names, those of bundled implementations, each with the model that describes it.
    mode: prefill or decode. printed: what a published workload's source says of it; left_out: which models
    of those shown by default, and why; remark: what a preset's heads do not say of it; or empty.
    """

    problems: list[Problem]
    passes: tuple[str, ...]
    names: tuple[str, ...]
    kernels: Mapping[str, str]
    choices: list[Choice]
    mode: str
    printed: str = ""
    left_out: str = ""
    remark: str = ""


def read(line: Mapping[str, str | None], given: Mapping[str, Any]) -> Request:
    """The request of a line of options; given: those of features.ROWS.

    Raises SpecError, UnknownName and UsageError for bad ones.
    """
    from flashbench import features, presets, sweep, units

    mode = units.parse_choice(line.get("mode") or MODES[0], "--mode", MODES)
    workload = presets.workload(line["preset"] or "", "--preset") if line.get("preset") is not None else None
    typed = options.given({name: line.get(name) for name in (*AXES, "model")})
    typed = presets.expand(typed, options.on_line)
    parsed = _features(line, given)
    if "varlen" in parsed:
        typed = _packed(typed, "--lengths" if line.get("lengths") is not None else "--varlen", line, given)
    elif mode == "decode":
        typed = _decode(typed)
    preset = {name: text for name, text in workload.options.items() if name in AXES} if workload else {}
    layers: list[Mapping[str, str | bool]] = [typed, preset, DEFAULTS]
    if mode == "decode" and "varlen" not in parsed:
        layers.insert(2, DECODE)
    joined = sweep.combine(*(sweep.parse(layer, options.on_line, ()) for layer in layers))
    problems = [
        _with_options(problem, line, parsed) for problem in sweep.Sweep(impls=(), **joined).problems()
    ]
    features.check_not_empty(problems, options.on_line, {**line, **given})
    asked = line.get("models")
    names, kernels = _models(WORKLOAD_MODELS if workload and asked is None else asked)
    left_out = ""
    if asked is None and (missing := _uncounted(names, problems)):
        options_ = sorted(frozenset().union(*missing.values()))
        left_out = f"{', '.join(missing)}: left out, as they do not count {', '.join(options_)}"
        names = tuple(name for name in names if name not in missing) or (COUNTS_ALL,)
    cards = line.get("gpu")
    devices = gpu.choose(cards) if cards is not None else []
    variant = _variant(line, mode, problems)
    choices = io_sweep.swept(line, _choices(line, devices, variant))
    sizes = {units.PROBLEMS: len(problems), "--passes": len(joined["passes"]), "--models": len(names),
             "--gpu, --sram and other axes of tiles": len(choices)}  # fmt: skip
    units.limit(sizes, sweep.MAX_CELLS, "rows")
    return Request(
        problems=problems,
        passes=joined["passes"],
        names=names,
        kernels=kernels,
        choices=choices,
        mode=mode,
        printed=workload.printed if workload else "",
        left_out=left_out,
        remark=presets.remark(presets.find(line["model"] or "")) if line.get("model") is not None else "",
    )


def _packed(
    typed: Mapping[str, str | bool], label: str, line: Mapping[str, str | None], given: Mapping[str, Any]
) -> dict[str, str | bool]:
    """With a packed batch there is one batch, whose sequences have those lengths."""
    lengths = line.get("lengths") or given.get("varlen")
    for name in ("seqlens", "seqlens_k", "batch", "tokens"):
        if name in typed:
            raise UsageError(
                f"{label} {lengths!r} and {options.on_line(name)} {str(typed[name])!r} exclude each other;"
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


def _with_options(problem: Problem, line: Mapping[str, str | None], parsed: Mapping[str, Any]) -> Problem:
    """The problem with the line's options of features.ROWS, and its own --alignment."""
    from flashbench import features, units
    from flashbench.problem import ALIGNMENTS

    if (text := line.get("alignment")) is not None:
        problem = replace(problem, alignment=units.parse_choice(text, "--alignment", ALIGNMENTS))
    return features.apply(problem, parsed, options.on_line)


def _features(line: Mapping[str, str | None], given: Mapping[str, Any]) -> dict[str, Any]:
    """Parsed options of features.ROWS: --lengths is --varlen, and a model may bring its window."""
    from flashbench import features

    if given.get("varlen") is not None and line.get("lengths") is not None:
        raise UsageError(
            f"--lengths {line['lengths']!r} and --varlen {given['varlen']!r} exclude each other;"
            " accepted: one of the two"
        )
    texts = {name: value for name, value in given.items() if name != "varlen"}
    if texts.get("window") is None:
        texts["window"] = _preset_window(line)
    parsed = features.parse_all(texts, options.on_line)
    for label, text in (("--lengths", line.get("lengths")), ("--varlen", given.get("varlen"))):
        if text is not None:
            parsed["varlen"] = features.parse_lengths(text, label, decode=line.get("mode") == "decode")
    return parsed


def _preset_window(line: Mapping[str, str | None]) -> str | None:
    """The window of a model of which every layer has it, as it would be typed."""
    if line.get("model") is None:
        return None
    from flashbench import presets

    preset = presets.find(line["model"] or "")
    return f"tokens={preset.window}" if preset.window and preset.windowed_layers == preset.layers else None


def _variant(line: Mapping[str, str | None], mode: str, problems: Sequence[Problem]) -> Variant:
    from flashbench import features, units
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
        values["density"] = features.parse_share(
            text, "--density", "above 0 and at most 1", lambda s: 0 < s <= 1
        )
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


def _uncounted(names: Sequence[str], problems: Sequence[Problem]) -> dict[str, frozenset[str]]:
    """The models that do not count all options of the problems, with those that they do not."""
    from flashbench._iomodel import engine

    found = {
        name: frozenset().union(*(engine.uncounted(engine.find(name), problem) for problem in problems))
        for name in names
    }
    return {name: missing for name, missing in found.items() if missing}
