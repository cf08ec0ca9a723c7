"""What a call of attention takes the host, flash-v3's beside SDPA's, on this machine's GPU.

python tools/host_times.py --out reports/h200-sxm/host.json [--seqlen 512] [--head-dims 128] [--impls sdpa]

A call is timed by the host's clock until it returns, CALLS in a row while the device, whose work is short,
keeps up. On a host that does other things, too, averages of long runs say how busy it was. So there are many
short ones: of a head dim every implementation, pass and kind of tensors takes its turn, REPEATS times, all
averages are kept in the file, and the one that a tenth of them stay below is what a call takes. Passes: fwd,
without grad; bwd, of a forward that was kept; fwd+bwd. Tensors: ``seen``, the same in every call; ``new``,
others in each call, SETS in turn, which is more than launches keep descriptors of. No two of implementations
and passes share q, k or v, as launches keep descriptors of all of them in one place: at head dim 256 and
``--seqlen`` 512 those are 19 GB. The gradient of o is one tensor for all. ``attention`` is
``flashbench.attention``, the public function; ``flash-v3`` the kernel's own. With --triton its kernels are
launched by Triton as it launches any, to compare.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from flashbench import environment  # noqa: E402

REPEATS, CALLS, SETS = 30, 20, 100
SHAPE = (1, 16)
"""Batch and heads."""
PASSES = ("fwd", "bwd", "fwd+bwd")
KINDS = ("seen", "new")
NAMES = ("flash-v3", "attention", "sdpa", "sdpa-flash", "sdpa-cudnn")
HELD = NAMES[:2]
BARS_S = {("fwd", "seen"): 60e-6, ("fwd", "new"): 130e-6}
"""What those two are to take at most."""
Key: TypeAlias = tuple[str, str, str]
"""Implementation, pass and kind of tensors."""
Attention = Callable[[Any, Any, Any], Any]
Call = Callable[[int], object]


def attentions() -> Mapping[str, Attention]:
    """Causal attention of (q, k, v), by NAMES."""
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
    made: Mapping[Key, Call], wait: Callable[[], object], repeats: int = REPEATS, count: int = CALLS
) -> dict[Key, list[float]]:
    """Seconds of a call in each repeat, by key, all in turns.

    A first repeat of each is not counted, nor the call before a repeat: what ran between is forgotten then.
    """
    samples: dict[Key, list[float]] = {key: [] for key in made}
    for turn in range(repeats + 1):
        for key, call in made.items():
            call(turn * count - 1)
            wait()
            start = time.perf_counter()
            for n in range(turn * count, (turn + 1) * count):
                call(n)
            taken_s = time.perf_counter() - start
            if turn:
                samples[key].append(taken_s / count)
    wait()
    return samples


def rows(
    head_dim: int, seqlen: int, by: Mapping[str, Attention], device: str = "cuda"
) -> Iterator[dict[str, Any]]:
    """One per implementation, pass and kind of tensors; with a reason where one does not run."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def sets(kind: str) -> list[list[Any]]:
        count = SETS if kind == "new" else 1
        make = partial(torch.randn, *SHAPE, seqlen, head_dim, device=device, dtype=torch.float16)
        return [[make(requires_grad=True) for _ in "qkv"] for _ in range(count)]

    dout = torch.ones(*SHAPE, seqlen, head_dim, device=device, dtype=torch.float16)
    made, reasons = dict[Key, Call](), dict[Key, str]()
    for key in itertools.product(by, PASSES, KINDS):
        name, pass_, kind = key
        try:
            call = calls(by[name], pass_, sets(kind), dout)
            call(0)
            made[key] = call
        except Exception as error:  # one that does not run leaves the others
            reasons[key] = f"{type(error).__name__}: {error}"[:300]
    samples = timed(made, wait)
    for kind, pass_, name in itertools.product(KINDS, PASSES, by):
        key = name, pass_, kind
        row = {"implementation": name, "pass": pass_, "tensors": kind, "head_dim": head_dim}
        yield {**row, "samples_s": samples[key]} if key in made else {**row, "reason": reasons[key]}


def host_s(row: Mapping[str, Any]) -> float:
    """Of a row: what a tenth of its repeats stay below."""
    samples = sorted(row.get("samples_s") or (math.nan,))
    found: float = samples[len(samples) // 10]
    return found


def above(document: Mapping[str, Any]) -> list[str]:
    """Rows that take longer than they are to, a line each."""
    return [
        f"{row['implementation']}, head_dim {row['head_dim']}, {row['pass']}, {row['tensors']} tensors:"
        f" {1e6 * host_s(row):.0f} us of {1e6 * BARS_S[row['pass'], row['tensors']]:.0f}"
        for row in document["rows"]
        if row["implementation"] in HELD
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
    started = time.perf_counter()
    document: dict[str, Any] = {
        "type": "host-times", "environment": environment.collect(environment.target("cuda")),
        "batch": SHAPE[0], "num_heads": SHAPE[1], "seqlen": given.seqlen, "dtype": "fp16", "causal": True,
        "calls": CALLS, "repeats": REPEATS, "launched_by": "triton" if given.triton else "flashbench",
        "rows": [],
    }  # fmt: skip
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for dim in map(int, given.head_dims.split(",")):
        for row in rows(dim, given.seqlen, by):
            document["rows"].append(row)
            said = row.get("reason") or f"{1e6 * host_s(row):.0f} us"
            print(f"d{dim} {row['pass']:8} {row['tensors']:5} {row['implementation']:10} {said}", flush=True)
        given.out.write_text(json.dumps(document) + "\n", encoding="utf-8")
    print(f"{time.perf_counter() - started:.0f} s")
    for line in above(document):
        print(f"above the bar: {line}")


if __name__ == "__main__":
    main()
