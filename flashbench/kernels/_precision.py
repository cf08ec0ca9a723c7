"""What a dtype name means for torch's matrix products: fp32 is IEEE, tf32 turns TF32 on."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flashbench.problem import DTYPES, Problem


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype that tensors of that dtype name are stored in."""
    dtype = getattr(torch, DTYPES[name].torch_name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def input_dtype(problem: Problem) -> torch.dtype:
    """The torch dtype of q, k, v and o: the problem's, but fp16 for fp8, to which implementations round."""
    return torch.float16 if problem.dtype_bytes == 1 else torch_dtype(problem.dtype)


@contextmanager
def precision(problem: Problem) -> Iterator[None]:
    """Inside, CUDA products of fp32 tensors use TF32 for dtype ``tf32`` and IEEE fp32 for any other.

    Uses torch's older switch: it sets the newer one along, while setting the newer one alone makes
    torch raise on the first read of the older.
    """
    switch = torch.backends.cuda.matmul
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = switch.allow_tf32
        switch.allow_tf32 = problem.dtype == "tf32"
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            switch.allow_tf32 = before
