"""Inputs with outliers, as the fp8 tests take them, and attention in fp64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashbench.kernels._fp8 import Quantised

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def with_outliers(*shape: int, seed: int, device: str = "cpu") -> Tensor:
    """N(0, 1) + N(0, 100)·Bernoulli(0.001), 100 a variance. Source: FlashAttention-3, section 4.3."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    rare = torch.rand(shape, generator=generator, device=device) < 0.001
    return normal() + 10 * normal() * rare


def exact(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """(o, lse) in fp64, head by head; causal is bottom-right."""
    group = q.shape[1] // k.shape[1]
    outputs, lses = [], []
    for h in range(q.shape[1]):
        keys, values = k[:, h // group].double(), v[:, h // group].double()
        s = q[:, h].double() @ keys.mT * q.shape[3] ** -0.5
        if causal:
            i, j = (
                torch.arange(s.shape[1], device=s.device)[:, None],
                torch.arange(s.shape[2], device=s.device),
            )
            s.masked_fill_(j > i + s.shape[2] - s.shape[1], float("-inf"))
        lses.append(s.logsumexp(-1))
        outputs.append(s.softmax(-1).nan_to_num() @ values)
    return torch.stack(outputs, 1), torch.stack(lses, 1)


HARD = ("jump", "flat", "grows", "late key", "early key", "far", "signs")


def hard(case: str, *, queries: int, keys: int, heads: int = 2, device: str = "cpu") -> tuple[Tensor, ...]:
    """q, k, v whose rows ask much of bases that lag, and of what fp8 holds beside its largest number.

    Keys are taken from the first. jump: a row's own key is far above all others, in whichever tile it is.
    flat: all alike. grows: from tile to tile. late key: the last that every row sees, far above those taken
    before. early key: one of the first, above thousands which together weigh as much. far: scores of
    hundreds; signs: of thousands, of either sign.
    """
    generator = torch.Generator(device).manual_seed(HARD.index(case))
    widths = (queries, keys, keys)
    q, k, v = (torch.randn(1, heads, n, 128, device=device, generator=generator) for n in widths)
    own = q.repeat(1, 1, -(-keys // queries), 1)[:, :, :keys]
    along = torch.zeros(128, device=device)
    along[3] = math.sqrt(128) * math.log(2)  # times 1 of a query: a power of two of its probability
    if case == "jump":
        k = 0.02 * k + 0.6 * own
    elif case == "flat":
        q = q * 0
    elif case == "grows":
        q = q.abs()
        tile = torch.arange(keys, device=device)[:, None] // 128
        k = 0.1 * k + 0.16 * tile.clamp(max=8)
    elif case in ("late key", "early key"):
        q = q * 0
        q[..., 3] = 1
        k = 0.05 * k * along
        v = v + 0.5
        k[:, :, keys - queries if case == "late key" else 5] = along * math.log2(keys)
    elif case == "far":
        q, k = 6 * q, 6 * k
    elif case == "signs":
        q = 3 * q.sign()
        k = torch.where(torch.arange(keys, device=device)[:, None] % 37 == 0, 3.0, -3.0) + 0.1 * k
    return q, k, v


def rmse(x: Tensor, ref: Tensor) -> float:
    """Root of the mean square of x - ref."""
    return float((x.double() - ref).square().mean().sqrt())


def guarded(
    q: Quantised,
    k: Quantised,
    v: Quantised,
    *,
    causal: bool,
    scale: float,
    block_q: int = 128,
    lift: int = 4,
    mean: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(o, lse) in fp32 by the arithmetic of _hopper_fp8_sums and _hopper_guard, emulated ones aside.

    Tiles of keys from the first to the last that a tile of block_q queries sees; v: straight, its scales
    powers of two. mean: what v's columns are less, (batch, heads of v, columns). In a warp's 16 rows where a
    thread's sum of a row passes the limit, or is far more than what it had, or a row has no base, rows that
    outgrew theirs by more than NEAR get a new one: below their maximum by as many powers of two, up to lift,
    as few keys are near it.
    """
    shift, near, grown, limit = 3.0, 0.8, 4.0, 448.0 if v.values.dtype == E4M3 else 1024.0
    room = 4.1
    group, keys, rows = q.values.shape[1] // k.values.shape[1], k.values.shape[2], q.values.shape[2]
    block, tall = k.block, -(-rows // block_q) * block_q
    pad = torch.nn.functional.pad

    def heads_of(x: Tensor) -> Tensor:
        return x.repeat_interleave(group, 1)

    queries = pad(q.values.float(), (0, 0, 0, tall - rows))
    unit = scale * math.log2(math.e)
    row_scale = q.scales.repeat_interleave(q.block, 2)[:, :, :tall, None] * unit
    row = torch.arange(tall, device=queries.device)[:, None]
    last = row + (keys - rows) if causal else torch.full_like(row, keys - 1)
    end = (row // block_q + 1) * block_q + keys - rows if causal else torch.full_like(row, keys)
    blocks = (end.clamp(1, keys) + block - 1) // block
    acc = queries.new_zeros(*queries.shape[:3], v.values.shape[3])
    total = acc.new_zeros(*acc.shape[:3], 4)
    top = acc.new_full((*acc.shape[:3], 1), -math.inf)
    for n in range(-(-keys // block)):
        at = slice(n * block, min((n + 1) * block, keys))
        seen = (n < blocks).expand_as(top)
        first = seen & (n == 0)
        column = torch.arange(at.start, at.start + block, device=queries.device)
        s = pad(queries @ heads_of(k.values[:, :, at].float()).mT, (0, block - (at.stop - at.start)))
        s = s * (row_scale * heads_of(k.scales[:, :, n, None, None]))
        s.masked_fill_((column > last) | (column >= keys), -math.inf)
        v_scale = heads_of(v.scales[:, :, n, None, None]).log2().expand_as(top)
        p = torch.exp2(s - top + shift)
        most = (grown * total).clamp(2 ** (shift + near), limit).nan_to_num(limit)
        found = first | (~(_by_thread(p) <= most)).any(-1, keepdim=True)
        found = found.unflatten(2, (-1, 16)).any(3, keepdim=True).expand(-1, -1, -1, 16, -1).flatten(2, 3)
        highest = s.amax(-1, keepdim=True)
        close = _by_thread((1 + (s - highest) / 4).nan_to_num(0).clamp(0, 1)).amax(-1, keepdim=True)
        higher = (room - close.log2()).floor().clamp(0, lift)
        new_top = torch.where(seen & found & ~(highest - top <= near), highest - higher, top)
        base = torch.where(new_top == -math.inf, 0.0, new_top)
        p = torch.where(seen, torch.exp2(s - base + shift), 0.0)
        shrink = torch.where(top == -math.inf, 1.0, torch.exp2(top - base))
        total = total * shrink + _by_thread(p)
        values = pad(heads_of(v.values[:, :, at].float()), (0, 0, 0, block - (at.stop - at.start)))
        product = p.clamp(max=torch.finfo(v.values.dtype).max).to(v.values.dtype).float() @ values
        acc = torch.where(seen, acc * shrink + product * torch.exp2(v_scale), acc)
        top = new_top
    total = total.sum(-1, keepdim=True)
    added = 0.0 if mean is None else heads_of(mean.float())[:, :, None, : acc.shape[3]]
    o = torch.where(total != 0, acc / total + added, 0.0)
    lse = (top + total.log2() - shift) * math.log(2)
    return o[:, :, :rows], lse.squeeze(-1)[:, :, :rows]


def _by_thread(p: Tensor) -> Tensor:
    """Sums of the columns that each thread of four has of a row."""
    return p.unflatten(-1, (-1, 4, 2)).sum((-3, -1))
