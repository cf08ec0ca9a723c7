"""What the fields of a results file's lines hold, by type, so that what reads them can rely on it.

A shape is one of the kinds below, ``[shape]`` for a list, or a mapping of names to shapes, in which ``*…``
is every other name that ends so, the first that fits, and ``*`` every other; a name that stands in none may
hold anything. Null, what is not told, may stand anywhere but in a list, in place of a ``PRESENT`` and of what
``NEEDS`` names of an object; a list or an object that is null is taken out, as one that is not there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from flashbench import sweep, units

NUMBER: Final = "a number"
COUNT: Final = "a whole number, 0 or more"
SIZE: Final = f"a whole number up to {units.MAX_INT}"
TEXT: Final = "text"
FLAG: Final = "true or false"
SCALAR: Final = "text, a number, true or false"
TILE: Final = f"a whole number, 1 to {units.MAX_INT}"
NEEDS: Final = "!"
"""Under this name an object's shape has those that cannot be missing."""
PRESENT: Final = frozenset({TILE})
MAX_COUNT = 2**63 - 1
MAX_NUMBER = 1e30
"""Larger than any time, rate or count of bytes; what is computed from numbers up to here stays finite."""

_NUMBERS = {"*": NUMBER}
_COUNTED = {"*_bytes": COUNT, "*_sectors": COUNT, "*": NUMBER}
_CLOCKS = {"*": NUMBER, "throttle": [TEXT], "persistence": FLAG}
_PROBLEM = {
    **dict.fromkeys(("batch", "num_heads", "num_kv_heads", "seqlen_q", "seqlen_k", "head_dim",
    "head_dim_v"), SIZE),
    **dict.fromkeys(("causal", "alibi", "sinks", "hadamard", "deterministic"), FLAG),
    **dict.fromkeys(("dtype", "alignment", "bias", "block_mask", "layout", "fp8_scale"), TEXT),
    "window": [SIZE], "lengths": [[SIZE]], "softcap": NUMBER, "dropout_p": NUMBER,
}  # fmt: skip
_TOPOLOGY = {"pci": TEXT, "pcie": TEXT, "numa_node": COUNT, "peers": {"*": TEXT}}
_ENVIRONMENT = {
    **dict.fromkeys(("device", "device_name", "device_type", "uuid", "driver", "cuda", "cudnn", "torch"),
    TEXT),
    **dict.fromkeys(("triton", "numpy", "python", "flashbench", "platform", "cpu", "source_hash"), TEXT),
    **dict.fromkeys(("host", "git_commit", "capability"), TEXT),
    "neighbours": [TEXT], "topology": _TOPOLOGY,
    "ranks": [{"device": TEXT, "uuid": TEXT, "topology": _TOPOLOGY}],
    **dict.fromkeys(("num_sms", "total_bytes", "l2_bytes", "smem_per_block_bytes", "cpu_threads"), COUNT),
    "power_limit_w": NUMBER, "max_sm_clock_mhz": NUMBER, "git_dirty": FLAG, "persistence": FLAG,
    "clocks": _CLOCKS,
}  # fmt: skip
COUNTERS: Mapping[str, Any] = {
    "total": _COUNTED, "kernels": [
        {NEEDS: ("kernel", "grid", "block"), "kernel": TEXT, "grid": TEXT, "block": TEXT, **_COUNTED}
    ],
    "reason": TEXT,
    "clocks": {"before": _CLOCKS, "after": _CLOCKS},
}  # fmt: skip
TRACE: Mapping[str, Any] = {
    "total": _COUNTED, "reason": TEXT, "error": TEXT, "traced_share": NUMBER, "difference_bytes": COUNT,
    "difference_flops": NUMBER,
    "kernels": [{
        NEEDS: ("step", "tensors"), "step": TEXT, "kernel": TEXT, **_COUNTED,
        "tensors": [{NEEDS: ("read_bytes", "write_bytes", "atomic_bytes"), "tensor": TEXT, **_COUNTED}],
    }],
}  # fmt: skip
_CONFIG = {"*block_q": TILE, "*block_k": TILE, "*": SCALAR}
RECORD: Mapping[str, Any] = {
    **dict.fromkeys(("status", "reason", "io_model", "backend", "device_type", "started_at"), TEXT),
    "flags": [TEXT], "wall_s": NUMBER, "config": _CONFIG, "environment": _ENVIRONMENT,
    "cell": {"implementation": TEXT, "pass": TEXT, "problem": _PROBLEM},
    "samples": dict.fromkeys(("cache", "method", "flush", "load"), TEXT),
    "memory": {"*": COUNT},
    "accuracy": {"max_abs_error": _NUMBERS, "budget": _NUMBERS, "query_rows": COUNT, "key_rows": COUNT},
    "tuned": {"file": TEXT, "cases": [TEXT]},
    "clocks": {"before": _CLOCKS, "after": _CLOCKS, "during": {}, "throttled_by": [TEXT]},
    "timing": {
        "rounds": [
            {"samples": COUNT, "place": COUNT, "waited_s": NUMBER, "sm_clock_mhz": NUMBER, "caps": [TEXT]}
        ],
        "set_aside": [{"samples_s": [NUMBER], "caps": [TEXT]}],
    },
    "spent": _NUMBERS,
    "energy": {"joules_per_call": NUMBER},
    "exact": FLAG, "apart": _NUMBERS,
    "stated": {},
    "counters": COUNTERS,
    "trace": TRACE,
}  # fmt: skip
NUMERICS: Mapping[str, Any] = {
    **dict.fromkeys(("implementation", "dtype", "range", "fp8_scale", "status", "reason", "backend"), TEXT),
    **dict.fromkeys(("seqlen_q", "seqlen_k", "head_dim", "num_heads"), COUNT),
    **dict.fromkeys(("rmse", "max_abs_error", "input_rmse", "reference_rms"), NUMBER),
    "hadamard": FLAG,
}  # fmt: skip
RING: Mapping[str, Any] = {
    **dict.fromkeys(("implementation", "pass", "dtype", "device", "local_step", "status", "reason", "link"),
    TEXT),
    **dict.fromkeys(("world_size", "batch", "num_heads", "num_kv_heads", "seqlen", "head_dim", "head_dim_v"),
    COUNT),
    **dict.fromkeys(("time_s", "one_card_s", "compute_s", "link_s", "overlap", "speedup", "efficiency",
    "flops_per_s", "tokens_per_s", "link_bytes_per_s", "peak_bytes", "model_time_s", "model_compute_s",
    "model_link_s", "model_one_card_s", "model_exposed_s", "model_efficiency"), NUMBER),
    "link_tensors": {"*": COUNT}, "link_bytes": COUNT, "sent_bytes": COUNT, "sent_by_rank": [COUNT],
    "samples_s": [NUMBER], "max_abs_error": _NUMBERS, "budget": _NUMBERS, "causal": FLAG, "hidden": FLAG,
}  # fmt: skip
BLOCKS: Mapping[str, Any] = {
    **dict.fromkeys(("model", "implementation", "mode", "dtype", "status", "reason"), TEXT),
    **dict.fromkeys(("batch", "seqlen", "layers", "flops", "peak_bytes"), COUNT),
    **dict.fromkeys(("time_s", "tokens_per_s", "flops_per_s", "attention_s", "attention_share"), NUMBER),
    **dict.fromkeys(("mfu", "max_abs_error", "budget"), NUMBER),
    "samples_s": [NUMBER], "flags": [TEXT], "attention_flags": [TEXT], "exact": FLAG,
    "config": {"*": SCALAR},
}  # fmt: skip
DECODE: Mapping[str, Any] = {
    **dict.fromkeys(("model", "dtype", "status", "reason", "tuned", "not_counted"), TEXT),
    **dict.fromkeys(("batch", "kv_len", "queries", "page_size", "splits"), COUNT),
    **dict.fromkeys(("time_s", "bytes_per_s", "copy_fraction", "model_s", "bound_s", "counted_ratio"),
    NUMBER),
    "samples_s": [NUMBER], "flags": [TEXT],
}  # fmt: skip
"""Of a step; errors are numbers of a step and by tensor of a case."""
_OPTIONS = {
    **{name: FLAG if option.parse is None else TEXT for name, option in sweep.OPTIONS.items()},
    "pairs": FLAG, "*": SCALAR,
}  # fmt: skip
"""As they are typed; those of commands beside ``run`` under a name of their own are any text or flag."""
HEADER: Mapping[str, Any] = {
    "schema": COUNT, "created_at": TEXT, "argv": [TEXT], "cells": [TEXT], "options": _OPTIONS,
    "environment": _ENVIRONMENT, "overheads": _NUMBERS, "planned": COUNT,
}  # fmt: skip
LINES: Mapping[str, Mapping[str, Any]] = {
    "header": HEADER, "record": RECORD, "counters": {"counters": COUNTERS}, "trace": {"trace": TRACE},
    "timings": _NUMBERS, "numerics": NUMERICS, "ring": RING,
    "blocks": BLOCKS,
    "decode": {
        "schema": COUNT, "created_at": TEXT, "argv": [TEXT], "environment": _ENVIRONMENT,
        "copy": {"value": NUMBER}, "rows": [DECODE],
    },
}  # fmt: skip
"""By the type of a line, or of a document that stands in one."""


