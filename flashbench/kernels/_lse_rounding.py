"""How far lse may be off for the arithmetic of the softmax alone, given exact scores.

In powers of two, as every kernel on a GPU has it: of scores x = s · log2(e) and their maximum, or a base near
it, l = sum of 2^(x - base), and lse = (base + log2(l)) · ln(2). What cannot be had otherwise is

- 2^x and log2(l) are a card's own instructions: ex2.approx is off by 2 units in the last place, 2^-22, and so
  is l, all of whose terms are positive; lg2.approx by 2^-22 where l is below 2, and by 2^-22 of log2(l) above
  (PTX ISA, ex2 and lg2);
- four numbers as large as lse or as the largest score are rounded to fp32: the factor scale · log2(e), the
  base, the sum and its product with ln(2), each to 2^-24 of itself;
- three roundings of x - base (of the factor, the difference and the product), of the probabilities' mean;
- n keys share l: ln(l) is between 0 and ln(n), and so is that mean, and the largest score is lse - ln(l).

naive has none of the first and may by chance have none of the others: of equal scores its sum is exact.
"""

from __future__ import annotations

import math

from torch import Tensor

APPROXIMATE = 2.0**-22
"""Relative error of ex2.approx, and of lg2.approx that of the result, absolute where it is below 1."""

ROUNDED = 2.0**-24
"""Relative error of one rounding to fp32."""


def largest(lse: Tensor, keys: int) -> float:
    """The most that rounding can do to any of these lse (exact ones) over so many keys and maybe a sink."""
    finite = lse[lse.isfinite()]  # −inf of a row without keys is no sum
    if not finite.numel():
        return 0.0
    most = math.log(keys + 1)  # at least ln(2), as lg2.approx is absolute below 1
    return APPROXIMATE * (1 + most) + ROUNDED * (4 * (float(finite.abs().max()) + most) + 3 * most)
