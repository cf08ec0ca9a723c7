"""The options that commands share, and how what was typed becomes parsed layers.

Every value is taken as text (None: not on the line), so that the units, the ranges and the error
messages are those of ``sweep`` and ``units``, for the command line and config files alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashbench import paths
from flashbench.errors import SpecError, UsageError

if TYPE_CHECKING:
    from flashbench.kernels import Target
    from flashbench.tuned import Tuned as TunedFile

_GRID, _OUTPUT = "Grid", "Output"


def path(text: str, name: str, accepted: str) -> str:
    """What was typed for a path that must be given. Raises UsageError for a blank, which the system takes."""
    if not text.strip():
        raise UsageError(f"{name} {text!r}: no path; accepted: {accepted}")
    return text


def folder(text: str, name: str) -> Path:
    """A folder of results files that is there. Raises UsageError."""
    from flashbench.units import quoted

    if not text.strip() or not Path(text).is_dir():
        raise UsageError(f"{name} {quoted(text, 400)}: no such folder; accepted: a folder of results files")
    return Path(text)


def complete_names(known: tuple[str, ...], incomplete: str) -> list[str]:
    """Completions of the last name of a comma list."""
    head, _, last = incomplete.rpartition(",")
    prefix = f"{head}," if head else ""
    return [prefix + name for name in known if name.startswith(last)]


def _implementations(incomplete: str) -> list[str]:
    from flashbench import kernels

    return complete_names(tuple(kernels.registry()), incomplete)


def models(incomplete: str) -> list[str]:
    """Completions of --model."""
    from flashbench.presets import PRESETS

    return complete_names(tuple(row.name for row in PRESETS), incomplete)


def gpus(incomplete: str) -> list[str]:
    """Completions of --gpu."""
    from flashbench.devices import DEVICES

    return complete_names(tuple(row.name for row in DEVICES), incomplete)


def _dtypes(incomplete: str) -> list[str]:
    return complete_names(("fp16", "bf16", "fp32", "tf32", "fp8", "fp8-e5m2"), incomplete)


def _passes(incomplete: str) -> list[str]:
    return complete_names(("fwd", "bwd", "fwd+bwd"), incomplete)


def _causal(incomplete: str) -> list[str]:
    return complete_names(("yes", "no", "both", "top-left"), incomplete)


def _grid(help_: str, metavar: str, complete: Any = None) -> Any:
    return typer.Option(help=help_, metavar=metavar, rich_help_panel=_GRID, autocompletion=complete)


Seqlens = Annotated[
    str | None,
    _grid("Sequence lengths: '1k-64k' doubles, '512,1k,3k' lists, '1k-8k+1k' steps. k = 1024.", "LENGTHS"),
]
SeqlensK = Annotated[
    str | None, _grid("Key/value lengths, crossed with --seqlens. Default: the same as --seqlens.", "LENGTHS")
]
HeadDims = Annotated[str | None, _grid("Head dims of Q and K.", "DIMS")]
HeadDimsV = Annotated[
    str | None, _grid("Head dims of V, crossed with --head-dims. Default: the same as --head-dims.", "DIMS")
]
Dtypes = Annotated[
    str | None, _grid("fp16, bf16, fp32 (IEEE), tf32, fp8, fp8-e5m2: a comma list.", "NAMES", _dtypes)
]
Impls = Annotated[
    str | None,
    _grid(
        "Implementations, a comma list; 'flashbench list implementations' shows all; none: --impl alone.",
        "NAMES",
        _implementations,
    ),
]
Impl = Annotated[
    list[str] | None,
    _grid("A function of your own, FILE.py:FUNCTION or MODULE:FUNCTION; repeatable.", "SPEC"),
]
Causal = Annotated[
    str | None,
    _grid(
        "Causal mask: yes, no or both (bottom-right: the last query sees every key), or top-left.",
        "CHOICE",
        _causal,
    ),
]
Passes = Annotated[str | None, _grid("fwd, bwd, fwd+bwd: a comma list.", "NAMES", _passes)]
Batch = Annotated[str | None, _grid("Batch size. Excludes --tokens.", "N")]
Tokens = Annotated[str | None, _grid("Batch = max(1, tokens // seqlen). Excludes --batch.", "N")]
Heads = Annotated[str | None, _grid("Query heads. Excludes --hidden.", "N")]
Hidden = Annotated[str | None, _grid("Heads = max(1, hidden // head dim). Excludes --heads.", "N")]
KvHeads = Annotated[
    str | None,
    _grid("K/V heads (GQA, MQA), a number or a list; must divide the heads. Default: as heads.", "N"),
]
Model = Annotated[
    str | None,
    _grid("Heads and head dims of a published model; 'flashbench list presets' shows all.", "NAME", models),
]
Features = dict[str, Any] | None
"""The options that ``feature_options.with_features`` puts in its place."""

Tuned = Annotated[
    str | None,
    typer.Option(
        help="Configurations from a file of 'flashbench tune', in place of the tables'.", metavar="FILE"
    ),
]
Device = Annotated[
    str | None,
    typer.Option(help="cuda:N, cuda or cpu. Default: the first GPU, else cpu.", metavar="DEVICE"),
]
Seed = Annotated[str | None, typer.Option(help="Seed of the random inputs. Default: 0.", metavar="N")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.", rich_help_panel=_OUTPUT)]
Csv = Annotated[bool, typer.Option("--csv", help="Print CSV to stdout.", rich_help_panel=_OUTPUT)]
Html = Annotated[
    str | None,
    typer.Option(help="Also write an interactive page.", metavar="FILE", rich_help_panel=_OUTPUT),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No notes, no progress.", rich_help_panel=_OUTPUT)]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="One line per cell on stderr.", rich_help_panel=_OUTPUT)
]


def flag(help_: str, *names: str, panel: str = _OUTPUT) -> Any:
    """An option that is on, off or not given, so that the line can undo a config file."""
    return typer.Option(*names, help=help_, rich_help_panel=panel)


def on_line(name: str) -> str:
    """The option as it is typed: seqlens_k is --seqlens-k."""
    return "--" + name.replace("_", "-")


def given(values: Mapping[str, Any]) -> dict[str, str | bool]:
    """The options that stand on the line; those of ``features`` beside the command's own."""
    flat = {**values, **values.get("features", {})}
    flat.pop("features", None)
    if "impl" in flat:
        flat["impl"] = ",".join(flat["impl"]) if flat["impl"] else None
    return {name: value for name, value in flat.items() if value is not None}


