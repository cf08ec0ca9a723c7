"""``flashbench io-model --world-size``: bytes over the link, and when compute hides them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flashbench._cli import options
from flashbench.errors import UsageError

if TYPE_CHECKING:
    from flashbench._cli.io_request import Request

_WITHOUT = ("models", "sram", "block_q", "block_k", "sweep_sram", "sweep_block", "html", "pack_gqa", "splits",
            "page_size", "density")  # fmt: skip
MAX_RANKS = 1024
MAX_ROWS = 6000


def show(request: Request, line: Mapping[str, str | None], *, json: bool, csv: bool, quiet: bool) -> None:
    """A row per problem, pass, algorithm and card. Raises UsageError for options that change none."""
    from flashbench import links, units
    from flashbench._cli import ring_table
    from flashbench._iomodel import across
    from flashbench.problem import Cell
    from flashbench.ring import rows

    for name in _WITHOUT:
        if (text := line.get(name)) is not None:
            option = options.on_line(name)
            raise UsageError(
                f"{option} {units.quoted(text)} changes no byte over the link; accepted: without --world-size"
            )
    ranks = units.parse_int(line["world_size"] or "", "--world-size", maximum=MAX_RANKS)
    link = line.get("link")
    if link is not None:
        units.parse_choice(link, "--link", links.KINDS)
        if line.get("gpu") is None:
            raise UsageError(f"--link {link!r} needs a card; accepted: with --gpu")
    sizes = {units.PROBLEMS: len(request.problems), "--passes": len(request.passes),
             "--gpu and other axes of cards": len(request.choices),
             "algorithms of --world-size": len(across.ALGORITHMS)}  # fmt: skip
    units.limit(sizes, MAX_ROWS, "rows")
    found = []
    for problem in request.problems:
        for pass_ in request.passes:
            for name in across.ALGORITHMS:
                cell = Cell(implementation=name, problem=problem, pass_=pass_)
                for choice in request.choices:
                    row = rows.modelled(cell, ranks, choice.device, link or "")
                    gpu = choice.device.name if choice.device else None
                    reason = across.why_unsupported(name, problem, ranks)
                    found.append(row | {"gpu": gpu, "reason": reason})
    ring_table.show_model(found, json=json, csv=csv, quiet=quiet)


def refuse_link(line: Mapping[str, str | None]) -> None:
    """Raise UsageError for a link without ranks."""
    if line.get("link") is not None:
        raise UsageError(f"--link {line['link']!r} needs --world-size; accepted: both, or neither")
