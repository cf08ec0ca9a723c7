"""The table of ``flashbench kv-cache``: its rows, columns, title and notes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashbench.console import Column
    from flashbench.kvcache import CacheEstimate


def row(e: CacheEstimate) -> dict[str, Any]:
    """All that is known of one, by column."""
    p, how = e.preset, e.serving
    weights = p.weights_bytes if how.weights_bytes is None else how.weights_bytes
    return {
        "model": p.name, "attention": p.kind or None, "layers": p.layers, "num_heads": p.num_heads or None,
        "num_kv_heads": p.num_kv_heads, "head_dim": p.head_dim, "head_dim_v": p.head_dim_v,
        "latent_dim": p.latent_dim or None, "rope_dim": p.rope_dim or None, "window": p.window,
        "windowed_layers": p.windowed_layers, "dtype": e.dtype, "batch": e.batch, "seqlen": e.seqlen,
        "token_bytes": e.token_bytes, "sequence_bytes": e.sequence_bytes, "total_bytes": e.total_bytes,
        "total_gb": e.total_bytes / 1e9, "total_gib": e.total_bytes / 2**30,
        "window_saved_bytes": e.window_saved_bytes,
        "page_size": how.page_size, "pages": e.pages, "page_bytes": e.page_bytes,
        "gpu": how.device.name if how.device else None, "tp": how.tp, "cp": how.cp,
        "card_bytes": e.card_bytes,
        "weights_bytes": weights if how.device else None, "room_bytes": e.room_bytes,
        "sequences": e.sequences, "decode_read_bytes": e.decode_read_bytes,
        "decode_link_bytes": e.decode_link_bytes, "decode_link_s": e.decode_link_s,
        "decode_flops": e.decode_flops or None, "intensity": e.intensity, "decode_s": e.decode_s,
        "tokens_per_s": e.tokens_per_s, "limit": e.limit,
    }  # fmt: skip


def columns() -> list[Column]:
    """All there are."""
    from flashbench import units
    from flashbench.console import Column

    def number(name: str, header: str, format: Any = str) -> Column:
        return Column(name=name, header=header, format=format, justify="right")

    size, gib = units.format_bytes, partial(units.format_bytes, binary=True)
    exact = "{:,} B".format
    return [
        Column(name="model", header="model"),
        Column(name="attention", header="kind"),
        number("layers", "layers"), number("num_heads", "heads"), number("num_kv_heads", "kv heads"),
        number("head_dim", "d"), number("head_dim_v", "dv"), number("latent_dim", "latent"),
        number("rope_dim", "rope"), number("window", "window"), number("windowed_layers", "windowed"),
        Column(name="dtype", header="dtype"),
        number("batch", "batch"), number("seqlen", "seqlen", units.format_length),
        number("token_bytes", "per token", exact), number("sequence_bytes", "per sequence", gib),
        number("total_bytes", "bytes", exact),
        number("total_gb", "total GB", "{:.2f}".format), number("total_gib", "total GiB", "{:.2f}".format),
        number("window_saved_bytes", "saved by window", gib),
        number("page_size", "page"), number("pages", "pages/seq", "{:,}".format),
        number("page_bytes", "page bytes", exact),
        Column(name="gpu", header="card"), number("tp", "cards"), number("cp", "groups"),
        number("card_bytes", "on each card", gib),
        number("weights_bytes", "weights", size), number("room_bytes", "room per card", gib),
        number("sequences", "sequences that fit", "{:,}".format),
        number("decode_read_bytes", "read per step", size),
        number("decode_flops", "FLOPs per step", partial(units.format_count, unit="FLOP")),
        number("decode_link_bytes", "sent per step", size),
        number("decode_link_s", "link at least", units.format_seconds),
        number("intensity", "FLOP/B", "{:.1f}".format),
        number("decode_s", "step at least", units.format_seconds),
        number("tokens_per_s", "tokens/s at most", units.format_count),
        Column(name="limit", header="limit"),
    ]  # fmt: skip


_RAW_ONLY = ("layers", "num_heads", "num_kv_heads", "head_dim", "head_dim_v", "latent_dim", "rope_dim",
             "window", "windowed_layers", "total_bytes", "page_size", "page_bytes", "decode_read_bytes",
             "decode_flops", "weights_bytes", "batch")  # fmt: skip
_WITH_CARD = ("gpu", "tp", "room_bytes", "sequences", "decode_s", "tokens_per_s", "limit")


def needed(columns: Sequence[Column], rows: Sequence[CacheEstimate]) -> list[Column]:
    """What a person needs; JSON and CSV have all."""
    card = any(row.serving.device for row in rows)
    hidden = {*_RAW_ONLY, *(() if card else _WITH_CARD)}
    if not any(row.preset.kind for row in rows):
        hidden.add("attention")
    if not any(row.preset.num_heads for row in rows):
        hidden.add("intensity")
    if not any(row.window_saved_bytes for row in rows):
        hidden.add("window_saved_bytes")
    if rows[0].serving.cp == 1:
        hidden |= {"cp", "decode_link_bytes", "decode_link_s"}
    if rows[0].batch == 1:
        hidden.add("sequence_bytes")
    return [column for column in columns if column.name not in hidden]


def title(rows: Sequence[CacheEstimate]) -> str:
    """What is the same in all rows."""
    how, first = rows[0].serving, rows[0]
    parts = [f"KV cache, batch {first.batch}, pages of {how.page_size} tokens"]
    shapes = {row.preset.name: row.preset for row in rows}
    if len(shapes) == 1:
        p = first.preset
        cached = (
            f"a latent of {p.latent_dim} + {p.rope_dim}"
            if p.latent_dim
            else f"{p.num_kv_heads} K/V heads of {p.head_dim}"
            + ("" if p.head_dim == p.head_dim_v else f" and {p.head_dim_v}")
        )
        parts.append(f"{p.layers} layers with {cached}")
        if p.windowed_layers:
            parts.append(f"{p.windowed_layers} of them keep {p.window} tokens")
    return ", ".join(parts)


def notes(rows: Sequence[CacheEstimate]) -> list[str]:
    """Units, what is assumed, and the sources of the shapes."""
    notes = [
        "GB = 10^9 bytes, GiB = 2^30 bytes; lengths k = 1024; per token: all layers of the whole model, while"
        " no window is full; on each card: whole pages, with what tensor parallel cannot share",
    ]
    shapes = {row.preset.name: row.preset for row in rows}.values()
    if any(row.serving.device for row in rows):
        share = float(rows[0].serving.memory_fraction)
        notes.append(
            f"room per card: {share:g} of its memory less its share of the weights"
            + "".join(
                f"; {p.name}: {row_weights / 1e9:.1f} GB ({p.weights})"
                for p, row_weights in {one.preset: row(one)["weights_bytes"] for one in rows}.items()
            )
        )
        notes.append(
            "step at least: one token for each sequence, its attention alone: bytes of the cache over the"
            " card's bandwidth or FLOPs over its dense peak, whichever is larger; reading the weights comes"
            " on top"
        )
    if any(row.room_bytes is not None and row.room_bytes < 0 for row in rows):
        notes.append(
            "room below 0: the weights alone do not fit; take more cards (--tp) or smaller --weights"
        )
    notes += [
        f"{p.name}: an encoder keeps no cache; shown is what K and V take" for p in shapes if not p.causal
    ]
    if rows[0].serving.cp > 1:
        notes.append(
            "split-KV: pages are dealt out in turns to the groups, each of which holds all weights; in each"
            " layer each card sends partial o and lse, fp32, to those with the same heads, and the step waits"
            " for them; link at least: at the link's rate, without the latency of every layer"
        )
    if any(p.latent_dim for p in shapes) and rows[0].serving.tp > 1:
        notes.append("MLA: every card holds the whole latent; only the query heads are shared")
    notes += [f"{p.name}: {p.source}" + (f"; {p.uncertain}" if p.uncertain else "") for p in shapes]
    return notes
