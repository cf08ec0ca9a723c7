"""What all rows of one file share, and the refusal to go on with one that would not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flashbench.errors import UsageError
from flashbench.record import FLUSH
from flashbench.record_json import json_able

if TYPE_CHECKING:
    from flashbench.record import Record
    from flashbench.runfile import RunFile

CONDITIONS = ("cache", "seed", "timing", "load")
"""Options that all rows of one file share."""

AFTERWARDS = ("counters", "trace")
"""Fields of a record that are found after the sweep, by the option of the same name."""

SOURCE_HASH = "source_sha256"
"""Of the configuration of an implementation that is not flashbench's: which file it was measured from."""


def of_another_source(record: Record, sources: Mapping[str, str]) -> bool:
    """Whether the row is of another file than the implementation of its name is now.

    sources: the hash of the file now, by implementation that is not flashbench's.
    """
    now = sources.get(record.cell.implementation)
    return now is not None and record.config.get(SOURCE_HASH) != now


def refuse_unlike(found: RunFile, environment: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise UsageError where rows measured now would not compare with those of the file."""
    before, now = found.header["environment"].get("device_name"), environment.get("device_name")
    fleets = found.header["options"].get("executor") and options.get("executor")
    types = {one.get("device_type") for one in (found.header["environment"], environment)}
    if before != now and not (fleets and len(types) == 1):
        raise UsageError(
            f"{found.path} was measured on {before!r}; this is {now!r}, and a file holds one kind of device",
            hint="choose another --out",
        )
    for name in CONDITIONS:
        old, new = found.header["options"].get(name), json_able(options.get(name))
        if old is None and name == "cache":
            raise UsageError(
                f"{found.path} holds a check: nothing in it was timed", hint="choose another --out"
            )
        if old is None and new is not None:
            raise UsageError(
                f"{found.path} does not say with which --{name} it was measured; now it is {new!r}",
                hint="choose another --out",
            )
        if old != new:
            raise UsageError(
                f"{found.path} was measured with {name} {old!r}; now {name} is {new!r}",
                hint=f"pass --{name} {old}, or choose another --out",
            )
    if others := {record.samples.flush for record in found.records if record.samples} - {None, FLUSH}:
        said = f"{found.path} was measured with the L2 flushed by a {others.pop()}; now it is by a {FLUSH}"
        raise UsageError(said, hint="choose another --out")
    for name in AFTERWARDS:
        if found.header["options"].get(name) is True and options.get(name) is False:
            raise UsageError(
                f"{found.path} was measured with --{name}; now it is --no-{name}",
                hint=f"leave --no-{name} out, or choose another --out",
            )


def environment_notes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Which versions changed, one clause each."""
    names = ("driver", "torch", "triton", "cuda", "cudnn", "python", "flashbench", "source_hash")
    return [
        f"{name} was {before.get(name)} when the file was begun and is {now.get(name)} now"
        for name in names
        if before.get(name) != now.get(name)
    ]
