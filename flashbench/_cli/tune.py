"""``flashbench tune``: the fastest configurations of the bundled kernels here, as a file for --tuned."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashbench._cli import options
from flashbench.errors import GateError, SpecError, UnavailableError, UsageError

if TYPE_CHECKING:
    from flashbench.kernels import Target
    from flashbench.problem import Cell
    from flashbench.tuning import Case, Options

DEFAULTS: Mapping[str, str] = {
    "impls": "flash-v2", "seqlens": "4k", "head_dims": "64,128", "dtypes": "bf16", "causal": "both",
    "passes": "fwd,bwd", "tokens": "16k", "hidden": "2048",
}  # fmt: skip
"""The grid, as it would be typed."""

GRID = ("seqlens", "seqlens_k", "head_dims", "head_dims_v", "dtypes", "impls", "causal", "passes", "batch",
        "tokens", "heads", "hidden", "kv_heads", "model")  # fmt: skip
STEPS = ("kv_lens", "batch", "queries", "page_size", "dtypes", "model")
"""Options of each way to say what is tuned; --kv-lens chooses between them."""

ANY_CARD = "h100-sxm"
"""What --dry-run compiles for where there is no GPU and none is named."""


def tune(
    seqlens: options.Seqlens = None,
    seqlens_k: options.SeqlensK = None,
    head_dims: options.HeadDims = None,
    head_dims_v: options.HeadDimsV = None,
    dtypes: options.Dtypes = None,
    impls: options.Impls = None,
    causal: options.Causal = None,
    passes: options.Passes = None,
    batch: options.Batch = None,
    tokens: options.Tokens = None,
    heads: options.Heads = None,
    hidden: options.Hidden = None,
    kv_heads: options.KvHeads = None,
    model: options.Model = None,
    kv_lens: Annotated[
        str | None,
        typer.Option(
            help="Instead of a grid, steps of 'flashbench decode' over caches of so many keys.",
            metavar="LENGTHS",
        ),
    ] = None,
    page_size: Annotated[
        str | None, typer.Option(help="With --kv-lens: keys per page, a list; 0 is contiguous.", metavar="N")
    ] = None,
    queries: Annotated[
        str | None, typer.Option(help="With --kv-lens: new tokens per sequence. Default: 1.", metavar="N")
    ] = None,
    candidates: Annotated[
        str | None,
        typer.Option(
            help="Configurations per kernel, nearest to the table's first. Default: 16.", metavar="N"
        ),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Time for everything, seconds or such as 5m.", metavar="TIME")
    ] = None,
    device: options.Device = None,
    gpu: Annotated[
        str | None, typer.Option(help="--dry-run: compile for this card of the table.", metavar="NAME")
    ] = None,
    seed: options.Seed = None,
    out: Annotated[
        str | None,
        typer.Option(help="File to write. Default: tuned-<device>.json in this folder.", metavar="FILE"),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Compile and list the candidates; needs no GPU and times nothing."),
    ] = False,
    json: options.Json = False,
    csv: options.Csv = False,
    quiet: options.Quiet = False,
) -> None:
    """Search the bundled kernels' configurations, check each against fp64, time them, write the fastest.

    A pass is tuned kernel by kernel, then as a whole, in turn with the table's own configuration. The file
    serves 'run', 'check', 'profile' and 'decode' as --tuned on the same GPU with the same Triton.

    Exits 3 without a GPU, 5 where the table's own configuration is wrong, 130 when interrupted, with all that
    was measured in the file.
    """
    line = {name: str(value) for name, value in options.given(locals()).items()}
    options.one_format(json, csv)
    request = resolve(line, dry_run=dry_run)
    from flashbench import console

    console.listen(quiet=quiet)
    if dry_run:
        from flashbench._cli import tune_show

        tune_show.candidates(request, json=json, csv=csv, quiet=quiet)
        return
    _tune(request, json=json, csv=csv, quiet=quiet)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is tuned, where, how, and the file; None for a dry run."""

    cases: tuple[Case, ...]
    target: Target
    options: Options
    out: Path | None


def resolve(line: Mapping[str, str], *, dry_run: bool) -> Request:
    """Read the line; what needs no device is judged before torch is imported.

    Raises UsageError, SpecError, UnknownName; UnavailableError where nothing can be timed, or compiled.
    """
    if "gpu" in line and not dry_run:
        raise UsageError("--gpu: is of --dry-run; accepted: --dry-run beside it, or --device")
    from flashbench import environment, kernels, sweep, tuning

    typed = sweep.parse(
        {name: line[name] for name in ("device", "seed") if name in line}, options.on_line, kernels.registry()
    )
    cases = tuple(_steps(line) if "kv_lens" in line else _cells(line))
    asked = tuning.Options(
        seed=typed.get("seed", 0), budget_s=_budget(line.get("budget")), per_kernel=_per_kernel(line)
    )
    out = _free(line["out"]) if "out" in line else None
    if dry_run:
        return Request(cases=cases, target=_card(line), options=asked, out=None)
    target = environment.target(typed.get("device"))
    if target.capability is None:
        status = environment.gpu_status()
        raise UnavailableError(
            f"no GPU to tune on: {status.message}",
            hint="'--dry-run' lists the candidates and what they compile to",
        )
    names = {case.cell.implementation for case in cases}
    options.settle(names, target)
    for name in sorted(names):
        if reason := kernels.get(name).why_unavailable(target):
            raise UnavailableError(f"{name}: {reason}")
    return Request(cases=cases, target=target, options=asked, out=out or _free(_default(target)))


