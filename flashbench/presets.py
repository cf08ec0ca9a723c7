"""PRESETS: the attention of published models; WORKLOADS: published measurements' problems.

To add a model, add a row. ``options`` gives what ``--model NAME`` stands for, ``workload`` what
``--preset NAME`` stands for, both as if typed on the command line. Rows hold one layer's attention;
what a layer caches is in ``kvcache``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from flashbench.errors import UnknownName, UsageError
from flashbench.units import quoted

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The attention of one published model.

    name: id on the command line. layers: attention layers. num_heads, num_kv_heads, head_dim,
    head_dim_v: of one layer, as a prefill or training pass runs it (MLA: not absorbed); num_heads
    is 0 where only the cache is described. window:
    keys that a windowed layer sees, the query's own among them; windowed_layers: how many layers
    have that window. latent_dim, rope_dim: MLA caches latent_dim + rope_dim numbers per token and
    layer, shared by all heads; 0 elsewhere. weights_bytes: the published checkpoint, approximate;
    weights: its format. intermediate: columns between the two matrices of the MLP, 0
    where its layers are not described; gated: SwiGLU, with RMSNorm and rotary positions. causal:
    False for an encoder, which keeps no cache. source: where the row comes from.
    uncertain: what was not checked against the model's own configuration, or empty.
    """

    name: str
    layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int = 0
    window: int | None = None
    windowed_layers: int = 0
    latent_dim: int = 0
    rope_dim: int = 0
    weights_bytes: int
    weights: str = "16 bit"
    intermediate: int = 0
    gated: bool = False
    causal: bool = True
    source: str
    uncertain: str = ""

    def __post_init__(self) -> None:
        if not self.head_dim_v:
            object.__setattr__(self, "head_dim_v", self.head_dim)

    @property
    def hidden(self) -> int:
        """Columns of the residual stream, in the models whose layers are described."""
        return self.num_heads * self.head_dim

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """(out, in) of a layer's matrices: q, k, v in one, the output, into the MLP (gated: two), out."""
        wide = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        up = self.intermediate * (2 if self.gated else 1)
        return ((wide, self.hidden), (self.hidden,) * 2, (up, self.hidden), (self.hidden, self.intermediate))

    @property
    def kind(self) -> str:
        """MHA, GQA, MQA or MLA; empty where the query heads are not known."""
        if self.latent_dim:
            return "MLA"
        if not self.num_heads:
            return ""
        if self.num_kv_heads == 1:
            return "MQA"
        return "MHA" if self.num_kv_heads == self.num_heads else "GQA"


_FROM_MEMORY = "configuration from memory"
_GPT2 = partial(
    Preset, head_dim=64, source="Radford et al. 2019, table 2; heads of the released checkpoints",
    uncertain="heads from memory",
)  # fmt: skip
_GQA = partial(Preset, num_kv_heads=8, head_dim=128)
_LLAMA3 = partial(_GQA, source="Llama Team 2024, arXiv:2407.21783, table 3")
_QWEN25 = partial(_GQA, source="Qwen 2024, arXiv:2412.15115, table 1", uncertain=_FROM_MEMORY)
_QWEN3 = partial(_GQA, source="Qwen 2025, arXiv:2505.09388, tables 1 and 2")
_MLA = partial(
    Preset, num_heads=128, num_kv_heads=128, head_dim=192, head_dim_v=128, latent_dim=512, rope_dim=64,
)  # fmt: skip

PRESETS: tuple[Preset, ...] = (
    _GPT2(name="gpt2-small", layers=12, num_heads=12, num_kv_heads=12, intermediate=3072,
          weights_bytes=249_000_000),
    _GPT2(name="gpt2-medium", layers=24, num_heads=16, num_kv_heads=16, intermediate=4096,
          weights_bytes=710_000_000),
    _GPT2(name="gpt2-large", layers=36, num_heads=20, num_kv_heads=20, intermediate=5120,
          weights_bytes=1_548_000_000),
    _GPT2(name="gpt2-xl", layers=48, num_heads=25, num_kv_heads=25, intermediate=6400,
          weights_bytes=3_115_000_000),
    Preset(
        name="bert-large", layers=24, num_heads=16, num_kv_heads=16, head_dim=64, causal=False,
        intermediate=4096,
        weights_bytes=670_000_000, source="Devlin et al. 2018, arXiv:1810.04805, section 3",
    ),
    _LLAMA3(name="llama-3-8b", layers=32, num_heads=32, intermediate=14336, gated=True,
            weights_bytes=16_060_000_000),
    _LLAMA3(name="llama-3-70b", layers=80, num_heads=64, intermediate=28672, gated=True,
            weights_bytes=141_100_000_000),
    _LLAMA3(name="llama-3-405b", layers=126, num_heads=128, weights_bytes=811_700_000_000,
            uncertain="released as Llama 3.1"),
    _GQA(
        name="mistral-7b", layers=32, num_heads=32, window=4096, windowed_layers=32,
        weights_bytes=14_480_000_000, source="Jiang et al. 2023, arXiv:2310.06825, table 1 (v0.1)",
        uncertain="later releases have no window",
    ),
    _GQA(
        name="mixtral-8x7b", layers=32, num_heads=32, weights_bytes=93_400_000_000,
        source="Jiang et al. 2024, arXiv:2401.04088, table 1", uncertain=_FROM_MEMORY,
    ),
    _QWEN25(name="qwen2.5-7b", layers=28, num_heads=28, num_kv_heads=4, weights_bytes=15_230_000_000),
    _QWEN25(name="qwen2.5-32b", layers=64, num_heads=40, weights_bytes=65_530_000_000),
    _QWEN25(name="qwen2.5-72b", layers=80, num_heads=64, weights_bytes=145_400_000_000),
    _QWEN3(name="qwen3-8b", layers=36, num_heads=32, weights_bytes=16_380_000_000, uncertain=_FROM_MEMORY),
    _QWEN3(name="qwen3-32b", layers=64, num_heads=64, weights_bytes=65_520_000_000),
    _QWEN3(name="qwen3-235b-a22b", layers=94, num_heads=64, num_kv_heads=4, weights_bytes=470_200_000_000,
           uncertain=_FROM_MEMORY),
    Preset(
        name="gpt-oss-120b", layers=36, num_heads=64, num_kv_heads=8, head_dim=64, window=128,
        windowed_layers=18, weights_bytes=65_300_000_000, weights="4-bit experts (MXFP4)",
        source="openai/gpt-oss, gpt_oss/torch/model.py: every other layer has the window",
        uncertain="size of the checkpoint from memory; attention sinks are one number per head, left out",
    ),
    _MLA(
        name="deepseek-v2", layers=60, weights_bytes=472_000_000_000,
        source="DeepSeek-AI 2024, arXiv:2405.04434, section 3.1.2",
    ),
    _MLA(
        name="deepseek-v3", layers=61, weights_bytes=671_000_000_000, weights="8 bit",
        source="DeepSeek-AI 2024, arXiv:2412.19437, section 4.2",
        uncertain="without the extra layer that predicts a second token",
    ),
)  # fmt: skip
"""Every known model, in the order in which they are listed."""


