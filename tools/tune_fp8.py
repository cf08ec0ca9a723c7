"""Checks and times configurations of flash-v3-fp8 at head dim 128 on an sm_90 GPU, beside flash-v3 in bf16.

python tools/tune_fp8.py --out FILE [--load sustained|burst] [--budget S]

bf16 inputs, rounded to e4m3 with a scale per block before anything is timed, o in bf16, 16 heads, batch ·
seqlen = 16k, both masks; what is timed is launches. Every form is first checked, in a process of its own that
is killed when it hangs and leaves what it compiled in Triton's cache; only right ones are timed, in turns.
The JSON is rewritten after every cell. mhz, watts: medians of the SM clock and of the power at that moment,
read from NVML, where it answers, while the load of a sample still runs.

sustained: 350 ms of its own load before each sample of 40 ms, so that the clock is what the power of that
form leaves it, as reports/<card>/tuning has it in flash-v3-fp8-guarded.json; 12 checks at once, then 6 cells,
6 forms and 3 rounds of 394 ms, 43 s in all, of the guarded forms the table's and those that differ from it in
one thing. burst: 4 ms of load before each sample of 12 ms; 22 checks, then 6 cells, 11 forms and 15 rounds of
20 ms. About 25 s more are for checks and starts.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import torch
from tune_hopper import LIMITS, Case, exact, milliseconds, right, timed

from flashbench import hopper_configs
from flashbench.environment import driver_version
from flashbench.hopper_configs import Tiles

DIM, HEADS, TOKENS = 128, 16, 16384
LENGTHS = (4096, 16384, 8192)
"""The ends first, should the time run out."""
BF16 = "flash-v3 bf16"
MAXIMA = {
    False: Tiles(stages=4, q_stages=1, max3=True, emulated=3),
    True: Tiles(stages=4, q_stages=1, max3=True, emulated=4),
}
"""By mask, the fastest of the kernel with row maxima."""


@dataclass(frozen=True)
class Load:
    """Milliseconds of a form's own load before each of its samples and of a sample; samples of a form."""

    warm_ms: float
    sample_ms: float
    rounds: int


LOADS = {"sustained": Load(350, 40, 3), "burst": Load(4, 12, 15)}
PREPARED = 4
"""Samples of the preparation."""
AFTER_MS = 4
"""Of load behind a sample, under which NVML is read."""

SHAPE = 1, HEADS, 4, 1300, 2605
"""batch, num_heads, num_kv_heads, seqlen_q, seqlen_k of the checks: ragged, grouped, and some programs have
two tiles of queries."""
REPEATS = 5
WITHIN, ROW_WITHIN, LSE_WITHIN = 4.5e-2, 0.1, 1e-2
"""Relative error of o, of all and of a row, and error of lse, to fp64 attention of q and k as they are
rounded and of v as it is not, so that it holds whatever is taken off v before that is rounded.

The kernels' arithmetic as tests/fp8.py (``guarded``) and ``_fp8.attention`` have it is off by 3.7e-2 to
3.8e-2, a row by up to 5.7e-2: rounding of P and of v, 2.7e-2 each for inputs of N(0, 1). Emulated
exponentials may add 6e-3; of lse ``many`` in tests/test_flash_v3_fp8_gpu.py allows as much. bf16 is held to
tune_hopper's limit, its rows to as much less.
"""


def bf16(causal: bool) -> Tiles:
    """The table's for bf16 beside which all are timed."""
    return hopper_configs.choose(DIM, DIM, causal, LENGTHS[0], fp16=False)


def forms(load: str, causal: bool) -> list[Tiles]:
    """What is timed under that load: the table's first, others of the kernel without maxima, with maxima."""
    own = [hopper_configs.choose_fp8(DIM, DIM, causal, keys) for keys in LENGTHS]
    options = product((4, 3), (2, 1), (2, 3))
    others = [replace(own[0], stages=s, q_stages=q, emulated=e) for s, q, e in options]
    if load == "burst":
        return list(dict.fromkeys([*own, *others, *MAXIMA.values()]))
    near = [one for one in others if any(_apart(one, of) == 1 for of in own)]
    return list(dict.fromkeys([*own, *near, MAXIMA[causal]]))


def _apart(one: Tiles, other: Tiles) -> int:
    """In how many things they differ."""
    return sum(a != b for a, b in zip(asdict(one).values(), asdict(other).values(), strict=True))


def cases(load: str) -> list[Case]:
    """What is checked: of each mask bf16's form and then the others."""
    return [(DIM, causal, one) for causal in (False, True) for one in (bf16(causal), *forms(load, causal))]


def inputs(batch: int, heads: int, kv_heads: int, rows: int, keys: int) -> list[torch.Tensor]:
    """q, k and v."""
    sizes = (heads, rows), (kv_heads, keys), (kv_heads, keys)
    return [torch.randn(batch, *size, DIM, device="cuda", dtype=torch.bfloat16) for size in sizes]


