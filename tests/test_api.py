"""flashbench from Python: the operator of the bundled kernels, and runs, comparisons and models as values."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention import exact, problem
from torch import Tensor

import flashbench
from flashbench import environment, kernels, runfile
from flashbench.errors import SpecError, UnknownName, UsageError
from flashbench.kernels import _op, _triton
from flashbench.kernels._inputs import make_inputs

TARGET = environment.target(None)
"""Triton interprets or compiles for the whole process: where there is a GPU, compiles."""

REASON = kernels.get("flash").why_unavailable(TARGET) if TARGET.type == "cpu" else "Triton compiles here"
interpreted = pytest.mark.skipif(REASON is not None, reason=str(REASON))

GRID: dict[str, Any] = {
    "seqlens": [16], "head_dims": 8, "heads": 2, "batch": 1, "dtypes": "fp32", "causal": False,
    "passes": ("fwd",), "device": "cpu",
}  # fmt: skip


def leaves(p: Any, seed: int = 0) -> list[Tensor]:
    inputs = make_inputs(p, "cpu", seed)
    return [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]


@interpreted
@pytest.mark.parametrize(
    ("options", "layout"),
    [({}, "bhsd"), ({"window": (3, 2)}, "bshd"), ({"softcap": 1.5}, "bhsd"), ({"num_kv_heads": 2}, "bshd")],
    ids=str,
)
def test_attention_and_its_gradients_are_exact_in_both_layouts(options: dict[str, Any], layout: str) -> None:
    p = problem(seqlen_q=9, **options)
    inputs = make_inputs(p, "cpu", 3)
    q, k, v = leaves(p, 3)
    swap = (lambda x: x.transpose(1, 2)) if layout == "bshd" else (lambda x: x)
    more = {name: value for name, value in options.items() if name != "num_kv_heads"}
    o = swap(flashbench.attention(swap(q), swap(k), swap(v), causal=True, layout=layout, **more))
    found = (o, *torch.autograd.grad(o, (q, k, v), inputs.dout))
    for mine, theirs in zip(found, exact(p, inputs), strict=True):
        assert torch.allclose(mine.double(), theirs, atol=3e-6)


@interpreted
def test_packed_sequences_are_each_attention_of_its_own() -> None:
    starts = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    q, k, v = (torch.randn(12, 2, 16, requires_grad=True) for _ in range(3))
    do = torch.randn(12, 2, 16)
    packed = {"layout": "bshd", "causal": True}
    o = flashbench.attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=7, **packed)
    found = torch.autograd.grad(o, (q, k, v), do)
    parts = [
        flashbench.attention(q[None, a:b], k[None, a:b], v[None, a:b], **packed)[0]
        for a, b in ((0, 5), (5, 12))
    ]
    alone = torch.cat(parts)
    assert torch.allclose(o, alone, atol=1e-6)
    for mine, theirs in zip(found, torch.autograd.grad(alone, (q, k, v), do), strict=True):
        assert torch.allclose(mine, theirs, atol=2e-6)


@interpreted
@pytest.mark.parametrize(
    ("starts", "longest", "said"),
    [
        ([0, 5, 12], 6, "max_seqlen_q 6 is too small; the longest sequence has 7 rows"),
        ([0, 7, 5, 12], 7, "must ascend from 0 to the 12 rows"),
        ([1, 5, 12], 7, "must ascend from 0 to the 12 rows"),
        ([0, 5, 13], 8, "must ascend from 0 to the 12 rows"),
        ([0, 5, 11], 6, "must ascend from 0 to the 12 rows"),
        ([0, 5, 12], -1, "max_seqlen_q -1 is out of range"),
        ([0.0, 5.0, 12.0], 7, "cu_seqlens_q must be int32"),
        ([[0, 12]], 12, "cu_seqlens_q must be int32"),
        ([], 12, "cu_seqlens_q must be int32"),
    ],
)
def test_lengths_that_are_not_those_of_the_rows_are_refused(
    starts: list[Any], longest: int, said: str
) -> None:
    """Of the same checks with max_seqlen_q left out, the longest alone is not one."""
    q = torch.randn(12, 2, 16)
    cu = torch.tensor(starts, dtype=torch.float32 if 5.0 in starts and "int32" in said else torch.int32)
    flash = _op._triton.load("cpu").flash_attention
    x = q.transpose(0, 1)[None]
    with pytest.raises(ValueError, match=said):
        flash(x, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest)


@interpreted
def test_what_is_shown_of_lse_and_refused() -> None:
    p = problem(causal=False)
    q, k, v = leaves(p)
    o, lse = flashbench.attention(q, k, v, return_lse=True)
    assert torch.allclose(lse, (q @ k.mT * p.softmax_scale).logsumexp(-1), atol=1e-5)
    assert (o.requires_grad, lse.requires_grad) == (True, False)
    with pytest.raises(ValueError, match="'sbhd' is not known"):
        flashbench.attention(q, k, v, layout="sbhd")
    with pytest.raises(ValueError, match="differ"):
        flashbench.attention(q, k[:, :, :3], v)


@interpreted
@pytest.mark.filterwarnings("ignore:Input #")
@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["fast", "every"])
@pytest.mark.parametrize(
    "causal", [pytest.param(False, marks=pytest.mark.slow), True], ids=["full", "causal"]
)
def test_gradcheck_holds_on_the_kernels_themselves(causal: bool, fast: bool) -> None:
    """In fp32, as the kernels compute: central differences of eps 1e-2 err by some 1e-5."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 3, 4, generator=generator, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(
        lambda q, k, v: flashbench.attention(q, k, v, causal=causal), (q, k, v),
        eps=1e-2, atol=2e-4, rtol=1e-3, fast_mode=fast,
    )  # fmt: skip


