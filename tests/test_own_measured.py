"""What a function of one's own does while it is measured decides what its row says."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from attention import problem
from test_own import CPU, GRID, RIGHT, flashbench_, here, loaded, rows, write
from tiers import tiers

import flashbench
from flashbench import blocks, iomodel, kernels, presets
from flashbench.kernels import Misbehaviour, _own
from flashbench.problem import PASSES

pytestmark = pytest.mark.usefixtures("here")
__all__ = ["here"]

EVERY = [*GRID, "--causal", "no", "--passes", "fwd,bwd,fwd+bwd", "-q"]
FWD = [*GRID, "--causal", "no", "--passes", "fwd", "-q"]
SPEC = "mine.py:attention"


def measured(text: str, *line: str, others: str = "none") -> dict[str, Any]:
    """The function's row of each pass, measured in this process."""
    write(text)
    flashbench_("run", "--in-process", "--impl", SPEC, "--impls", others, *line, "--out", "o")
    return {pass_: row for (name, pass_), row in rows("o").items() if name == SPEC}


COMPILED = """
import torch

@torch.compile(backend="aot_eager")
def attention(q, k, v, scale):
    return torch.softmax(q @ k.mT * scale, -1) @ v
"""


def test_a_compiled_function_has_every_pass_that_keeps_its_graph(capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(COMPILED, *EVERY)
    assert {pass_: (one.status, one.reason) for pass_, one in found.items()} == dict.fromkeys(
        PASSES, ("ok", None)
    )
    assert flashbench_("check", "--impl", SPEC, *EVERY, "--seqlens", "24") == 0


def test_the_switch_holds_in_every_thread_and_is_taken_back() -> None:
    """As a GPU's backward runs in a thread of torch's."""
    from torch._functorch import config

    from flashbench.kernels._backward import kept_graphs

    def seen() -> tuple[bool, bool]:
        with ThreadPoolExecutor(1) as pool:
            return config.donated_buffer, pool.submit(lambda: config.donated_buffer).result()

    before = seen()
    with kept_graphs():
        assert seen() == (False, False)
    assert seen() == before


@pytest.mark.slow
def test_a_process_that_keeps_no_graph_leaves_nothing_behind_for_one_that_does(tmp_path: Path) -> None:
    """Through torch's caches on disk."""
    spec = write(COMPILED.replace('backend="aot_eager"', ""))
    once = (
        "import torch; from mine import attention; x = [torch.randn(1, 2, 16, 8, requires_grad=True) for _ in"
        " range(3)]; o = attention(*x, 8**-0.5); torch.autograd.grad(o, x, o.detach())"
    )
    around = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    line = ["-m", "flashbench", "run", "--impl", spec, "--impls", "none", *EVERY, "--out", "o"]
    subprocess.run([sys.executable, "-c", once], env=around, check=True)
    subprocess.run([sys.executable, *line], env=around, check=True)
    assert {one.status for one in rows("o").values()} == {"ok"}


BY_ADDRESS = """
kept = {}
def attention(q, k, v, scale):
    key = KEY
    if key not in kept:
        kept[key] = WHAT
    return RETURNED
"""
OUTPUT = ("(q @ k.mT * scale).softmax(-1) @ v", "kept[key]")
SOFTMAX = ("(q @ k.mT * scale).softmax(-1)", "kept[key] @ v")
KEYS = ("k.mT.contiguous()", "(q @ kept[key] * scale).softmax(-1) @ v")
QUERIES = ("q * scale", "(kept[key] @ k.mT).softmax(-1) @ v")
VALUES = ("v + 0", "(q @ k.mT * scale).softmax(-1) @ kept[key]")


def by_address(key: str, what: tuple[str, str]) -> str:
    return BY_ADDRESS.replace("KEY", key).replace("WHAT", what[0]).replace("RETURNED", what[1])


@pytest.mark.parametrize(
    ("what", "layout"),
    tiers(
        [(OUTPUT, "bhsd"), (KEYS, "bhsd"), (SOFTMAX, "bshd")],
        [(SOFTMAX, "bhsd"), (QUERIES, "bhsd"), (VALUES, "bhsd"), (OUTPUT, "bshd"), (QUERIES, "bshd")],
    ),
)
def test_what_is_kept_by_address_is_noticed_after_it_was_timed(what: tuple[str, str], layout: str) -> None:
    text = by_address("(q.data_ptr(), k.data_ptr(), v.data_ptr())", what)
    if layout == "bshd":
        text = (
            f"{text}\nimport flashbench\ninner = attention\n"
            "@flashbench.implementation(layout='bshd', passes='fwd')\n"
            "def attention(q, k, v, scale):\n"
            "    return inner(*(x.transpose(1, 2) for x in (q, k, v)), scale).transpose(1, 2).contiguous()\n"
        )
    row = measured(text, *FWD, others="naive")["fwd"]
    assert (row.status, row.samples) == ("wrong", None)
    assert row.reason.startswith("after it was timed it was called with other values in the same tensors")
    assert "o is off by" in row.reason
    assert row.reason.endswith("does it keep results from call to call?")
    assert rows("o")["naive", "fwd"].status == "ok"


def test_what_is_kept_for_as_long_as_the_tensors_are_the_same_is_right() -> None:
    key = "(k.data_ptr(), k._version)"
    assert measured(by_address(key, KEYS), *FWD)["fwd"].status == "ok"


LATE = """
calls = 0
def attention(q, k, v, scale):
    global calls
    calls += 1
    return (q @ k.mT * scale).softmax(-1) @ v * (1 if calls < 4 else 1.25)
"""
LATE_BACKWARD = """
import torch

class Late(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, o):
        return o + 0

    @staticmethod
    def backward(ctx, do):
        Late.calls += 1
        return do * (1 if Late.calls < 4 else 1.25)

def attention(q, k, v, scale):
    return Late.apply((q @ k.mT * scale).softmax(-1) @ v)
"""


@pytest.mark.parametrize(
    ("text", "passes", "tensor"), [(LATE, "fwd", "o"), (LATE_BACKWARD, "bwd", "dq"),
    (LATE_BACKWARD, "fwd+bwd", "dq")],
)  # fmt: skip
def test_what_is_wrong_from_a_later_call_on_is_no_time(text: str, passes: str, tensor: str) -> None:
    row = measured(text, *EVERY, "--passes", passes)[passes]
    assert (row.status, row.samples) == ("wrong", None)
    assert row.reason.startswith(f"it was right at first, and wrong once it was timed: {tensor} is off by")


@pytest.mark.parametrize("passes", tiers(["bwd"], ["fwd+bwd"]))
def test_gradients_that_are_kept_by_address_are_noticed(passes: str) -> None:
    text = """
import torch
kept = {}

class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale):
        p = (q @ k.mT * scale).softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        ctx.scale = scale
        return p @ v

    @staticmethod
    def backward(ctx, do):
        q, k, v, p = ctx.saved_tensors
        if (key := q.data_ptr()) not in kept:
            dp = do @ v.mT
            ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * ctx.scale
            kept[key] = ds @ k, ds.mT @ q, p.mT @ do
        return *kept[key], None

def attention(q, k, v, scale):
    return Kept.apply(q, k, v, scale)
"""
    row = measured(text, *EVERY, "--passes", passes)[passes]
    assert (row.status, row.samples) == ("wrong", None)
    assert "did not compute them: dq is off by" in row.reason


@pytest.mark.parametrize(
    "features", tiers([["--kv-heads", "1"]], [[], ["--window", "5,0"], ["--bias", "1h1k"]])
)
def test_what_computes_each_time_is_ok_with_any_features(features: list[str]) -> None:
    text = """
import torch

def attention(q, k, v, causal=False, scale=None, window=None, bias=None):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ k.mT * scale
    if bias is not None:
        s = s + bias
    if window:
        distance = torch.arange(s.shape[2])[:, None] - torch.arange(s.shape[3])
        s = s.masked_fill((distance > window[0]) | (distance < -window[1]), float("-inf"))
    return s.softmax(-1) @ v
"""
    found = measured(text, *EVERY, *features)
    assert {one.status for one in found.values()} == {"ok"}, found


# -- sys.exit ------------------------------------------------------------------------------------------

LEAVES = "import sys\n" + RIGHT.replace("    return ", "    sys.exit(0)\n    return ")


def test_sys_exit_in_this_process_is_a_failed_row_and_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    row = measured(LEAVES, *FWD, others="naive")["fwd"]
    assert row.status == "failed"
    assert row.reason.startswith("SystemExit: 0 (mine.py:")
    assert rows("o")["naive", "fwd"].status == "ok"
    assert flashbench_("check", "--impl", SPEC, *FWD) == 5


def test_sys_exit_from_python_ends_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_own, "registry", kernels.registry)

    def attention(q: Any, k: Any, v: Any) -> Any:
        raise SystemExit(0)

    [row] = flashbench.run(
        attention, seqlens=16, head_dims=8, heads=2, batch=1, dtypes="fp32", causal=False, passes="fwd",
        device=torch.device("cpu"),
    ).records  # fmt: skip
    assert (row.status, row.reason.partition(" (")[0]) == ("failed", "SystemExit: 0")


