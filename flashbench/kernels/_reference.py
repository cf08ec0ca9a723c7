"""The oracle: attention in fp64, and how far an implementation may be from it. Never timed.

An implementation's tensor x passes if, with maxima over the compared rows,

    max|x − ref| ≤ 2·max|naive − ref| + 2·max|((ref + 0.3) − 0.3 in the dtype) − ref|

where naive is the textbook op list run in the tensors' dtype (or, where that is not finite, in fp32
with its result rounded). In tf32 that is the dtype's own arithmetic on every device: the operands of
each product rounded to TF32 (``to_tf32``) and multiplied in fp32. ref knows no dtype: it takes the
inputs as they are. Small problems compare every row; larger ones o and dq on sampled query rows
and dk and dv on sampled key rows, of all heads, so that 64k is checked in bounded memory. dk and dv
need the log-sum-exp and delta = rowsum(dout * o) of every query row; both are streamed in fp64.

Source: the backward is Dao 2022 (arXiv:2205.14135), appendix B.2; the bound is the rule of
FlashAttention's own tests (naive in the same dtype as the yardstick) with an fp64 reference.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from flashbench.kernels._inputs import Inputs
from flashbench.kernels._precision import precision, torch_dtype
from flashbench.problem import Problem
from flashbench.record import Accuracy

ALL_ROWS_PAIRS = {"cpu": 2**24, "cuda": 2**26}
"""Up to this many (query, key) pairs over batch and heads, every row is compared."""

SAMPLED_ROWS = 96
"""Query rows, and key rows, compared in a larger problem: ends, tile edges, then random ones."""

WORKSPACE_BYTES = {"cpu": 2**26, "cuda": 2**29}
"""Size of the largest scratch tensor; in all, about three of them are alive."""

BATCHED_BYTES = {"cpu": 2**23, "cuda": 2**28}
"""K/V heads go together up to this scratch tensor: few launches on a GPU, warm caches on a CPU."""

LARGEST_EXPONENT = 600.0
"""exp(±600) is far inside fp64's range: scores below that need no running maximum."""


def sample_rows(rows: int, seed: int) -> list[int]:
    """SAMPLED_ROWS row numbers below rows, ascending: both ends, tile edges, random ones."""
    edges = [edge + step for edge in (64, 128, 192, 256) for step in (-1, 0)]
    middle = rows // 2 // 128 * 128
    wanted = [0, 1, 2, rows - 1, rows - 2, *edges, *(rows - 1 - edge for edge in edges), middle - 1, middle]
    chosen = dict.fromkeys(row for row in wanted if 0 <= row < rows)
    generator = torch.Generator().manual_seed(seed)
    for row in torch.randint(0, rows, (4 * SAMPLED_ROWS,), generator=generator).tolist():
        if len(chosen) >= min(SAMPLED_ROWS, rows):
            break
        chosen[row] = None
    return sorted(chosen)


def to_tf32(x: Tensor) -> Tensor:
    """fp32 x rounded to TF32's 10 mantissa bits: to nearest, ties away from zero, exponent range as fp32.

    Source: PTX ISA, cvt.rna.tf32.f32.
    """
    bits = x.view(torch.int32).add(0x1000).bitwise_and_(-0x2000)
    return torch.where(x.isnan(), x, bits.view(torch.float32))  # a NaN's bits could wrap around


def rounding(ref: Tensor, dtype: torch.dtype) -> float:
    """max|((ref + 0.3) − 0.3 in the dtype) − ref|: what rounding alone does at the data's scale."""
    if not ref.numel():
        return 0.0
    return _max_error(((ref.to(dtype) + 0.3) - 0.3), ref)


def _max_error(x: Tensor, ref: Tensor) -> float:
    return float((x.double() - ref).abs().max()) if ref.numel() else 0.0


@dataclass(frozen=True)
class _Expected:
    """One tensor's reference on the compared rows, (batch, heads, rows, width) fp64, and its budget."""

    ref: Tensor
    budget: float


