"""A stored noise profile: how far runs of a grid were seen to differ on a device.

``flashbench noise RUNS`` writes it, ``compare`` finds it by the device's name. One JSON object: ``type``
"noise", ``schema`` 1, ``created_at`` (UTC), ``device``, ``runs``, and ``metrics``: by name the
``correlation`` of cells within a run and ``cells``, by key [standard deviation of the logarithm, degrees of
freedom]; from five cells on also ``shared``, such a pair for what runs differ by in all cells, and ``own``,
by key for what is left of each. Files without these two have them worked out of the correlation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flashbench import paths, userdata
from flashbench.errors import RunFileError, UsageError
from flashbench.judge.spread import Repeats, Spread

SCHEMA = 1
FOLDER, VARIABLE = "noise", "FLASHBENCH_NOISE"
"""Of the files, in the user's data; the environment variable names another."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a file holds. measures: by name."""

    device: str
    measures: Mapping[str, Repeats]
    path: str = ""


def path_for(device: str) -> Path:
    """The file of that device: in $FLASHBENCH_NOISE, else in flashbench/noise in the user's data.

    Raises UsageError where there is no such folder.
    """
    folder = userdata.needed(FOLDER, VARIABLE)
    stem = re.sub(r"[^A-Za-z0-9.-]+", "-", device).strip("-.") or "unnamed"
    return folder / f"{stem[:100]}.json"


def save(profile: Profile, runs: int, path: Path) -> None:
    """Write it whole or not at all. Raises UsageError where the disk refuses."""
    document = {
        "type": "noise", "schema": SCHEMA, "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": profile.device, "runs": runs,
        "metrics": {
            name: _document(seen) for name, seen in profile.measures.items()
        },
    }  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        paths.put(path, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror or error}); accepted: a path that can"
        ) from None


def _document(seen: Repeats) -> dict[str, Any]:
    def pairs(cells: Mapping[str, Spread]) -> dict[str, list[float]]:
        return {key: list(spread) for key, spread in cells.items()}

    found: dict[str, Any] = {"correlation": seen.correlation, "cells": pairs(seen.cells)}
    if seen.shared is not None:
        found |= {"shared": list(seen.shared), "own": pairs(seen.own)}
    return found


def load(path: Path | str) -> Profile:
    """The profile in a file.

    Raises UsageError for a file that cannot be opened, RunFileError for one that is no noise profile.
    """
    where = f"noise profile {str(path)!r}"
    try:
        text = paths.whole(path).decode("utf-8")
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror or error}; accepted: a file that can be read") from None
    except UnicodeDecodeError:
        raise RunFileError(f"{where}: not text; accepted: what 'flashbench noise' writes") from None
    try:
        return _parse(json.loads(text), str(path))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        said = f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise RunFileError(f"{where}: {said}; accepted: what 'flashbench noise' writes") from None


def _parse(document: Any, path: str) -> Profile:
    if not isinstance(document, dict) or document.get("type") != "noise":
        raise ValueError("no noise profile")
    if document["schema"] != SCHEMA:
        raise ValueError(f"schema {document['schema']!r}; this flashbench reads {SCHEMA}")
    measures = {name: _repeats(value) for name, value in document["metrics"].items()}
    return Profile(device=str(document["device"]), measures=measures, path=path)


MOST = 100.0
"""Spread of a cell's runs, as a logarithm, beyond which it is no spread of times: a factor of e**100."""


def _repeats(value: Mapping[str, Any]) -> Repeats:
    cells = _spreads(value["cells"])
    correlation = float(value["correlation"])
    if not 0 <= correlation <= 1:
        raise ValueError(f"correlation is {correlation}")
    if "shared" not in value:
        return Repeats(cells=cells, correlation=correlation)
    shared = _spreads({"shared": value["shared"]})["shared"]
    return Repeats(cells=cells, correlation=correlation, shared=shared, own=_spreads(value["own"]))


def _spreads(pairs: Mapping[str, Any]) -> dict[str, Spread]:
    found = {key: Spread(*map(float, pair)) for key, pair in pairs.items()}
    for key, spread in found.items():
        if not (0 <= spread.deviation <= MOST and 0 < spread.df < 1e9):
            raise ValueError(
                f"{key!r} has a spread of {spread.deviation} with {spread.df} degrees of freedom"
            )
    return found


def stored(device: str) -> Profile | None:
    """The profile that this machine keeps of that device, None where there is none."""
    if userdata.folder(FOLDER, VARIABLE) is None:
        return None
    path = path_for(device)
    return load(path) if path.is_file() else None
