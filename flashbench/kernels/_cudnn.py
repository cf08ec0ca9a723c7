"""Graphs of cuDNN's front end for an attention and its backward, and the call that executes them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flashbench.kernels import Call
from flashbench.kernels._inputs import Inputs
from flashbench.problem import ALIGNMENTS, UNLIMITED, Problem

KINDS = {torch.float16: "HALF", torch.bfloat16: "BFLOAT16", torch.float32: "FLOAT"}
"""cudnn.data_type of a torch dtype."""


class Graph:
    """One graph and its workspace; ``run`` takes tensors in the order in which they were declared."""

    def __init__(self, cudnn: ModuleType, like: Tensor) -> None:
        self._cudnn, self._device = cudnn, like.device
        self._handle = _handle(cudnn, like.device)
        self._ports: list[Any] = []
        self.operations = cudnn.pygraph(
            io_data_type=self._kind(like),
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=self._handle,
        )

    def reads(self, **tensors: Tensor) -> dict[str, Any]:
        """Inputs of the graph, of those shapes and strides, by name."""
        ports = {
            name: self.operations.tensor(
                name=name, dim=list(x.shape), stride=list(x.stride()), data_type=self._kind(x)
            )
            for name, x in tensors.items()
        }
        self._ports += ports.values()
        return ports

    def writes(self, port: Any, like: Tensor) -> None:
        """An output of an operation is the graph's, of that shape and those strides."""
        port.set_output(True).set_dim(list(like.shape)).set_stride(list(like.stride()))
        port.set_data_type(self._kind(like))
        self._ports.append(port)

    def build(self) -> None:
        """Choose and compile a plan. Raises NotImplementedError in cuDNN's words where it has none."""
        modes = self._cudnn.heur_mode
        try:
            with _on(self._device):
                self.operations.build([modes.A, modes.FALLBACK])
        except self._cudnn.cudnnGraphNotSupportedError as error:
            raise NotImplementedError(str(error)) from None
        size = max(1, self.operations.get_workspace_size())
        self._workspace = torch.empty(size, dtype=torch.uint8, device=self._device)

    def run(self, *tensors: Tensor) -> None:
        """Execute on the current stream."""
        with _on(self._device):
            if self._device.type == "cuda":
                stream = torch.cuda.current_stream(self._device).cuda_stream
                self._cudnn.set_stream(handle=self._handle, stream=stream)
            data = dict(zip(self._ports, tensors, strict=True))
            self.operations.execute(data, self._workspace, handle=self._handle)

    def _kind(self, x: Tensor) -> Any:
        return getattr(self._cudnn.data_type, KINDS[x.dtype])


@cache
def _handle(cudnn: ModuleType, device: torch.device) -> Any:
    with _on(device):
        return cudnn.create_handle()


def _on(device: torch.device) -> AbstractContextManager[object]:
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    found: AbstractContextManager[object] = torch.cuda.device(device)
    return found


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """o by one graph, and where gradients are wanted the other."""

    @staticmethod
    def forward(
        ctx: Any, forward: Graph, backward: Graph, like: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        o, stats = torch.empty_like(like), _stats(q)
        forward.run(q, k, v, o, stats)
        ctx.save_for_backward(q, k, v, o, stats)
        ctx.graph, ctx.strides = backward, like.stride()
        return o

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:  # type: ignore[override]
        q, k, v, o, stats = ctx.saved_tensors
        if dout.stride() != ctx.strides:
            dout = torch.empty_like(o).copy_(dout)
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        ctx.graph.run(q, k, v, o, dout, stats, *gradients)
        return None, None, None, *gradients


def make(cudnn: ModuleType, problem: Problem, inputs: Inputs) -> Call:
    """The call; graphs are built here. Raises NotImplementedError for what cuDNN has no plan for."""
    options = {"attn_scale": problem.softmax_scale, **_mask(cudnn, problem)}
    q, k, v, like = inputs.q, inputs.k, inputs.v, inputs.dout
    if not q.requires_grad:
        alone = _forward(cudnn, inputs, options, training=False)

        def call() -> Tensor:
            o = torch.empty_like(like)
            alone.run(q, k, v, o)
            return o

        return call
    forward = _forward(cudnn, inputs, options, training=True)
    if problem.deterministic:
        options["use_deterministic_algorithm"] = True
    backward = _backward(cudnn, inputs, options)
    return lambda: _Attention.apply(forward, backward, like, q, k, v)  # type: ignore[no-any-return,no-untyped-call]


def _forward(cudnn: ModuleType, inputs: Inputs, options: dict[str, Any], *, training: bool) -> Graph:
    graph = Graph(cudnn, inputs.q)
    ports = graph.reads(q=inputs.q, k=inputs.k, v=inputs.v)
    o, stats = graph.operations.sdpa(name="sdpa", **ports, is_inference=not training, **options)
    graph.writes(o, inputs.dout)
    if training:
        graph.writes(stats, _stats(inputs.q))
    graph.build()
    return graph


def _backward(cudnn: ModuleType, inputs: Inputs, options: dict[str, Any]) -> Graph:
    graph, operands = Graph(cudnn, inputs.q), (inputs.q, inputs.k, inputs.v)
    ports = graph.reads(
        **dict(zip("qkv", operands, strict=True)), o=inputs.dout, dO=inputs.dout, stats=_stats(inputs.q)
    )
    gradients = graph.operations.sdpa_backward(name="sdpa_backward", **ports, **options)
    for port, x in zip(gradients, operands, strict=True):
        graph.writes(port, torch.empty_like(x, device="meta"))
    graph.build()
    return graph


def _stats(q: Tensor) -> Tensor:
    """The row sums that the backward reads, fp32."""
    return q.new_empty((*q.shape[:3], 1), dtype=torch.float32)


def _mask(cudnn: ModuleType, p: Problem) -> dict[str, Any]:
    """The diagonal band, whose left bound counts the query's own key."""
    if not p.masked:
        return {}
    if not hasattr(cudnn, "diagonal_alignment"):
        raise NotImplementedError("masks are asked as diagonal bands, which this version has not")
    kinds, (left, right) = cudnn.diagonal_alignment, p.window
    right = 0 if p.causal else right
    square = p.seqlen_q == p.seqlen_k  # where both alignments are one, the older is the wider supported
    band: dict[str, Any] = {
        "diagonal_alignment": kinds.TOP_LEFT if square or p.alignment != ALIGNMENTS[0] else kinds.BOTTOM_RIGHT
    }
    if left != UNLIMITED:
        band["diagonal_band_left_bound"] = left + 1
    if right != UNLIMITED:
        band["diagonal_band_right_bound"] = right
    return band
