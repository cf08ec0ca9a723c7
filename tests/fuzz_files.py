"""A good file of each kind that flashbench reads, the lines that read it, and what may become of it."""

from __future__ import annotations

import copy
import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import fuzz_sealed
import numpy
from hypothesis import strategies as st
from judging import cell, written
from synthetic import H100, record
from test_judge_formats import CUDNN, FLASH, asv, nvbench, pyperf, static

from flashbench import baselines, environment, judge, runfile, tuned
from flashbench._runfile import lines
from flashbench.kernels import Target

BASELINES = Path(__file__).parents[1] / "configs/baselines"

CARD = """name = "my-card"
base = "h100-sxm"
reported = ["My Card"]
capability = [9, 0]
num_sms = 100
smem_per_block_bytes = 232448
hbm_bytes_per_s = 2.5e12
source = "a data sheet"
[peak_flops_per_s]
bf16 = 700e12
"""
SWEEP = """seqlens = [128, 256]
head-dims = "64"
dtypes = ["fp32"]
impls = "naive,sdpa"
causal = true
passes = "fwd"
batch = 1
heads = 2
window = "64"
softcap = 30.0
seed = 3
time-budget = "5m"
dry-run = true
"""
GRIDS = """[[cells]]
seqlens = [64]
head-dims = [16]
dtypes = "fp32"
heads = 1
[[cells]]
seqlens = "128"
kv-heads = 1
"""
CLAIMS = """[[claim]]
name = "a"
says = "b"
source = "c"
conditions = "d"
at_least = 1.5
ratio = [
    { of = { file = "results.jsonl", implementation = "naive" }, to = { file = "results.jsonl" }, per = 2 },
]
[[claim]]
name = "e"
says = "f"
source = "g"
conditions = "h"
at_most = 3
value = { file = "other.jsonl", pass = ["fwd", "bwd"], metric = ["time_s", "peak_extra_bytes"] }
"""
PLAN = """[static]
impls = "flash"
arch = "sm_90"
[[model]]
seqlens = "1k"
[trace]
seqlens = "65"
[check]
seqlens = 65
"""


_SHAPE = {"dtype": "bf16", "implementation": "naive", "status": "ok", "reason": None}
OTHERS: Sequence[dict[str, Any]] = (
    {"type": "numerics", "range": "plain", "backend": None, "fp8_scale": "", "hadamard": False,
     "seqlen_k": 64, "seqlen_q": 16, "num_heads": 2, "head_dim": 64, "rmse": 1e-7,
     "max_abs_error": 1e-6, "input_rmse": 0.0, "reference_rms": 0.2, **_SHAPE},
    {"type": "blocks", "model": "llama-3-8b", "exact": True, "mode": "train", "batch": 1, "seqlen": 64,
     "layers": 1, "flops": 10**9, "time_s": 1e-3, "samples_s": [1e-3], "flags": [], "tokens_per_s": 64e3,
     "flops_per_s": 1e12, "attention_s": 1e-4, "attention_share": 0.1, "max_abs_error": 0.1, "budget": 0.2,
     **_SHAPE},
    {"type": "ring", "pass": "fwd", "world_size": 2, "causal": True, "batch": 1, "num_heads": 4,
     "num_kv_heads": 4, "seqlen": 128, "head_dim": 64, "head_dim_v": 64, "link": "nvlink",
     "link_bytes": 1024, "link_tensors": {"k": 512, "v": 512}, "time_s": 1e-3, "one_card_s": 2e-3,
     "hidden": True, "device": "NVIDIA H200", "sent_bytes": 1024, "max_abs_error": {"o": 0.1},
     "budget": {"o": 0.2}, **_SHAPE},
)  # fmt: skip
TIMELINE = [{
    "cell": "naive fwd b1 h2 n64 d64 bf16 full", "kernel_s": 1e-3, "span_s": 2e-3, "gap_s": 1e-3,
    "busy_share": 0.5, "kernels": [{"kernel": "k", "start_s": 0.0, "duration_s": 1e-3}], "event_s": 2e-3,
    "launch_bound": True, "backend": None, "gpm": {"sm_utilisation": 0.5, "occupancy": 0.25},
}]  # fmt: skip
DECODE = {
    "type": "decode", "schema": 1, "created_at": "2026-01-01T00:00:00Z", "argv": ["flashbench", "decode"],
    "environment": {"device_name": H100}, "copy": {"value": 3e12, "unit": "B/s"},
    "rows": [
        {"model": "llama-3-8b", "dtype": "bf16", "batch": 1, "queries": 1, "kv_len": 1024, "page_size": page,
         "splits": 4, "status": "ok", "reason": None, "time_s": 2e-5, "samples_s": [2e-5, 2e-5], "flags": [],
         "bytes_per_s": 2e11, "copy_fraction": 0.1, "model_s": 1e-5, "bound_s": 5e-6, "counted_ratio": 1.0,
         "max_abs_error": 1e-4, "budget": 1e-2}
        for page in (0, 16)
    ],
}  # fmt: skip


