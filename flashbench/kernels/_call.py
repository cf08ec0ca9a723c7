"""What one attention call is made of: its options, the tensors beside q, k and v, and kernel launches.

Import through ``_triton.load``, as all modules that hold Triton kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from flashbench.flash_configs import MAX_HEAD_DIM, Config, choose, register_limit, widest, with_options
from flashbench.kernels import _flash_kernels as kernels
from flashbench.kernels._block_mask import DeviceMask
from flashbench.kernels._jit_keys import settle

HIGH_CAP = 64.0
"""Above it every tanh is computed as for fp32: the short form is off by 2**-24, whatever the score, and the
cap times that is then more than fp32's rounding of scores of ten.
"""

INTERPRETED = isinstance(kernels.forward, InterpretedFunction)


@dataclass(frozen=True)
class Launch:
    """One kernel launch, ready to run or to be compiled."""

    name: str
    kernel: Any
    programs: int
    args: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> None:
        """Launch on the current device and stream, or where calls are rehearsed take note."""
        rehearsal = _REHEARSAL.get()
        if rehearsal is not None:
            rehearsal.launches.append(self)
        elif self.programs:
            self.start()

    def start(self) -> None:
        """Launch; there is something to do."""
        settle(self.kernel)
        self.kernel[(self.programs,)](*self.args, **self.options)

    def compile(self) -> Any:
        """Compile only; arguments may be meta tensors."""
        settle(self.kernel)
        return self.kernel.warmup(*self.args, grid=(1,), **self.options)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for launches that share one compiled kernel: what Triton specialises on."""
        special = (
            (arg % 16 == 0, arg == 1, arg >= 2**31)
            for name, arg in zip(self.kernel.arg_names, self.args, strict=False)
            if isinstance(arg, int) and name not in kernels.RUNTIME
        )
        tensors = (getattr(arg, "base", arg) for arg in self.args)  # of a descriptor, too
        dtypes = (getattr(arg, "dtype", None) for arg in tensors if arg is None or isinstance(arg, Tensor))
        return self.name, *self.options.items(), *special, *dtypes