NEEDED: Mapping[str, tuple[str, ...]] = {
    "numerics": ("implementation", "dtype", "range", "status", "seqlen_q", "seqlen_k", "head_dim",
                 "num_heads"),
    "blocks": ("model", "implementation", "mode", "dtype", "status", "batch", "seqlen", "layers"),
    "ring": ("implementation", "pass", "status", "world_size"),
    "decode": ("model", "dtype", "status", "batch", "kv_len", "queries", "page_size"),
}  # fmt: skip
"""What a line of the type, or a row of such a document, cannot do without."""


def check(value: dict[str, Any]) -> None:
    """Raise ValueError naming the first field of a line that is not what its type holds.

    Takes lists and objects out that are null.
    """
    kind = value.get("type")
    if isinstance(kind, str) and kind in LINES:
        rest = {name: item for name, item in value.items() if name != "type"}
        _check(rest, LINES[kind], "")
        for name in value.keys() - rest.keys() - {"type"}:
            del value[name]
        if kind != "decode":
            need(value, kind)


def need(value: Mapping[str, Any], kind: str) -> None:
    """Raise ValueError for a field that what is of the type cannot do without."""
    for name in NEEDED.get(kind, ()):
        if value.get(name) is None:
            raise ValueError(f"the field {name!r} is missing")