@interpreted
@pytest.mark.parametrize("how", ["fast", pytest.param("every", marks=pytest.mark.slow)])
def test_gradcheck_holds_on_the_kernels_in_fp64(how: str) -> None:
    """The same kernels with fp64 in place of fp32, which the interpreter alone can do."""
    program = Path(__file__).with_name("gradients_fp64.py")
    done = subprocess.run([sys.executable, program, how], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Input #")
@pytest.mark.parametrize(
    "more", [{}, {"causal": True}, {"causal": True, "window": (2, 0)}, {"softcap": 1.5}], ids=str
)
def test_gradcheck_holds_on_a_gpu_in_fp32(more: dict[str, Any]) -> None:
    """IEEE fp32: central differences of eps 1e-2 err by some 1e-5, by rounding and by their third order."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, 5, 16, generator=generator).cuda().requires_grad_() for heads in (2, 1, 1)
    )
    assert torch.autograd.gradcheck(
        lambda q, k, v: flashbench.attention(q, k, v, **more), (q, k, v), eps=1e-2, atol=1e-3, rtol=1e-3
    )


@interpreted
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["bhsd", pytest.param("bshd", marks=pytest.mark.slow)])
def test_the_operators_are_what_torch_takes_them_for(layout: str) -> None:
    p = problem(batch=1, num_heads=2, num_kv_heads=1, layout=layout)
    q, k, v = leaves(p)
    options = (True, -1, -1, 0.3, 0.0, -1, -1)
    torch.library.opcheck(torch.ops.flashbench.attention.default, (q, k, v, None, None, None, *options))
    torch.library.opcheck(torch.ops.flashbench.attention, (q, k, v))
    with torch.no_grad():
        o, lse = torch.ops.flashbench.attention(q, k, v, None, None, None, *options)
        saved = [x.detach() for x in (o, o, lse, q, k, v)]
    torch.library.opcheck(
        torch.ops.flashbench.attention_backward.default, (*saved, None, None, None, *options),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


@interpreted
def test_the_operators_defaults_are_those_of_the_function() -> None:
    """Torch does not pass on arguments at the end that have their defaults."""
    p = problem(batch=1, num_heads=2, num_kv_heads=1)
    (q, k, v), do = leaves(p), make_inputs(p, "cpu", 0).dout
    for mine, theirs in (
        (torch.ops.flashbench.attention(q, k, v), flashbench.attention(q, k, v, return_lse=True)),
        (torch.ops.flashbench.attention(q, k, v, causal=True, softcap=2.0),
         flashbench.attention(q, k, v, causal=True, softcap=2.0, return_lse=True)),
    ):  # fmt: skip
        assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))
        of = [torch.autograd.grad(o, (q, k, v), do) for o, _ in (mine, theirs)]
        assert all(torch.equal(x, y) for x, y in zip(*of, strict=True))


ALONE = """
import torch, flashbench
q, k, v = (torch.randn(1, 2, 16, 32, requires_grad=True) for _ in range(3))
flashbench.attention(q, k, v, causal=True).sum().backward()
assert q.grad.isfinite().all()
"""


@interpreted
def test_it_is_the_first_thing_that_a_process_does() -> None:
    """Nothing has told Triton to interpret, and torch imports it for its operators."""
    told = {name: value for name, value in os.environ.items() if name != _triton.VARIABLE}
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, env=told)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"window": (1, 2, 3)}, "window"), ({"window": (1.5, 0)}, "window"), ({"window": 5}, "window 5"),
        ({"causal": "top-left"}, "causal 'top-left' must"),
        ({"alibi_slopes": [1.0, 2.0]}, "alibi_slopes must be"),
        ({"max_seqlen_q": 5}, "max_seqlen_q"), ({"cu_seqlens_k": torch.tensor([0, 4])}, "cu_seqlens"),
        ({"alibi_slopes": torch.ones(2, requires_grad=True)}, "alibi_slopes"),
    ],
    ids=str,
)  # fmt: skip
def test_a_misfit_is_said_in_one_line(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        flashbench.attention(*leaves(problem(num_heads=2, num_kv_heads=2)), **wrong)


@interpreted
@pytest.mark.filterwarnings("ignore")
def test_torch_compile_keeps_it_whole() -> None:
    p = problem(batch=1)
    eager, compiled = leaves(p, 1), leaves(p, 1)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (flashbench.attention(q * 2, k, v, causal=True) + 1).sum()

    wanted = layer(*eager)
    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(*compiled)
    assert torch.allclose(found, wanted, atol=1e-5)
    for mine, theirs in zip(
        torch.autograd.grad(found, compiled), torch.autograd.grad(wanted, eager), strict=True
    ):
        assert torch.allclose(mine, theirs, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("more", [{}, {"window": (63, 0)}], ids=str)
def test_on_a_gpu_it_is_right_compiled_and_eager(more: dict[str, Any], layout: str) -> None:
    from flashbench.kernels._reference import Reference

    p = problem(
        dtype="bf16",
        seqlen_q=200,
        seqlen_k=200,
        head_dim=64,
        head_dim_v=64,
        num_kv_heads=2,
        layout=layout,
        **more,
    )
    inputs = make_inputs(p, "cuda:0", 2).detached(grad=True)
    swap = (lambda x: x.transpose(1, 2)) if layout == "bshd" else (lambda x: x)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return swap(flashbench.attention(swap(q), swap(k), swap(v), causal=True, layout=layout, **more))

    for function in (call, torch.compile(call, fullgraph=True)):
        o = function(inputs.q, inputs.k, inputs.v)
        gradients = torch.autograd.grad(o, inputs.leaves, inputs.dout)
        assert Reference(p, inputs).compare(o.detach(), gradients).ok
    torch.library.opcheck(
        torch.ops.flashbench.attention.default,
        (inputs.q, inputs.k, inputs.v, None, None, None, True, -1, -1, 0.125, 0.0, -1, -1),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 72), (256, 256), (256, 64)], ids=str)
def test_on_hopper_the_backward_is_flash_v3s(
    dims: tuple[int, int], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashbench import hopper_configs
    from flashbench.kernels._reference import Reference

    if torch.cuda.get_device_capability() != hopper_configs.CAPABILITY:
        pytest.skip("flash-v3 is for sm_90")
    p = problem(
        dtype="bf16", seqlen_q=300, seqlen_k=300, head_dim=dims[0], head_dim_v=dims[1], num_kv_heads=2,
        layout=layout,
    )  # fmt: skip
    inputs = make_inputs(p, "cuda:0", 2).detached(grad=True)
    swap = (lambda x: x.transpose(1, 2)) if layout == "bshd" else (lambda x: x)
    seen = []
    own = _op._backward_v3
    monkeypatch.setattr(_op, "_backward_v3", lambda *args: seen.append(1) or own(*args))
    o = swap(flashbench.attention(swap(inputs.q), swap(inputs.k), swap(inputs.v), causal=True, layout=layout))
    gradients = torch.autograd.grad(o, inputs.leaves, inputs.dout)
    assert Reference(p, inputs).compare(o.detach(), gradients).ok
    assert bool(seen) == (hopper_configs.why_portable(*dims) is None)
    lse, plain = torch.zeros(o.shape[:3], device="cuda"), [x.detach() for x in inputs.leaves]
    again = torch.ops.flashbench.attention_backward(
        inputs.dout, o.detach(), lse, *plain,
        None, None, None, True, -1, -1, 0.1, 0.0, -1, -1,
    )  # fmt: skip
    assert all(x.is_contiguous() for x in again)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if any CUDA device were an H100."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    monkeypatch.setattr("flashbench.kernels._kernels_of.why_unfit", lambda *_: None)
    _op._fits_v3.cache_clear()
    yield
    _op._fits_v3.cache_clear()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("dims", "dtype", "fwd", "bwd"),
    [
        ((64, 64), torch.float16, True, True),
        ((256, 256), torch.bfloat16, True, True),
        ((128, 100), torch.bfloat16, False, False),
        ((64, 64), torch.float32, False, False),
    ],
)
def test_which_kernels_run_is_chosen_once_for_a_shape(
    dims: tuple[int, int], dtype: torch.dtype, fwd: bool, bwd: bool
) -> None:
    shapes = tuple(torch.Size((2, 4, 300, dim)) for dim in (dims[0], *dims))
    asked = shapes, dtype, torch.device("cuda:0"), True
    assert (_op._fits_v3(*asked, "fwd"), _op._fits_v3(*asked, "bwd")) == (fwd, bwd)
    assert _op._fits_v3.cache_info().misses == 2
    _op._fits_v3(*asked, "fwd")
    assert _op._fits_v3.cache_info().hits == 1
    empty = (torch.Size((2, 4, 0, dims[0])), *shapes[1:])
    assert not _op._fits_v3(empty, *asked[1:], "fwd")


@interpreted
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dim", [64, 256])
def test_where_flash_v3_ran_its_backward_runs_and_gives_dense_gradients(
    dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels are faked: this is about who is called, with what, and what comes back."""
    q, k, v = (torch.randn(1, 8, 2, dim).transpose(1, 2) for _ in range(3))
    called = []

    class Work:
        dq, dk, dv = (x + 1 for x in (q, k, v))

        def run(self, saved: Any) -> None:
            called.append(saved)

    def load(device: str, module: str = "") -> Any:
        def launches(saved: Any, call: Any, **more: Any) -> Work:
            called.extend((module, call, more))
            return Work()

        return SimpleNamespace(backward_launches=launches)

    monkeypatch.setattr(_op, "_takes_v3", lambda *args: args[-1] == "bwd")
    monkeypatch.setattr(_op._triton, "load", load)
    lse = torch.zeros(1, 2, 8)
    found = _op._backward(q, q, lse, q, k, v, None, None, None, True, -1, -1, 0.3, 0.0, -1, -1)
    assert all(
        x.is_contiguous() and torch.equal(x, like + 1) for x, like in zip(found, (q, k, v), strict=True)
    )
    module, call, more, saved = called
    assert (module, more) == (
        ("_flash_v3_wide", {}) if dim > 128 else ("_flash_v3_backward", {"deterministic": False})
    )
    assert (call.causal, call.scale, saved.lse, saved.dlse) == (True, 0.3, lse, None)


def slow(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return (q @ k.mT * scale).softmax(-1) @ v


def test_run_takes_functions_and_names_and_returns_values(capsys: pytest.CaptureFixture[str]) -> None:
    found = flashbench.run(["naive", slow], **GRID)
    assert capsys.readouterr().out == ""
    assert found.path is None
    own = f"{__name__}:slow"
    assert [(one.cell.implementation, one.status) for one in found.records] == [("naive", "ok"), (own, "ok")]
    frame = found.to_pandas()
    assert list(frame["implementation"]) == ["naive", own]
    assert (frame["time_s"] > 0).all()


@pytest.mark.parametrize("impls", [[slow], slow, (one for one in [slow])], ids=["list", "one", "any"])
def test_run_measures_what_it_is_given_and_nothing_beside(impls: Any) -> None:
    found = flashbench.run(impls, **GRID)
    assert [one.cell.implementation for one in found.records] == [f"{__name__}:slow"]


def test_a_run_of_one_function_is_resumed_with_nothing_beside(tmp_path: Path) -> None:
    kept = flashbench.run(slow, out=tmp_path / "o", **GRID)
    again = flashbench.run(slow, out=tmp_path / "o", resume=True)
    assert again.records == kept.records


@pytest.mark.parametrize("dtypes", [[torch.bfloat16, "fp16"], torch.bfloat16], ids=str)
def test_dtypes_may_be_torchs(dtypes: Any) -> None:
    found = flashbench.run("naive", **{**GRID, "dtypes": dtypes})
    assert found.records[0].cell.problem.dtype == "bf16"


def test_results_become_a_page_and_a_side_of_a_comparison(tmp_path: Path) -> None:
    kept = flashbench.run("naive", out=str(tmp_path / "o"), **GRID)
    assert kept.path == tmp_path / "o" / "results.jsonl"
    page = kept.to_html(tmp_path / "page.html")
    assert page.startswith("<!")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page
    lost = flashbench.run("naive", in_process=True, **GRID)
    judged = flashbench.compare(kept, [lost, str(kept.path)], warn=0.2, fail=0.9)
    [row] = judged.to_pandas().to_dict("records")
    assert row["cell"] == kept.records[0].cell.key
    assert row["base"] == pytest.approx(kept.records[0].samples.median_s)  # type: ignore[union-attr]
    same = flashbench.compare(kept, kept)
    assert same.ok
    beside = flashbench.compare(lost, kept).to_html(tmp_path / "beside.html")
    assert (tmp_path / "beside.html").read_text(encoding="utf-8") == beside
    assert kept.records[0].cell.key in beside
    assert "<code>not kept</code>" in beside  # and no file of a folder that is gone
    assert f"<code>{kept.path}</code>" in beside
    assert [cell.verdict for cell in same.comparison.cells] in (["same"], ["undecided"])


def test_the_model_from_python_is_that_of_the_command() -> None:
    [standard, flash] = flashbench.io_model("standard,flash-v2", seqlens=4096, heads=1, batch=1)
    estimate = flashbench.estimate("flash-v2", flash.estimate.problem, "fwd")
    assert flash.estimate.requested == estimate.requested
    assert standard.estimate.requested.total_bytes > flash.estimate.requested.total_bytes


@pytest.mark.parametrize(
    "given",
    [
        {"gpus": "h100-sxm,h200", "seqlens": "1k-4k", "causal": "both"},
        {"sram": "16KB-64KB", "seqlens": 2048}, {"blocks": "16-64", "seqlens": 2048, "passes": "fwd,bwd"},
        {"sram": 4096, "seqlens": 2048},
    ],
    ids=str,
)  # fmt: skip
def test_the_model_becomes_a_table_and_a_page(given: dict[str, Any], tmp_path: Path) -> None:
    found = flashbench.io_model("standard,flash-v1", heads=1, batch=1, **given)
    assert isinstance(found, flashbench.IoTable)
    assert len(found.to_pandas()) == len(found)
    page = found.to_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page
    for said in ("standard", "flash-v1", *given.get("gpus", "").split(",")):
        assert said in page


def test_the_signature_of_io_model_says_what_it_returns() -> None:
    found, plain = inspect.signature(flashbench.io_model), inspect.signature(flashbench.io_table)
    assert found.return_annotation is flashbench.Modelled
    assert found.parameters == plain.parameters
    assert plain.return_annotation == "IoTable"
    assert typing.get_type_hints(flashbench.io_model)["return"] is flashbench.Modelled
    assert typing.get_type_hints(flashbench.io_table)["return"] is flashbench.IoTable


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "nowhere" / "page.html"
    measured = flashbench.Results(file=runfile.load(Path(__file__).parent / "data" / "cpu.jsonl"))
    for found in (measured, flashbench.io_model("standard", seqlens=1024)):
        with pytest.raises(UsageError, match=r"^to_html\(.*nowhere.*\): No such file"):
            found.to_html(page)


def test_functions_of_one_name_are_told_apart() -> None:
    """As lambdas are, and closures of one maker."""

    def of(factor: float) -> Any:
        return lambda q, k, v: factor * torch.nn.functional.scaled_dot_product_attention(q, k, v)

    found = flashbench.run(["naive", of(1), of(2), of(1)], **GRID)
    statuses = {one.cell.implementation.partition(":")[2]: one.status for one in found.records}
    assert statuses == {"": "ok", "function": "ok", "function_2": "wrong", "function_3": "ok"}


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda: flashbench.run("naive", seqlens="1k-3k"), SpecError, "--seqlens '1k-3k'"),
        (lambda: flashbench.run("naif"), UnknownName, "did you mean 'naive'"),
        (lambda: flashbench.run("x.py:f"), UsageError, "there is no file x.py"),
        (lambda: flashbench.run([]), SpecError, "run(): impls is empty"),
        (lambda: flashbench.run(["naive", 3]), SpecError, "run(): impls has 3"),
        (lambda: flashbench.run(3), SpecError, "run(): impls is '3'; accepted: names, specs and functions"),
        (lambda: flashbench.run("none"), SpecError, "--impls 'none': nothing is left"),
        (lambda: flashbench.run(["naive"], dtypes=[torch.int8]), UnknownName, "--dtypes 'torch.int8'"),
        (lambda: flashbench.run("naive", dtypes=[1]), UsageError, "such as 'fp16,bf16' or ['fp16', 'bf16']"),
        (lambda: flashbench.run("naive", passes=[1]), UsageError, "such as 'fwd,bwd' or ['fwd', 'bwd']"),
        (lambda: flashbench.run("naive", json=True), SpecError, "run(): json"),
        (lambda: flashbench.run("naive", seqlen=8), UsageError, "did you mean 'seqlens'"),
        (lambda: flashbench.run("naive", batch=[1]), UsageError, "run(): batch = '[1]' is a list"),
        (lambda: flashbench.compare("a", "b", metric="time"), UnknownName, "metric 'time'"),
        (lambda: flashbench.compare("a", "b", fails=1), SpecError, "compare(): 'fails'"),
    ],
)
def test_what_cannot_be_is_refused_in_the_words_of_the_command(call: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind) as error:
        call()
    assert said in str(error.value)


def test_importing_stays_light_and_typed() -> None:
    code = (
        "import sys, flashbench\n"
        "flashbench.run, flashbench.compare, flashbench.io_model, flashbench.Results\n"
        "heavy = {'torch', 'triton', 'pandas', 'plotly', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert Path(flashbench.__file__).with_name("py.typed").is_file()