@dataclass(frozen=True, kw_only=True)
class Call:
    """What the launches of one attention call share, beside tensors.

    window: (keys before the diagonal, keys after it), -1 is unlimited; causal: none after it. scale,
    softcap, dropout_p, seed: as of ``flash_attention``. biased: whether a bias has a number per pair.
    alone: whether a window in a block mask leaves a row its own key or none.
    configs: takes the place of the table for the kernels that it names.
    """

    causal: bool
    scale: float
    tf32: bool = False
    window: tuple[int, int] = (-1, -1)
    top_left: bool = False
    softcap: float = 0.0
    dropout_p: float = 0.0
    seed: int = 0
    biased: bool = False
    alone: bool = False
    configs: tuple[tuple[str, Config], ...] = ()

    @property
    def band(self) -> tuple[int, int]:
        """(keys before the diagonal, keys after it), -1 is unlimited."""
        return self.window[0], 0 if self.causal else self.window[1]

    @property
    def grows(self) -> bool:
        """Whether later queries see more keys under the band."""
        before, after = self.band
        return after >= 0 > before

    def config(self, name: str, q: Tensor, v: Tensor) -> Config:
        """The configuration that the named kernel runs with."""
        for kernel, config in self.configs:
            if kernel == name:
                return config
        config = choose(name, self.math(q), q.shape[-1], v.shape[-1], *card(q.device))
        return with_options(name, config, biased=self.biased, capped=self.softcap > 0)

    def math(self, q: Tensor) -> str:
        """How q's dtype is multiplied, as the table of configurations has it."""
        return "half" if q.element_size() == 2 else "tf32" if self.tf32 else "ieee"

    def options(self, name: str, q: Tensor, v: Tensor, *strided: Tensor) -> tuple[Config, dict[str, Any]]:
        """The configuration, and the launch options and compile-time constants that follow from it."""
        config = self.config(name, q, v)
        tallest = max(config.block_q, config.block_k)
        limit = self._register_limit(name, config, q, v)
        return config, {
            "BLOCK_M": config.block_q,
            "BLOCK_N": config.block_k,
            "DIM": q.shape[-1],
            "DIM_V": v.shape[-1],
            "WIDEST": widest(self.math(q)),
            "LOWER": self.band[0] >= 0,
            "UPPER": self.band[1] >= 0,
            "TOP_LEFT": self.top_left,
            "CAPPED": 2 if self.softcap > HIGH_CAP else self.softcap > 0,
            "DROPS": self.dropout_p > 0,
            "PRECISION": "tf32" if self.tf32 and not INTERPRETED else "ieee",  # no CPU has TF32
            "WIDE": any(tallest * x.stride(2) >= 2**31 for x in strided),
            "EARLY": any(x.stride(2) % 16 or x.data_ptr() % 16 for x in strided),
            "EXACT": q.element_size() == 4,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            **({} if limit is None else {"maxnreg": limit}),
            "enable_fp_fusion": True,  # off by default from Triton 3.10 on: an operation more per score
        }

    def _register_limit(self, name: str, config: Config, q: Tensor, v: Tensor) -> int | None:
        if self.softcap or self.dropout_p or self.biased:  # more to hold: it would be spilled
            return None
        return register_limit(name, config, self.math(q), max(q.shape[-1], v.shape[-1]), card(q.device)[0])

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The arguments ``before`` to ``cap`` of every kernel."""
        before, after = (min(max(side, 0), 2**30) for side in self.band)
        threshold = round(self.dropout_p * 2**32) - 2**31
        return before, after, self.seed, threshold, 1 / (1 - self.dropout_p), self.scale, self.softcap or 1.0


@dataclass(frozen=True, kw_only=True)
class Extra:
    """Tensors that an attention call may have beside q, k and v; all of them as of ``flash_attention``.

    block_mask: with the causal mask and the window in it, which the call then has not.
    """

    slopes: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    block_mask: DeviceMask | None = None
    longest_q: int = 0
    longest_k: int = 0

    def lengths(self, q: Tensor, k: Tensor) -> tuple[int, int, int]:
        """(sequences, the longest in queries, the longest in keys)."""
        if self.cu_q is None:
            return q.shape[0], q.shape[2], k.shape[2]
        return self.cu_q.shape[0] - 1, self.longest_q, self.longest_k

    def lists(self, *, by_key: bool = False) -> tuple[Tensor | None, ...]:
        """The arguments SPANS, BLOCKS, SLOTS and BITS of a kernel."""
        if self.block_mask is None:
            return None, None, None, None
        lists = self.block_mask.by_key if by_key else self.block_mask.by_query
        return lists.spans, lists.blocks, lists.slots, self.block_mask.bits

    def grows(self, call: Call) -> bool:
        """Whether later queries see more keys, so that their tiles should start first."""
        return call.grows if self.block_mask is None else self.block_mask.host.grows

    @property
    def bias_strides(self) -> tuple[int, ...]:
        """Of (batch, head, query, key), 0 where one entry serves all."""
        if self.bias is None:
            return 0, 0, 0, 0
        return tuple(
            0 if n == 1 else step for n, step in zip(self.bias.shape, self.bias.stride(), strict=True)
        )

    @property
    def options(self) -> dict[str, Any]:
        """Compile-time constants: along which sides the bias varies, whether each sequence has slopes."""
        rows, columns = (1, 1) if self.bias is None else self.bias.shape[2:]
        own_slopes = self.slopes is not None and self.slopes.ndim == 2
        return {"BIAS_ROWS": rows != 1, "BIAS_COLS": columns != 1, "OWN_SLOPES": own_slopes}


NOTHING = Extra()


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless the shapes are those of one attention problem with head dims that run."""
    if wrong := misfit(q.shape, k.shape, v.shape):
        raise ValueError(wrong)


