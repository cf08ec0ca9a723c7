"""Compiles, checks and times configurations of the flash kernels on this machine's GPU.

python tools/tune_flash.py --out tuning.json [--budget 200] [--kernels fwd,dq,dkdv] [--head-dims 64,128]

Every variant is compiled in parallel first, then checked against fp64 on ragged and grouped problems;
only right ones are timed, beside SDPA's FlashAttention and cuDNN, with the L2 cache flushed before each
sample. The JSON is rewritten after every group, and a variant that hangs ends the run at its budget,
named, so a time limit loses nothing. The winners belong into flashbench/flash_configs.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import threading
import time
from dataclasses import astuple, dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashbench.flash_configs import Config, choose
from flashbench.kernels import _compile, _triton
from flashbench.kernels._inputs import make_inputs
from flashbench.problem import Problem
from flashbench.profilers import Flush

C = Config
VARIANTS = {
    ("fwd", 64): (C(128, 64, 8, 3), C(128, 64, 4, 3), C(64, 64, 4, 3), C(128, 128, 8, 3), C(64, 128, 4, 3)),
    ("fwd", 128): (C(128, 128, 8, 3), C(128, 64, 8, 3), C(64, 64, 4, 3), C(64, 64, 4, 2), C(128, 128, 8, 2)),
    ("fwd", 256): (C(128, 64, 8, 2), C(128, 32, 8, 3), C(64, 32, 4, 3), C(128, 32, 8, 2)),
    ("dq", 64): (C(128, 64, 8, 3), C(64, 64, 4, 3), C(128, 64, 4, 3), C(128, 128, 8, 2)),
    ("dq", 128): (C(64, 64, 4, 2), C(128, 64, 8, 3), C(128, 32, 4, 3), C(64, 32, 4, 3)),
    ("dq", 256): (C(64, 64, 8, 2), C(64, 64, 8, 1), C(64, 32, 8, 2), C(128, 32, 8, 2), C(64, 32, 4, 2)),
    ("dkdv", 64): (C(64, 64, 4, 3), C(64, 64, 4, 2), C(32, 64, 4, 3), C(64, 128, 8, 3)),
    ("dkdv", 128): (C(32, 64, 4, 3), C(32, 64, 4, 2), C(32, 64, 4, 4), C(16, 64, 4, 3), C(32, 128, 8, 3)),
    ("dkdv", 256): (C(16, 64, 8, 2), C(16, 64, 8, 3), C(32, 64, 8, 2), C(32, 32, 4, 2), C(64, 64, 8, 1)),
}
"""What to try, by kernel and largest head dim of the table's row."""

PRODUCTS = {"fwd": 2, "dq": 3, "dkdv": 4}
"""Matrix products that each kernel does for a visible pair; the nominal backward has 5."""


@dataclass
class Session:
    """Where time and results stand; now says what is running, for the case that it never returns."""

    out: Path
    budget_s: float
    now: str = "start"
    started: float = field(default_factory=time.monotonic)
    results: dict = field(default_factory=lambda: {"rows": [], "notes": []})

    @property
    def left_s(self) -> float:
        return self.budget_s - (time.monotonic() - self.started)

    def say(self, *words: object) -> None:
        line = " ".join(map(str, words))
        print(f"[{time.monotonic() - self.started:6.1f}] {line}", flush=True)
        self.results["notes"].append(line)

    def add(self, **row: object) -> None:
        self.results["rows"].append(row)

    def save(self) -> None:
        self.out.write_text(json.dumps(self.results, indent=1))

    def give_up(self) -> None:
        self.say("out of time in:", self.now)
        self.save()
        os._exit(3)


