"""Other packages are asked, called as their real signatures have it, and refuse in their own words."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib.machinery import ModuleSpec

import pytest
import torch
from attention import FEATURES, SHAPES, exact, featured, problem, run
from peer_packages import APPROXIMATE, FAKES, install

from flashbench import environment, kernels
from flashbench.cli import main
from flashbench.kernels import SPENT, Refusal, Target, _peer, flex, transformer_engine_dpa
from flashbench.kernels._inputs import make_inputs

CPU, GPU = Target(), Target(device="cuda:0", capability=(9, 0))
TAKEN = {
    "fa2": {"window", "softcap", "alibi", "varlen", "bshd", "deterministic"},
    "fa3": {"window", "softcap", "varlen", "bshd", "deterministic"},
    "fa4": {"window", "softcap", "varlen", "bshd", "deterministic"},
    "xformers": {"window", "top-left", "bias", "varlen", "bshd"},
    "flashinfer": {"softcap", "varlen", "bshd", "deterministic"},
    "transformer-engine": {"window", "top-left", "softcap", "alibi", "varlen", "bshd"},
    "cudnn-frontend": {"window", "top-left", "bshd", "deterministic"},
}
"""Features that each takes, backward and forward (flashinfer: its forward alone)."""


@pytest.fixture(autouse=True)
def forgotten() -> None:
    _peer._imported.cache_clear()
    yield
    _peer._imported.cache_clear()


def right(name: str, p, seed: int = 2) -> None:
    row, inputs = kernels.get(name), make_inputs(p, "cpu", seed)
    wanted = exact(p, inputs)
    if name == "flashinfer":
        found = (row.prepare(p, inputs)(),)
    elif name == "xformers" and p.group > 1:
        found = (row.prepare(p, inputs)(),)  # grouped heads have no backward there
    else:
        found = run(row, p, inputs)
    for mine, theirs in zip(found, wanted, strict=False):
        assert torch.allclose(mine.double(), theirs, atol=4e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FAKES)
def test_every_shape_arrives_as_the_package_wants_it(
    name: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAKES[name](monkeypatch)
    p = problem(**SHAPES[shape])
    row, pass_ = kernels.get(name), "fwd" if name == "flashinfer" else "bwd"
    assert row.why_unavailable(GPU) is None
    assert row.why_unsupported(p, pass_, GPU) is None
    right(name, p)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", FAKES)
def test_a_feature_that_the_signature_has_is_computed_and_any_other_refused(
    name: str, feature: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAKES[name](monkeypatch)
    p = featured(feature, causal=causal)
    reason = kernels.get(name).why_unsupported(p, "fwd" if name == "flashinfer" else "bwd", GPU)
    both = name == "xformers" and ((feature == "bias" and causal) or feature == "top-left")
    to_the_left = name == "flashinfer" and feature == "window" and causal
    if (feature in TAKEN[name] and not both) or to_the_left:
        assert reason is None
        right(name, p)
    else:
        assert reason is not None
        assert len(reason.split()) > 4


@pytest.mark.parametrize("window", [(3, 0), (3, -1), (-1, 0), (0, 0)])
@pytest.mark.parametrize("name", FAKES)
def test_windows_keep_their_sides(name: str, window, monkeypatch: pytest.MonkeyPatch) -> None:
    FAKES[name](monkeypatch)
    for causal in (False, True):
        p = problem(window=window, causal=causal, seqlen_q=9, seqlen_k=14)
        assert kernels.get(name).why_unsupported(p, "fwd", GPU) is None
        right(name, p)


def test_an_older_version_is_asked_for_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False): ...  # of release 2.0

    install(monkeypatch, "flash_attn", flash_attn_func=flash_attn_func, __version__="2.0.0")
    row = kernels.get("fa2")
    for feature in ("window", "softcap", "alibi", "varlen"):
        assert row.why_unsupported(featured(feature), "fwd", GPU) == f"it does not take {feature}"
    assert row.why_unsupported(problem(), "fwd", GPU) is None


@pytest.mark.parametrize("without_files", [True, False])
def test_flash_attn_without_its_function_is_no_flash_attention_2(
    without_files: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """flash-attn-4 alone leaves flash_attn a namespace; release 1 named its functions otherwise."""
    if without_files:
        FAKES["fa4"](monkeypatch)
        namespace = importlib.util.module_from_spec(ModuleSpec("flash_attn", None, is_package=True))
        monkeypatch.setitem(sys.modules, "flash_attn", namespace)
        reason = "flash-attn is not installed: "
    else:
        install(monkeypatch, "flash_attn", __version__="1.0.9", __file__="flash_attn/__init__.py")
        reason = "flash-attn 1.0.9 has no flash_attn_func: "
    reason += "pip install flash-attn --no-build-isolation"
    assert kernels.get("fa2").why_unavailable(GPU) == reason
    for name in ("fa2", "fa4"):
        refused = kernels.get(name).why_unsupported(featured("window"), "fwd", GPU)
        assert (refused is None) == (name == "fa4" and without_files)
    monkeypatch.setattr(environment, "target", lambda name=None, _=None: GPU)
    with pytest.raises(SystemExit) as stop:
        main(["list", "implementations", "--json"])
    assert not stop.value.code
    listed = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert (listed["fa2"]["available"], listed["fa2"]["why_not"]) == (False, reason)
    assert listed["fa4"]["available"] == without_files


def test_what_a_package_refuses_is_unsupported_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    FAKES["fa2"](monkeypatch)
    p = problem()
    inputs = make_inputs(p, "cpu", 0)
    doubled = type(inputs)(
        **{**vars(inputs), **{n: getattr(inputs, n).double() for n in ("q", "k", "v", "dout")}}
    )
    with pytest.raises(Refusal) as refusal:
        kernels.get("fa2").prepare(p, doubled)
    assert str(refusal.value).startswith(
        "flash-attn 2.8.4 refuses it: FlashAttention only support fp16 and bf16"
    )
    assert "\n" not in str(refusal.value)


def test_a_lost_device_and_a_full_memory_are_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    module = FAKES["fa2"](monkeypatch)
    for text in ("CUDA out of memory. Tried", "CUDA error: an illegal memory access was encountered"):

        def broken(*_, text=text, **__):
            raise RuntimeError(text)

        module.flash_attn_func = broken
        p = problem()
        with pytest.raises(RuntimeError, match=text[:10]):
            kernels.get("fa2").prepare(p, make_inputs(p, "cpu", 0))


@pytest.mark.parametrize("name", FAKES)
def test_what_is_missing_says_why_and_how_to_get_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = kernels.get(name)
    reason = row.why_unavailable(GPU) or ""
    assert "is not installed: " in reason
    both = row.why_unavailable(CPU) or ""
    assert both == reason.replace("is not installed", "needs a GPU, and is not installed")
    FAKES[name](monkeypatch)
    assert row.why_unavailable(GPU) is None
    assert (row.why_unavailable(CPU) or "").endswith(" needs a GPU")
    assert "unknown" not in row.describe(problem(), "fwd", GPU)["package"]


def test_a_package_that_cannot_be_imported_is_unavailable_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol:\\n _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    reason = kernels.get("fa2").why_unavailable(GPU)
    assert reason == "flash-attn cannot be imported: ImportError: undefined symbol: _ZN3c10"
    _peer._imported.cache_clear()
    assert kernels.get("fa4").why_unavailable(GPU) is not None


def test_no_peer_is_imported_by_listing() -> None:
    code = (
        "import sys; from flashbench import kernels\n"
        f"for name in {[*FAKES, *APPROXIMATE, 'flex']}:\n"
        "    kernels.get(name).why_unavailable(kernels.Target())\n"
        "packages = {'flash_attn', 'xformers', 'flashinfer', 'transformer_engine', 'cudnn', 'fla'}\n"
        "assert not {'torch', 'sageattention', *packages} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_transformer_engine_says_which_backend_it_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    FAKES["transformer-engine"](monkeypatch)
    row, p = kernels.get("transformer-engine"), problem()
    call = row.prepare(p, make_inputs(p, "cpu", 0))
    choices = sys.modules[transformer_engine_dpa.CHOICES]._attention_backends
    choices.update(use_fused_attention=False, use_flash_attention=True, flash_attention_backend="2.8.3")
    assert row.backend(call) == "FusedAttention sub-backend 1"  # of this call, whatever ran since
    assert transformer_engine_dpa.chosen() == "FlashAttention 2.8.3"
    del sys.modules[transformer_engine_dpa.CHOICES]._attention_backends
    assert transformer_engine_dpa.chosen() is None


def test_cudnn_refuses_in_its_words_and_names_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    module = FAKES["cudnn-frontend"](monkeypatch)
    row, wide = kernels.get("cudnn-frontend"), problem(head_dim=512)
    assert row.describe(wide, "fwd", GPU) == {"package": "nvidia-cudnn-frontend 1.32.0", "cudnn": 92700}
    with pytest.raises(Refusal, match=r"frontend 1\.32\.0 refuses it: No valid engine configs for MATMUL_$"):
        row.prepare(wide, make_inputs(wide, "cpu", 0))
    del module.diagonal_alignment  # as before release 1.11
    with pytest.raises(Refusal, match="diagonal bands, which this version has not"):
        row.prepare(problem(), make_inputs(problem(), "cpu", 0))
    right("cudnn-frontend", problem(causal=False))


@pytest.mark.parametrize(
    ("feature", "shape"),
    [*(("", shape) for shape in SHAPES), *((feature, "square") for feature in FEATURES), ("bias", "gqa"),
     ("alibi", "more queries"), ("window", "fewer queries")],
)  # fmt: skip
def test_flex_computes_what_it_takes(feature: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its masks and changes of scores, uncompiled: torch runs the same functions then."""
    monkeypatch.setattr(flex, "compiled", lambda function: function)
    p = problem(**{**FEATURES.get(feature, {}), **SHAPES[shape]})
    row = kernels.get("flex")
    reason = row.why_unsupported(p, "fwd", CPU)
    assert (reason is None) == (feature not in {"sinks", "dropout", "block-mask", "varlen"})
    if reason:
        return
    inputs = make_inputs(p, "cpu", 1)
    assert torch.allclose(row.prepare(p, inputs)().double(), exact(p, inputs)[0], atol=4e-6)