@lru_cache(maxsize=256)
def misfit(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> str | None:
    """What is wrong with the shapes, one sentence, or None."""
    shapes = f"q {tuple(q)}, k {tuple(k)}, v {tuple(v)}"
    if not len(q) == len(k) == len(v) == 4:
        return f"q, k and v have 4 dimensions (batch, heads, seqlen, head_dim); got {shapes}"
    if q[0] != k[0] or k[:3] != v[:3] or q[3] != k[3]:
        return f"batch, K/V heads, seqlen_k or head_dim differ: {shapes}"
    if k[1] == 0 or q[1] % k[1]:
        return f"num_heads {q[1]} is not divisible by num_kv_heads {k[1]}"
    if not 1 <= min(q[3], v[3]) <= max(q[3], v[3]) <= MAX_HEAD_DIM:
        return f"head dims must be 1 to {MAX_HEAD_DIM}: {shapes}"
    return None


def check_scale(scale: float) -> None:
    """Raise ValueError for a softmax scale that is not positive and finite."""
    if not 0 < scale < math.inf:
        raise ValueError(f"softmax_scale {scale} is out of range; it must be greater than 0, and finite")


def check_strides(**tensors: Tensor) -> None:
    """Raise ValueError for a tensor whose head dim is not dense: kernels take any other stride as it is."""
    for name, x in tensors.items():
        if x.stride(-1) != 1 < x.shape[-1]:
            raise ValueError(
                f"the last stride of {name} must be 1, got {x.stride()}; accepted: {name}.contiguous()"
            )


def check_devices(**tensors: Tensor | None) -> None:
    """Raise ValueError for a tensor that is not where the first one is."""
    check_same_device(**{name: x.device for name, x in tensors.items() if x is not None})


def check_same_device(**there: torch.device) -> None:
    """The same, of devices."""
    first = next(iter(there))
    for name, device in there.items():
        if device != there[first]:
            raise ValueError(f"{name} is on {device}, {first} on {there[first]}")


def computable(x: Tensor) -> Tensor:
    """x; in fp32 where the interpreter would garble it.

    The interpreter's bf16 arithmetic is wrong and its rounding to bf16 truncates, so there bf16
    comes in as fp32, goes out as fp32, and torch rounds.
    """
    return x.float() if INTERPRETED and x.dtype == torch.bfloat16 else x


def like(q: Tensor, columns: int) -> Tensor:
    """An output for q's rows, its heads inside or outside its rows as q's are."""
    batch, heads, rows, _ = q.shape
    if rows > 1 < heads and q.stride(1) < q.stride(2):
        return q.new_empty(batch, rows, heads, columns).transpose(1, 2)
    return q.new_empty(batch, heads, rows, columns)


def on(device: torch.device) -> Any:
    """Triton launches on the current device; make it the tensors'."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


_HERE = nullcontext()


@dataclass(frozen=True)
class _Rehearsal:
    card: tuple[tuple[int, int] | None, int | None]
    launches: list[Launch]


_REHEARSAL: ContextVar[_Rehearsal | None] = ContextVar("rehearsal", default=None)


def rehearsing() -> bool:
    """Whether calls are rehearsed."""
    return _REHEARSAL.get() is not None


@contextmanager
def rehearsed(card: tuple[tuple[int, int] | None, int | None]) -> Iterator[list[Launch]]:
    """Inside, calls on meta tensors launch nothing: the list holds what they would launch on the card.

    card: (compute capability, shared memory per block in bytes, None for no limit).
    """
    rehearsal = _Rehearsal(card, [])
    token = _REHEARSAL.set(rehearsal)
    try:
        yield rehearsal.launches
    finally:
        _REHEARSAL.reset(token)


def card(device: torch.device) -> tuple[tuple[int, int] | None, int | None]:
    """(compute capability, shared memory per block in bytes), both None in the interpreter."""
    rehearsal = _REHEARSAL.get()
    return _card(device) if rehearsal is None else rehearsal.card


@cache
def _card(device: torch.device) -> tuple[tuple[int, int] | None, int | None]:
    if INTERPRETED:
        return None, None
    properties = torch.cuda.get_device_properties(device)
    limit = getattr(properties, "shared_memory_per_block_optin", None)
    return (properties.major, properties.minor), limit
