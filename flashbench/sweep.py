"""Which cells: options and TOML files become a Sweep, a Sweep becomes cells in a fixed order.

One row of OPTIONS describes an option of ``flashbench run`` for the command line and the config
file alike. Three layers are joined: what stands on the command line wins over the config file,
which wins over the defaults of the kind of device. ``batch``/``tokens`` and ``heads``/``hidden``
exclude each other within a layer; across layers the upper one replaces the lower.
"""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashbench import features, units
from flashbench.configfile import read_toml
from flashbench.errors import SpecError, UsageError
from flashbench.problem import ALIGNMENTS, DTYPES, MAX_SEQLEN, PASSES, Cell, Problem
from flashbench.record import LOADS, TIMINGS

MAX_CELLS = 100_000
MAX_HEAD_DIM = 65536
MAX_HEADS = 65536
CAUSAL: Mapping[str, tuple[bool | str, ...]] = {
    "yes": (True,), "no": (False,), "both": (False, True), "top-left": ("top-left",)
}  # fmt: skip
"""Values of the axis: False, True (bottom-right) and top-left."""
CACHES = ("cold", "hot")
EXCLUSIVE = (
    ("batch", "tokens"), ("heads", "hidden"), ("json", "csv"), ("quiet", "verbose"),
    ("varlen", "seqlens"), ("varlen", "seqlens_k"), ("varlen", "batch"), ("varlen", "tokens"),
)  # fmt: skip
"""Pairs of options that set the same thing in two ways; a flag that is off excludes nothing."""

_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,4})?")


@dataclass(frozen=True, kw_only=True)
class Opt:
    """One option: ``parse(text, label, implementations)`` for text, ``bool`` flags when None."""

    name: str
    accepted: str
    parse: Callable[[str, str, Collection[str]], Any] | None = None


def _int(maximum: int, minimum: int = 1) -> Callable[[str, str, Collection[str]], int]:
    return lambda text, label, _: units.parse_int(text, label, minimum=minimum, maximum=maximum)


def _axis(maximum: int, minimum: int = 1) -> Callable[[str, str, Collection[str]], tuple[int, ...]]:
    return lambda text, label, _: units.parse_axis(text, label, minimum=minimum, maximum=maximum)


def _choice(known: Collection[str]) -> Callable[[str, str, Collection[str]], str]:
    return lambda text, label, _: units.parse_choice(text, label, known)


def _device(text: str, label: str, _: Collection[str]) -> str:
    if not _DEVICE.fullmatch(text):
        raise SpecError(f"{label} {units.quoted(text)}: not a device; accepted: cpu, cuda or cuda:N")
    return text


def _path(text: str, label: str, _: Collection[str]) -> Path:
    try:
        named = text.strip() and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # a file's word: a shell gives no such text
        named = False
    if not named:
        raise SpecError(f"{label} {units.quoted(text)}: not a path; accepted: the path of a folder")
    return Path(text)


def _duration(text: str, label: str, _: Collection[str]) -> float:
    return units.parse_duration(text, label)


def _of_feature(row: features.Feature) -> Callable[[str, str, Collection[str]], Any] | None:
    rule = row.parse
    return None if rule is None else lambda text, label, _: rule(text, label)


def _implementations(text: str, label: str, known: Collection[str]) -> tuple[str, ...]:
    return () if text.strip() == NONE else units.parse_names(text, label, known)


def _names(known: Collection[str] | None) -> Callable[[str, str, Collection[str]], tuple[str, ...]]:
    return lambda text, label, _: units.parse_names(text, label, known)


def _listed(one: str, two: str) -> str:
    return f"names such as '{one},{two}' or ['{one}', '{two}']"


_NUMBER = "a whole number such as 16 or '16k'"
_LENGTHS = "lengths such as '1k-64k' or [512, 1024]"
_FLAGS = ("resume", "energy", "cycles", "timings", "counters", "trace", "dry_run", "strict", "quiet",
          "verbose", "json", "csv")  # fmt: skip
NONE = "none"
"""In place of names of implementations: those of --impl alone."""
_SPECS = "names such as 'my_kernels.py:attention'"

