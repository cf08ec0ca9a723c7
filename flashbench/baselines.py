"""Baselines: older runs kept in a folder of plain files, found again by device and environment.

A store holds ``NAME/DEVICE/ENVIRONMENT/``: the runs as they were written (``results.jsonl``, or several) and
``baseline.json``: ``type`` "baseline", ``schema`` 1, ``name``, ``device``, ``environment`` (versions),
``commit``, ``saved_at`` (UTC) and ``files``, the SHA-256 of each by name. Nothing else is needed, so that a
folder in a repository, a branch or a CI cache may hold it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flashbench import paths
from flashbench._runfile.lock import Lock
from flashbench.errors import RunFileError, UsageError
from flashbench.judge import Run, Side, load_run

SCHEMA = 1
FILE = "baseline.json"
STORE = "flashbench-baselines"
"""The folder, in the current one, where neither --store nor the variable says."""
VARIABLE = "FLASHBENCH_BASELINES"
ENVIRONMENT = ("driver", "cuda", "torch", "triton")
"""Versions that an environment consists of, those of them that a file tells."""
NO_DEVICE = "unknown"
EXACT = frozenset({"flashbench gate", "flashbench profile --static"})
"""Kinds of files whose every number is another with another compiler: no other environment will do."""

_RESULTS = re.compile(r"results(-[0-9]+)?(-[0-9a-f]{12})?\.[A-Za-z0-9]+")
"""Names that ``save`` gives to runs; the hexadecimal digits stand there while it replaces others."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, kw_only=True)
class Key:
    """What a baseline is found by."""

    device: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """DEVICE/ENVIRONMENT."""
        said = "-".join(f"{name}-{value}" for name, value in self.environment.items())
        return Path(_slug(self.device)) / _slug(said or "any")

    def __str__(self) -> str:
        said = ", ".join(f"{name} {value}" for name, value in self.environment.items())
        return f"{self.device} ({said})" if said else self.device


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """One entry of a store. files: SHA-256 by name."""

    folder: Path
    name: str
    key: Key
    commit: str
    saved_at: str
    files: Mapping[str, str]

    def side(self, name: str = "base", allowed: Collection[str] = ()) -> Side:
        """Its runs. allowed: as of judge.load_side. Raises RunFileError where a file is missing, not as it
        was saved, or was damaged before."""
        for file, expected in self.files.items():
            path = self.folder / file
            try:
                found = hashlib.sha256(paths.whole(path)).hexdigest()
            except OSError as error:
                raise RunFileError(f"{path}: {error.strerror or error}; {FILE} beside it names it") from None
            if found != expected:
                raise RunFileError(
                    f"{path}: is not what was saved (SHA-256 {found[:12]}, was {expected[:12]})",
                    hint="'flashbench baseline save' writes it anew",
                )
        return Side(name=name, runs=tuple(load_run(self.folder / file, allowed) for file in self.files))


def store(text: str | None) -> Path:
    """The folder of --store, else of the environment variable, else the usual one."""
    return Path(text or os.environ.get(VARIABLE) or STORE)


def key_of(side: Side, typed: str = "") -> Key:
    """The device and environment of a side's runs. Raises UsageError where they differ.

    typed: what named the runs, where that is no list of them.
    """
    keys = {str(key): key for key in map(_key, side.runs)}
    if len(keys) > 1:
        raise UsageError(
            f"{typed or ','.join(str(run.path) for run in side.runs)}: the runs are of"
            f" {' and of '.join(sorted(keys))}; accepted: runs of one device and environment"
        )
    return next(iter(keys.values()))


def _key(run: Run) -> Key:
    environment = {name: run.versions[name] for name in ENVIRONMENT if name in run.versions}
    return Key(device=run.conditions.get("device", NO_DEVICE), environment=environment)


