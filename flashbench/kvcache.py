"""The KV cache of a decoder: bytes per token and in all, pages, what fits, the bound on decode time.

    estimate(presets.find("llama-3-70b"), seqlen=131072, batch=4, dtype="bf16") -> CacheEstimate
    estimate(..., serving=Serving(device=devices.find("h100-sxm"), tp=8))

Exact integers from closed forms, tested against a walk over layers, heads and pages. A layer
caches, per token, num_kv_heads · (head_dim + head_dim_v) numbers; with MLA latent_dim + rope_dim,
shared by all heads (DeepSeek-V2, arXiv:2405.04434, section 2.1). A windowed layer keeps the last
``window`` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from flashbench import links
from flashbench.devices import Device
from flashbench.errors import SpecError, UnknownName
from flashbench.presets import Preset

CACHE_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8, "int8": 8, "fp4": 4, "int4": 4}
"""Bits of one cached number by dtype, scales apart."""

PAGE_SIZE = 16
"""Tokens of one page where none are asked for."""

MEMORY_FRACTION = Fraction(9, 10)
"""Share of a card's memory that weights and cache may take; the rest is for activations."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How a model is served.

    page_size: tokens per page of one layer; an allocation is whole pages. device: the card, None
    for none. tp: cards that share the KV heads (tensor parallel); with more cards than KV heads, or
    with MLA, each card holds a copy. cp: groups of such cards that share the tokens of each
    sequence, page by page in turns (split-KV across cards, context parallel): each decodes over its
    own, and partial o and lse go to all. link: of links.KINDS, over which they go; empty for the
    fastest. weights_bytes: of the whole model, None for the published checkpoint. memory_fraction:
    see MEMORY_FRACTION. scale_bytes: bytes of quantisation scales per token and layer, for each of
    K and V of each head (MLA: for the latent).
    """

    page_size: int = PAGE_SIZE
    device: Device | None = None
    tp: int = 1
    cp: int = 1
    link: str = ""
    weights_bytes: int | None = None
    memory_fraction: Fraction = MEMORY_FRACTION
    scale_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class CacheEstimate:
    """The cache of ``batch`` sequences of ``seqlen`` tokens; bytes are exact integers.

    token_bytes: what one more token adds in all layers while no window is full, whole model.
    sequence_bytes, total_bytes: one sequence and the batch, whole model, without page rounding.
    window_saved_bytes: what windows save of total_bytes. pages: pages per sequence, layer by layer
    added up; page_bytes: one page of one layer on one card. card_bytes: the batch on one card, in
    whole pages. room_bytes: memory of one card for the cache, None without a card; below 0 where
    the weights alone do not fit. sequences: how many such sequences fit. decode_read_bytes: what
    one decode step of the batch reads of the cache on one card; decode_flops: its matrix FLOPs
    there (MLA: absorbed). decode_link_bytes: what one card sends in a step to the others that hold other
    tokens. decode_bytes_s, decode_flops_s, decode_link_s: the seconds that these take at least, at
    the card's bandwidth, dense peak and link; decode_s: the larger of the first two, then the last, which
    waits for them in every layer: the bound on one step.
    """

    preset: Preset
    seqlen: int
    batch: int
    dtype: str
    serving: Serving
    token_bytes: int
    sequence_bytes: int
    total_bytes: int
    window_saved_bytes: int
    pages: int
    page_bytes: int
    card_bytes: int
    decode_read_bytes: int
    decode_flops: int
    decode_link_bytes: int = 0
    room_bytes: int | None = None
    sequences: int | None = None
    decode_bytes_s: float | None = None
    decode_flops_s: float | None = None
    decode_link_s: float | None = None

    @property
    def decode_s(self) -> float | None:
        """Seconds that one decode step (one token per sequence) takes at least, for its attention."""
        local = self._local_s
        return None if local is None else local + (self.decode_link_s or 0.0)

    @property
    def _local_s(self) -> float | None:
        return max((t for t in (self.decode_bytes_s, self.decode_flops_s) if t is not None), default=None)

    @property
    def limit(self) -> str | None:
        """What takes most of the decode step: ``bandwidth``, ``compute`` or ``link``."""
        local = self._local_s
        if local is None:
            return None
        if (self.decode_link_s or 0.0) > local:
            return "link"
        return "bandwidth" if local == self.decode_bytes_s else "compute"

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte of cache read in a decode step, None where the query heads are not known."""
        return self.decode_flops / self.decode_read_bytes if self.preset.num_heads else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of the whole batch at the bound."""
        return None if self.decode_s is None else self.batch / self.decode_s


def estimate(
    preset: Preset, *, seqlen: int, batch: int = 1, dtype: str = "bf16", serving: Serving | None = None
) -> CacheEstimate:
    """The cache of ``batch`` sequences of ``seqlen`` tokens each, in ``dtype``.

    Raises UnknownName for a dtype without a row in CACHE_BITS and SpecError for a size below 1 or a
    tp that neither divides the KV heads nor is a multiple of them, or does not divide the heads.
    """
    how = serving or Serving()
    _check(preset, how, seqlen, batch, dtype)
    whole = layer_token_bytes(preset, dtype, scale_bytes=how.scale_bytes)
    card = layer_token_bytes(preset, dtype, tp=how.tp, scale_bytes=how.scale_bytes)
    full, windowed = preset.layers - preset.windowed_layers, preset.windowed_layers
    kept = min(seqlen, preset.window or seqlen)
    slots = full * seqlen + windowed * kept
    pages = full * pages_of(seqlen, None, how.page_size) + windowed * pages_of(
        seqlen, preset.window, how.page_size
    )
    on_card = full * _shared(pages_of(seqlen, None, how.page_size), how.cp) + windowed * _shared(
        pages_of(seqlen, preset.window, how.page_size), how.cp
    )
    page_bytes = how.page_size * card
    sequence_card = on_card * page_bytes
    device = how.device
    room = None if device is None else _room(preset, how, device)
    mine = full * _tokens(seqlen, how) + windowed * _tokens(kept, how)
    reads = batch * mine * card
    work = batch * mine * _flops_per_slot(preset) // how.tp
    sent = batch * preset.layers * (how.cp - 1) * _partial_bytes(preset, how.tp)
    peak = None if device is None else _peak(device, dtype)
    return CacheEstimate(
        preset=preset, seqlen=seqlen, batch=batch, dtype=dtype, serving=how,
        token_bytes=preset.layers * whole,
        sequence_bytes=slots * whole,
        total_bytes=batch * slots * whole,
        window_saved_bytes=batch * windowed * (seqlen - kept) * whole,
        pages=pages,
        page_bytes=page_bytes,
        card_bytes=batch * sequence_card,
        decode_read_bytes=reads,
        decode_flops=work,
        decode_link_bytes=sent,
        room_bytes=room,
        sequences=None if room is None else max(0, room) // sequence_card,
        decode_bytes_s=None if device is None else reads / device.hbm_bytes_per_s,
        decode_flops_s=None if peak is None else work / peak,
        decode_link_s=sent / _link_rate(how, device) if device is not None and sent else None,
    )  # fmt: skip


def layer_token_bytes(preset: Preset, dtype: str, *, tp: int = 1, scale_bytes: int = 0) -> int:
    """Bytes that one layer caches of one token on one of ``tp`` cards, a broken byte rounded up."""
    if preset.latent_dim:
        return -(-(preset.latent_dim + preset.rope_dim) * CACHE_BITS[dtype] // 8) + scale_bytes
    heads = -(-preset.num_kv_heads // tp)
    numbers = heads * (preset.head_dim + preset.head_dim_v)
    return -(-numbers * CACHE_BITS[dtype] // 8) + 2 * heads * scale_bytes


def pages_of(seqlen: int, window: int | None, page_size: int) -> int:
    """Pages of one layer for one sequence: those that hold one of the last ``window`` tokens."""
    first = max(0, seqlen - window) if window else 0
    return (seqlen - 1) // page_size - first // page_size + 1


def _shared(count: int, cards: int) -> int:
    """Of things dealt out in turns, those of the card that has most."""
    return -(-count // cards)


def _tokens(kept: int, how: Serving) -> int:
    """Of a layer's kept tokens those on the card that has most: all without cp, else whole pages in turns."""
    return min(kept, _shared(-(-kept // how.page_size), how.cp) * how.page_size)


def _partial_bytes(preset: Preset, tp: int) -> int:
    """Partial o and lse in fp32 of one token's query heads on one card of a layer."""
    width = preset.latent_dim or preset.head_dim_v
    return 4 * (preset.num_heads // tp) * (width + 1)


def _link_rate(how: Serving, device: Device) -> float:
    found = links.of(device.name)
    return found.rate(how.link or found.fastest)


def _flops_per_slot(preset: Preset) -> int:
    """Matrix FLOPs of one query token against one cached token of one layer, all heads."""
    if preset.latent_dim:
        return 2 * preset.num_heads * (2 * preset.latent_dim + preset.rope_dim)
    return 2 * preset.num_heads * (preset.head_dim + preset.head_dim_v)


def _room(preset: Preset, how: Serving, device: Device) -> int:
    weights = preset.weights_bytes if how.weights_bytes is None else how.weights_bytes
    return int(device.hbm_bytes * how.memory_fraction) - -(-weights // how.tp)  # a copy to each of cp


def _peak(device: Device, dtype: str) -> float | None:
    """The fastest dense peak that products with a cache of that dtype could run at."""
    names = {"fp8": ("fp8", "bf16", "fp16"), "fp32": ("tf32", "fp32")}.get(dtype, ("bf16", "fp16"))
    rates = [rate for name in names if (rate := device.peak_flops_per_s.get(name)) is not None]
    return max(rates, default=None)


def _check(preset: Preset, how: Serving, seqlen: int, batch: int, dtype: str) -> None:
    if dtype not in CACHE_BITS:
        raise UnknownName("dtype", dtype, CACHE_BITS)
    sizes = {"seqlen": seqlen, "batch": batch, "tp": how.tp, "cp": how.cp, "page_size": how.page_size}
    for name, value in sizes.items():
        if value < 1:
            raise SpecError(f"{name} {value} is out of range; it must be 1 or more")
    if how.cp > 1 and not preset.num_heads:
        raise SpecError(f"cp {how.cp} needs the query heads; it must be 1 without them")
    if how.scale_bytes < 0:
        raise SpecError(f"scale_bytes {how.scale_bytes} is out of range; it must be 0 or more")
    if not 0 < how.memory_fraction <= 1:
        raise SpecError(
            f"memory_fraction {how.memory_fraction} is out of range; it must be above 0, at most 1"
        )
    heads, kv_heads = preset.num_heads, preset.num_kv_heads
    if heads % how.tp:
        raise SpecError(
            f"tp {how.tp} does not divide {heads} query heads; it must be a divisor of {heads} that"
            f" fits the KV heads: {_fitting(preset)}"
        )
    if not preset.latent_dim and kv_heads % how.tp and how.tp % kv_heads:
        raise SpecError(
            f"tp {how.tp} does not fit {kv_heads} KV heads; it must divide {kv_heads} or be a multiple of it"
            + (f": {_fitting(preset)}" if heads else "")
        )


def _fitting(preset: Preset) -> str:
    """Every tp that both the query heads and the KV heads allow."""
    heads, shared = preset.num_heads, preset.num_kv_heads
    return ", ".join(
        str(tp)
        for tp in range(1, heads + 1)
        if heads % tp == 0 and (preset.latent_dim or not (shared % tp and tp % shared))
    )
