"""Checks and times configurations of flash-v3's forward on an sm_90 GPU, beside cuDNN, cell by cell.

python tools/tune_hopper.py --out tuning.json [--budget 130] [--head-dims 64,128,256] [--table]

Every configuration is checked first, in a process of its own that is killed when it hangs; only right ones
are timed, each after a little load of its own, in turns with SDPA's cuDNN, fp16, batch · seqlen = 16k,
heads · head_dim = 2048, in one process that is killed, and goes on without the configuration it was at,
when that hangs. --table: only what the table has, checked in bf16 too. The JSON is rewritten after every
cell. The winners belong into flashbench/hopper_configs.py.
"""

from __future__ import annotations

import argparse
import json
import math
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from peers_table import REFERENCE
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashbench import hopper_configs
from flashbench.hopper_configs import Tiles

LENGTHS = (512, 2048, 8192, 1024, 4096, 16384)
"""Every second first, should the time run out."""
TOKENS, WIDTH = 16384, 2048
HANG_S, SILENT_S = 45, 20
WARM_MS, SAMPLE_MS, ROUNDS = 4, 12, 5
REPEATS = 12

Case = tuple[int, bool, Tiles]
_TWO = Tiles()
_THREE = Tiles(warpgroups=3)
_128 = replace(_TWO, q_stages=1)
_256 = Tiles(block_k=64, q_stages=1, o_shared=True)


def _each(tiles: Tiles) -> list[Tiles]:
    """In turns and not, with maxima, those by three, and without."""
    forms = {}, {"max3": True}, {"guarded": 2 if tiles.warpgroups == 3 else 1}
    return [replace(tiles, pingpong=turns, **form) for turns in (False, True) for form in forms]


_D64 = [tiles for q in (1, 2) for own in (_TWO, _THREE) for tiles in _each(replace(own, q_stages=q))]
VARIANTS = {
    (64, False): _D64,
    (64, True): _D64,
    (128, False): _each(_128),
    (128, True): [*_each(_TWO), *_each(_128)],
    (256, False): _each(_256),
    (256, True): _each(_256),
}
"""What to try, by head dim and mask."""

SHAPES = [
    (2, 4, 4, 512, 512), (2, 3, 3, 113, 257), (1, 4, 2, 1, 300), (2, 2, 2, 257, 113), (1, 8, 2, 640, 1537),
    (1, 1, 1, 1, 1), (2, 16, 4, 1536, 1536), (1, 2, 1, 2049, 2049), (40, 16, 16, 128, 96), (1, 2, 2, 700, 64),
    (8, 16, 4, 640, 769),
]  # fmt: skip
"""batch, num_heads, num_kv_heads, seqlen_q, seqlen_k of the checks."""


LIMITS = {torch.float16: 6e-4, torch.bfloat16: 5e-3}