def _cells(line: Mapping[str, str]) -> list[Case]:
    from flashbench import features, kernels, presets, sweep, tuning

    _only(line, GRID, STEPS, "without --kv-lens")
    known = tuning.tunable()
    grid: dict[str, str | bool] = {name: line[name] for name in GRID if name in line}
    grid = presets.expand(grid, options.on_line)
    for name in str(grid.get("impls", "")).split(","):
        if name.strip() in kernels.registry() and name.strip() not in known:
            raise UsageError(
                f"--impls {name.strip()!r}: it has no configurations to choose from;"
                f" accepted: {', '.join(known)}"
            )
    typed = sweep.parse(grid, options.on_line, known)
    cells = sweep.sweep_of(sweep.combine(typed, sweep.parse(DEFAULTS, options.on_line, known))).cells()
    features.check_not_empty((cell.problem for cell in cells), options.on_line, line)
    _check_head_dims(cells, line)
    if "top-left" in typed.get("causal", ()):
        raise SpecError("--causal 'top-left': tuned is one mask of either alignment; accepted: yes, no, both")
    return tuning.cases_of(cells)


def _check_head_dims(cells: Iterable[Cell], line: Mapping[str, str]) -> None:
    """Raise SpecError for a head dim that no kernel with configurations takes."""
    from flashbench import units
    from flashbench.flash_configs import MAX_HEAD_DIM

    for cell in cells:
        p = cell.problem
        if max(p.head_dim, p.head_dim_v) <= MAX_HEAD_DIM:
            continue
        wide_v = p.head_dim_v > MAX_HEAD_DIM and "head_dims_v" in line
        name = "head_dims_v" if wide_v else "head_dims" if "head_dims" in line else "model"
        raise SpecError(
            f"{options.on_line(name)} {units.quoted(line[name])}: no kernel takes a head dim of"
            f" {p.head_dim_v if wide_v else p.head_dim}; accepted: at most {MAX_HEAD_DIM}"
        )


def _steps(line: Mapping[str, str]) -> list[Case]:
    from flashbench import tuning
    from flashbench._cli import decode

    _only(line, STEPS, GRID, "with --kv-lens")
    if line.get("impls", "flash-decode") != "flash-decode":
        raise UsageError(f"--impls {line['impls']!r} with --kv-lens; accepted: flash-decode")
    texts = {name: line[name] for name in STEPS if name in line}
    if "dtypes" in texts:
        texts["dtype"] = texts.pop("dtypes")
    return tuning.steps_of(decode.parse_steps({**decode.DEFAULTS, **texts}))


def _only(line: Mapping[str, str], own: tuple[str, ...], other: tuple[str, ...], when: str) -> None:
    """Refuse an option that would do nothing. Raises UsageError."""
    for name in line:
        if name in other and name not in (*own, "impls"):
            raise UsageError(f"{options.on_line(name)} does nothing {when}; accepted: its own options")


def _budget(text: str | None) -> float | None:
    """Seconds; a plain number is seconds."""
    from flashbench import units

    if text is None:
        return None
    return units.parse_duration(f"{text}s" if re.fullmatch(r"[0-9]+", text.strip()) else text, "--budget")


def _per_kernel(line: Mapping[str, str]) -> int:
    from flashbench import tuning, units

    return units.parse_int(line.get("candidates", str(tuning.PER_KERNEL)), "--candidates", maximum=10_000)


def _card(line: Mapping[str, str]) -> Target:
    """The card to compile for: the one that is named, this machine's, or any."""
    from flashbench import environment, kernels
    from flashbench._cli.gpu import target_of

    if reason := kernels._triton.why_missing():
        raise UnavailableError(f"--dry-run: {reason}")
    if "gpu" in line:
        return target_of(line["gpu"])
    here = environment.target(line.get("device"))
    return here if here.capability is not None else target_of(ANY_CARD)


def _free(text: str) -> Path:
    """The file of --out, refused before anything runs if it cannot be written anew. Raises UsageError."""
    path = options.out_file(text)
    if path.exists():
        raise UsageError(
            f"--out {text!r}: exists and is not overwritten; accepted: a file that is not there yet"
        )
    return path


def _default(target: Target) -> str:
    return f"tuned-{re.sub(r'[^a-z0-9]+', '-', target.name.lower()).strip('-')}.json"


def _tune(request: Request, *, json: bool, csv: bool, quiet: bool) -> None:
    from flashbench import console, tuned, tuning
    from flashbench._cli import tune_show
    from flashbench._cli.interrupt import interrupted, interruptible

    out = request.out
    assert out is not None
    found = tuning.document(request.target, ["flashbench", *sys.argv[1:]])
    tuned.save(found, out)
    if not quiet:
        console.note(f"tuning {len(request.cases)} cases on {request.target.name}; results go to {out}")
    with interruptible() as stop, console.progress(len(request.cases), quiet=quiet) as tick:
        tuning.tune(
            request.cases, request.target, found, request.options,
            on_change=lambda: tuned.save(found, out), on_progress=lambda done, _, text: tick(done, text),
        )  # fmt: skip
    tune_show.found(found, json=json, csv=csv)
    if not quiet:
        console.note(f"stored in {out}; '--tuned {out}' uses it")
    if stop():
        done = sum(bool(case["winner"]) for case in found["cases"])
        raise interrupted(f"{out} has winners for {done} of {len(request.cases)} cases")
    verdict(found)


def verdict(found: Mapping[str, Any]) -> None:
    """Raise GateError where the table's own is wrong, UnavailableError where nothing could be tuned."""
    for case in found["cases"]:
        for trial in case["trials"]:
            if trial["own"] and trial["status"] == "wrong":
                raise GateError(f"the table's configuration is wrong in {case['case']}: {trial['reason']}")
    if not any(case["winner"] for case in found["cases"]):
        why = next((case["reason"] for case in found["cases"] if case["reason"]), "no candidate was timed")
        raise UnavailableError(f"nothing could be tuned: {why}")