OPTIONS = {
    row.name: row
    for row in (
        Opt(name="seqlens", accepted=_LENGTHS, parse=_axis(MAX_SEQLEN, minimum=0)),
        Opt(name="seqlens_k", accepted=_LENGTHS, parse=_axis(MAX_SEQLEN, minimum=0)),
        Opt(name="head_dims", accepted=_LENGTHS, parse=_axis(MAX_HEAD_DIM)),
        Opt(name="head_dims_v", accepted=_LENGTHS, parse=_axis(MAX_HEAD_DIM)),
        Opt(name="dtypes", accepted=_listed("fp16", "bf16"), parse=_names(DTYPES)),
        Opt(name="impls", accepted=_listed("naive", "sdpa"), parse=_implementations),
        Opt(name="impl", accepted=_SPECS, parse=_names(None)),
        Opt(
            name="causal",
            accepted="'yes', 'no', 'both', 'top-left', true or false",
            parse=lambda t, label, _: CAUSAL[units.parse_choice(t, label, CAUSAL)],
        ),
        *(Opt(name=row.name, accepted=row.accepted, parse=_of_feature(row)) for row in features.ROWS),
        Opt(name="passes", accepted=_listed("fwd", "bwd"), parse=_names(PASSES)),
        Opt(name="batch", accepted=_NUMBER, parse=_int(units.MAX_INT)),
        Opt(name="tokens", accepted=_NUMBER, parse=_int(2**40)),
        Opt(name="heads", accepted=_NUMBER, parse=_int(MAX_HEADS)),
        Opt(name="hidden", accepted=_NUMBER, parse=_int(2**30)),
        Opt(name="kv_heads", accepted=_LENGTHS, parse=_axis(MAX_HEADS)),
        Opt(name="model", accepted="a model such as 'llama-3-8b'", parse=lambda t, label, _: t),
        Opt(name="device", accepted="'cpu', 'cuda' or 'cuda:0'", parse=_device),
        Opt(name="cache", accepted="'cold' or 'hot'", parse=_choice(CACHES)),
        Opt(name="timing", accepted="'auto', 'events', 'graph' or 'cupti'", parse=_choice(TIMINGS)),
        Opt(name="load", accepted="'burst' or 'sustained'", parse=_choice(LOADS)),
        Opt(name="seed", accepted=_NUMBER, parse=_int(2**63 - 1, minimum=0)),
        Opt(name="time_budget", accepted="a time such as '5m'", parse=_duration),
        Opt(name="cell_timeout", accepted="a time such as '10m'", parse=_duration),
        Opt(name="executor", accepted="'local', 'ray' or 'slurm'", parse=_choice(("local", "ray", "slurm"))),
        *(
            Opt(name=name, accepted="text such as '0,1'", parse=lambda t, label, _: t)
            for name in ("devices", "address", "accelerator_type", "slurm_args")
        ),
        Opt(name="jobs", accepted="a whole number such as 8", parse=_int(1000)),
        Opt(name="in_process", accepted="true or false"),
        Opt(name="tuned", accepted="a path such as 'tuned.json'", parse=_path),
        Opt(name="out", accepted="a path such as 'results/today'", parse=_path),
        *(Opt(name=name, accepted="true or false") for name in _FLAGS),
    )
}
"""Every option of ``run`` that a config file may hold; the key is the option with underscores."""