def exact(q, k, v, causal: bool):
    """(o, lse) in fp64; o is 0 and lse -inf in rows without keys."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), *(x.double().repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        keys = torch.arange(k.shape[2], device=q.device)
        last = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
        s = s.masked_fill(keys > last, -math.inf)
    lse = s.logsumexp(-1)
    return (s - lse.where(~lse.isinf(), 0.0)[..., None]).exp() @ v, lse


def check(dim: int, causal: bool, tiles: Tiles, limits: dict[torch.dtype, float]) -> None:
    """Raises AssertionError for a wrong result, on ragged and grouped shapes, or for one that varies.

    limits: of the relative error, by dtype.
    """
    from flashbench.kernels import _flash_v3 as flash

    torch.manual_seed(0)
    for n, (batch, heads, kv_heads, rows, keys) in enumerate(SHAPES):
        for dtype, limit in limits.items():
            q, k, v = (
                torch.randn(batch, h, length, dim, device="cuda", dtype=dtype)
                for h, length in ((heads, rows), (kv_heads, keys), (kv_heads, keys))
            )
            options = {"causal": causal, "scale": dim**-0.5, "tiles": tiles}
            o, lse, launch = flash.forward_launch(q, k, v, **options)
            o.fill_(math.nan)
            lse.fill_(math.nan)
            launch.run()
            ref, ref_lse = exact(q, k, v, causal)
            what = SHAPES[n], dtype
            assert float((o.double() - ref).norm() / ref.norm()) < limit, (*what, "o")
            assert float((o.double() - ref).abs().max()) < 40 * limit, (*what, "o, at most")
            assert torch.equal(lse.isinf(), ref_lse.isinf()), (*what, "lse where there is no key")
            assert float((lse.double() - ref_lse).nan_to_num().abs().max()) < 2e-3, (*what, "lse")
            for _ in range(REPEATS):
                again = flash.forward(q, k, v, **options)
                assert torch.equal(again[0], o), (*what, "not repeatable")
                assert torch.equal(again[1], lse), (*what, "lse not repeatable")


def right(cases: list[Case], told: object, *, script: str = __file__, parallel: int = 15) -> Iterator[Case]:
    """Those of the cases that are right by the script's --check, so many at once; the others are named.

    told: what it is told beside the case; here in how many of the dtypes, the first ones, it is to be right.
    """
    waiting, running = list(cases), {}
    while waiting or running:
        while waiting and len(running) < parallel:
            case = waiting.pop(0)
            line = json.dumps([*case[:2], asdict(case[2]), told])
            command = [sys.executable, script, "--check", line]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            running[case] = process, time.monotonic()
        for case, (process, started) in list(running.items()):
            said = f"d{case[0]} {'causal' if case[1] else 'full'} {case[2].name}"
            if process.poll() is None:
                if time.monotonic() - started < HANG_S:
                    continue
                process.kill()
                print(f"{said}: HANGS", flush=True)
            elif process.returncode == 0:
                yield case
            else:
                print(f"{said}: WRONG: {process.stdout.read().strip()[-400:]}", flush=True)
            del running[case]
        time.sleep(0.1)


def milliseconds(call: Callable[[], object], number: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(number):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / number


def cell(dim: int, causal: bool, seqlen: int, variants: list[Tiles]) -> dict[str, object]:
    """One row: samples and TFLOP/s of each variant and of cuDNN, in turns."""
    from flashbench.kernels import _flash_v3 as flash

    batch, heads = TOKENS // seqlen, WIDTH // dim
    q, k, v = (torch.randn(batch, heads, seqlen, dim, device="cuda", dtype=torch.float16) for _ in range(3))
    flops = 4 * batch * heads * seqlen**2 * dim / (2 if causal else 1)

    def cudnn() -> object:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    calls: dict[str, Callable[[], object]] = {"sdpa-cudnn": cudnn}
    for tiles in variants:
        options = {"causal": causal, "scale": dim**-0.5, "tiles": tiles}
        calls[tiles.name] = lambda options=options: flash.forward(q, k, v, **options)
    samples: dict[str, list[float]] = {one: [] for one in calls}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        once = {}
        for one, call in calls.items():
            print(json.dumps({"trying": one}), flush=True)
            call()
            once[one] = milliseconds(call, 3)
        for turn in range(ROUNDS):
            for one in list(calls) if turn % 2 == 0 else list(calls)[::-1]:
                milliseconds(calls[one], max(1, round(WARM_MS / once[one])))
                samples[one].append(milliseconds(calls[one], max(2, round(SAMPLE_MS / once[one]))))
    tflops = {one: flops / statistics.median(ms) / 1e9 for one, ms in samples.items()}
    there = [row[sorted(LENGTHS).index(seqlen)] for row in REFERENCE["fwd", dim, causal]]
    fa4 = there[1] / there[0] * tflops["sdpa-cudnn"]
    peer = max(fa4, tflops["sdpa-cudnn"])
    return {
        "head_dim": dim, "causal": causal, "seqlen": seqlen, "samples_ms": samples, "tflops": tflops,
        "fa4_scaled": fa4, "best_peer": peer,
    }  # fmt: skip


def said(row: dict) -> str:
    """A cell in one line, the fastest first."""
    ours = {one: speed for one, speed in row["tflops"].items() if one != "sdpa-cudnn"}
    ranked = sorted(ours, key=ours.__getitem__, reverse=True)
    text = " ".join(f"{one} {ours[one]:.0f} ({ours[one] / row['best_peer']:.3f})" for one in ranked)
    mask = "causal" if row["causal"] else "full"
    cudnn, fa4 = row["tflops"]["sdpa-cudnn"], row["fa4_scaled"]
    return f"d{row['head_dim']} {mask} {row['seqlen']:5d} cudnn {cudnn:.0f} fa4~ {fa4:.0f} | {text}"


Cell = tuple[int, bool, int]


def timed(
    cells: list[Cell], good: list[Case], until: float, told: object, *, script: str = __file__
) -> Iterator[dict]:
    """Rows of the cells by the script's --cells; if that hangs it is killed, and what it was at is left out.

    Where that is no case but what they are timed beside, the cell is left out. told: what it is told beside
    cells and cases; here whether only the table's are timed.
    """
    good = list(good)
    while cells and good and time.monotonic() < until:
        asked = json.dumps([cells, [[*of, asdict(tiles)] for *of, tiles in good], told])
        with subprocess.Popen(
            [sys.executable, script, "--cells", asked], stdout=subprocess.PIPE, text=True
        ) as process:
            lines: queue.Queue[str] = queue.Queue()
            threading.Thread(target=lambda p=process, q=lines: [*map(q.put, p.stdout), q.put("")]).start()
            trying = None
            try:
                while line := lines.get(timeout=max(0.0, min(SILENT_S, until - time.monotonic()))):
                    if line.startswith('{"trying"'):
                        trying = json.loads(line)["trying"]
                    elif line.startswith("{"):
                        yield json.loads(line)
                        cells = cells[1:]
                    else:
                        print(line, end="", flush=True)
            except queue.Empty:
                process.kill()
        if cells and time.monotonic() < until:
            print(f"{cells[0]}: {trying} HANGS or fails", flush=True)
            left = [case for case in good if (*case[:2], case[2].name) != (*cells[0][:2], trying)]
            cells, good = cells[len(left) == len(good) :], left


def time_cells(asked: str) -> None:
    """Print a line of JSON per cell."""
    cells, cases, table = json.loads(asked)
    good = [(dim, causal, Tiles(**fields)) for dim, causal, fields in cases]
    for dim, causal, seqlen in cells:
        variants = [tiles for *of, tiles in good if of == [dim, causal]]
        if table:
            variants = [hopper_configs.choose(dim, dim, causal, seqlen, fp16=True)]
        print(json.dumps(cell(dim, causal, seqlen, variants)), flush=True)


def summary(rows: list[dict]) -> None:
    """Geomeans over the best peer: of each variant, of the best of each cell, of the table's choice."""

    def geomean(ratios: list[float]) -> str:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan
        return f"geomean {mean:.3f}, least {min(ratios, default=math.nan):.3f} of {len(ratios)}"

    def over(row: dict, one: str) -> float:
        return row["tflops"][one] / row["best_peer"]

    for dim, causal in VARIANTS:
        of = [row for row in rows if (row["head_dim"], row["causal"]) == (dim, causal)]
        of.sort(key=lambda row: row["seqlen"])
        lines = []
        for one in dict.fromkeys(one for row in of for one in row["tflops"] if one != "sdpa-cudnn"):
            ratios = [over(row, one) for row in of if one in row["tflops"]]
            each = " ".join(f"{ratio:.3f}" for ratio in ratios)
            lines.append((geomean(ratios), f"d{dim} {'causal' if causal else 'full'} {one}: {each}"))
        for mean, line in sorted(lines, reverse=True):
            print(f"{line} | {mean}")
    best = [max(over(row, one) for one in row["tflops"] if one != "sdpa-cudnn") for row in rows]
    print("best of each cell:", geomean(best))
    table = []
    for row in rows:
        chosen = hopper_configs.choose(
            row["head_dim"], row["head_dim"], row["causal"], row["seqlen"], fp16=True
        )
        if chosen.name in row["tflops"]:
            table.append(over(row, chosen.name))
    print("the table's choice:", geomean(table), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget", type=float, default=130)
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--check")
    parser.add_argument("--cells")
    asked = parser.parse_args()
    if asked.check:
        dim, causal, fields, dtypes = json.loads(asked.check)
        return check(dim, causal, Tiles(**fields), dict([*LIMITS.items()][:dtypes]))
    if asked.cells:
        return time_cells(asked.cells)
    started = time.monotonic()
    cases = [
        (dim, causal, tiles)
        for dim, causal in VARIANTS
        if str(dim) in asked.head_dims.split(",")
        for tiles in (chosen(dim, causal) if asked.table else VARIANTS[dim, causal])
    ]
    good = sorted(right(cases, 2 if asked.table else 1), key=cases.index)
    print(f"{len(good)} of {len(cases)} right after {time.monotonic() - started:.0f} s", flush=True)
    cells = [(*of, seqlen) for seqlen in LENGTHS for of in dict.fromkeys(case[:2] for case in good)]
    rows: list[dict] = []
    for row in timed(cells, good, started + asked.budget, asked.table):
        rows.append(row)
        print(said(row), flush=True)
        if asked.out:
            asked.out.write_text(json.dumps(document(good, rows), indent=1) + "\n", encoding="utf-8")
    summary(rows)
    return None


def chosen(dim: int, causal: bool) -> list[Tiles]:
    return list(
        dict.fromkeys(hopper_configs.choose(dim, dim, causal, seqlen, fp16=True) for seqlen in LENGTHS)
    )


def document(good: list[tuple[int, bool, Tiles]], rows: list[dict]) -> dict[str, object]:
    import triton

    return {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(), "dtype": "fp16",
        "configurations": {tiles.name: asdict(tiles) for *_, tiles in good}, "rows": rows,
    }  # fmt: skip


if __name__ == "__main__":
    main()