def refuse_own(specs: Iterable[str], where: str, more: str = "") -> None:
    """Raise UsageError where a file names functions to import: a file may come from anybody, and its word
    alone runs nothing. where: the file; more: what is accepted beside --impl on the line.
    """
    for spec in specs:
        raise UsageError(
            f"{where}: impl {spec!r} would be imported, and no file runs code on its own word;"
            f" accepted: --impl SPEC on the line{more}"
        )


def own(specs: Iterable[str]) -> None:
    """Look at the spec of each function of --impl, before torch is imported. Raises UsageError."""
    from flashbench.kernels import _own, registry

    for spec in specs:
        if spec not in registry():
            _own.look(spec)


def fraction(text: str, option: str) -> Fraction:
    """A share above 0, at most 1, exact: "0.9" is 9/10. Raises SpecError."""
    found = re.fullmatch(r"[0-9]?\.[0-9]{1,9}|[01]", text.strip())
    value = Fraction(text.strip()) if found else Fraction(0)
    if not 0 < value <= 1:
        raise SpecError(f"{option} {text!r}: not a share; accepted: a number above 0, at most 1, such as 0.9")
    return value


def tuned(path: Path | None, target: Target, *, quiet: bool) -> TunedFile | None:
    """The file of --tuned, fit for the target, with a note on what differs; None without one. Raises as
    ``tuned.read``.
    """
    if path is None:
        return None
    from flashbench import console
    from flashbench.tuned import read

    found = read(path, target)
    for text in () if quiet else found.notes:
        console.note(text)
    return found


def settle(names: Iterable[str], target: Target) -> None:
    """Let each implementation look at the target before anything else runs.

    Triton compiles or interprets for the life of the process, as decided when it is first imported,
    and torch imports it by itself: the kernel that cares must come first. Raises UsageError where kernels
    would be compiled for the target and Triton has no folder for them, and where a function of --impl cannot
    be imported.
    """
    from flashbench import kernels
    from flashbench.kernels import _triton

    for name in names:
        implementation = kernels.get(name)
        if implementation.origin and implementation.origin.spec == name:
            implementation.origin.load(target)
        unavailable = implementation.why_unavailable(target)
        if implementation.prepare_tiles and not unavailable and not implementation.interpreted(target):
            _triton.check_cache()


def spare(path: Path, label: str, inputs: Iterable[Path | str | None] = ()) -> Path:
    """The path, refused before anything runs where an output may not take the place of what is there
    (``paths.why_kept``). label: how it was typed. Raises UsageError."""
    if why := paths.why_kept(path, (one for one in inputs if one is not None)):
        raise UsageError(f"{label}: {why}; accepted: another path")
    return path


def out_file(text: str, inputs: Iterable[Path | str | None] = ()) -> Path:
    """The file of --out, refused before anything runs if it cannot be one. Raises UsageError."""
    path = Path(text)
    if not text.strip() or path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(f"--out {text!r}: not a file in a folder that is there; accepted: a file to write")
    return spare(path, f"--out {text!r}", inputs)


def write_out(path: Path, text: str) -> None:
    """Write the file of --out. Raises UsageError where the disk refuses."""

    try:
        paths.put(path, text)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"--out {str(path)!r}: {reason}; accepted: a file that can be written") from None


def one_format(json: bool, csv: bool) -> None:
    """Raise UsageError where both formats are asked for."""
    if json and csv:
        raise UsageError("--json and --csv exclude each other; accepted: one of the two")


def one_volume(quiet: bool, verbose: bool) -> None:
    """Raise UsageError where both volumes are asked for."""
    if quiet and verbose:
        raise UsageError("--quiet and --verbose exclude each other; accepted: one of the two")
