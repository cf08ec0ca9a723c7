"""The oracle: attention in fp64, and how far an implementation may be from it. Never timed.

An implementation's tensor x passes if, with maxima over the compared rows,

    max|x − ref| ≤ 2·max|naive − ref| + 2·max|((ref + 0.3) − 0.3 in x's dtype) − ref|

where naive is the textbook op list run in the tensors' dtype (or, where that is not finite, in fp32
with its result rounded; ``_yardstick``); of fp8 on inputs that went through it. lse is fp32 whatever the
inputs are: naive's is computed in fp32 from them (``CUT_OFF``), and to its bound comes what a card's own
exponentials and logarithms and fp32's roundings of numbers as large as lse may do (``_lse_rounding``), of
which naive's error says nothing. So for gradients: the root of the squares of 2·max|naive − ref| and of three
deviations of what a delta of the o that was stored and, in fp32, probabilities that are computed again do to
them (``_gradient_rounding``) stands in place of the first term; and for o, where scores are large, with what
their roundings do to it (``_output_rounding``). Of fp32 and tf32, and of small tensors in 16
bits, three standard deviations of naive's error stand in place of its largest where that is more
(``_other_units``). ref knows no dtype: it takes the inputs as they are (``_exact``). Small problems compare
every row; larger ones o, lse and dq on sampled query rows, dk and dv on sampled key rows, of all heads, and
dbias where both meet, so that 64k is checked in bounded memory. The sequences of a packed batch are problems
of their own.

Source: the rule of FlashAttention's own tests (naive in the same dtype as the yardstick) with an fp64
reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from flashbench.kernels import _exact, _fp8, _lse_rounding, _other_units
from flashbench.kernels._gradient_rounding import VARIANCE
from flashbench.kernels._inputs import Inputs
from flashbench.kernels._part import Part, joined
from flashbench.kernels._precision import input_dtype, precision
from flashbench.kernels._yardstick import Yardstick
from flashbench.problem import Problem
from flashbench.record import Accuracy

ALL_ROWS_PAIRS = {"cpu": 2**24, "cuda": 2**26}
"""Up to this many (query, key) pairs over batch and heads, every row is compared."""

CUT_OFF = 2
"""By how much what is cut off is more wrong than what is rounded: lse where tensor cores multiply 16 bits, as
their sums are cut off and fp32's rounded to nearest (Fasi et al. 2021, "Numerical behavior of NVIDIA tensor
cores", section 4), and in TF32 what products read (``_yardstick.to_tf32``), of which o's deviation is drawn.
"""

Tensors = dict[str, Tensor]


class Naive(Protocol):
    """The yardstick's tensors of a part in a dtype; cut: as ``Yardstick``'s."""

    def __call__(self, part: Part, dtype: torch.dtype, *, cut: bool = False) -> Tensors: ...


def rounding(ref: Tensor, dtype: torch.dtype) -> float:
    """max|((ref + 0.3) − 0.3 in the dtype) − ref|: what rounding alone does at the data's scale."""
    return _max_error(((ref.to(dtype) + 0.3) - 0.3), ref)


def _max_error(x: Tensor, ref: Tensor) -> float:
    """Largest |x - ref|; the same infinity on both sides is no error."""
    if not ref.numel():
        return 0.0
    return float((x.double() - ref).abs_().masked_fill_(x == ref, 0).max())


@dataclass(frozen=True)
class Expected:
    """One tensor's reference in fp64 on the compared rows of each part, and its budget."""

    refs: tuple[Tensor, ...]
    budget: float