@cache
def good() -> dict[str, bytes]:
    """A good file of each kind, by name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        here = Target(device="cpu", name=environment.cpu_name())
        rows = [
            record("flash", 1024), record("naive", 1024), record("sdpa", 1024, backend="cudnn"),
            record("naive", 2048, status="oom", reason="out of memory"), record("flash", 2048, window=(64,
            0)),
        ]  # fmt: skip
        about = environment.collect(here)
        written(path / "results", rows, **about | {"device_name": H100})
        _begun(path / "here", about)
        _lines_of_others(path / "mixed")
        written(path / "other", [cell(1e-3, seqlen) for seqlen in (512, 1024)], device_name=H100)
        numpy.savez(path / "mask", mask=numpy.tril(numpy.ones((2, 2), dtype=bool)))
        packed = {
            "results.jsonl": "results",
            "other.jsonl": "other",
            "mask.npz": "mask.npz",
            "here/results.jsonl": "here",
            "mixed.jsonl": "mixed",
        }
        found = {name: (path / file).read_bytes() for name, file in packed.items()}
        documents = _documents(path, here)
        kept = baselines.save(judge.load_side(str(path / "other"), "x"), path / "store", "b", "0" * 40)
        found |= {f"store/b/c/{file.name}": file.read_bytes() for file in kept.folder.iterdir()}
    data = Path(__file__).parent / "data"
    return {
        **found, **fuzz_sealed.others(),
        "cpu.jsonl": (data / "cpu.jsonl").read_bytes(), "ncu.csv": (data / "ncu_wide.csv").read_bytes(),
        "mine.py": b"def f(q, k, v, causal=False, scale=None):\n    return q\n",
        "cudnn.csv": CUDNN.format(3.5).encode(), "flash.csv": FLASH.format(3.5).encode(),
        "card.toml": CARD.encode(), "sweep.toml": SWEEP.encode(),
        "grids.toml": GRIDS.encode(), "claims.toml": CLAIMS.encode(), "plan.toml": PLAN.encode(),
        **{f"{name}.json": json.dumps(value).encode() for name, value in documents.items()},
    }  # fmt: skip


def _begun(path: Path, about: Mapping[str, Any]) -> None:
    """A run of this machine that can go on."""
    row = record("naive", 16, status="failed", reason="x", dtype="fp32", head_dim=16, batch=1)
    asked = {"seqlens": "16", "head_dims": "16", "dtypes": "fp32", "impls": "naive,sdpa", "heads": "1",
    "passes": "fwd",
             "causal": "no", "batch": "1", "cache": "hot", "timing": "auto", "load": "burst",
             "seed": "0"}  # fmt: skip
    head = runfile.header(argv=["flashbench", "run"], options=asked, environment=about, cells=[row.cell])
    with runfile.create(path, head) as writer:
        writer.append(row)


def _lines_of_others(path: Path) -> None:
    """A file with the lines that ``check --numerics``, ``block`` and ``ring`` write."""
    row = record("naive", 512)
    head = runfile.header(argv=["flashbench"], options={}, environment={}, cells=[row.cell])
    with runfile.create(path, head) as writer:
        writer.append(row)
        for line in OTHERS:
            writer.put(line)


def _documents(folder: Path, here: Target) -> dict[str, Any]:
    """The files that are one JSON document."""
    shape = {"implementation": "flash-v2", "pass": "fwd", "dtype": "fp32", "head_dim": 64, "head_dim_v": 64,
             "causal": False, "group": 1}  # fmt: skip
    winner = {"config": {"fwd_block_q": 64, "fwd_block_k": 32, "num_warps": 4}}
    case = {"case": "flash-v2 fwd", "point": {"seqlen_q": 128, "seqlen_k": 128, "heads": 2}, "shape": shape,
            "winner": winner, "trials": []}  # fmt: skip
    (measured,) = BASELINES.glob("*/*/*/results.json")
    exact = json.loads(measured.read_text())
    parts = ("model", "tiles", "trace", "check", "static")
    return {
        "timeline": TIMELINE, "decode": DECODE,
        "gate": exact | {part: exact[part][:2] for part in parts},
        "pyperf": pyperf(0.1), "asv": asv(0.1), "nvbench": nvbench(0.1, folder), "static": static(0),
        "noise": {
            "type": "noise", "schema": 1, "device": H100, "runs": 3,
            "metrics": {"time_s": {"correlation": 0.5, "cells": {"a": [0.01, 3.0]}}},
        },
        "tuned": {"type": "tuned", "schema": tuned.SCHEMA, "key": tuned.key_of(here), "cases": [case]},
    }  # fmt: skip


READERS: dict[str, Sequence[str]] = {
    "results.jsonl": (
        "report results.jsonl", "report other.jsonl results.jsonl", "verify results.jsonl",
        "compare results.jsonl other.jsonl",
        "compare other.jsonl results.jsonl --metric time_s,peak_extra_bytes",
        "history results.jsonl other.jsonl", "noise results.jsonl,other.jsonl --out n.json",
        "baseline save results.jsonl --name b", "bisect --base other.jsonl -- x {out}",
        "run --resume --out . --dry-run --device cpu",
        "compare results.jsonl other.jsonl -o junit=x -o csv=y -o markdown=z",
    ),
    "mixed.jsonl": ("report mixed.jsonl", "verify mixed.jsonl", "report mixed.jsonl other.jsonl"),
    "decode.json": ("report decode.json", "report decode.json other.jsonl", "report decode.json --markdown"),
    "timeline.json": ("report other.jsonl --timeline timeline.json",),
    "claims.toml": ("claims claims.toml --results .", "claims claims.toml --results . --json"),
    "cpu.jsonl": ("report cpu.jsonl", "compare cpu.jsonl cpu.jsonl --json",
    "history cpu.jsonl other.jsonl --csv"),
    "here/results.jsonl": ("run --resume --out here",
    "run --resume --out here --seqlens 32 --counters --json"),
    "sweep.toml": (
        "run --config sweep.toml --device cpu", "run --config sweep.toml --dry-run --device cpu",
    ),
    "grids.toml": ("profile --config grids.toml --trace", "profile --config grids.toml --counters"),
    "plan.toml": ("gate --config plan.toml --out o.json",),
    "card.toml": ("io-model --gpu card.toml", "io-model --gpu card.toml,h100-sxm --mode decode --json",
                  "kv-cache --gpu card.toml --model llama-3-70b",
                  "io-model --gpu card.toml --sweep-sram 64KB",
                  "io-model --gpu card.toml --tensors --csv"),
    "ncu.csv": ("profile --import ncu.csv", "profile --import ncu.csv --json"),
    "cudnn.csv": ("compare cudnn.csv cudnn.csv",), "flash.csv": ("compare flash.csv flash.csv --csv",),
    "mask.npz": ("io-model --block-mask mask.npz --seqlens 256 --models flash", "check --block-mask mask.npz"
                 " --seqlens 256 --head-dims 16 --device cpu",
                 "run --block-mask mask.npz --dry-run --seqlens 256"
                 " --device cpu", "profile --trace --block-mask mask.npz --seqlens 256"),
    "tuned.json": ("check --tuned tuned.json --device cpu --seqlens 16 --head-dims 16",
                   "run --tuned tuned.json --dry-run --device cpu", "decode --tuned tuned.json --check"),
    "noise.json": ("compare other.jsonl other.jsonl --noise noise.json",),
    "store/b/c/baseline.json": (
        "compare --baseline b --store store other.jsonl", "baseline list --store store",
        "baseline show b --store store --json", "baseline promote b c --store store",
        "history store other.jsonl", "bisect --baseline b --store store -- x {out}",
    ),
    **{f"{name}.json": (f"compare {name}.json {name}.json", f"history {name}.json other.jsonl --json")
       for name in ("pyperf", "asv", "nvbench", "static", "gate")},
}  # fmt: skip
"""The command lines that read each file."""

RAW = "@@"
"""What stands in such a string is written without its quotes."""
SCALARS: Sequence[Any] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 0.5, -0.0, 1e-320, 1e308, "", " ", "x", "0", "1e9",
    "\x00", "\x1b[2J", "é\u202e\U0001f600", "\ud800", "a" * 3000, "../../../etc/passwd", "/etc/passwd",
    "</script><script>alert(1)</script>", "2026-01-01T00:00:00+00:00", "ok", "failed", "fp16", H100,
    [], {}, [[]], [None], {"": None}, {"a": {"b": [1]}}, [1e999, -1e999],
    *(f"{RAW}{text}{RAW}" for text in (
        "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "1.5e-400", "[" * 50_000,
        "[" * 400 + "]" * 400,
        '{"a":' * 500 + "1" + "}" * 500, '{"a":1,"a":2}', '"unfinished', "// no", "nul",
    )),
)  # fmt: skip
TOML_VALUES = (
    "1", "-1", "0", "1.5", "nan", "inf", "-inf", "1e400", "9" * 5000, '""', '"x"', '"\\u0000"',
    '"\\uD800"', "true",
    "[]", "[[]]", "[1, 'a']", "{}", "{a = 1}", "[" * 3000, "[" * 100 + "]" * 100, "1979-05-27T07:32:00Z",
    "07:32:00",
    '"1k-64k"', '"' + "9" * 400 + '"', "'''\nx\n'''", "[true]", "[-1, 2]", "[nan]", '"é\U0001f600"', "",
    "0x10", "1_0",
    '"a,b"', "[{}]", '"../x"', "18446744073709551616",
)  # fmt: skip
CELLS = ("", "0", "-1", "nan", "inf", "1e999", "9" * 400, "1,5", '"', '""', "x", "%", "é", "\x00", "n/a",
"1.000.000",
         "True", "(1, 1, 1)", "a" * 3000)  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, name: str) -> bytes:
    """The good file of that name, with one to three changes: in its bytes or in what they mean."""
    data = good()[name]
    how = {"jsonl": _lines, "json": _document, "toml": _toml, "csv": _csv, "npz": _mask}[
        name.rpartition(".")[2]
    ]
    for _ in range(draw(st.integers(1, 2))):
        data = draw(_bytes(data)) if draw(st.integers(0, 7)) == 0 else draw(how(data))
    return data


@st.composite
def _bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Truncated, overwritten, doubled, or something else altogether."""
    at, to = sorted(draw(st.tuples(st.integers(0, len(data)), st.integers(0, len(data)))))
    kind = draw(st.sampled_from(("cut", "drop", "write", "double", "other", "bom", "wide")))
    return {
        "cut": data[:at], "drop": data[:at] + data[to:], "double": data[:to] + data[at:],
        "write": data[:at] + draw(st.binary(max_size=20)) + data[at + 5 :],
        "other": draw(st.binary(max_size=200)), "bom": b"\xef\xbb\xbf" + data,
        "wide": data.decode("latin-1").encode("utf-16"),
    }[kind]  # fmt: skip


