"""Configurations of the decode kernel against each other and against a copy, on this machine's GPU.

python tools/decode_bench.py --out decode.json                      every configuration below
python tools/decode_bench.py --configs 64,4,4,2 128,4,3,2,0 --dtypes bf16,fp8

A configuration is block_k,num_warps,num_stages[,resident[,ahead]] as in decode_configs.DecodeConfig. Each
is checked (the first of a case against fp64, the others against that bound too) before it is timed, over
{contiguous, pages} x batch x keys; the copy is measured before and after. Compiles in parallel first.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from flashbench import calibrate, decode_configs, environment, presets, units  # noqa: E402
from flashbench.decode_configs import DecodeConfig, Shape  # noqa: E402
from flashbench.decoding import Step, graphed  # noqa: E402
from flashbench.profilers import Policy, measure_time  # noqa: E402

CONFIGS = (
    "32,4,4,4", "32,4,6,2", "32,2,4,4", "64,4,3,2", "64,4,3,3", "64,4,4,2", "64,4,5,1", "64,4,6,1",
    "64,8,4,2", "64,2,3,3", "128,4,2,2", "128,4,3,1", "128,8,3,1", "128,8,2,2", "64,4,4,2,0", "64,4,6,2,0",
)  # fmt: skip
POLICY = Policy(limit_s=0.08, min_samples=5, max_samples=40, warmup=2)


def config(text: str) -> DecodeConfig:
    block_k, warps, stages, *rest = map(int, text.split(","))
    resident, ahead = (*rest, *(2, 1)[len(rest) :])
    return DecodeConfig(block_k, warps, stages, resident, bool(ahead))


def compile_(step: Step, how: DecodeConfig, target) -> str:
    """Compile both kernels into Triton's cache; the reason where that fails."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    from flashbench.kernels import _compile

    major, minor = target.capability
    triton.runtime.driver.set_active(_compile._NoDevice(GPUTarget("cuda", 10 * major + minor, 32)))
    from flashbench.kernels import _flash_decode as decode

    p = step.problem
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[p.dtype]

    def meta(*shape, dtype):
        return torch.empty(*shape, dtype=dtype, device="meta")

    q = meta(p.batch, p.num_heads, p.seqlen_q, p.head_dim, dtype=dtype)
    is_fp8 = step.dtype == "fp8"
    pages = -(-p.seqlen_k // step.page_size) if step.page_size else 0
    shape = (
        (p.batch * pages, step.page_size, p.num_kv_heads) if pages else (p.batch, p.num_kv_heads, p.seqlen_k)
    )
    k, v = (meta(*shape, dim, dtype=decode.FP8 if is_fp8 else dtype) for dim in (p.head_dim, p.head_dim_v))
    scale = meta(1, dtype=torch.float32) if is_fp8 else None
    cache = decode.Cache(
        k=k, v=v, seqused_k=meta(p.batch, dtype=torch.int32), k_descale=scale, v_descale=scale,
        block_table=meta(p.batch, pages, dtype=torch.int32) if pages else None,
    )  # fmt: skip
    card = target.capability, target.smem_per_block_bytes, target.num_sms
    call = decode.Call(causal=True, scale=p.softmax_scale, num_splits=2, config=how, card=card)
    try:
        for launch in decode.launches(q, cache, call)[2]:
            launch.compile()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def case(step: Step, configs: list[str], target, copy: float) -> list[dict]:
    """All configurations over one cache."""
    import torch

    from flashbench.kernels import _decode_reference as reference
    from flashbench.kernels import _flash_decode as decode

    p, rows, first, budget = step.problem, [], None, 0.0
    q, cache = reference.make(p, step.page_size, step.dtype == "fp8", target.device, 0)
    moved = step.cache_bytes
    for text in configs:
        row = {"config": text, "page_size": step.page_size, "batch": step.batch, "kv_len": step.kv_len,
               "dtype": step.dtype}  # fmt: skip
        how = decode.Call(causal=True, scale=p.softmax_scale, config=config(text))
        try:
            o = decode.run(q, cache, how)
            if first is None:
                error, budget = reference.compare(p, (q, cache), o)
                first = o
            else:
                error = float((o.double() - first.double()).abs().max())
            row |= {"error": error, "budget": budget, "splits": decode.plan(q, cache, how)[2]}
            if not error <= budget:
                rows.append(row | {"reason": "wrong"})
                continue
            call = graphed(partial(decode.run, q, cache, how), target.device)
            timing = measure_time(call, device=target.device, policy=POLICY)
        except Exception as error:  # too much shared memory, too many registers
            rows.append(row | {"reason": f"{type(error).__name__}: {str(error).splitlines()[0]}"})
            continue
        seconds = statistics.median(timing.samples.samples_s)
        rate = moved / seconds
        rows.append(row | {"us": seconds * 1e6, "gb_per_s": rate / 1e9, "copy_fraction": rate / copy,
                           "flags": list(timing.flags)})  # fmt: skip
    torch.cuda.empty_cache()
    return rows


def show(rows: list[dict], configs: list[str]) -> None:
    """The fastest of each case, and each configuration's geometric mean share of a copy."""
    cases = dict.fromkeys((r["dtype"], r["page_size"], r["batch"], r["kv_len"]) for r in rows)
    for one in cases:
        timed = [
            r for r in rows if (r["dtype"], r["page_size"], r["batch"], r["kv_len"]) == one and "us" in r
        ]
        print(f"{one[0]} page {one[1]} batch {one[2]} keys {one[3]}:")
        for r in sorted(timed, key=lambda r: r["us"])[:5]:
            print(f"    {r['config']:14s} splits {r['splits']:3d} {r['us']:9.1f} us {r['gb_per_s']:7.0f} GB/s"
                  f" {100 * r['copy_fraction']:6.1f} %")  # fmt: skip
    for dtype, page in dict.fromkeys((one[0], one[1]) for one in cases):
        means = {}
        for text in configs:
            shares = [
                r["copy_fraction"]
                for r in rows
                if (r["dtype"], r["page_size"], r["config"]) == (dtype, page, text) and "us" in r
            ]
            if shares:
                means[text] = math.exp(statistics.fmean(map(math.log, shares))), min(shares)
        best = sorted(means, key=means.get, reverse=True)[:6]
        print(
            f"{dtype} page {page}: "
            + "  ".join(f"{t} {means[t][0]:.3f} (worst {means[t][1]:.3f})" for t in best)
        )
    for r in rows:
        if "reason" in r:
            print("no:", r["config"], "page", r["page_size"], r["dtype"], r["reason"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configs", nargs="*", default=list(CONFIGS))
    parser.add_argument("--dtypes", default="bf16")
    parser.add_argument("--pages", default="0,16,256")
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--kv-lens", default="32k,128k")
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--out", default="decode_bench.json")
    asked = parser.parse_args()
    target = environment.target("cuda")
    model, began = presets.find(asked.model), time.monotonic()
    steps = [
        Step(preset=model, kv_len=length, batch=batch, page_size=page, dtype=dtype)
        for dtype in asked.dtypes.split(",")
        for page in units.parse_axis(asked.pages, "--pages", minimum=0)
        for batch in units.parse_axis(asked.batch, "--batch")
        for length in units.parse_axis(asked.kv_lens, "--kv-lens")
    ]
    kinds = {(s.dtype, s.page_size): s for s in steps}.values()
    workers = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = [(s, config(text), target) for s, text in product(kinds, asked.configs)]
        reasons = list(pool.map(compile_, *zip(*jobs, strict=True)))
    seconds, failed = time.monotonic() - began, sum(map(bool, reasons))
    print(f"{len(jobs)} kernels compiled in {seconds:.0f} s, {failed} failed", flush=True)
    copies = [calibrate.measure_one("copy_bytes_per_s", target)]
    rows = []
    for step in steps:
        rows += case(step, asked.configs, target, copies[0]["value"])
        print(f"{step.dtype} page {step.page_size} batch {step.batch} keys {step.kv_len}:"
              f" {time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
    copies.append(calibrate.measure_one("copy_bytes_per_s", target))
    document = {
        "type": "decode-bench",
        "environment": environment.collect(target),
        "copy": copies,
        "rows": rows,
    }
    Path(asked.out).write_text(json.dumps(document) + "\n", encoding="utf-8")
    print("copy before and after:", ", ".join(f"{c['value'] / 1e9:.0f} GB/s" for c in copies))
    show(rows, asked.configs)
    shape = Shape("half", model.head_dim, model.head_dim_v, 2)
    print("the table has", decode_configs.choose(shape, target.capability, target.smem_per_block_bytes))


if __name__ == "__main__":
    main()