class Reference:
    """The fp64 attention of one problem on the compared rows, computed when first needed.

    inputs: as from ``make_inputs``, on any device; kept, not copied. ``all_rows`` forces the
    comparison of every row; by default the problem's size decides.
    """

    def __init__(
        self, problem: Problem, inputs: Inputs, *, seed: int = 0, all_rows: bool | None = None
    ) -> None:
        self.problem = problem
        self._inputs = inputs
        sequences = problem.lengths or ((problem.seqlen_q, problem.seqlen_k),) * problem.batch
        pairs = problem.num_heads * sum(queries * keys for queries, keys in sequences)
        if all_rows is None:
            all_rows = pairs <= ALL_ROWS_PAIRS[inputs.q.device.type]
        make = partial(Part, seed=seed, all_rows=all_rows)
        ends = list(accumulate(problem.lengths, lambda a, b: (a[0] + b[0], a[1] + b[1])))
        self._starts = [(0, 0), *ends[:-1]]

        def parts(inputs: Inputs) -> list[Part]:
            if not problem.lengths:
                return [make(problem, inputs)]
            return [
                make(*_sequence(problem, inputs, number, start), first_batch=number)
                for number, start in enumerate(self._starts)
            ]

        self._parts_of = parts
        self._draws = problem.dtype_bytes > 1 and pairs <= _other_units.LIMIT
        self._forward: dict[str, Expected] = {}
        self.parts = parts(inputs)
        self._rounded = parts(_fp8.rounded(problem, inputs)) if problem.dtype_bytes == 1 else self.parts

    def prepare(self, *, gradients: bool, lse: bool = True) -> None:
        """Compute now what ``compare`` will need, so that a caller can tell its cost apart."""
        self.expected(gradients=gradients, lse=lse)

    def expected(self, *, gradients: bool, lse: bool = True) -> dict[str, Expected]:
        """o, and lse if it is wanted; with gradients dq, dk, dv and, where there are, dbias and dsinks."""
        # whether a library's TF32 products are TF32 depends on the sizes; the yardstick's must not
        with precision(replace(self.problem, dtype="fp32", fp8_scale="", hadamard=False)):
            if not self._forward or (lse and "lse" not in self._forward):
                self._forward = self._of_rows(lse)
            return self._forward if not gradients else {**self._forward, **self._backward}

    def compare(
        self,
        o: Tensor | None,
        gradients: Sequence[Tensor] | None = None,
        lse: Tensor | None = None,
        *,
        exponentials_within: float = 0.0,
    ) -> Accuracy:
        """Largest error of o, of the gradients (of ``Inputs.leaves``) and of lse, if given, and the budgets.

        exponentials_within: the most that each term of a row's sum may be off, relative, where it is not an
        exponential of fp32 (``Implementation.exponentials_within``). The sum of positive numbers is off by no
        more, and by the logarithm of that lse.
        A NaN anywhere in a tensor, in rows that are not compared too, makes its error NaN.
        Raises ValueError for a tensor of another shape or dtype than the problem's.
        """
        found = {} if o is None else {"o": (o, self._inputs.dout)}
        if lse is not None:
            found["lse"] = lse, self._inputs.dout[..., 0].float()
        if gradients is not None:
            likes = self._inputs.differentiable().items()
            found |= {f"d{name}": (x, like) for (name, like), x in zip(likes, gradients, strict=True)}
        expected = self.expected(gradients=gradients is not None, lse=lse is not None)
        errors, budgets = {}, {}
        for name, (tensor, like) in found.items():
            if tensor.shape != like.shape or tensor.dtype != like.dtype:
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)};"
                    f" {like.dtype} {tuple(like.shape)} is wanted"
                )
            picked = self._picked(name, tensor.detach())
            worst = [_max_error(x, ref) for x, ref in zip(picked, expected[name].refs, strict=True)]
            errors[name] = float("nan") if _has_nan(tensor) else max(worst)
            budgets[name] = expected[name].budget - math.log1p(-exponentials_within) * (name == "lse")
        return Accuracy(
            max_abs_error=errors,
            budget=budgets,
            query_rows=sum(len(part.query_rows) for part in self.parts),
            key_rows=sum(len(part.key_rows) for part in self.parts) if gradients is not None else 0,
        )

    def apart(self, o: Tensor) -> dict[str, float]:
        """How far o is from exact attention over the compared rows: ``max_abs_error``, and ``relative``, the
        RMS error over the RMS of the reference.
        """
        refs = self.expected(gradients=False, lse=False)["o"].refs
        picked = self._picked("o", o.detach())
        wrong = torch.cat([(x.double() - ref).flatten() for x, ref in zip(picked, refs, strict=True)])
        right = torch.cat([ref.flatten() for ref in refs])
        return {
            "max_abs_error": float(wrong.abs().max()), "relative": float(wrong.norm() / right.norm()),
        }  # fmt: skip

    def _picked(self, name: str, tensor: Tensor) -> list[Tensor]:
        """The compared rows of a tensor, for each part."""
        if name == "dsinks":
            return [tensor]
        if name == "dbias":
            [part], bias = self.parts, self.problem.bias
            tensor = tensor.index_select(2, part.query_rows) if bias[2] == "q" else tensor
            return [tensor.index_select(3, part.key_rows) if bias[3] == "k" else tensor]
        keys = name in ("dk", "dv")
        return [
            tensor.index_select(2, (part.key_rows if keys else part.query_rows) + start[keys])
            for part, start in zip(self.parts, self._starts, strict=True)
        ]

    def _of_rows(self, lse: bool) -> dict[str, Expected]:
        def naive(part: Part, dtype: torch.dtype, *, cut: bool = False) -> Tensors:
            return part.in_slices(partial(Yardstick(part, dtype, cut=cut).rows, gradients=False, lse=lse))

        return self._expected(*self._exact_rows, naive)

    @cached_property
    def _exact_rows(self) -> tuple[list[Tensors], list[Tensors]]:
        """o and lse in fp64, and variances of o."""
        every = (part.in_slices(partial(_exact.rows, part, gradients=False)) for part in self.parts)
        return _apart([_shaped(part, found) for part, found in zip(self.parts, every, strict=True)])

    @cached_property
    def _backward(self) -> dict[str, Expected]:
        def slices(part: Part) -> list[slice]:
            return part.head_slices(part.problem.group * part.problem.seqlen_q * part.problem.seqlen_k)

        def exact(part: Part) -> Tensors:
            sums = joined([_exact.columns(part, heads) for heads in slices(part)], dim=0)
            return {**part.in_slices(partial(_exact.rows, part, gradients=True)), **sums}

        def naive(part: Part, dtype: torch.dtype, *, cut: bool = False) -> Tensors:
            yardstick = Yardstick(part, dtype, cut=cut)
            sums = joined([yardstick.columns(heads) for heads in slices(part)], dim=0)
            return {**part.in_slices(partial(yardstick.rows, gradients=True)), **sums}

        return self._expected(*_apart([_shaped(part, exact(part)) for part in self.parts]), naive)

    def _expected(
        self,
        refs: list[Tensors],
        variances: list[Tensors],
        naive: Naive,
    ) -> dict[str, Expected]:
        """References and budgets: naive in the dtype, or rounded fp32 where that is not finite.

        refs: exact, of each part; those that naive does not compute are left out. variances: of some.
        """
        dtype = input_dtype(self.problem)
        computed = torch.float32 if self.problem.dtype_bytes == 1 else dtype  # of fp8 numbers, in fp32
        yardsticks = []
        for part, ref in zip(self._rounded, refs, strict=True):
            found = _shaped(part, naive(part, computed))
            if dtype != torch.float32 and not _as_finite(found, ref):
                found = _shaped(part, naive(part, torch.float32))
                found = {name: x if name == "lse" else x.to(dtype) for name, x in found.items()}
            yardsticks.append(found)
        drawn = self._drawn(refs, naive, yardsticks) if self._draws else {}
        expected = {}
        for name in yardsticks[0]:
            mine, theirs = ([part[name] for part in parts] for parts in (refs, yardsticks))
            apart = [part[name] for part in variances if name in part]
            if name == "dsinks":  # shared by all sequences
                apart = [torch.cat(apart, 1).sum(1)]
                by_row, found_by_row = torch.cat(mine, 1), torch.cat(theirs, 1)
                mine, error = [by_row.sum(1)], _error_of_sums(found_by_row, by_row)
            else:
                error = max(_max_error(x, ref) for x, ref in zip(theirs, mine, strict=True))
                if name == "lse":
                    error = max(error, _three_deviations(theirs, mine))
                    error *= CUT_OFF if dtype.itemsize == 2 else 1
                error = max(error, 3 * drawn.get(name, 0.0))
            own = torch.float32 if name in ("lse", "dsinks") else dtype
            budget = math.hypot(2 * error, 3 * _largest_deviation(apart))  # the two are independent
            budget += 2 * max(rounding(ref, own) for ref in mine)
            if name == "lse":
                keys = (part.problem.seqlen_k for part in self.parts)
                budget += max(_lse_rounding.largest(ref, n) for ref, n in zip(mine, keys, strict=True))
            expected[name] = Expected(tuple(mine), budget)
        return expected

    def _drawn(self, refs: list[Tensors], naive: Naive, found: list[Tensors]) -> dict[str, float]:
        """By tensor, a standard deviation of naive's errors, where its largest one may be luck.

        In 16 bits of small tensors alone; of lse, which is computed in fp32 from them, in fp32.
        """

        def of(inputs: Inputs, dtype: torch.dtype, *, cut: bool = False) -> dict[str, float]:
            def again(inputs: Inputs) -> list[Tensors]:
                return [_shaped(part, naive(part, dtype, cut=cut)) for part in self._parts_of(inputs)]

            return _other_units.deviations(inputs, again, refs, alike=self.problem.dtype != "tf32")

        dtype = input_dtype(self.problem)
        if dtype == torch.float32:
            drawn = of(self._inputs, dtype)
            if self.problem.dtype == "tf32" and "o" in drawn:
                drawn["o"] = max(drawn["o"], of(self._inputs, dtype, cut=True)["o"] / CUT_OFF)
            return drawn
        sizes = {name: sum(part[name].numel() for part in found) for name in found[0].keys() - {"dsinks"}}
        few = {name for name, size in sizes.items() if size < _other_units.FEW}
        drawn = of(self._inputs, dtype) if few - {"lse"} else {}
        if "lse" in few:
            drawn["lse"] = of(self._inputs.widened(), torch.float32)["lse"]
        return {name: drawn[name] for name in few}