def problem(seqlen: int, head_dim: int, causal: bool, **changes) -> Problem:
    """The papers' sweep: 16k tokens, hidden size 2048, bf16."""
    heads = 2048 // head_dim
    values = {
        "batch": max(1, 16384 // seqlen), "num_heads": heads, "num_kv_heads": heads, "seqlen_q": seqlen,
        "seqlen_k": seqlen, "head_dim": head_dim, "head_dim_v": head_dim, "dtype": "bf16", "causal": causal,
    }  # fmt: skip
    return Problem(**{**values, **changes})


def environment() -> dict:
    import triton

    query = "name,driver_version,clocks.sm,clocks.max.sm,power.draw,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    card = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    versions = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }
    return {"nvidia_smi": card, "fields": query, **versions}


def median_s(call, flush: Flush, budget_s: float = 0.08) -> float:
    """Median device time over at least 5 samples, the L2 cache flushed before each."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    count = max(5, min(25, int(budget_s / (time.perf_counter() - start))))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for before, after in events:
        flush()
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in events) * 1e-3


class Attention:
    """One problem's inputs, and its launches under any configuration."""

    def __init__(self, p: Problem) -> None:
        self.flash = _triton.load("cuda")
        self.p = p
        inputs = make_inputs(p, "cuda", 0)
        self.q, self.k, self.v, self.do = inputs.q, inputs.k, inputs.v, inputs.dout
        self.o, self.lse, forward = self.forward(())
        forward.run()

    def forward(self, configs):
        call = self.flash.Call(causal=self.p.causal, scale=self.p.softmax_scale, configs=configs)
        return self.flash.forward_launch(self.q, self.k, self.v, call)

    def backward(self, configs):
        call = self.flash.Call(causal=self.p.causal, scale=self.p.softmax_scale, configs=configs)
        saved = self.flash.Saved(q=self.q, k=self.k, v=self.v, o=self.o, lse=self.lse, do=self.do)
        work = self.flash.backward_launches(saved, call)
        return work.gradients, {launch.name: launch for launch in work.launches}

    def launch(self, kernel: str, config: Config):
        configs = ((kernel, config),)
        return self.forward(configs)[2] if kernel == "fwd" else self.backward(configs)[1][kernel]


def dense(p: Problem, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    """o, dq, dk, dv in fp64 from the whole score matrix."""
    q, k, v, do = (x.double() for x in (q, k, v, do))
    k, v = (x.repeat_interleave(p.group, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * p.softmax_scale
    if p.causal:
        ones = torch.ones(p.seqlen_q, p.seqlen_k, dtype=torch.bool, device="cuda")
        scores.masked_fill_(ones.triu(1 + p.seqlen_k - p.seqlen_q), -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    dp = do @ v.transpose(-1, -2)
    ds = weights * (dp - (weights * dp).sum(-1, keepdim=True)) * p.softmax_scale
    dk, dv = (
        x.unflatten(1, (p.num_kv_heads, p.group)).sum(2)
        for x in (ds.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ do)
    )
    return weights @ v, ds @ k, dk, dv


def check(session: Session, head_dim: int, variants: list[tuple[str, Config]]) -> list[tuple[str, Config]]:
    """The variants whose results are within 1 % of fp64 on ragged, rectangular and grouped problems."""
    wrong = set()
    shapes = (
        {"seqlen_q": 1021, "seqlen_k": 1021},
        {"seqlen_q": 300, "seqlen_k": 533},
        {"seqlen_q": 533, "seqlen_k": 300},
    )
    for shape, causal in itertools.product(shapes, (False, True)):
        p = problem(1024, head_dim, causal, batch=2, num_heads=4, num_kv_heads=2, **shape)
        attention = Attention(p)
        o, *gradients = dense(p, attention.q, attention.k, attention.v, attention.do)
        for kernel, config in variants:
            session.now = f"check of {kernel} {astuple(config)} on {p.key}"
            if kernel == "fwd":
                found, _, launch = attention.forward(((kernel, config),))
                launch.run()
                pairs = [(found, o)]
            else:
                made, launches = attention.backward(((kernel, config),))
                launches["delta"].run()
                launches[kernel].run()
                wanted = (0,) if kernel == "dq" else (1, 2)
                pairs = [(made[i], gradients[i]) for i in wanted]
            worst = max(((x.double() - ref).norm() / ref.norm()).item() for x, ref in pairs)
            if not worst < 0.01:
                wrong.add((kernel, config))
                session.say("WRONG", kernel, astuple(config), p.key, worst)
    return [variant for variant in variants if variant not in wrong]


def sdpa(session: Session, attention: Attention, flush: Flush) -> dict[str, tuple[float, float]]:
    """(forward, backward) seconds of torch's FlashAttention and cuDNN, where they take the problem."""
    times = {}
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        q, k, v = (x.detach().requires_grad_() for x in (attention.q, attention.k, attention.v))

        def forward(q=q, k=k, v=v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=attention.p.causal)

        try:
            with sdpa_kernel(backend):
                seconds = median_s(forward, flush)
                o = forward()
                backward = median_s(
                    lambda o=o, x=(q, k, v): torch.autograd.grad(o, x, attention.do, retain_graph=True), flush
                )
        except RuntimeError as error:
            session.say("sdpa", name, "refuses:", str(error).splitlines()[0])
            continue
        times[name] = (seconds, backward)
        session.add(kernel=f"sdpa-{name}", problem=attention.p.key, fwd_s=seconds, bwd_s=backward)
    return times


def time_group(session: Session, p: Problem, variants: list[tuple[str, Config]], flush: Flush) -> None:
    """Time the variants on one problem, and print the best of each kernel beside SDPA."""
    attention = Attention(p)
    rate = lambda products, seconds: f"{2 * products * p.visible_pairs * p.head_dim / seconds / 1e12:.0f}"  # noqa: E731
    times = sdpa(session, attention, flush)
    session.say(
        p.key, *(f"sdpa-{n} {rate(2, f)}/{rate(5, b)}" for n, (f, b) in times.items()), "TFLOP/s fwd/bwd"
    )
    attention.backward(())[1]["delta"].run()
    limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    card = torch.cuda.get_device_capability(), limit
    chosen = {}
    for kernel in PRODUCTS:
        default = choose(kernel, "half", p.head_dim, p.head_dim_v, *card)
        configs = dict.fromkeys((default, *(c for k, c in variants if k == kernel)))
        timed = []
        for config in configs:
            if session.left_s < 5:
                return
            session.now = f"timing of {kernel} {astuple(config)} on {p.key}"
            try:
                seconds = median_s(attention.launch(kernel, config).run, flush)
            except Exception as error:
                session.say("failed", kernel, astuple(config), repr(error)[:150])
                continue
            timed.append((seconds, config))
            session.add(kernel=kernel, problem=p.key, config=astuple(config), seconds=seconds)
        chosen[kernel] = next((s for s, config in timed if config == default), float("inf"))
        timed.sort(key=lambda pair: pair[0])
        best = " ".join(f"{astuple(c)}:{rate(PRODUCTS[kernel], s)}" for s, c in timed[:5])
        session.say(
            "  ", kernel, "table", astuple(default), rate(PRODUCTS[kernel], chosen[kernel]), "| best", best
        )
    delta = median_s(attention.backward(())[1]["delta"].run, flush)
    backward = delta + chosen["dq"] + chosen["dkdv"]
    ratios = " ".join(f"{f / chosen['fwd']:.2f}/{b / backward:.2f} x sdpa-{n}" for n, (f, b) in times.items())
    session.say(f"   table: {rate(2, chosen['fwd'])}/{rate(5, backward)} = {ratios}")
    session.save()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=200.0, help="seconds")
    parser.add_argument("--head-dims", default="64,128,96,192,256")
    parser.add_argument("--seqlens", default="4096,16384,1024")
    options = parser.parse_args()
    session = Session(options.out, options.budget)
    watchdog = threading.Timer(options.budget, session.give_up)
    watchdog.daemon = True
    watchdog.start()
    head_dims = [int(x) for x in options.head_dims.split(",")]
    session.results["environment"] = environment()
    session.say(session.results["environment"])
    properties = torch.cuda.get_device_properties(0)
    card = (properties.major, properties.minor), properties.shared_memory_per_block_optin
    variants = {}
    for head_dim in head_dims:
        row = min(top for _, top in VARIANTS if top >= head_dim)
        defaults = [(k, choose(k, "half", head_dim, head_dim, *card)) for k in PRODUCTS]
        tried = [(k, c) for (k, top), configs in VARIANTS.items() if top == row for c in configs]
        variants[head_dim] = list(dict.fromkeys(defaults + tried))
    tasks = [
        _compile.Task(kernel, problem(4096, d, causal, num_heads=4, num_kv_heads=kv_heads), *card, config)
        for d in head_dims
        for causal, kv_heads in itertools.product((False, True), (4, 2))
        for kernel, config in [*variants[d], ("delta", None)]
        if kv_heads == 4 or kernel == "dkdv"
    ]
    session.now = "compilation"
    for done in _compile.compile_all(tasks):
        if done.error:
            session.say("does not compile:", done.task.kernel, done.task.problem.key, done.error[:200])
    session.say("compiled", len(tasks))
    flush = Flush("cuda")
    for head_dim in head_dims:
        right = check(session, head_dim, variants[head_dim])
        session.say("head dim", head_dim, "checked:", len(right), "of", len(variants[head_dim]), "are right")
        for seqlen, causal in itertools.product(options.seqlens.split(","), (False, True)):
            if session.left_s > 8:
                time_group(session, problem(int(seqlen), head_dim, causal), right, flush)
        session.save()
    watchdog.cancel()


if __name__ == "__main__":
    main()