def launched(causal: bool, tiles: Tiles, q, k, v):
    """(o, lse, the launch that fills them, q and k as the kernel has them)."""
    from flashbench.kernels import _flash_v3, _flash_v3_fp8, _fp8

    options = {"causal": causal, "scale": DIM**-0.5}
    if tiles == bf16(causal):
        return *_flash_v3.forward_launch(q, k, v, **options, tiles=tiles), (q, k)
    x = _flash_v3_fp8.operands(q, k, v, dtype=torch.float8_e4m3fn, causal=causal, tiles=tiles)
    done = _flash_v3_fp8.forward_launch(x, **options, out_dtype=torch.bfloat16)
    return *done, tuple(_fp8.dequantise(one, torch.float64) for one in (x.q, x.k))


def check(causal: bool, tiles: Tiles) -> None:
    """Raises AssertionError for a wrong result, or for one that varies."""
    torch.manual_seed(0)
    q, k, v = inputs(*SHAPE)
    o, lse, launch, rounded = launched(causal, tiles, q, k, v)
    first = None
    for _ in range(1 + REPEATS):
        o.fill_(math.nan)
        lse.fill_(math.nan)
        launch.run()
        if first is None:
            share = LIMITS[torch.bfloat16] / WITHIN if tiles == bf16(causal) else 1.0
            judge(o, lse, exact(*rounded, v, causal), share)
            first = o.clone(), lse.clone()
        assert torch.equal(first[0], o), "o is not repeatable"
        assert torch.equal(first[1], lse), "lse is not repeatable"


def judge(o, lse, ref, share: float = 1.0) -> None:
    """Raises AssertionError unless o and lse are within so much of the limits of ref's."""
    off, size = (o.double() - ref[0]).norm(dim=-1), ref[0].norm(dim=-1)
    everywhere, worst = float(off.norm() / size.norm()), float((off / size).max())
    assert everywhere < share * WITHIN, f"o is off by {everywhere:.2g}"
    assert worst < share * ROW_WITHIN, f"a row of o is off by {worst:.2g}"
    lse_off = float((lse.double() - ref[1]).abs().max())
    assert lse_off < LSE_WITHIN, f"lse is off by {lse_off:.2g}"


Gauge = Callable[[], Mapping[str, float]]