def _sequence(
    problem: Problem, inputs: Inputs, number: int, start: tuple[int, int]
) -> tuple[Problem, Inputs]:
    """One sequence of a packed batch as a problem with views of its tensors."""
    queries, keys = problem.lengths[number]
    alone = replace(problem, batch=1, seqlen_q=queries, seqlen_k=keys, lengths=())
    rows, columns = slice(start[0], start[0] + queries), slice(start[1], start[1] + keys)
    views = {"q": rows, "dout": rows, "k": columns, "v": columns}
    return alone, replace(inputs, **{name: getattr(inputs, name)[:, :, at] for name, at in views.items()})


def _shaped(part: Part, found: Tensors) -> Tensors:
    """Tensors of K/V heads as those of the problem: (batch, heads, …), summed where they are shared."""
    p = part.problem
    shaped = {}
    for name, x in found.items():
        of = name.removeprefix(VARIANCE)  # independent errors' add up as the numbers do
        if of in ("dk", "dv"):
            shaped[name] = x.unflatten(0, (p.batch, p.num_kv_heads))
            continue
        x = x.flatten(0, 1).unflatten(0, (p.batch, p.num_heads))
        if of == "dsinks":
            x = x.transpose(0, 1).flatten(1)  # (num_heads, all rows)
        if of == "dbias":
            shared = [dim for dim in (0, 1) if p.bias[dim] == "1"]
            x = x.sum(shared, keepdim=True) if shared else x
        shaped[name] = x
    return shaped


