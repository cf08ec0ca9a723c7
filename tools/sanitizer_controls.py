"""A broken kernel for each sanitizer, so that a clean log is known to come from a tool that can find.

None of them is launched but under the sanitizer that is to find it.
"""

# Triton reads the bodies below, not Python.

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

RACE: tl.constexpr = tl.constexpr("""{
    .shared .align 4 .b32 everybodys[4];
    st.volatile.shared.b32 [everybodys], $1;
    ld.volatile.shared.b32 $0, [everybodys];
}""")
"""All threads of the block write one word of shared memory and read it, and none waits."""
DIVERGED: tl.constexpr = tl.constexpr("""{
    .reg .pred few;
    setp.lt.s32 few, $1, 16;
    @few bar.sync 0;
    mov.b32 $0, $1;
}""")
"""A barrier of the block that half a warp reaches."""


@triton.jit
def write_past_the_end(X, BLOCK: tl.constexpr):
    """As memcheck is to find it: X is shorter than BLOCK."""
    tl.store(X + tl.arange(0, BLOCK), 1)


@triton.jit
def read_what_nobody_wrote(X, Out, BLOCK: tl.constexpr):
    """As initcheck is to find it."""
    at = tl.arange(0, BLOCK)
    tl.store(Out + at, tl.load(X + at) + 1)


@triton.jit
def share_without_a_barrier(Out, BLOCK: tl.constexpr):
    """As racecheck is to find it."""
    at = tl.arange(0, BLOCK)
    tl.store(Out + at, tl.inline_asm_elementwise(RACE, "=r,r", [at], dtype=tl.int32, is_pure=False, pack=1))


@triton.jit
def wait_apart(Out, BLOCK: tl.constexpr):
    """As synccheck is to find it."""
    at = tl.arange(0, BLOCK)
    waited = tl.inline_asm_elementwise(DIVERGED, "=r,r", [at], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(Out + at, waited)


OF: dict[str, Any] = {
    "memcheck": write_past_the_end,
    "initcheck": read_what_nobody_wrote,
    "racecheck": share_without_a_barrier,
    "synccheck": wait_apart,
}
"""The kernel that each tool is to find."""
BLOCK = 128


def run(tool: str) -> object:
    """Launch the tool's kernel once, four warps; its tensors."""
    import torch

    out = torch.empty(BLOCK if tool != "memcheck" else BLOCK - 28, dtype=torch.int32, device="cuda")
    more = [torch.empty(BLOCK, dtype=torch.int32, device="cuda")] if tool == "initcheck" else []
    OF[tool][(1,)](*more, out, BLOCK=BLOCK, num_warps=4)
    return out, more
