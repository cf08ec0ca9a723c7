"""The rounding errors that naive may have in fp32 or TF32, drawn several times: what it had may be luck.

Attention is homogeneous: with c q and k / c in place of q and k, a v of v and b dout of dout, scores and lse
are the same, o is a times as large, dv b times, dq a b / c, dk a b c and dbias a b. In exact arithmetic that
is nothing new; in fp32 every product and sum is rounded anew, and each input once, as by a kernel that folds
its scale and log2(e) into q; in TF32 all that products read is rounded to other numbers, or cut off there.
The results, scaled back, are so many draws of the errors of one problem.

Source: Monte Carlo arithmetic (Parker 1997), by a change of units in place of random last digits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flashbench.kernels._inputs import Inputs

DRAWS = 8

LIMIT = 2**20
"""(query, key) pairs over batch and heads up to which errors are drawn: beyond, the largest is of many."""

FEW = 400
"""Numbers from which on the largest of normal errors is three standard deviations or more."""

Tensors = dict[str, Tensor]


def deviations(
    inputs: Inputs,
    compute: Callable[[Inputs], list[Tensors]],
    refs: Sequence[Tensors],
    *,
    alike: bool = True,
) -> dict[str, float]:
    """By tensor, the largest standard deviation of an error: of a row's numbers, which are alike, over the
    draws; of dbias, whose are not, and of lse, one number per row, of one element.

    alike: False where one score's error may be all of a row's, as in TF32: its numbers are wrong together,
    each by another multiple of it, and the largest counts.
    compute: naive's tensors of each part, of inputs; refs: the exact ones.
    """
    generator = torch.Generator().manual_seed(inputs.seed % 2**63)
    squares = [{name: torch.zeros_like(ref) for name, ref in part.items()} for part in refs]
    for _ in range(DRAWS):
        a, b, c = (1 + torch.rand(3, generator=generator, dtype=torch.float64)).tolist()
        units = {"o": a, "dv": b, "dq": a * b / c, "dk": a * b * c, "dbias": a * b, "dsinks": a * b}
        factors = {"q": c, "k": 1 / c, "v": a, "dout": b}
        scaled = {name: _scaled(getattr(inputs, name), factor) for name, factor in factors.items()}
        for total, found, exact in zip(squares, compute(replace(inputs, **scaled)), refs, strict=True):
            for name, x in found.items():
                error = x.double() / units.get(name, 1.0) - exact[name]
                error.nan_to_num_(0.0, 0.0, 0.0)  # rows without keys; what overflows in 16 bits alone
                total[name] += error.square_()
    single = {"dbias", "lse"} if alike else set(refs[0])
    return {name: max(_largest(part[name], name in single) for part in squares) for name in refs[0]}


def _largest(squares: Tensor, single: bool) -> float:
    if not squares.numel():
        return 0.0
    mean = squares if single else squares.mean(-1)
    return float((mean.max() / DRAWS).sqrt())


def _scaled(x: Tensor, factor: float) -> Tensor:
    """Rounded once."""
    return (x.detach().double() * factor).to(x.dtype)