@pytest.mark.parametrize("since", tiers([9], [3]))
def test_sys_exit_while_it_is_timed_too(since: int) -> None:
    row = measured(LATE.replace("    return", f"    calls < {since} or sys.exit()\n    return")
                   .replace("calls = 0", "import sys\ncalls = 0", 1), *FWD)["fwd"]  # fmt: skip
    assert (row.status, row.reason.partition(" (")[0]) == ("failed", "SystemExit: no message")


def test_sys_exit_in_a_backward_a_limit_and_a_model() -> None:
    text = LATE_BACKWARD.replace("        Late.calls += 1\n", "        raise SystemExit(3)\n")
    assert measured(text, *EVERY, "--passes", "bwd")["bwd"].reason.startswith("SystemExit: 3")

    def leave(problem: Any, pass_: str) -> Any:
        raise SystemExit(0)

    f = flashbench.implementation(supports=leave, io_model=leave)(lambda q, k, v, causal: q)
    row = loaded(f)
    assert row.why_unsupported(problem(), "fwd", CPU) == "its supports(problem, pass_) raised SystemExit: 0"
    with pytest.raises(Misbehaviour, match=r"the io_model of mine\.py:f raised SystemExit: 0"):
        row.stated(problem(), "fwd")


def test_ctrl_c_in_a_call_still_stops() -> None:
    spec = write(LEAVES.replace("sys.exit(0)", "raise KeyboardInterrupt"))
    assert flashbench_("run", "--in-process", "--impl", spec, "--impls", "none", *FWD) == 130
    assert flashbench_("check", "--impl", spec, *FWD) == 130