def _apart(found: list[Tensors]) -> tuple[list[Tensors], list[Tensors]]:
    """(tensors, their variances), of each part."""
    variances = [
        {name.removeprefix(VARIANCE): part.pop(name) for name in [*part] if name.startswith(VARIANCE)}
        for part in found
    ]
    return found, variances


def _error_of_sums(x: Tensor, refs: Tensor) -> float:
    """The largest error of sums over rows (heads, rows), or three standard deviations where that is more.

    A tensor of thousands of numbers has one as wrong as that; of a few sums the largest error is chance.
    """
    deviation = float((x.double() - refs).square().sum(1).sqrt().max()) if x.numel() else 0.0
    return max(_max_error(x.sum(1), refs.sum(1)), 3 * deviation)


def _three_deviations(x: Sequence[Tensor], refs: Sequence[Tensor]) -> float:
    """Of one number per row: three standard deviations of its errors, the largest of about 400.

    Where there are fewer, the largest that naive has is chance.
    """
    errors = torch.cat([(a.double() - ref).flatten() for a, ref in zip(x, refs, strict=True)])
    errors = errors[errors.isfinite()]  # −inf of a row without keys has none
    return 3 * float(errors.square().mean().sqrt()) if errors.numel() else 0.0


def _largest_deviation(variances: Sequence[Tensor]) -> float:
    return math.sqrt(max((float(x.max()) for x in variances if x.numel()), default=0.0))


def _as_finite(found: Tensors, refs: Tensors) -> bool:
    """Whether every tensor is finite where its reference is."""
    return all(bool((x.isfinite() | ~refs[name].isfinite()).all()) for name, x in found.items())


def _has_nan(tensor: Tensor) -> bool:
    # a sum would miss inf − inf; max propagates NaN and makes no mask of the tensor's size
    return bool(tensor.numel()) and bool(tensor.max().isnan())
