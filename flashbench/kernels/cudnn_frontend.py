"""cuDNN's attention through its own front end: the graph is built once, before anything is timed.

Signatures: github.com/NVIDIA/cudnn-frontend, python/pygraph/sdpa.cpp and python/cudnn of 1.32: pygraph, its
tensor(…), sdpa(…), sdpa_backward(…), build(heuristics), get_workspace_size() and execute(tensors, workspace).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flashbench.kernels import Call, Target
from flashbench.kernels._peer import Peer
from flashbench.problem import Problem

if TYPE_CHECKING:
    from flashbench.kernels._inputs import Inputs


def make(module: ModuleType, problem: Problem, inputs: Inputs) -> Call:
    """The call that executes the built graphs; tensors are taken in the strides that they have."""
    from flashbench.kernels._cudnn import make

    return make(module, problem, inputs)


class _CuDNN(Peer):
    def describe(self, problem: Problem, pass_: str, target: Target) -> Mapping[str, Any]:
        """The package, and the version of the library whose kernels run."""
        import importlib

        found = importlib.import_module(self.module).backend_version()
        return {**super().describe(problem, pass_, target), "cudnn": found}


def _why_unsupported(problem: Problem) -> str | None:
    if not (problem.seqlen_q and problem.seqlen_k):
        return "cuDNN's graph takes no empty sequence"
    return None


PEER = _CuDNN(
    name="cudnn-frontend",
    package="nvidia-cudnn-frontend",
    module="cudnn",
    summary="cuDNN's attention through its own front end, a graph that is built before it is timed",
    make=make,
    function="pygraph",
    takes=frozenset({"bshd", "top-left", "window", "deterministic"}),
    why_unsupported=_why_unsupported,
)
IMPLEMENTATIONS = (PEER.row(),)
