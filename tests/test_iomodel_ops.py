"""The model ``standard`` is the implementation ``naive``, op by op: same bytes, same peak memory.

naive runs on the CPU under a dispatch mode that sees every op that torch really runs: what each
reads and writes, and which storages are alive. Two ops are launched by CUDA otherwise than the
dispatcher shows: softmax's backward is a product into a temporary and then a kernel, and an
out-of-place masked_fill is a copy and a fill. masked_fill reads its broadcast mask for every score and
leaves out a quarter of the scores under it, as an H100 counted (docs/counters.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from flashbench import iomodel, kernels
from flashbench.iomodel import estimate
from flashbench.problem import Problem, packed

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
            elif name in {"masked_fill", "masked_fill_"}:
                scores, mask = inputs[0], inputs[1].expand(inputs[0].shape)
                if name == "masked_fill":
                    read, write = read + bytes_of(scores), 2 * write
                read += mask.numel() - bytes_of(inputs[1])
                read -= int(mask.sum()) // 4 * scores.element_size()
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
    from flashbench.kernels._inputs import Inputs

    dtype = getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[p.dtype])
    shapes = {
        "q": (p.batch, p.num_heads, p.seqlen_q, p.head_dim),
        "k": (p.batch, p.num_kv_heads, p.seqlen_k, p.head_dim),
        "v": (p.batch, p.num_kv_heads, p.seqlen_k, p.head_dim_v),
        "dout": (p.batch, p.num_heads, p.seqlen_q, p.head_dim_v),
    }
    made = {name: torch.ones(shape, dtype=dtype) for name, shape in shapes.items()}
    inputs = Inputs(**made).detached(grad=True)
    call = kernels.get(name).prepare(p, inputs)

    def forward() -> object:
        with torch.no_grad():
            return call()

    backward, _ = backward_call(call, inputs)
    return {"fwd": forward, "bwd": backward, "fwd+bwd": forward_backward_call(call, inputs)}


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "fwd+bwd"])
@pytest.mark.parametrize("changes", PROBLEMS, ids=str)
def test_standard_is_what_naive_runs(changes: dict[str, Any], pass_: str) -> None:
    p = problem(**changes)
    row = estimate("standard", p, pass_)
    read, write, peak = observe(calls("naive", p)[pass_])
    assert (row.requested.read_bytes, row.requested.write_bytes) == (read, write)
    assert row.extra_bytes == peak


def eager(style: str, p: Problem) -> Callable[[Any, Any, Any], Any]:
    """Attention in the ops of a style; in fp32, since a CPU has no softmax from 16 bit to fp32."""
    import torch

    hidden = torch.ones(p.seqlen_q, p.seqlen_k, dtype=torch.bool).triu_(p.seqlen_k - p.seqlen_q + 1)
    mask = torch.zeros(p.batch, 1, p.seqlen_q, p.seqlen_k).masked_fill_(hidden, float("-inf"))

    def naive(q: Any, k: Any, v: Any) -> Any:
        scores = (q * p.softmax_scale) @ k.transpose(-2, -1)
        if p.causal:
            scores.masked_fill_(hidden, float("-inf"))
        probabilities = scores.softmax(dim=-1)
        del scores
        if p.dropout_p:
            probabilities = torch.native_dropout(probabilities, p.dropout_p, True)[0]
        return probabilities @ v

    def hugging_face(q: Any, k: Any, v: Any) -> Any:
        weights = (q @ k.transpose(-2, -1)) * p.softmax_scale
        if p.causal:
            weights = weights + mask
        weights = torch.nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
        if p.dropout_p:
            weights = torch.native_dropout(weights, p.dropout_p, True)[0]
        return weights @ v

    return {"standard": naive, "standard-hf": hugging_face}[style]


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "fwd+bwd"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("style", ["standard", "standard-hf"])
@pytest.mark.parametrize("seqlen", [96, 8])
def test_eager_styles_are_the_ops_that_torch_runs(
    seqlen: int, style: str, dropout_p: float, causal: bool, pass_: str
) -> None:
    import torch

    from flashbench.kernels._backward import backward_call, forward_backward_call
    from flashbench.kernels._inputs import Inputs

    p = replace(problem(causal=causal, seqlen_q=seqlen, seqlen_k=seqlen), dropout_p=dropout_p)
    function = eager(style, p)
    shape = (p.batch, p.num_heads, p.seqlen_q, p.head_dim)
    inputs = Inputs(**{name: torch.ones(shape) for name in ("q", "k", "v", "dout")}).detached(grad=True)

    def call() -> Any:
        return function(*inputs.leaves)

    def forward() -> Any:
        with torch.no_grad():
            return call()

    timed = {
        "fwd": forward,
        "bwd": backward_call(call, inputs)[0],
        "fwd+bwd": forward_backward_call(call, inputs),
    }
    row = estimate(style, p, pass_)
    read, write, peak = observe(timed[pass_])
    assert (row.requested.read_bytes, row.requested.write_bytes) == (read, write)
    assert row.extra_bytes == peak


def test_a_softmax_in_fp32_doubles_what_it_writes_in_16_bit() -> None:
    """Hugging Face's softmax: P read, fp32 written, cast back; the backward's six passes are wide."""
    p = replace(problem(dtype="bf16"), seqlen_k=4096)
    one = p.batch * p.num_heads * p.seqlen_q * p.seqlen_k * 2
    steps = {step.name: step for step in estimate("standard-hf", p, "fwd+bwd").steps}
    assert (steps["softmax"].read, steps["softmax"].write) == ({"s_scaled": one}, {"p_fp32": 2 * one})
    assert (steps["cast p"].read, steps["cast p"].write) == ({"p_fp32": 2 * one}, {"p": one})
    rows = steps["softmax backward: rows"]
    assert sum(rows.read.values()) == 4 * one
    assert rows.write == {"ds": one}
    wide = steps["softmax backward: dp·p"]
    assert sum(wide.read.values()) + sum(wide.write.values()) == 6 * one


def test_the_least_standard_attention_is_the_papers() -> None:
    """Figure 2's problem: 4N² + 4Nd forward, 7N² + 8Nd backward: 9.13, 16.11 and 25.23 GB."""
    p = problem(batch=64, num_heads=16, num_kv_heads=16, seqlen_q=1024, seqlen_k=1024, head_dim=64,
                head_dim_v=64, dtype="fp16")  # fmt: skip
    heads, n2, nd = 64 * 16, 1024 * 1024 * 2, 1024 * 64 * 2
    forward = estimate("standard-minimal", p, "fwd").requested.total_bytes
    backward = estimate("standard-minimal", p, "bwd").requested.total_bytes
    assert (forward, backward) == (heads * (4 * n2 + 4 * nd), heads * (7 * n2 + 8 * nd))
    assert [round(x / 1e9, 2) for x in (forward, backward, forward + backward)] == [9.13, 16.11, 25.23]
    assert round(40.3e9 / (heads * n2), 1) == 18.8  # what the figure prints, in score matrices
    for causal in (False, True):
        assert estimate("standard-minimal", replace(p, causal=causal), "fwd").requested.total_bytes == forward


