"""What a library's matrix products fetch again of their narrow operands, as their tiles drift apart.

Of an eager attention's six products each has scores on one side. On Hopper cuBLAS cuts the output into tiles
of 32,768 elements (128 × 256, 64 × 512: its kernels are named by them), takes tiles by two, which share what
they load, and runs one program per SM. So the narrow operand (V of PV) is passed over once per pair of tiles,
and the scores that stream by push some of it out before the last pair has come to it.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashbench._iomodel.tensors import FP16
from flashbench._iomodel.types import Step
from flashbench.problem import Problem

_TILE, _MOST_ROWS, _PAIR = 32768, 512, 2
"""Elements of a tile of the output, its rows at most, and tiles that share what they load. The bytes that
cross between SM and L2 on an H100 are those of such tiles, to 0.1 %."""

_PASSED = 0.083
"""Of each further pass over a narrow operand beside scores that are read, what is fetched again.

Set by the counts of N = 2k, d = 128 on an H100 SXM (0.077 to 0.10); 0.089 to 0.12 at 1k and 0.069 to 0.096 at
4k are not in it. At d = 64 it is 0.01 to 0.08: what is expected is too much there by up to 0.3 % of the op.
"""

_WAVED = 0.015
"""Of both operands of a product that writes scores, what is fetched again per further wave of a head's tiles.

Set by the eight counts of N = 4k on an H100 SXM (0.012 to 0.017), the only ones with more than one wave.
"""


def fetched_again(step: Step, problem: Problem, sms: int) -> Mapping[str, float]:
    """How many times over each operand of a product is expected to be fetched again; empty for others.

    Of 16-bit operands, as counted. sms: SMs of the card.
    """
    p = problem
    if p.dtype_bytes != FP16:
        return {}
    if step.name in ("qk", "dp"):
        further = max(0.0, p.seqlen_q * p.seqlen_k / _TILE / sms - 1)
        return dict.fromkeys(step.read, _WAVED * further) if further else {}
    if step.name not in _PASSING:
        return {}
    rows, dim = _PASSING[step.name]
    tile = min(_MOST_ROWS, _TILE // getattr(p, dim))
    further = max(0.0, getattr(p, rows) / (_PAIR * tile) - 1)
    narrow = min(step.read, key=lambda name: step.read[name])
    return {narrow: _PASSED * further} if further else {}


_PASSING = {
    "pv": ("seqlen_q", "head_dim_v"), "dv": ("seqlen_k", "head_dim_v"),
    "dq": ("seqlen_q", "head_dim"), "dk": ("seqlen_k", "head_dim"),
}  # fmt: skip
"""Products that read scores: what counts the rows and the columns of their output."""