def test_flex_says_what_compiling_took_and_what_it_lacks_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "compiled", lambda function: function)
    row, p = kernels.get("flex"), problem()
    call = row.prepare(p, make_inputs(p, "cpu", 0))
    assert getattr(call, SPENT)["compile_s"] > 0
    assert row.why_unsupported(p, "bwd", CPU) == "torch's FlexAttention has no backward on a CPU"
    assert row.why_unsupported(p, "bwd", GPU) is None


@pytest.mark.slow
def test_flex_is_compiled_and_right() -> None:
    p = problem(seqlen_q=64, seqlen_k=64, head_dim=16, head_dim_v=16)
    row, inputs = kernels.get("flex"), make_inputs(p, "cpu", 1)
    assert torch.allclose(row.prepare(p, inputs)().double(), exact(p, inputs)[0], atol=4e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flex", *FAKES])
def test_on_a_gpu_it_is_right_or_says_why_not(name: str) -> None:
    from flashbench import environment
    from flashbench.kernels._reference import Reference

    p = problem(dtype="bf16", seqlen_q=200, seqlen_k=200, head_dim=64, head_dim_v=64, num_kv_heads=2)
    target, row = environment.target("cuda:0"), kernels.get(name)
    pass_ = "fwd" if name in ("flashinfer", "xformers") else "bwd"
    reason = row.why_unavailable(target) or row.why_unsupported(p, pass_, target)
    if reason is not None:
        assert len(reason.split()) > 3
        return
    inputs = make_inputs(p, "cuda:0", seed=2).detached(grad=pass_ != "fwd")
    with row.context(p):
        o = row.prepare(p, inputs)()
        gradients = torch.autograd.grad(o, inputs.leaves, inputs.dout) if pass_ != "fwd" else None
    assert Reference(p, inputs).compare(o, gradients).ok