def test_dropout_costs_a_flag_per_score_in_eager_and_nothing_in_flash() -> None:
    p = problem(dtype="bf16")
    dropped = replace(p, dropout_p=0.1)
    one, flags = p.batch * p.num_heads * p.seqlen_q * p.seqlen_k * 2, 2 * 96 * 96
    for pass_, read, write in (("fwd", one, one + flags), ("bwd", one + flags, one)):
        plain, more = (estimate("standard", x, pass_).requested for x in (p, dropped))
        assert more.read_bytes - plain.read_bytes == read
        assert more.write_bytes - plain.write_bytes == write
    for model in ("flash-v1", "flash-v2", "flash-v2-atomic"):
        tiles = {"block_q": 64, "block_k": 64}
        for pass_ in ("fwd", "bwd"):
            moved = [estimate(model, x, pass_, tiles=tiles).requested for x in (p, dropped)]
            assert moved[0] == moved[1]


def test_a_padded_batch_is_masked_per_sequence() -> None:
    p = packed(problem(batch=2), [(10, 20), (96, 96)])
    row = estimate("standard", p, "fwd")
    assert row.requested.read["mask"] == 2 * p.num_heads * 96 * 96
    assert row.flops < row.done_flops
    assert iomodel.compulsory(p, "fwd").read["k"] == 2 * (20 + 96) * 32 * 4


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "fwd+bwd"])
def test_every_implementations_own_tiles_reach_its_model(pass_: str) -> None:
    target = kernels.Target(device="cuda:0", capability=(9, 0))
    p = problem(dtype="bf16")
    modelled = [
        row
        for row in kernels.registry().values()
        if row.io_model is not None and row.exact and iomodel.find(row.io_model).refuses(p) is None
    ]
    assert {row.name for row in modelled} >= {"naive", "flash"}
    for row in modelled:
        if pass_ not in iomodel.find(str(row.io_model)).passes:
            continue
        config = row.describe(p, pass_, target)
        tiles = estimate(str(row.io_model), p, pass_, tiles=config).tiles
        if any("block" in name for name in config):
            assert tiles == {name: config[name] for name in tiles}
            assert tiles


@pytest.mark.parametrize(("left", "right"), [(-1, 0), (50, 20), (0, -1), (-1, -1)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(512, 512), (300, 1024), (700, 512)])
def test_of_masked_scores_a_threads_last_one_is_not_read(
    seqlen_q: int, seqlen_k: int, left: int, right: int
) -> None:
    """Brute force over threads of four scores, 128 apart, whose blocks of 512 fall on the rows alike."""
    p = problem(
        batch=1, num_heads=1, num_kv_heads=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=False,
        window=(left, right), dtype="fp16",
    )  # fmt: skip
    low, high = p.band
    seen = [i for i in range(seqlen_q) if max(0, i + low) <= min(seqlen_k - 1, i + high)]
    read = sum(
        j % 512 < 384 or low <= j - i <= high for i in seen for j in range(seqlen_k)
    )  # rows without keys take no part
    steps = iomodel.estimate("standard", p, "fwd").steps if p.masked else ()
    found = [step.read["s"] for step in steps if step.name == "mask"]
    assert found == ([2 * read] if p.masked else [])