# -- Triton's interpreter ------------------------------------------------------------------------------


@pytest.fixture
def akern() -> None:
    """A file beside that holds the kernels and what launches them."""
    if reason := kernels.get("flash").why_unavailable(CPU):
        pytest.skip(reason)
    assert flashbench_("new-impl", "akern.py", "--triton") == 0


HANDED_ON = """
from akern import attention as inner

def attention(q, k, v, causal=False, scale=None):
    return inner(q, k, v, causal, scale)
"""


@pytest.mark.usefixtures("akern")
def test_kernels_of_another_file_are_interpreted_and_their_time_is_no_performance(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = measured(HANDED_ON, *FWD)["fwd"]
    assert (row.status, row.samples) == ("checked", None)
    assert row.reason == "Triton's interpreter: correct, not timed"
    capsys.readouterr()
    assert flashbench_("profile", "--trace", "--impl", SPEC, *FWD[:-1], "--json") == 0
    assert '"read_bytes"' in capsys.readouterr().out


def test_what_calls_the_bundled_kernels_is_interpreted_too() -> None:
    if reason := kernels.get("flash").why_unavailable(CPU):
        pytest.skip(reason)
    text = """
def attention(q, k, v, causal=False, scale=None):
    import flashbench
    return flashbench.attention(q, k, v, causal=causal, scale=scale)
"""
    found = measured(text, *EVERY, "--seqlens", "8", "--heads", "1", "--passes", "fwd,bwd")
    assert {pass_: one.status for pass_, one in found.items()} == {"fwd": "checked", "bwd": "checked"}


@pytest.mark.usefixtures("akern")
def test_a_backward_alone_that_is_interpreted_is_not_timed() -> None:
    text = """
import torch
from akern import attention as inner

class Mixed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale):
        ctx.save_for_backward(q, k, v)
        ctx.scale = scale
        return (q @ k.mT * scale).softmax(-1) @ v

    @staticmethod
    def backward(ctx, do):
        q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        inner(q.detach(), k.detach(), v.detach(), False, ctx.scale)
        with torch.enable_grad():
            o = (q @ k.mT * ctx.scale).softmax(-1) @ v
        return *torch.autograd.grad(o, (q, k, v), do), None

def attention(q, k, v, scale):
    return Mixed.apply(q, k, v, scale)
"""
    found = measured(text, *EVERY)
    assert {pass_: one.status for pass_, one in found.items()} == {
        "fwd": "ok", "bwd": "checked", "fwd+bwd": "checked"
    }  # fmt: skip


@pytest.mark.usefixtures("akern")
def test_torch_beside_a_triton_kernel_is_timed() -> None:
    assert measured("from akern import forward\n" + RIGHT, *FWD)["fwd"].status == "ok"


@pytest.mark.usefixtures("akern")
def test_a_block_of_what_is_interpreted_is_not_timed() -> None:
    spec = write(HANDED_ON)
    task = blocks.Task(
        preset=presets.find("gpt2-medium"), implementation=spec, mode="infer", batch=1, seqlen=16, layers=1,
        dtype="fp32",
    )  # fmt: skip
    row = blocks.measure(task, CPU)
    assert (row["status"], row["reason"]) == ("checked", "Triton's interpreter: correct, not timed")


# -- what can be called ----------------------------------------------------------------------------------


class Sdpa(torch.nn.Module):
    def forward(self, q: Any, k: Any, v: Any, causal: bool = False, softmax_scale: Any = None) -> Any:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(q, k, v, is_causal=causal, scale=softmax_scale)


class Object:
    def __call__(self, q: Any, k: Any, v: Any, causal: bool = False, softmax_scale: Any = None) -> Any:
        return Sdpa()(q, k, v, causal, softmax_scale)


def _wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def outer(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    return outer


@pytest.mark.parametrize(
    "function",
    [
        Sdpa(), Object(), Sdpa().forward, functools.partial(Sdpa()), functools.partial(Object()),
        functools.partial(functools.partial(Sdpa()), softmax_scale=3.0), _wrapped(Sdpa().forward),
        torch.compile(Sdpa()), torch.compile(Sdpa().forward), functools.partial(torch.compile(Sdpa())),
    ],
    ids=["module", "object", "method", "partial", "partial object", "partials", "wrapped",
         "compiled module", "compiled", "partial compiled"],
)  # fmt: skip
def test_parameters_and_source_are_those_of_what_does_the_work(function: Any) -> None:
    row = loaded(function)
    assert row.why_unsupported(problem(causal=True), "fwd", CPU) is None
    found = row.origin.load(CPU)  # type: ignore[union-attr]
    assert found.takes == {"causal": "causal", "scale": "softmax_scale"}  # type: ignore[attr-defined]
    written = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    assert found.facts == {"source": "mine.py:f", "source_sha256": written}  # type: ignore[attr-defined]


def test_a_module_is_called_with_what_its_forward_takes(tmp_path: Path) -> None:
    text = (
        f"import torch\n{Path(__file__).read_text().partition('class Sdpa')[2].partition('class Object')[0]}"
    )
    text = text.replace("(torch.nn.Module)", "class Sdpa(torch.nn.Module)", 1).replace("Any", "object")
    found = measured(text + "attention = Sdpa()\n", *GRID, "--causal", "both", "--passes", "fwd", "-q")
    assert found["fwd"].status == "ok", found["fwd"].reason


def test_the_declaration_of_what_is_wrapped_holds() -> None:
    @flashbench.implementation(layout="bshd", passes="fwd")
    def f(q: Any, k: Any, v: Any, causal: bool = False) -> Any: ...

    class Module(torch.nn.Module):
        forward = f

    for function in (functools.partial(f), Module(), functools.partial(Module()), torch.compile(f)):
        declared = loaded(function).origin.load(CPU).declared  # type: ignore[union-attr, attr-defined]
        assert (declared.layout, declared.passes) == ("bshd", ("fwd",))


# -- the template ----------------------------------------------------------------------------------------

OPTIONS = {
    "passes": lambda row, _: row.status == ("ok" if row.cell.pass_ == "fwd" else "unsupported"),
    "dtypes": lambda row, _: row.reason == "it declares the dtype fp16, bf16 alone, not fp32",
    "supports": lambda row, _: row.status == "ok",
    "io_model=\"": lambda row, _: (row.status, row.io_model) == ("ok", "flash-v2"),
    "io_model=traffic": lambda row, nominal: row.stated["flops"] == nominal and row.status == "ok",
    "config": lambda row, _: row.config["block_q"] == 128,
}  # fmt: skip


def _template() -> str:
    Path("mine.py").unlink(missing_ok=True)
    assert flashbench_("new-impl", "mine.py") == 0
    return Path("mine.py").read_text()


def test_every_option_that_the_template_shows_is_tried_below() -> None:
    shown = re.findall(r"^    # (\w+=.*)$", _template(), flags=re.MULTILINE)
    assert len(shown) == len(OPTIONS)
    for line in shown:
        assert len([name for name in OPTIONS if line.startswith(name)]) == 1, line


@pytest.mark.parametrize(
    "option", tiers(["passes", "io_model=traffic"], ["dtypes", "supports", 'io_model="', "config"])
)
def test_an_option_of_the_template_is_used_by_uncommenting_it(option: str) -> None:
    text = re.sub(rf"^    # ({re.escape(option)})", r"    \1", _template(), flags=re.MULTILINE)
    assert text != Path("mine.py").read_text()
    found = measured(text, *EVERY)
    assert set(found) == set(PASSES)
    for pass_, row in found.items():
        assert OPTIONS[option](row, iomodel.flops(row.cell.problem, pass_)), (pass_, row)
