"""Run as a program: gradcheck on flash-v2's kernels in fp64, through Triton's interpreter.

In the interpreter a kernel is Python over numpy, so that fp64 in place of fp32, in the kernels and in the
buffers between them, makes the same kernel compute in fp64: its one error is then log2(e), which is an fp32
number (some 1e-8). A process of its own, as Triton's fp32 is fp64 in it from then on.

    python tests/gradients_fp64.py fast|every
"""

from __future__ import annotations

import os
import sys
from typing import Any

EPS, ATOL, RTOL = 1e-6, 1e-6, 1e-5
"""Central differences of fp64 err by some 1e-10 at this eps."""


class Doubled:
    """torch, whose fp32 is fp64."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return torch.float64 if name == "float32" else getattr(torch, name)


def main(fast: bool) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import torch
    import triton.language as tl

    from flashbench.kernels import _triton

    kernels = _triton.load("cpu")
    from flashbench.kernels import _call, _launches

    _launches.torch = _call.torch = Doubled()  # type: ignore[assignment]
    tl.float32 = tl.float64
    for options in ({"causal": True}, {"causal": False, "window": (1, 0), "softcap": 1.5}):
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(1, heads, 3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
            for heads in (2, 1, 1)
        )
        call = _call.Call(scale=0.5, **options)

        def attention(q: Any, k: Any, v: Any, call: Any = call) -> Any:
            o, _ = kernels.FlashAttention.apply(q, k, v, None, None, call, _call.NOTHING)
            return o

        assert attention(q, k, v).dtype == torch.float64
        ahead = torch.arange(3) - torch.arange(3)[:, None]
        cap = options.get("softcap", 0.0)
        s = q @ k.mT * 0.5
        s = (cap * torch.tanh(s / cap) if cap else s).masked_fill(ahead > 0, -torch.inf)
        s = s.masked_fill(ahead < -options.get("window", (3, 0))[0], -torch.inf)
        assert (attention(q, k, v) - s.softmax(-1) @ v).abs().max() < 1e-7  # fp32 would err by more
        assert torch.autograd.gradcheck(attention, (q, k, v), eps=EPS, atol=ATOL, rtol=RTOL, fast_mode=fast)


if __name__ == "__main__":
    main(sys.argv[1] == "fast")
    print("right")