def gauge() -> Gauge:
    """What reads mhz and watts of the card, as far as NVML answers."""
    from flashbench._profilers.clocks import open_clocks, optional

    clocks = open_clocks("cuda:0")
    if clocks is None:
        return dict
    nvml, handle = clocks.nvml, clocks.handle

    def watts() -> float | None:
        """At this moment: nvmlDeviceGetPowerUsage is the mean of a second, which others ran in."""
        (field,) = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_POWER_INSTANT])
        return None if field.nvmlReturn else field.value.uiVal / 1000

    def read() -> dict[str, float]:
        mhz = optional(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        both = {"mhz": mhz, "watts": optional(watts)}
        return {name: value for name, value in both.items() if value is not None}

    return read


Samples = dict[str, dict[str, list[float]]]


def sampled(calls: Mapping[str, Callable[[], object]], load: Load, read: Gauge) -> Samples:
    """samples_ms, mhz and watts of each form, in turns; what runs is printed before it does.

    Each round has an order of its own: what the clock is in a burst depends on what ran before it.
    """
    once, found = {}, {what: {one: [] for one in calls} for what in ("samples_ms", "mhz", "watts")}
    for one, call in calls.items():
        _trying(one)
        milliseconds(call, 1)
        once[one] = milliseconds(call, 3)
    for turn in range(load.rounds):
        for one in random.Random(turn).sample(list(calls), len(calls)):
            _trying(one)
            milliseconds(calls[one], max(1, round(load.warm_ms / once[one])))
            number = max(2, round(load.sample_ms / once[one]))
            found["samples_ms"][one].append(milliseconds(calls[one], number))
            for _ in range(max(1, round(AFTER_MS / once[one]))):
                calls[one]()
            for what, value in read().items():
                found[what][one].append(value)
            torch.cuda.synchronize()
    return found


def _trying(one: str) -> None:
    print(json.dumps({"trying": one}), flush=True)


def row(causal: bool, seqlen: int, found: Samples) -> dict[str, object]:
    """A cell as the file has it; of what NVML reads the medians."""
    batch = TOKENS // seqlen
    flops = 4 * batch * HEADS * seqlen**2 * DIM / (2 if causal else 1)
    samples = found["samples_ms"]
    read = {
        what: {one: statistics.median(values) for one, values in found[what].items() if values}
        for what in ("mhz", "watts")
    }
    return {
        "head_dim": DIM, "batch": batch, "num_heads": HEADS, "causal": causal, "seqlen": seqlen,
        "samples_ms": samples,
        "tflops": {one: flops / statistics.median(ms) / 1e9 for one, ms in samples.items()},
        **read,
    }  # fmt: skip


def time_cells(asked: str) -> None:
    """Print a line of JSON per cell."""
    cells, good, load = json.loads(asked)
    read = gauge()
    for _, causal, seqlen in cells:
        q, k, v = inputs(TOKENS // seqlen, HEADS, HEADS, seqlen, seqlen)
        calls = {}
        for _, mask, fields in good:
            if mask == causal:
                tiles = Tiles(**fields)
                name = BF16 if tiles == bf16(causal) else tiles.name
                calls[name] = launched(causal, tiles, q, k, v)[2].run
        own = hopper_configs.choose_fp8(DIM, DIM, causal, seqlen)
        made = row(causal, seqlen, sampled(calls, LOADS[load], read))
        print(json.dumps({**made, "preparation_ms": prepared(own, q, k, v)}), flush=True)


def prepared(tiles: Tiles, q, k, v) -> dict[str, list[float]]:
    """Milliseconds of the preparation by kernels: of all, and of v alone."""
    from flashbench.kernels import _flash_v3_fp8

    fp8 = torch.float8_e4m3fn
    calls = {
        "all": lambda: _flash_v3_fp8.operands(q, k, v, dtype=fp8, causal=False, tiles=tiles),
        "v": lambda: _flash_v3_fp8.rounded_values(v, fp8, tiles),
    }
    for call in calls.values():
        milliseconds(call, 1)  # compiles
    return {what: [milliseconds(call, 3) for _ in range(PREPARED)] for what, call in calls.items()}


def said(one: Mapping) -> str:
    """A cell in one line, the fastest first: TFLOP/s, over bf16, and at which clock and power."""

    def of(form: str) -> str:
        read = [f"{one[what][form]:.0f} {unit}" for what, unit in UNITS.items() if form in one[what]]
        speed = one["tflops"][form]
        return " ".join([f"{form} {speed:.0f} ({speed / one['tflops'][BF16]:.3f})", *read])

    ranked = sorted(one["tflops"], key=one["tflops"].__getitem__, reverse=True)
    return f"{'causal' if one['causal'] else 'full'} {one['seqlen']:5d} | {', '.join(map(of, ranked))}"


UNITS = {"mhz": "MHz", "watts": "W"}


def card() -> dict[str, object]:
    """What the file says of the machine."""
    import triton

    return {
        "device": torch.cuda.get_device_name(), "driver": driver_version(), "torch": torch.__version__,
        "triton": triton.__version__, "cudnn": torch.backends.cudnn.version(), "clocks": "not locked",
    }  # fmt: skip


def document(
    machine: Mapping[str, object], load: str, seconds: float, good: Sequence[Case], rows: Sequence[Mapping]
) -> dict[str, object]:
    """The file; bf16: the form that stands there, by mask."""
    fp8 = [tiles for _, causal, tiles in good if tiles != bf16(causal)]
    return {
        **machine, "dtype": "fp8", "load": load, **asdict(LOADS[load]), "seconds": seconds,
        "bf16": {"causal" if causal else "full": bf16(causal).name for causal in (False, True)},
        "configurations": {tiles.name: asdict(tiles) for tiles in fp8}, "rows": list(rows),
    }  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check and time configurations of flash-v3-fp8.")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--load", choices=LOADS, default="sustained")
    parser.add_argument("--budget", type=float, default=100, help="seconds of the whole run (100)")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    parser.add_argument("--cells", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.check or asked.cells:
        return asked
    if asked.out is None or asked.out.is_dir() or not asked.out.parent.is_dir():
        parser.error(f"--out is a file in a folder that is there; got {asked.out}")
    if not asked.budget > 0:
        parser.error(f"--budget is more than 0 seconds; got {asked.budget:g}")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != hopper_configs.CAPABILITY:
        parser.error("it runs on an sm_90 GPU, and torch sees none")
    return asked


def main() -> None:
    asked, started = arguments(), time.monotonic()
    if asked.check:
        _, causal, fields, _ = json.loads(asked.check)
        return check(causal, Tiles(**fields))
    if asked.cells:
        return time_cells(asked.cells)
    every = cases(asked.load)
    good = sorted(right(every, None, script=__file__, parallel=len(every)), key=every.index)
    print(f"{len(good)} of {len(every)} right after {time.monotonic() - started:.0f} s", flush=True)
    masks = [causal for causal in (False, True) if (DIM, causal, bf16(causal)) in good]
    cells, machine, rows = [(DIM, causal, n) for n in LENGTHS for causal in masks], card(), []
    for one in timed(cells, good, started + asked.budget, asked.load, script=__file__):
        rows.append(one)
        print(said(one), flush=True)
        made = document(machine, asked.load, time.monotonic() - started, good, rows)
        asked.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(f"{len(rows)} cells after {time.monotonic() - started:.0f} s", flush=True)
    if missing := 2 * len(LENGTHS) - len(rows):
        sys.exit(f"{missing} cells are missing")
    return None


if __name__ == "__main__":
    main()
