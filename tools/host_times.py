"""What a call of attention takes the host, flash-v3's beside SDPA's, on this machine's GPU.

python tools/host_times.py --out reports/h200-sxm/host.json [--seqlen 512] [--head-dims 128] [--impls sdpa]

A call is timed by the host's clock until it returns, CALLS in a row while the device, whose work is short,
keeps up; implementations take turns in rounds, so that what else the host does is theirs alike. Passes: fwd,
without grad; bwd, of a forward that was kept; fwd+bwd. Tensors: ``seen``, the same in every call; ``new``,
others in each call of a round, more of them than launches keep descriptors of. ``attention`` is
``flashbench.attention``, the operator; ``flash-v3`` the kernel's own function. With --triton its kernels are
launched by Triton as it launches any, to compare.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from flashbench import environment  # noqa: E402

ROUNDS, CALLS = 5, 100
SHAPE = (1, 16)
"""Batch and heads."""
PASSES = ("fwd", "bwd", "fwd+bwd")
NAMES = ("flash-v3", "attention", "sdpa", "sdpa-flash", "sdpa-cudnn")
BARS_S = {("fwd", "seen"): 60e-6, ("fwd", "new"): 130e-6}
"""What flash-v3 is to take at most."""
Attention = Callable[[Any, Any, Any], Any]
Call = Callable[[int], object]


def attentions() -> Mapping[str, Attention]:
    """Causal attention of (q, k, v), by NAMES."""
    from functools import partial

    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    import flashbench
    from flashbench.kernels import _triton

    sdpa: Attention = partial(scaled_dot_product_attention, is_causal=True)

    def by(backend: SDPBackend) -> Attention:
        def call(q: Any, k: Any, v: Any) -> Any:
            with sdpa_kernel(backend):
                return sdpa(q, k, v)

        return call

    found: tuple[Attention, ...] = (
        partial(_triton.load("cuda", "_flash_v3").flash_attention, causal=True),
        partial(flashbench.attention, causal=True),
        sdpa,
        by(SDPBackend.FLASH_ATTENTION),
        by(SDPBackend.CUDNN_ATTENTION),
    )
    return dict(zip(NAMES, found, strict=True))


def calls(attend: Attention, pass_: str, sets: Sequence[Sequence[Any]], dout: Any) -> Call:
    """The nth call: of the nth set of q, k and v, or of the only one."""
    import torch

    def forward(n: int) -> object:
        with torch.no_grad():
            return attend(*sets[n % len(sets)])

    def both(n: int) -> object:
        leaves = sets[n % len(sets)]
        return torch.autograd.grad(attend(*leaves), leaves, dout)

    if pass_ != "bwd":
        return forward if pass_ == "fwd" else both
    kept = [attend(*leaves) for leaves in sets]

    def backward(n: int) -> object:
        return torch.autograd.grad(kept[n % len(sets)], sets[n % len(sets)], dout, retain_graph=True)

    return backward


def timed(
    made: Mapping[str, Call], wait: Callable[[], object], rounds: int = ROUNDS, count: int = CALLS
) -> dict[str, list[float]]:
    """Seconds of a call in each round, by name; a first round of each is not counted."""
    samples: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(rounds + 1):
        for name, call in made.items():
            wait()
            start = time.perf_counter()
            for n in range(count):
                call(n)
            taken_s = time.perf_counter() - start
            if turn:
                samples[name].append(taken_s / count)
    wait()
    return samples


def rows(
    head_dim: int, seqlen: int, by: Mapping[str, Attention], device: str = "cuda"
) -> Iterator[dict[str, Any]]:
    """One per implementation, pass and kind of tensors; with a reason where one does not run."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for tensors, pass_ in ((tensors, pass_) for tensors in ("seen", "new") for pass_ in PASSES):
        sets = [
            [torch.randn(*SHAPE, seqlen, head_dim, device=device, dtype=torch.float16, requires_grad=True)
             for _ in "qkv"] for _ in range(CALLS if tensors == "new" else 1)
        ]  # fmt: skip
        dout, made, reasons = torch.randn_like(sets[0][0]), {}, {}
        for name, attend in by.items():
            try:
                made[name] = calls(attend, pass_, sets, dout)
                made[name](0)
            except Exception as error:  # one that does not run leaves the others
                made.pop(name, None)
                reasons[name] = f"{type(error).__name__}: {error}"[:300]
        samples = timed(made, wait)
        for name in by:
            row = {"implementation": name, "pass": pass_, "tensors": tensors, "head_dim": head_dim}
            yield {**row, "samples_s": samples[name]} if name in made else {**row, "reason": reasons[name]}


def host_s(row: Mapping[str, Any]) -> float:
    """Of a row: the median of its rounds."""
    return statistics.median(row["samples_s"]) if row.get("samples_s") else math.nan


def above(document: Mapping[str, Any]) -> list[str]:
    """Rows of flash-v3 that take longer than they are to, a line each."""
    return [
        f"head_dim {row['head_dim']}, {row['pass']}, {row['tensors']} tensors: {1e6 * host_s(row):.0f} us of"
        f" {1e6 * BARS_S[row['pass'], row['tensors']]:.0f}"
        for row in document["rows"]
        if row["implementation"] == "flash-v3"
        and not host_s(row) <= BARS_S.get((row["pass"], row["tensors"]), math.inf)
    ]


def by_triton() -> None:
    """From now on flash-v3's kernels are launched by Triton, as any."""
    from flashbench.kernels import _triton

    _triton.load("cuda", "_hopper_ready").Ready.start = lambda *_: False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--impls", default=",".join(NAMES), help="a comma list")
    parser.add_argument("--triton", action="store_true", help="launch flash-v3's kernels by Triton")
    given = parser.parse_args()
    wanted = given.impls.split(",")
    if strange := [name for name in wanted if name not in NAMES]:
        parser.error(f"--impls {strange[0]!r} is not known; it must be of {', '.join(NAMES)}")
    import torch

    if not torch.cuda.is_available():
        parser.error("it needs a GPU: none is found")
    if given.triton:
        by_triton()
    every = attentions()
    by = {name: every[name] for name in wanted}
    document: dict[str, Any] = {
        "type": "host-times", "environment": environment.collect(environment.target("cuda")),
        "batch": SHAPE[0], "num_heads": SHAPE[1], "seqlen": given.seqlen, "dtype": "fp16", "causal": True,
        "calls": CALLS, "launched_by": "triton" if given.triton else "flashbench", "rows": [],
    }  # fmt: skip
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for dim in map(int, given.head_dims.split(",")):
        for row in rows(dim, given.seqlen, by):
            document["rows"].append(row)
            said = row.get("reason") or f"{1e6 * host_s(row):.0f} us"
            print(f"d{dim} {row['pass']:8} {row['tensors']:5} {row['implementation']:10} {said}", flush=True)
        given.out.write_text(json.dumps(document) + "\n", encoding="utf-8")
    for line in above(document):
        print(f"above the bar: {line}")


if __name__ == "__main__":
    main()