def _check(value: Any, shape: Any, where: str) -> None:
    if value is None and (not isinstance(shape, str) or shape not in PRESENT):
        return
    if isinstance(shape, str):
        if not _is(value, shape):
            raise ValueError(f"{where} is {units.quoted(value)}; {shape} is wanted")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise ValueError(f"{where} is {units.quoted(value)}; {_kind(shape)} is wanted")
        for index, item in enumerate(value):
            if item is None:
                raise ValueError(f"{where}[{index}] is null; {_kind(shape[0])} is wanted")
            _check(item, shape[0], f"{where}[{index}]")
    else:
        if not isinstance(value, dict):
            raise ValueError(f"{where} is {units.quoted(value)}; {_kind(shape)} is wanted")
        for name in shape.get(NEEDS, ()):
            if value.get(name) is None:
                raise ValueError(f"the field {name!r} of {where} is missing")
        for name, item in list(value.items()):
            inner = shape.get(name, _of_ending(name, shape))
            if item is None and isinstance(inner, list | dict):
                del value[name]
            elif inner is not None:
                _check(item, inner, f"{where}.{units.cut(name)}" if where else name)


def of_config(name: str) -> str:
    """What the value of that name in a row's config may be, in words."""
    return str(_of_ending(name, _CONFIG))


def _kind(shape: Any) -> str:
    """What is wanted, in words."""
    return shape if isinstance(shape, str) else "a list" if isinstance(shape, list) else "an object"


def _of_ending(name: str, shape: Mapping[str, Any]) -> Any:
    """The shape of a name that is not listed: that of its ending, None where any value will do."""
    found = (inner for ending, inner in shape.items() if ending[0] == "*" and name.endswith(ending[1:]))
    return next(found, None)


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind in (FLAG, SCALAR)
    if isinstance(value, str):
        return kind in (TEXT, SCALAR)
    if kind == SIZE:
        return isinstance(value, int) and -1 <= value <= units.MAX_INT
    if kind == TILE:
        return isinstance(value, int) and 1 <= value <= units.MAX_INT
    if kind == COUNT:
        return isinstance(value, int) and 0 <= value <= MAX_COUNT
    whole = isinstance(value, int) and abs(value) <= MAX_COUNT
    number = isinstance(value, float) and math.isfinite(value) and abs(value) <= MAX_NUMBER
    return kind in (NUMBER, SCALAR) and (whole or number)