class Reference:
    """The fp64 attention of one problem on the compared rows, computed when first needed.

    inputs: as from ``make_inputs``, on any device; kept, not copied. ``all_rows`` forces the
    comparison of every row; by default the problem's size decides.
    """

    def __init__(
        self,
        problem: Problem,
        inputs: Inputs,
        *,
        seed: int = 0,
        all_rows: bool | None = None,
    ) -> None:
        self.problem = problem
        p, device = problem, inputs.q.device
        # (batch * num_kv_heads, group, rows, width): one leading index per K/V head
        self._q = inputs.q.detach().reshape(p.batch * p.num_kv_heads, p.group, p.seqlen_q, p.head_dim)
        self._k = inputs.k.detach().reshape(p.batch * p.num_kv_heads, p.seqlen_k, p.head_dim)
        self._v = inputs.v.detach().reshape(p.batch * p.num_kv_heads, p.seqlen_k, p.head_dim_v)
        self._dout = inputs.dout.detach().reshape(p.batch * p.num_kv_heads, p.group, p.seqlen_q, p.head_dim_v)
        pairs = p.batch * p.num_heads * p.seqlen_q * p.seqlen_k
        if all_rows is None:
            all_rows = pairs <= ALL_ROWS_PAIRS[device.type]
        rows_q = range(p.seqlen_q) if all_rows else sample_rows(p.seqlen_q, seed)
        rows_k = range(p.seqlen_k) if all_rows else sample_rows(p.seqlen_k, seed + 1)
        self.query_rows = torch.tensor(list(rows_q), device=device)
        self.key_rows = torch.tensor(list(rows_k), device=device)
        self._compared_keys = list(rows_k)
        self._elements = WORKSPACE_BYTES[device.type] // 8
        self._batched = min(WORKSPACE_BYTES[device.type], BATCHED_BYTES[device.type]) // 8

    def prepare(self, *, gradients: bool) -> None:
        """Compute now what ``compare`` will need, so that a caller can tell its cost apart."""
        # whether a library's TF32 products are TF32 depends on the sizes; the yardstick's must not
        with precision(replace(self.problem, dtype="fp32")):
            _ = self._forward
            if gradients:
                _ = self._query_side, self._key_side

    def compare(self, o: Tensor, gradients: Sequence[Tensor] | None = None) -> Accuracy:
        """Largest error of o, and of (dq, dk, dv) if given, on the compared rows, and the budgets.

        A NaN anywhere in a tensor, in rows that are not compared too, makes its error NaN.
        Raises ValueError for a tensor of another shape or dtype than the problem's.
        """
        self.prepare(gradients=gradients is not None)
        p = self.problem
        found = {"o": (o, p.num_heads, p.seqlen_q, p.head_dim_v, self.query_rows, self._forward)}
        if gradients is not None:
            dq, dk, dv = gradients
            dk_expected, dv_expected = self._key_side
            found["dq"] = (dq, p.num_heads, p.seqlen_q, p.head_dim, self.query_rows, self._query_side)
            found["dk"] = (dk, p.num_kv_heads, p.seqlen_k, p.head_dim, self.key_rows, dk_expected)
            found["dv"] = (dv, p.num_kv_heads, p.seqlen_k, p.head_dim_v, self.key_rows, dv_expected)
        errors, budgets = {}, {}
        for name, (tensor, heads, length, width, rows, expected) in found.items():
            shape, dtype = (p.batch, heads, length, width), torch_dtype(p.dtype)
            if tensor.shape != shape or tensor.dtype != dtype:
                raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; {dtype} {shape} is wanted")
            tensor = tensor.detach()
            picked = tensor.index_select(2, rows).reshape(expected.ref.shape)
            errors[name] = float("nan") if _has_nan(tensor) else _max_error(picked, expected.ref)
            budgets[name] = expected.budget
        return Accuracy(
            max_abs_error=errors,
            budget=budgets,
            query_rows=len(self.query_rows),
            key_rows=len(self.key_rows) if gradients is not None else 0,
        )

    @cached_property
    def _forward(self) -> _Expected:
        """o on the compared query rows."""
        ref = self._in_slices(lambda heads, rows: self._rows_in_fp64(heads, rows, dq=False))
        return self._expected(
            ref,
            lambda dtype: self._in_slices(lambda heads, rows: self._naive_rows(heads, rows, dtype, dq=False)),
        )

    @cached_property
    def _query_side(self) -> _Expected:
        """dq on the compared query rows."""
        ref = self._in_slices(lambda heads, rows: self._rows_in_fp64(heads, rows, dq=True))
        return self._expected(
            ref,
            lambda dtype: self._in_slices(lambda heads, rows: self._naive_rows(heads, rows, dtype, dq=True)),
        )

    @cached_property
    def _key_side(self) -> tuple[_Expected, _Expected]:
        """dk and dv on the compared key rows."""
        p = self.problem
        slices = self._head_slices(p.group * p.seqlen_q * p.seqlen_k)
        refs = [self._columns_in_fp64(heads) for heads in slices]
        naives: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

        def naive(dtype: torch.dtype, index: int) -> Tensor:
            if dtype not in naives:
                both = [self._naive_columns(heads, dtype) for heads in slices]
                naives[dtype] = torch.cat([dk for dk, _ in both]), torch.cat([dv for _, dv in both])
            return naives[dtype][index]

        return (
            self._expected(torch.cat([dk for dk, _ in refs]), lambda dtype: naive(dtype, 0)),
            self._expected(torch.cat([dv for _, dv in refs]), lambda dtype: naive(dtype, 1)),
        )

    def _expected(self, ref: Tensor, naive: Callable[[torch.dtype], Tensor]) -> _Expected:
        """The budget of a reference: naive in the dtype, or rounded fp32 where that is not finite."""
        dtype = torch_dtype(self.problem.dtype)
        yardstick = naive(dtype)
        if dtype != torch.float32 and not bool(yardstick.isfinite().all()):
            yardstick = naive(torch.float32).to(dtype)
        return _Expected(ref, 2 * _max_error(yardstick, ref) + 2 * rounding(ref, dtype))

    def _in_slices(self, compute: Callable[[slice, Tensor], Tensor]) -> Tensor:
        """Run over slices of K/V heads and compared query rows whose scores fit the workspace; join."""
        per_row = self.problem.group * self.problem.seqlen_k
        parts = self.query_rows.split(max(1, self._elements // per_row))
        heads = self._head_slices(per_row * len(parts[0]))
        return torch.cat([torch.cat([compute(these, rows) for rows in parts], dim=2) for these in heads])

    def _head_slices(self, elements: int) -> list[slice]:
        """Some K/V heads at a time, at least one; elements: the scratch tensor of one."""
        count, step = self._k.shape[0], max(1, self._batched // elements)
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]

    def _hidden(self, rows: Tensor, columns: Tensor) -> Tensor | None:
        """True where a query row may not see a key column (bottom-right causal), or None."""
        if not self.problem.causal:
            return None
        shift = self.problem.seqlen_k - self.problem.seqlen_q
        return columns[None, :] > rows[:, None] + shift

    def _gather(self, heads: slice, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """q, dout (heads, group * rows, width), k, v (heads, seqlen_k, width), rows, those without keys."""
        q = self._q[heads].index_select(2, rows).to(dtype).flatten(1, 2)
        dout = self._dout[heads].index_select(2, rows).to(dtype).flatten(1, 2)
        every = rows.repeat(self.problem.group)
        empty = (every < self.problem.rows_without_keys)[:, None]
        return q, dout, self._k[heads].to(dtype), self._v[heads].to(dtype), every, empty

    def _rows_in_fp64(self, heads: slice, rows: Tensor, *, dq: bool) -> Tensor:
        """o, or dq, on some query rows: (heads, group, rows, width) fp64."""
        q, dout, k, v, every, empty = self._gather(heads, rows, torch.float64)
        hidden = self._hidden(every, self._columns)
        scores = (q * self.problem.softmax_scale) @ k.transpose(-2, -1)
        p = _softmax(scores, hidden).masked_fill_(empty, 0)
        del scores
        result = p @ v
        if dq:
            delta = (result * dout).sum(-1, keepdim=True)
            ds = p.mul_((dout @ v.transpose(-2, -1)).sub_(delta))
            result = (ds @ k) * self.problem.softmax_scale
        return result.unflatten(1, (self.problem.group, len(rows)))

    @cached_property
    def _columns(self) -> Tensor:
        return torch.arange(self.problem.seqlen_k, device=self._k.device)

    @cached_property
    def _rows(self) -> Tensor:
        return torch.arange(self.problem.seqlen_q, device=self._k.device)

    def _chunks(self, heads: int) -> Iterator[tuple[int, int, int]]:
        """(first row, end row, end of the keys visible to any of them) over the query rows with keys."""
        p = self.problem
        step = max(1, self._elements // (heads * p.group * p.seqlen_k))
        for start in range(p.rows_without_keys, p.seqlen_q, step):
            end = min(start + step, p.seqlen_q)
            yield start, end, min(p.seqlen_k, end + p.seqlen_k - p.seqlen_q) if p.causal else p.seqlen_k

    def _lse_and_delta(self, heads: slice) -> tuple[Tensor, Tensor]:
        """log-sum-exp and rowsum(dout * o) of every query row, (heads, group, seqlen_q) fp64.

        exp(S) goes through memory once: the sum of its rows comes out of the product with V, which
        has a column of ones, and no maximum is subtracted unless the scores could be large.
        """
        p = self.problem
        k = self._k[heads].double()
        v = torch.cat((self._v[heads].double(), k.new_ones(*k.shape[:2], 1)), dim=2)
        lse = k.new_full((len(k), p.group, p.seqlen_q), float("-inf"))
        delta = torch.zeros_like(lse)
        longest_k = k.norm(dim=-1).max()
        for start, end, visible in self._chunks(len(k)):
            q = self._q[heads, :, start:end].double() * p.softmax_scale  # (heads, group, rows, head_dim)
            scores = _per_head(q, k[:, :visible].mT)
            hidden = self._hidden(self._rows[start:end], self._columns[:visible])
            if hidden is not None:
                scores.masked_fill_(hidden, float("-inf"))
            top = lse.new_zeros(())
            if q.norm(dim=-1).max() * longest_k > LARGEST_EXPONENT:
                top = scores.amax(-1)
                scores.sub_(top[..., None])
            sums = _per_head(scores.exp_(), v[:, :visible])  # (heads, group, rows, head_dim_v + 1)
            weight = sums[..., -1]
            lse[:, :, start:end] = weight.log() + top
            dout = self._dout[heads, :, start:end].double()
            delta[:, :, start:end] = (sums[..., :-1] * dout).sum(-1) / weight
        return lse, delta

    def _columns_in_fp64(self, heads: slice) -> tuple[Tensor, Tensor]:
        """dk and dv on the compared key rows, (heads, key rows, width) fp64."""
        p = self.problem
        lse, delta = self._lse_and_delta(heads)
        k, v = (x[heads].index_select(1, self.key_rows).double() for x in (self._k, self._v))
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        step = max(1, self._elements // (len(k) * p.group * len(self.key_rows)))
        for start in range(p.rows_without_keys, p.seqlen_q, step):
            rows = slice(start, min(start + step, p.seqlen_q))
            q, dout = self._q[heads, :, rows].double(), self._dout[heads, :, rows].double()
            scores = _per_head(q, k.mT).mul_(p.softmax_scale).sub_(lse[:, :, rows, None])
            hidden = self._hidden(self._rows[rows], self.key_rows)
            if hidden is not None:
                scores.masked_fill_(hidden, float("-inf"))
            probabilities = scores.exp_()  # (heads, group, rows, key rows)
            dv += probabilities.flatten(1, 2).mT @ dout.flatten(1, 2)
            ds = probabilities.mul_(_per_head(dout, v.mT).sub_(delta[:, :, rows, None]))
            dk += ds.flatten(1, 2).mT @ q.flatten(1, 2)
        return dk * p.softmax_scale, dv

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b as the problem's dtype multiplies, for naive."""
        return to_tf32(a) @ to_tf32(b) if self.problem.dtype == "tf32" else a @ b

    def _naive_rows(self, heads: slice, rows: Tensor, dtype: torch.dtype, *, dq: bool) -> Tensor:
        """naive's o, or dq, on some query rows: (heads, group, rows, width), op by op in the dtype."""
        q, dout, k, v, every, empty = self._gather(heads, rows, dtype)
        hidden = self._hidden(every, self._columns)
        scores = self._product(q * self.problem.softmax_scale, k.transpose(-2, -1))
        p = _softmax(scores, hidden).masked_fill_(empty, 0)
        del scores
        if dq:
            ds = _softmax_backward(self._product(dout, v.transpose(-2, -1)), p)
            result = self._product(ds, k) * self.problem.softmax_scale
        else:
            result = self._product(p, v)
        return result.unflatten(1, (self.problem.group, len(rows)))

    def _naive_columns(self, heads: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """naive's dk and dv on the compared key rows, (heads, key rows, width) in the dtype.

        Softmax rows are complete, in chunks of rows; their compared columns are kept, so that the
        sum over all query rows is one product in the dtype, as in naive.
        """
        p = self.problem
        k, v = self._k[heads].to(dtype), self._v[heads].to(dtype)
        shape = (len(k), p.group, p.seqlen_q, len(self.key_rows))
        kept_p, kept_ds = k.new_zeros(shape), k.new_zeros(shape)
        for start, end, visible in self._chunks(len(k)):
            q = self._q[heads, :, start:end].to(dtype) * p.softmax_scale
            hidden = self._hidden(self._rows[start:end], self._columns[:visible])
            probabilities = _softmax(_per_head(q, k[:, :visible].mT, self._product), hidden)
            dp = _per_head(self._dout[heads, :, start:end].to(dtype), v[:, :visible].mT, self._product)
            ds = _softmax_backward(dp, probabilities)
            seen = bisect_left(self._compared_keys, visible)  # they ascend; later ones are invisible here
            kept_p[:, :, start:end, :seen] = probabilities.index_select(3, self.key_rows[:seen])
            kept_ds[:, :, start:end, :seen] = ds.index_select(3, self.key_rows[:seen])
        q, dout = self._q[heads].to(dtype) * p.softmax_scale, self._dout[heads].to(dtype)
        dk = self._product(kept_ds.mT, q).sum(1)
        dv = self._product(kept_p.mT, dout).sum(1)
        return dk, dv


def _per_head(x: Tensor, y: Tensor, product: Callable[[Tensor, Tensor], Tensor] = torch.matmul) -> Tensor:
    """x (heads, group, rows, n) times y (heads, n, m): one product for each head, y not copied."""
    return product(x.flatten(1, 2), y).unflatten(1, x.shape[1:3])


def _softmax(scores: Tensor, hidden: Tensor | None) -> Tensor:
    """Over the last dimension, without what is hidden; scores is overwritten."""
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    return scores.softmax(-1)


def _softmax_backward(gradient: Tensor, probabilities: Tensor) -> Tensor:
    """What autograd runs for softmax over the last dimension, in the tensors' dtype."""
    return torch._softmax_backward_data(gradient, probabilities, -1, probabilities.dtype)


def _has_nan(tensor: Tensor) -> bool:
    # a sum would miss inf − inf; max propagates NaN and makes no mask of the tensor's size
    return bool(tensor.max().isnan())
