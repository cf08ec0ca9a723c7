"""Tensors whose last byte is the last that may be touched: behind it is a page that nobody may read.

Run as a program it runs kernels on such inputs, one case after another, and says what is done; a kernel that
reads past an input ends it with a signal (on a CPU) or loses the device (on a GPU).
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from flashbench import environment, kernels  # noqa: E402
from flashbench.kernels._inputs import Inputs, make_inputs  # noqa: E402
from flashbench.kernels._reference import Reference  # noqa: E402
from flashbench.problem import Problem  # noqa: E402

SHAPE: dict[str, Any] = {"batch": 1, "num_heads": 2, "num_kv_heads": 1, "causal": True}
HELD: list[Any] = []
"""What keeps the memory; it is never given back."""


def at_the_end(x: torch.Tensor) -> torch.Tensor:
    """A dense copy of x that ends where the pages behind it are forbidden."""
    flat = x.detach().contiguous().flatten().view(torch.uint8)
    memory = _pages_of_a_card(flat.numel()) if x.is_cuda else _pages(flat.numel())
    memory.copy_(flat)
    return memory.view(x.dtype).view(x.shape)


def _pages(size: int) -> torch.Tensor:
    page = mmap.PAGESIZE
    usable = -(-size // page) * page
    area = mmap.mmap(-1, usable + page)
    HELD.append(area)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(start + usable), ctypes.c_size_t(page), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    return torch.frombuffer(memoryview(area)[usable - size : usable], dtype=torch.uint8)


class _Where(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("id", ctypes.c_int))


class _Kind(ctypes.Structure):
    """CUmemAllocationProp of the driver API."""

    _fields_ = (
        ("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", _Where),
        ("win32", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8),
    )  # fmt: skip


class _Access(ctypes.Structure):
    _fields_ = (("location", _Where), ("flags", ctypes.c_int))


def _pages_of_a_card(size: int) -> torch.Tensor:
    """Of an address range that is mapped up to here alone. Source: CUDA driver API, virtual memory."""
    driver = ctypes.CDLL("libcuda.so.1")
    device = _Where(1, torch.cuda.current_device())
    kind, granularity = _Kind(1, 0, device), ctypes.c_size_t()

    def call(name: str, *given: Any) -> None:
        if status := getattr(driver, name)(*given):
            raise OSError(f"{name} answers {status}")

    call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(kind), 0)
    page = granularity.value
    usable = -(-size // page) * page
    start, handle = ctypes.c_uint64(), ctypes.c_uint64()
    reserved = ctypes.c_size_t(usable + page)
    call("cuMemAddressReserve", ctypes.byref(start), reserved, ctypes.c_size_t(0), ctypes.c_uint64(0),
         ctypes.c_uint64(0))  # fmt: skip
    call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(usable), ctypes.byref(kind), ctypes.c_uint64(0))
    call("cuMemMap", start, ctypes.c_size_t(usable), ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
    access = _Access(device, 3)  # read and write
    call("cuMemSetAccess", start, ctypes.c_size_t(usable), ctypes.byref(access), ctypes.c_size_t(1))

    memory = type("Memory", (), {"__cuda_array_interface__": {
        "shape": (size,), "typestr": "|u1", "data": (start.value + usable - size, False), "version": 3
    }})  # fmt: skip
    return torch.as_tensor(memory(), device="cuda")


def ended(p: Problem, device: str) -> Inputs:
    """The problem's inputs, each at the end of its pages."""
    made = make_inputs(p, device, 0)
    return replace(made, **{name: at_the_end(getattr(made, name)) for name in ("q", "k", "v", "dout")})


def ran(implementation: str, p: Problem, device: str) -> None:
    """Both passes of the kernel on such inputs, held to exact attention."""
    row = kernels.get(implementation)
    inputs = ended(p, device).detached(grad=True)
    for name in ("q", "k", "v", "dout"):
        x = getattr(inputs, name)
        assert (x.data_ptr() + x.numel() * x.element_size()) % mmap.PAGESIZE == 0, f"{name} was copied"
    with row.context(p):
        o = row.prepare(p, inputs)()
        gradients = torch.autograd.grad(o, inputs.leaves, inputs.dout)
    found = Reference(p, inputs).compare(o.detach(), gradients)
    assert found.ok, found


def read_past(x: torch.Tensor) -> None:
    """What must not be survived: the number behind the last one is read, on a GPU by a kernel."""
    if not x.is_cuda:
        ctypes.string_at(x.data_ptr() + x.numel() * x.element_size(), 1)
        return
    import triton
    import triton.language as tl

    @triton.jit
    def shifted(X, Out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, SIZE)
        tl.store(Out + at, tl.load(X + 1 + at))

    out = torch.empty_like(x)
    shifted[(1,)](x, out, x.numel())
    torch.cuda.synchronize()


def cases(device: str) -> Sequence[tuple[str, dict[str, Any]]]:
    """Lengths and head dims that fill no tile."""
    if device == "cpu":
        return [
            ("flash-v2", {"dtype": "fp32", "seqlen_q": 19, "seqlen_k": 37, "head_dim": 24, "head_dim_v": 24}),
            ("flash-v2", {"dtype": "fp16", "seqlen_q": 33, "seqlen_k": 17, "head_dim": 16, "head_dim_v": 40}),
            ("flash-v1", {"dtype": "fp32", "seqlen_q": 21, "seqlen_k": 21, "head_dim": 16, "head_dim_v": 16}),
        ]
    lengths = ((77, 201), (129, 65), (300, 300))
    dims = {
        "flash-v2": (24, 64, 128),
        "flash-v1": (64,),
        "flash-v2-atomic": (64,),
        "flash-v3": (64, 128, 256),
    }
    return [
        (name, {"dtype": "bf16", "seqlen_q": q, "seqlen_k": k, "head_dim": dim, "head_dim_v": dim})
        for name, of in dims.items()
        for dim in of
        for q, k in lengths
    ]


def main() -> None:
    device = sys.argv[1]
    target = environment.target(device)
    if sys.argv[2:] == ["past"]:
        read_past(at_the_end(torch.zeros(1024, device=target.device)))
    for name, fields in cases(target.type):
        p = Problem(**{**SHAPE, **fields})
        if kernels.get(name).why_unavailable(target) is None:
            ran(name, p, target.device)
            print(f"{name} {p.key}", flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main()
