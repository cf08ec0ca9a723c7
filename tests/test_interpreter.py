"""The interpreter is made quicker, and nothing else about it changes."""

from __future__ import annotations

import importlib.util
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from attention import problem, run

from flashbench import kernels
from flashbench.kernels import Target, _interpreter
from flashbench.kernels._inputs import make_inputs

ONE, TWO = ModuleType("one"), ModuleType("two")


def function(**names: Any) -> FunctionType:
    return FunctionType((lambda: None).__code__, names)


def test_a_module_is_replaced_once_a_launch_whoever_asks() -> None:
    made: list[Any] = []
    ended: list[Any] = []

    def step(one: Any) -> Any:
        made.append(one)
        return SimpleNamespace(restore=lambda: ended.append(one))

    once = _interpreter._once_a_launch(step, (ONE, TWO), lambda: SimpleNamespace(restore=lambda: None))
    kernel, same, other, both = function(a=ONE), function(b=ONE, c=3), function(a=TWO), function(a=ONE, b=TWO)
    for _ in range(2):
        launch = once(kernel)
        for device_function in (same, other, same, both, other, kernel):
            once(device_function).restore()
        launch.restore()
    assert made == [kernel, other] * 2
    assert ended[-1] is kernel


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or torch.cuda.is_available(), reason="needs the interpreter"
)


@needs_triton
def test_results_are_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    flash = kernels.get("flash")
    assert flash.why_unavailable(Target()) is None
    p = problem(batch=1, seqlen_q=70, seqlen_k=90, dtype="fp16", bias="1hqk", dropout_p=0.2)
    inputs = make_inputs(p, "cpu", 0)
    quick = run(flash, p, inputs)
    monkeypatch.setattr(interpreter, "_patch_lang", interpreter._patch_lang.__wrapped__)
    for mine, theirs in zip(quick, run(flash, p, inputs), strict=True):
        assert torch.equal(mine, theirs)


@needs_triton
def test_the_language_is_its_own_again_after_a_launch_that_fails() -> None:
    """Held to the names that Triton itself gives back."""
    from triton import language
    from triton.runtime.errors import InterpreterError

    from flashbench.kernels import _triton

    flash = _triton.load("cpu")
    x = torch.zeros(1, 1, 4, 16)
    for _ in range(2):
        launch = flash.forward_launch(x, x, x, flash.Call(causal=False, scale=1.0))[-1]
        with pytest.raises(InterpreterError):
            launch.kernel[(1,)](*launch.args, **launch.options | {"BLOCK_M": 17})
        assert language.core.is_builtin(language.load)
        assert language.core.is_builtin(language.tensor.__add__)
        flash.flash_attention(x, x, x, causal=False)
        assert language.core.is_builtin(language.load)