Raw = Mapping[str, "str | bool"]
"""Unparsed values by option name: text, or bool for flags."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The axes of a grid. Lengths and head dims are counts of rows and elements.

    None means: seqlens_k as seqlens, head_dims_v as head_dims, kv_heads as heads. Exactly one of
    batch and tokens is set, and one of heads and hidden: batch = max(1, tokens // seqlen_q), 1 of no queries,
    heads = max(1, hidden // head_dim). features: parsed options of features.ROWS, of every problem.
    """

    seqlens: tuple[int, ...]
    head_dims: tuple[int, ...]
    dtypes: tuple[str, ...]
    impls: tuple[str, ...]
    causal: tuple[bool | str, ...] = (False,)
    passes: tuple[str, ...] = ("fwd",)
    seqlens_k: tuple[int, ...] | None = None
    head_dims_v: tuple[int, ...] | None = None
    kv_heads: tuple[int, ...] | None = None
    batch: int | None = None
    tokens: int | None = None
    heads: int | None = None
    hidden: int | None = None
    features: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for one, other in EXCLUSIVE[:2]:
            if (getattr(self, one) is None) == (getattr(self, other) is None):
                raise SpecError(f"a sweep needs either {one} or {other}; accepted: one of the two")

    def problems(self) -> Iterator[Problem]:
        """Every problem, ordered by dtype, head_dim, head_dim_v, causal, kv_heads, seqlen, seqlen_k.

        Raises SpecError where the query heads are not divisible by kv_heads.
        """
        for dtype, head_dim, head_dim_v, causal, kv_heads, seqlen, seqlen_k in itertools.product(
            self.dtypes, self.head_dims, self.head_dims_v or (None,), self.causal,
            self.kv_heads or (None,), self.seqlens, self.seqlens_k or (None,),
        ):  # fmt: skip
            num_heads = self.num_heads(head_dim)
            if kv_heads is not None and num_heads % kv_heads:
                raise SpecError(self._indivisible(num_heads, kv_heads, head_dim))
            problem = Problem(
                batch=self.batch or max(1, (self.tokens or 0) // seqlen if seqlen else 1),
                num_heads=num_heads,
                num_kv_heads=kv_heads or num_heads,
                seqlen_q=seqlen,
                seqlen_k=seqlen if seqlen_k is None else seqlen_k,
                head_dim=head_dim,
                head_dim_v=head_dim_v or head_dim,
                dtype=dtype,
                causal=bool(causal),
                alignment=causal if isinstance(causal, str) else ALIGNMENTS[0],
            )
            yield features.apply(problem, self.features, lambda name: f"--{name.replace('_', '-')}")

    def num_heads(self, head_dim: int) -> int:
        """Query heads at that head dim."""
        return self.heads or max(1, (self.hidden or 0) // head_dim)

    def _indivisible(self, num_heads: int, kv_heads: int, head_dim: int) -> str:
        origin = f"--heads {num_heads}" if self.heads else f"--hidden {self.hidden} // head dim {head_dim}"
        return (
            f"--kv-heads '{kv_heads}': {num_heads} query heads ({origin}) are not divisible by {kv_heads};"
            f" accepted: a divisor of {num_heads}"
        )

    def cells(self) -> tuple[Cell, ...]:
        """Every cell in a fixed order: by problem, then pass, the implementation innermost.

        Raises SpecError for a cell that occurs twice and for more than MAX_CELLS cells.
        """
        axes = ("seqlens", "seqlens_k", "head_dims", "head_dims_v", "dtypes", "causal", "kv_heads", "passes",
                "impls")  # fmt: skip
        sizes = {
            f"--{name.replace('_', '-')}": len(axis)
            for name in axes
            if (axis := getattr(self, name)) is not None
        }
        units.limit(sizes, MAX_CELLS, "cells")
        cells = tuple(
            Cell(implementation=name, problem=problem, pass_=pass_)
            for problem in self.problems()
            for pass_ in self.passes
            for name in self.impls
        )
        seen: set[Cell] = set()
        for cell in cells:
            if cell in seen:
                raise SpecError(f"the cell '{cell.key}' occurs twice; accepted: every cell once")
            seen.add(cell)
        return cells


DEFAULTS: Mapping[str, Mapping[str, str]] = {
    "cuda": {
        "seqlens": "1k-64k",
        "head_dims": "64,128",
        "dtypes": "bf16",
        "causal": "both",
        "passes": "fwd,bwd",
        "tokens": "16k",
        "hidden": "2048",
        "impls": "naive,sdpa,sdpa-flash,sdpa-cudnn,flash",
        "cache": "cold",
        "timing": "auto",
        "load": "burst",
        "seed": "0",
    },
    "cpu": {
        "seqlens": "128-512",
        "head_dims": "64",
        "dtypes": "fp32,bf16",
        "causal": "both",
        "passes": "fwd,bwd",
        "batch": "1",
        "heads": "1",
        "impls": "naive,sdpa,flash",
        "cache": "hot",
        "timing": "auto",
        "load": "burst",
        "seed": "0",
    },
}
"""What an option is where neither the command line nor a config file says, as it would be typed."""


def defaults(device_type: str) -> dict[str, Any]:
    """Parsed default options for ``cuda`` or ``cpu``."""
    raw = DEFAULTS[device_type]
    return parse(raw, lambda name: f"default {name}", raw["impls"].split(","))


def parse(raw: Raw, label: Callable[[str], str], implementations: Collection[str]) -> dict[str, Any]:
    """Parse one layer of options; ``label(name)`` is how errors call an option.

    Raises SpecError or UnknownName for a bad value, UsageError where two options of a pair stand.
    """
    parsed: dict[str, Any] = {}
    for name, value in raw.items():
        rule = OPTIONS[name].parse
        parsed[name] = value if rule is None else rule(str(value), label(name), implementations)
    for one, other in EXCLUSIVE:
        if raw.get(one, False) is not False and raw.get(other, False) is not False:
            raise UsageError(
                f"{_shown(label(one), raw[one])} and {_shown(label(other), raw[other])} exclude each other;"
                " accepted: one of the two"
            )
    return parsed


def _shown(label: str, value: str | bool) -> str:
    return label if isinstance(value, bool) else f"{label} {units.quoted(value)}"


def combine(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Join parsed layers, the first winning; a value removes its partner of EXCLUSIVE further down."""
    joined: dict[str, Any] = {}
    for layer in layers:
        given = {name for name, value in joined.items() if value is not False}
        taken = {two for pair in EXCLUSIVE if given & set(pair) for two in pair}
        joined |= {name: value for name, value in layer.items() if name not in joined and name not in taken}
    return joined


AXES = tuple(name for name in Sweep.__dataclass_fields__ if name != "features")

ASKED = (*AXES, "impl", *features.NAMES)
"""Options that decide which cells there are."""


def sweep_of(options: Mapping[str, Any]) -> Sweep:
    """The Sweep within joined options, which may hold others beside."""
    axes = {name: options[name] for name in AXES if name in options}
    axes["impls"] = implementations(options)
    if options.get("varlen"):
        axes |= {"seqlens": (1,), "batch": 1}
    return Sweep(**axes, features={name: options[name] for name in features.NAMES if name in options})


def implementations(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Those of impls and of impl among parsed options, each once. Raises SpecError where there is none."""
    found = tuple(dict.fromkeys((*options.get("impls", ()), *options.get("impl", ()))))
    if not found:
        raise SpecError(f"--impls '{NONE}': nothing is left; accepted: names, or {NONE} beside --impl")
    return found


def load_config(path: str | Path) -> dict[str, str | bool]:
    """The options of a TOML file by name, unparsed; keys may be spelt with dashes or underscores.

    Raises UsageError for a file that cannot be read or is not TOML in UTF-8, for an unknown key
    (naming the nearest known one), a key given in both spellings and a value of a wrong type.
    """
    where = f"--config {units.quoted(path, 400)}"
    return options_of(read_toml(path), where, OPTIONS)


def options_of(
    table: Mapping[str, Any], where: str, known: Collection[str], more: Collection[str] = ()
) -> dict[str, str | bool]:
    """The options of a TOML table by name, unparsed, or UsageError. known: its keys; more: of the caller."""
    raw: dict[str, str | bool] = {}
    accepted = (*known, *more)
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in known:
            close = difflib.get_close_matches(name, accepted, n=1, cutoff=0.5)
            said = f"not known; did you mean {close[0]!r}?" if close else "not known"
            raise UsageError(f"{where}: key {units.quoted(key)} is {said} (accepted: {', '.join(accepted)})")
        if name in raw:
            raise UsageError(f"{where}: key {key!r} stands twice (dash, underscore); accepted: one of them")
        raw[name] = _config_value(OPTIONS[name], key, value, where)
    return raw


def _config_value(option: Opt, key: str, value: object, where: str) -> str | bool:
    if option.parse is None:
        if isinstance(value, bool):
            return value
    elif option.name == "causal" and isinstance(value, bool):
        return "yes" if value else "no"
    elif (
        isinstance(value, str)
        or (_is_int(value) and option.accepted in (_NUMBER, _LENGTHS))
        or (type(value) in (int, float) and option.accepted.startswith("a number"))
    ):
        return str(value)
    elif isinstance(value, list) and option.accepted.startswith(("names", "lengths")):
        numbers = option.accepted.startswith("lengths")
        if all(isinstance(item, str) or (numbers and _is_int(item)) for item in value):
            return ",".join(str(item) for item in value)
    shown = units.quoted(value)
    raise UsageError(f"{where}: {key} = {shown} is {_type_name(value)}; accepted: {option.accepted}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _type_name(value: object) -> str:
    names = {bool: "a boolean", int: "a number", str: "text", dict: "a table", list: "a list"}
    return names.get(type(value), f"a {type(value).__name__}")