def save(side: Side, root: Path, name: str, commit: str) -> Baseline:
    """Keep the runs of a side under a name, in the place of what it held for their key.

    Raises UsageError for a bad name, for unlike runs and where the disk refuses.
    """
    check_name(name)
    key = key_of(side)
    several = len(side.runs) > 1
    names = {
        f"results{f'-{number}' if several else ''}{run.path.suffix or '.jsonl'}": run.path
        for number, run in enumerate(side.runs, 1)
    }
    data = {file: paths.whole(path) for file, path in names.items()}
    about = {
        "type": "baseline", "schema": SCHEMA, "name": name, "device": key.device,
        "environment": dict(key.environment), "commit": commit,
        "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    _replace(root / name / key.folder, about, data)
    return load(root / name / key.folder / FILE)


def _replace(folder: Path, about: Mapping[str, Any], data: Mapping[str, bytes]) -> None:
    """Make these files the entry of a folder: at every moment it holds the old one or the new one, whole.

    What FILE names is the entry. A file that the old one holds otherwise gets another name first, so that the
    new FILE takes the old one's place in one step, and its own name after that.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with Lock(folder):
            held, digests = _files(folder), _digests(data)
            if any(held.get(name, digest) != digest for name, digest in digests.items()):
                _write(folder, about, {_apart(name, digest): data[name] for name, digest in digests.items()})
            _write(folder, about, data)
    except OSError as error:
        raise UsageError(
            f"--store {str(folder)!r}: {error.strerror or error}; accepted: a store that can be written"
        ) from None


def _write(folder: Path, about: Mapping[str, Any], data: Mapping[str, bytes]) -> None:
    """Write the files, then what names them, then take those away that nothing names any more."""
    before = _files(folder)
    for name, content in data.items():
        paths.replace(folder / name, content)
    document = {**about, "files": _digests(data)}
    paths.replace(folder / FILE, (json.dumps(document, indent=1) + "\n").encode())
    left = {path.name for path in folder.iterdir() if _RESULTS.fullmatch(path.name)}
    for name in (left | before.keys()) - data.keys():
        (folder / name).unlink(missing_ok=True)


def _digests(data: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in data.items()}


def _apart(name: str, digest: str) -> str:
    """Another name for a file, which no other content has."""
    path = Path(name)
    return f"{path.stem}-{digest[:12]}{path.suffix}"


def _files(folder: Path) -> Mapping[str, str]:
    """What an entry consists of; nothing where there is none that can be read."""
    try:
        return load(folder / FILE).files
    except RunFileError:
        return {}


def check_name(name: str) -> None:
    """Raise UsageError where that is no name of a baseline."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"name {name!r}: not a name of a baseline; accepted: letters, digits, '.', '_' and '-'"
        )


def promote(root: Path, name: str, to: str) -> list[Baseline]:
    """Make what is kept under a name the baseline of another, whose other keys stay. Raises UsageError."""
    check_name(to)
    found = entries(root / _existing(root, name))
    for one in found:
        one.side()  # a damaged file is not handed on
        about = json.loads(paths.whole(one.folder / FILE)) | {"name": to}
        files = {file: paths.whole(one.folder / file) for file in one.files}
        _replace(root / to / one.key.folder, about, files)
    return [load(root / to / one.key.folder / FILE) for one in found]


def _existing(root: Path, name: str) -> str:
    if not (root / name).is_dir() or not _NAME.fullmatch(name):
        known = sorted(path.name for path in root.glob("*") if path.is_dir()) if root.is_dir() else []
        raise UsageError(
            f"baseline {name!r} is not in {str(root)!r}; accepted: {', '.join(known) or 'none, it is empty'}",
            hint="'flashbench baseline save RUNS --name NAME' keeps one; --store names another folder",
        )
    return name


def entries(folder: Path) -> list[Baseline]:
    """Every baseline below a folder, oldest first. Raises RunFileError for one that cannot be read."""
    found = [load(path) for path in sorted(folder.rglob(FILE))]
    return sorted(found, key=lambda one: (one.saved_at, str(one.folder)))


def named(text: str, root: Path) -> list[Baseline]:
    """The entries of --baseline: of a folder, else of a name in the store. Raises UsageError."""
    if Path(text).is_dir() and (found := entries(Path(text))):
        return found
    return entries(root / _existing(root, text))


def fitting(found: Sequence[Baseline], side: Side) -> Baseline | None:
    """The entry to judge a side by: of its device and environment, else the latest of its device.

    What is exact in one environment only has no second choice.
    """
    key = key_of(side)
    alike = [one for one in found if one.key.device == key.device]
    same = [one for one in alike if one.key == key]
    if not same and any(run.kind in EXACT for run in side.runs):
        return None
    chosen = same or alike
    return chosen[-1] if chosen else None


def load(path: Path) -> Baseline:
    """The entry that a ``baseline.json`` describes. Raises RunFileError where it cannot be read as one."""
    try:
        document = json.loads(paths.whole(path))
        return _parse(path.parent, document)
    except OSError as error:
        raise RunFileError(f"{path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        said = f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise RunFileError(f"{path}: {said}; accepted: what 'flashbench baseline save' writes") from None


def _parse(folder: Path, document: Any) -> Baseline:
    if document["type"] != "baseline" or document["schema"] != SCHEMA:
        raise ValueError(
            f"{document['type']!r} of schema {document['schema']!r}; read here is 'baseline' {SCHEMA}"
        )
    files = {str(name): str(value) for name, value in document["files"].items()}
    if not files or any(Path(name).name != name for name in files):
        raise ValueError(f"files {list(files)!r}: not names of files")
    environment = {str(name): str(value) for name, value in document["environment"].items()}
    return Baseline(
        folder=folder, name=str(document["name"]), files=files, commit=str(document["commit"]),
        saved_at=str(document["saved_at"]),
        key=Key(device=str(document["device"]), environment=environment),
    )  # fmt: skip


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:100] or NO_DEVICE