@st.composite
def _edited(draw: st.DrawFn, document: Any) -> Any:
    """A copy with one place changed: another value, gone, doubled, or under another name."""
    found = copy.deepcopy(document)
    place, key = None, None
    inside = found
    while isinstance(inside, dict | list) and inside:
        place = inside
        key = draw(st.sampled_from(sorted(inside) if isinstance(inside, dict) else range(len(inside))))
        inside = place[key]
        if draw(st.integers(0, 3)) == 0:
            break
    if place is None:
        return draw(st.sampled_from(SCALARS))
    kind = draw(st.sampled_from(("value", "value", "value", "drop", "double", "rename")))
    if kind == "value":
        place[key] = draw(st.sampled_from(SCALARS))
    elif kind == "drop":
        del place[key]
    elif isinstance(place, list):
        place.insert(0, copy.deepcopy(inside))
    else:
        place[draw(st.sampled_from(("", "x", "type", "key", "é", *sorted(place))))] = inside
    return found


def _text(document: Any) -> str:
    text = json.dumps(document, separators=(",", ":"))
    for inner in {scalar for scalar in SCALARS if isinstance(scalar, str) and scalar.startswith(RAW)}:
        text = text.replace(json.dumps(inner), inner[len(RAW) : -len(RAW)])
    return text


