"""The what-if options of ``flashbench io-model``: sweeps of M and of block sizes, and the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flashbench import paths
from flashbench._cli import options
from flashbench.errors import UsageError

if TYPE_CHECKING:
    from flashbench._cli.io_request import Request
    from flashbench.iomodel import Choice

_REPLACES = {"sweep_sram": ("sram",), "sweep_block": ("block_q", "block_k")}


def swept(line: Mapping[str, str | None], choices: Sequence[Choice]) -> list[Choice]:
    """Every choice at every size of --sweep-sram and every square tile of --sweep-block, the card innermost.

    Raises SpecError for a bad range and UsageError beside an option that sets the same.
    """
    sizes, blocks = ranges(line)
    return [
        choice._replace(
            sram_bytes=size or choice.sram_bytes,
            tiles={"block_q": block, "block_k": block} if block else choice.tiles,
        )
        for size in sizes or (None,)
        for block in blocks or (None,)
        for choice in choices
    ]


def ranges(line: Mapping[str, str | None]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes of --sweep-sram in bytes and the rows of --sweep-block; empty where not given."""
    from flashbench import units

    for name, others in _REPLACES.items():
        for other in others:
            if line.get(name) is not None and line.get(other) is not None:
                raise UsageError(
                    f"{options.on_line(name)} {units.quoted(line[name])} and {options.on_line(other)}"
                    f" {units.quoted(line[other])} exclude each other; accepted: one of the two"
                )
    sram, block = line.get("sweep_sram"), line.get("sweep_block")
    return (
        units.parse_byte_axis(sram, "--sweep-sram") if sram is not None else (),
        units.parse_axis(block, "--sweep-block", maximum=2**20) if block is not None else (),
    )


def page_path(text: str, inputs: Iterable[Path | str | None] = ()) -> Path:
    """The file of --html, refused before anything is computed. Raises UsageError."""
    from flashbench import units

    path = Path(text)
    try:
        folder = path.is_dir() or not text.strip()
        missing = not path.absolute().parent.is_dir()
    except (OSError, ValueError) as error:
        raise UsageError(f"--html {units.quoted(text, 400)}: {error}; accepted: a file to write") from None
    if folder or missing:
        why = "not a file" if folder else "its folder does not exist"
        raise UsageError(f"--html {units.quoted(text, 400)}: {why}; accepted: a file to write")
    return options.spare(path, f"--html {units.quoted(text, 400)}", inputs)


def write_page(request: Request, line: Mapping[str, str | None], path: Path, argv: Sequence[str]) -> None:
    """Write the page of the request: over lengths with its cards, over M and over block sizes without.

    Bundled kernels stand as the models that describe them. Raises UsageError where it cannot be written.
    """
    import shlex

    from flashbench import whatif
    from flashbench.report import io_page

    sizes, blocks = ranges(line)
    cards = {choice.device.name: choice.device for choice in request.choices if choice.device}
    study = whatif.study(
        request.problems,
        request.passes,
        tuple(dict.fromkeys(request.kernels.get(name, name) for name in request.names)),
        tuple(cards.values()),
        sram=sizes,
        blocks=blocks,
        variant=request.choices[0].variant,
    )
    put(path, io_page.build(study, command=shlex.join(["flashbench", *argv])))


def put(path: Path, text: str) -> None:
    """Write the file of --html. Raises UsageError where it cannot be written."""
    from flashbench import units

    try:
        paths.put(path, text)
    except OSError as error:
        raise UsageError(
            f"--html {units.quoted(path, 400)}: {error.strerror or error}; accepted: a file to write"
        ) from None
