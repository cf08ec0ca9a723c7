"""The model ``standard`` is the implementation ``naive``, op by op: same bytes, same peak memory.

naive runs on the CPU under a dispatch mode that sees every op that torch really runs: what each
reads and writes, and which storages are alive. Two ops are launched by CUDA otherwise than the
dispatcher shows: softmax's backward is a product into a temporary and then a kernel, and an
out-of-place masked_fill is a copy and a fill.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flashbench import kernels
from flashbench.iomodel import estimate
from flashbench.problem import Problem

VIEWS = {"view", "expand", "transpose", "unsqueeze", "slice", "alias", "detach", "_unsafe_view", "permute",
         "as_strided", "squeeze", "t", "select", "narrow", "split_with_sizes"}  # fmt: skip
UNWRITTEN = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}

PROBLEMS = [
    {},
    {"causal": True},
    {"num_heads": 4, "num_kv_heads": 2},
    {"num_heads": 4, "num_kv_heads": 1, "causal": True, "batch": 2},
    {"head_dim": 16, "head_dim_v": 40},
    {"seqlen_q": 48, "seqlen_k": 96, "causal": True},
    {"seqlen_q": 96, "seqlen_k": 64, "causal": True},
    {"seqlen_q": 96, "seqlen_k": 64, "causal": True, "num_heads": 4, "num_kv_heads": 2},
    {"seqlen_q": 8, "seqlen_k": 8},
    {"seqlen_q": 8, "seqlen_k": 8, "num_heads": 4, "num_kv_heads": 2},
    {"dtype": "bf16"},
]


def problem(**changes: Any) -> Problem:
    values: dict[str, Any] = {
        "batch": 1, "num_heads": 2, "num_kv_heads": 2, "seqlen_q": 96, "seqlen_k": 96, "head_dim": 32,
        "head_dim_v": 32, "dtype": "fp32", "causal": False,
    }  # fmt: skip
    return Problem(**{**values, **changes})


def observe(call: Callable[[], object]) -> tuple[int, int, int]:
    """(bytes read, bytes written, peak bytes beyond those alive before) of a call on CPU tensors."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Observer(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.read = self.write = self.peak = 0
            self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            out = func(*args, **(kwargs or {}))
            outputs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            name = func._schema.name.removeprefix("aten::")
            if name not in VIEWS:
                self.count(name, inputs, outputs)
            extra = bytes_of(outputs[0]) if name == "_softmax_backward_data" else 0
            known = {StorageWeakRef(x.untyped_storage()).cdata for x in inputs}
            for x in outputs:
                reference = StorageWeakRef(x.untyped_storage())
                if reference.cdata not in known:
                    self.storages[reference.cdata] = (reference, x.untyped_storage().nbytes())
            self.storages = {key: row for key, row in self.storages.items() if not row[0].expired()}
            self.peak = max(self.peak, extra + sum(size for _, size in self.storages.values()))
            return out

        def count(self, name: str, inputs: list[Any], outputs: list[Any]) -> None:
            read, write = sum(map(bytes_of, inputs)), sum(map(bytes_of, outputs))
            if name == "_softmax_backward_data":
                read, write = 2 * read, 2 * write
            elif name == "masked_fill":
                read, write = read + bytes_of(outputs[0]), 2 * write
            elif name == "copy_":
                read -= bytes_of(inputs[0])
            elif name in UNWRITTEN:
                read = write = 0
            elif name in {"new_zeros", "zero_", "fill_"}:
                read = 0
            elif name == "slice_backward":
                write += read  # zeros, then the rows
            self.read += read
            self.write += write

    def bytes_of(x: Any) -> int:
        """Bytes of the elements; a dimension that only repeats is one."""
        count = 1
        for length, stride in zip(x.shape, x.stride(), strict=True):
            count *= 1 if stride == 0 else length
        return int(count * x.element_size())

    observer = Observer()
    with observer:
        result = call()
    del result
    return observer.read, observer.write, observer.peak


def calls(name: str, p: Problem) -> dict[str, Callable[[], object]]:
    """The three timed calls of an implementation."""
    import torch

    from flashbench.kernels._backward import backward_call, forward_backward_call

    dtype = getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[p.dtype])
    shapes = {
        "q": (p.batch, p.num_heads, p.seqlen_q, p.head_dim),
        "k": (p.batch, p.num_kv_heads, p.seqlen_k, p.head_dim),
        "v": (p.batch, p.num_kv_heads, p.seqlen_k, p.head_dim_v),
        "do": (p.batch, p.num_heads, p.seqlen_q, p.head_dim_v),
    }
    q, k, v, do = (torch.ones(shape, dtype=dtype) for shape in shapes.values())
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    call = kernels.get(name).prepare(p, *inputs)

    def forward() -> object:
        with torch.no_grad():
            return call()

    backward, _ = backward_call(call, inputs, do)
    return {"fwd": forward, "bwd": backward, "fwd+bwd": forward_backward_call(call, inputs, do)}


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "fwd+bwd"])
@pytest.mark.parametrize("changes", PROBLEMS, ids=str)
def test_standard_is_what_naive_runs(changes: dict[str, Any], pass_: str) -> None:
    p = problem(**changes)
    row = estimate("standard", p, pass_)
    read, write, peak = observe(calls("naive", p)[pass_])
    assert (row.requested.read_bytes, row.requested.write_bytes) == (read, write)
    assert row.extra_bytes == peak


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "fwd+bwd"])
def test_every_implementations_own_tiles_reach_its_model(pass_: str) -> None:
    p, target = problem(dtype="bf16"), kernels.Target(device="cuda:0", capability=(9, 0))
    modelled = [row for row in kernels.registry().values() if row.io_model is not None]
    assert {row.name for row in modelled} >= {"naive", "flash"}
    for row in modelled:
        config = row.describe(p, pass_, target)
        tiles = estimate(str(row.io_model), p, pass_, tiles=config).tiles
        if any("block" in name for name in config):
            assert tiles == {name: config[name] for name in tiles}
            assert tiles