TINY = Preset(
    name="tiny", layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate=128, gated=True,
    weights_bytes=131_072, source="no published model: for tests of 'flashbench block'",
)  # fmt: skip
"""A model so small that a CPU's interpreter runs its layers."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A published measurement's problem: ``options`` as they would be typed, and what it printed."""

    name: str
    options: Mapping[str, str] = field(repr=False)
    source: str
    printed: str


WORKLOADS: tuple[Workload, ...] = (
    Workload(
        name="fa1-fig2",
        options={
            "batch": "64", "heads": "16", "seqlens": "1k", "head_dims": "64", "dtypes": "fp16",
            "causal": "no", "passes": "fwd+bwd",
        },
        source="Dao et al. 2022, arXiv:2205.14135, figure 2 (left), A100",
        printed=(
            "the figure prints 40.3 GB (standard) and 4.4 GB (flash) of HBM reads and writes, the conference"
            " text 35.3 and 4.4 GB; the passes that it counts (mask, dropout, softmax backward) are not"
            " stated, so the model's bytes can be consistent with it but cannot reproduce it; its 66.6 and"
            " 75.2 GFLOPs are not the matrix FLOPs of this workload"
        ),
    ),
)  # fmt: skip
"""Every known workload."""

SETS = ("heads", "kv_heads", "head_dims", "head_dims_v")
"""The options that a model sets."""

_BY_NAME = {row.name: row for row in PRESETS}
_WORKLOADS = {row.name: row for row in WORKLOADS}


def find(name: str, option: str = "--model") -> Preset:
    """The model of that name. Raises UnknownName, offering the nearest."""
    if name.strip() not in _BY_NAME:
        raise UnknownName(option, name, _BY_NAME)
    return _BY_NAME[name.strip()]


def workload(name: str, option: str = "--preset") -> Workload:
    """The workload of that name. Raises UnknownName, offering the nearest."""
    if name.strip() not in _WORKLOADS:
        raise UnknownName(option, name, _WORKLOADS)
    return _WORKLOADS[name.strip()]


def options(preset: Preset) -> dict[str, str]:
    """The model's heads and head dims as they would be typed."""
    return {
        "heads": str(preset.num_heads),
        "kv_heads": str(preset.num_kv_heads),
        "head_dims": str(preset.head_dim),
        "head_dims_v": str(preset.head_dim_v),
    }


def remark(preset: Preset) -> str:
    """What heads and head dims alone do not say of the model: windows, MLA's other form; or empty."""
    words = []
    if preset.windowed_layers:
        words.append(
            f"{preset.windowed_layers} of its {preset.layers} layers see {preset.window} keys"
            f" (io-model: --window tokens={preset.window})"
        )
    if preset.latent_dim:
        latent, absorbed = preset.latent_dim, preset.latent_dim + preset.rope_dim
        words.append(
            "heads as a prefill or training pass runs them; absorbed for decoding:"
            f" --heads {preset.num_heads} --kv-heads 1 --head-dims {absorbed} --head-dims-v {latent}"
        )
    if not preset.causal:
        words.append("an encoder: no causal mask")
    return f"{preset.name}: {'; '.join(words)}" if words else ""


def expand(typed: Mapping[str, str | bool], label: Callable[[str], str]) -> dict[str, str | bool]:
    """Options in which ``model`` is replaced by the heads and head dims that it stands for.

    ``label(name)`` is how errors call an option. Raises UnknownName for an unknown model and
    UsageError where the same options hold a number of heads or a head dim of their own.
    """
    rest = {name: value for name, value in typed.items() if name != "model"}
    if "model" not in typed:
        return rest
    model = str(typed["model"])
    preset = find(model, label("model"))
    for name in (*SETS, "hidden"):
        if name in rest:
            raise UsageError(
                f"{label('model')} {quoted(model)} and {label(name)} {quoted(rest[name])} exclude each other;"
                f" accepted: one of the two (the model sets heads and head dims)"
            )
    return rest | options(preset)
