"""``flashbench calibrate``: what this card really reaches, measured and stored."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashbench._cli import options
from flashbench.errors import UnavailableError, UsageError

if TYPE_CHECKING:
    from flashbench.console import Column
    from flashbench.devices import Device


def calibrate(
    device: Annotated[
        str | None,
        typer.Option(help="cuda:N, cuda or cpu. Default: the first GPU.", metavar="DEVICE"),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="File to write. Default: this card's in the user's data folder, where the model finds it.",
            metavar="FILE",
        ),
    ] = None,
    json: options.Json = False,
    csv: options.Csv = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure this card's ceilings: copy, read, L2, matrix products per dtype, exponentials.

    Takes under a minute. Without a GPU it exits 3, unless --device cpu asks for what a CPU has.
    """
    options.one_format(json, csv)
    from flashbench import ceilings, console, environment, sweep

    console.listen(quiet=quiet)
    asked = sweep.OPTIONS["device"].parse
    assert asked is not None
    name = None if device is None else asked(device, "--device", ())
    path = _writable(out)
    target = environment.target(name)
    if target.type == "cpu" and name != "cpu":
        status = environment.gpu_status()
        raise UnavailableError(
            f"no GPU to calibrate: {status.message}",
            hint=status.hint or "'--device cpu' measures what a CPU has",
        )
    from flashbench import calibrate as measuring
    from flashbench._cli.interrupt import interrupted, interruptible

    with interruptible() as stop, console.progress(len(measuring.PROBES), quiet=quiet) as tick:
        document = measuring.measure(target, tick)
    if stop():
        raise interrupted("not all ceilings were measured, and none is stored")
    path = path or ceilings.path_for(document["device"]["name"], document["device"]["uuid"])
    rows = _rows(document)
    notes = [] if quiet else _notes(document)
    try:
        ceilings.save(document, path)
        notes = notes if quiet else [*notes, f"stored in {path}"]
    except OSError as error:  # what was measured is shown all the same
        console.warn(f"not stored in {str(path)!r}: {error.strerror or error}")
    if json:
        console.show_json(document)
    else:
        title = f"ceilings of {document['device']['name']}"
        console.show_table(_columns(), rows, csv=csv, title=title)
    for text in notes:
        console.note(text)


def _writable(out: str | None) -> Path | None:
    """The file asked for, refused before anything is measured. Raises UsageError."""
    from flashbench import ceilings, userdata

    if out is None:
        userdata.needed(ceilings.FOLDER, ceilings.VARIABLE)
        return None
    path = Path(out)
    if not out.strip() or path.is_dir():
        raise UsageError(f"--out {out!r}: not a file; accepted: a file to write")
    parent = path.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"--out {out!r}: there is no folder {str(parent)!r}; accepted: a file to write")
    return options.spare(path, f"--out {out!r}")


def _rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    from flashbench import devices

    row = document["device"]["id"]
    card = devices.find(row) if row else None
    found = []
    for item in document["measurements"]:
        sheet = _sheet(card, item["name"])
        value = item["value"]
        found.append({
            "name": item["name"], "value": value, "best": item.get("best"), "unit": item["unit"],
            "sheet": sheet, "fraction": value / sheet if value and sheet else None,
            "spread": item.get("spread"), "samples": item.get("samples"), "reason": item.get("reason"),
            "flags": item.get("flags") or None, "method": item["method"],
        })  # fmt: skip
    return found


def _sheet(card: Device | None, name: str) -> float | None:
    """What the table of cards says of that ceiling, or None."""
    if card is None:
        return None
    if name.startswith("flops_per_s."):
        return card.peak_flops_per_s.get(name.partition(".")[2])
    if name == "exps_per_s":
        return card.num_sms * card.mufu_per_clk_per_sm * card.clock_hz
    return card.hbm_bytes_per_s if name in ("copy_bytes_per_s", "read_bytes_per_s") else None


def _columns() -> list[Column]:
    from flashbench import units
    from flashbench.console import Column

    def number(name: str, header: str, format: Any) -> Column:
        return Column(name=name, header=header, format=format, justify="right")

    scaled = units.format_count
    return [
        Column(name="name", header="ceiling"),
        number("value", "sustained", scaled),
        number("best", "best", scaled),
        Column(name="unit", header="unit"),
        number("sheet", "data sheet", scaled),
        number("fraction", "of it", "{:.1%}".format),
        number("spread", "spread", "{:.1%}".format),
        number("samples", "samples", str),
        Column(name="flags", header="flags", format=", ".join),
        Column(name="reason", header="why not"),
    ]


def _notes(document: Mapping[str, Any]) -> list[str]:
    from flashbench import units

    rate = partial(units.format_count, unit="s")
    seconds = sum(item.get("seconds") or 0 for item in document["measurements"])
    return [
        "sustained: the median of the later half of the samples, as the card settles; best: the fastest"
        " sample; rates in units of 1000 (GB = 10^9 bytes); exponentials: the data sheet's is 16 (or 32) per"
        f" clock and SM; {rate(seconds)} of samples",
    ]