def _json(data: bytes) -> Any:
    """The document, or None for bytes that are none any more."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


@st.composite
def _document(draw: st.DrawFn, data: bytes) -> bytes:
    return _text(draw(_edited(_json(data)))).encode()


@st.composite
def _lines(draw: st.DrawFn, data: bytes) -> bytes:
    """One line edited, with the checksum of its new content or the old one; or lines out of order."""
    rows = data.splitlines(keepends=True) or [b""]
    at = draw(st.integers(0, len(rows) - 1))
    document = _json(rows[at])
    if not isinstance(document, dict) or draw(st.integers(0, 7)) == 0:
        return b"".join(draw(st.permutations(rows[:20])))
    document.pop(lines.FIELD, None)
    body = _text(draw(_edited(document))).encode()
    if draw(st.booleans()) and body.endswith(b"}"):
        body = body[:-1] + f',"{lines.FIELD}":"{lines._sum(body)}"}}'.encode()
    return b"".join([*rows[:at], body + b"\n", *rows[at + 1 :]])


@st.composite
def _toml(draw: st.DrawFn, data: bytes) -> bytes:
    """One line with another value or key, gone, doubled, or a table of another name."""
    rows = data.decode("utf-8", "replace").splitlines() or [""]
    at = draw(st.integers(0, len(rows) - 1))
    name, equals, _ = rows[at].partition("=")
    value = draw(st.sampled_from(TOML_VALUES))
    key = draw(st.sampled_from(("", "impl", "impls", "varlen", "bias", "block-mask", "out", "é", "a.b",
    "base", "name",
                                "tuned", "model", "[x]", "[[static]]", "[model]", "tokens",
                                "config")))  # fmt: skip
    new = draw(st.sampled_from((
        [f"{name}= {value}"] if equals else [f"{name} {value}"], [], [rows[at]] * 2, [rows[at],
        f"{key} = {value}"],
        [f"{key} ={rows[at].partition('=')[2]}"], [key],
    )))  # fmt: skip
    return "\n".join([*rows[:at], *new, *rows[at + 1 :], ""]).encode("utf-8", "replace")


@st.composite
def _csv(draw: st.DrawFn, data: bytes) -> bytes:
    rows = [row.split(",") for row in data.decode("utf-8", "replace").splitlines()] or [[""]]
    at = draw(st.integers(0, len(rows) - 1))
    place = draw(st.integers(0, len(rows[at]) - 1))
    kind = draw(st.sampled_from(("value", "value", "drop", "double", "line", "twice")))
    if kind == "value":
        rows[at][place] = draw(st.sampled_from(CELLS))
    elif kind == "drop":
        del rows[at][place]
    elif kind == "double":
        rows[at].insert(place, rows[at][place])
    else:
        rows[at : at + 1] = [] if kind == "line" else [rows[at]] * 2
    return "\n".join(map(",".join, rows)).encode()


@st.composite
def _mask(draw: st.DrawFn, data: bytes) -> bytes:
    """An archive of other arrays, or the good one with a byte changed."""
    if draw(st.booleans()) and data:
        at = draw(st.integers(0, len(data) - 1))
        return data[:at] + bytes([draw(st.integers(0, 255))]) + data[at + 1 :]
    arrays = draw(st.sampled_from((
        [], [numpy.ones((2, 2))], [numpy.ones((2, 2), dtype=bool)] * 2, [numpy.ones((256, 256), dtype=bool)],
        [numpy.array(True)], [numpy.array([[None, 1], [2, 3]], dtype=object)], [numpy.zeros((0, 2),
        dtype=bool)],
        [numpy.zeros((2, 2), dtype=bool)], [numpy.ones((3, 2), dtype=bool)], [numpy.zeros((2, 2),
        dtype="V4")],
        [numpy.array([["a"]])],
    )))  # fmt: skip
    file = io.BytesIO()
    (numpy.savez_compressed if draw(st.booleans()) else numpy.savez)(file, *arrays)
    return file.getvalue()
