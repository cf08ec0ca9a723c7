"""The measured ceilings of one card: the file that ``flashbench calibrate`` writes and others read.

    ceilings.stored("NVIDIA H100 80GB HBM3", uuid) -> Ceilings | None
    ceilings.load(path) -> Ceilings

The file is one JSON object: ``type`` "calibration", ``schema`` 1, ``created_at`` (UTC), ``device``
(name, uuid, id of the row of DEVICES or null, type, num_sms, memory_bytes, l2_bytes, power_limit_w,
max_sm_clock_mhz), ``driver``, ``versions`` (flashbench, torch, cuda, triton, python), ``ceilings``
(copy_bytes_per_s, read_bytes_per_s, l2_bytes_per_s, exps_per_s, flops_per_s by dtype: numbers in SI
units, null where not measured) and ``measurements`` (one per ceiling: name, value, unit, best,
spread, samples, seconds, work, method, clocks, flags, or a reason).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashbench import paths, userdata
from flashbench.errors import RunFileError

SCHEMA = 1
FOLDER, VARIABLE = "calibration", "FLASHBENCH_CALIBRATION"
"""Of the files, in the user's data; the environment variable names another."""

_RATES = ("copy_bytes_per_s", "read_bytes_per_s", "l2_bytes_per_s", "exps_per_s")
MAX_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What one card was measured to reach; rates in B/s, FLOP/s and 1/s, None where not measured.

    copy_bytes_per_s: bytes read plus bytes written of a copy far larger than the L2.
    read_bytes_per_s: of reading such a buffer. l2_bytes_per_s: of re-reading half the L2 from all
    SMs, past the L1. flops_per_s: matrix products on random data, sustained, by dtype. exps_per_s:
    fp32 base-2 exponentials. path: the file, empty where there is none.
    """

    device_name: str
    device_uuid: str | None
    created_at: str
    copy_bytes_per_s: float | None
    read_bytes_per_s: float | None
    l2_bytes_per_s: float | None
    exps_per_s: float | None
    flops_per_s: Mapping[str, float | None]
    path: str = ""

    def document(self) -> dict[str, Any]:
        """The same as ``parse`` takes it, without the measurements behind it: for the header of a run."""
        rates = {name: getattr(self, name) for name in _RATES}
        return {
            "type": "calibration", "schema": SCHEMA, "created_at": self.created_at,
            "device": {"name": self.device_name, "uuid": self.device_uuid},
            "ceilings": {**rates, "flops_per_s": dict(self.flops_per_s)},
        }  # fmt: skip


def path_for(device_name: str, uuid: str | None) -> Path:
    """The file of that card: in $FLASHBENCH_CALIBRATION, else in flashbench/calibration in the user's data.

    Raises UsageError where there is no such folder.
    """
    stem = re.sub(r"[^A-Za-z0-9.-]+", "-", uuid or device_name).strip("-.") or "unnamed"
    return userdata.needed(FOLDER, VARIABLE) / f"{stem[:100]}.json"


def stored(device_name: str, uuid: str | None = None) -> Ceilings | None:
    """The newest calibration of that card on this machine, or None.

    The name must be the same and, where both sides know it, the uuid. A file that cannot be read
    counts as none.
    """
    found, kept = [], userdata.folder(FOLDER, VARIABLE)
    for path in sorted(kept.glob("*.json")) if kept and kept.is_dir() else []:
        try:
            row = load(path)
        except RunFileError:
            continue
        if row.device_name == device_name and (uuid is None or row.device_uuid in (None, uuid)):
            found.append(row)
    return max(found, key=lambda row: row.created_at, default=None)


def save(document: Mapping[str, Any], path: Path) -> None:
    """Write the document whole or not at all. Raises OSError, and RunFileError for what load would refuse."""
    parse(document, "the calibration")
    path.parent.mkdir(parents=True, exist_ok=True)
    paths.put(path, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())


def load(path: str | Path) -> Ceilings:
    """The ceilings in a file. Raises RunFileError where it is no calibration or a newer schema."""
    where = f"calibration {str(path)!r}"
    try:
        with paths.opened(path) as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RunFileError(f"{where}: {error.strerror or error}; accepted: a file that can be read") from None
    if len(data) > MAX_BYTES:
        raise RunFileError(f"{where}: too large; accepted: what 'flashbench calibrate' writes")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise RunFileError(f"{where}: not JSON; accepted: what 'flashbench calibrate' writes") from None
    return parse(document, where, str(path))


def parse(document: Any, where: str, path: str = "") -> Ceilings:
    """The ceilings in a document. Raises RunFileError, naming the field that is missing or wrong."""
    if not isinstance(document, Mapping) or document.get("type") != "calibration":
        raise RunFileError(f"{where}: no calibration; accepted: what 'flashbench calibrate' writes")
    schema = document.get("schema")
    if schema != SCHEMA:
        raise RunFileError(f"{where}: schema {schema!r}; accepted: {SCHEMA}")
    device, rates = document.get("device"), document.get("ceilings")
    if not isinstance(device, Mapping) or not isinstance(device.get("name"), str):
        raise RunFileError(f"{where}: no device name; accepted: what 'flashbench calibrate' writes")
    if not isinstance(rates, Mapping) or not isinstance(rates.get("flops_per_s"), Mapping):
        raise RunFileError(f"{where}: no ceilings; accepted: what 'flashbench calibrate' writes")
    uuid = device.get("uuid")
    return Ceilings(
        device_name=device["name"],
        device_uuid=uuid if isinstance(uuid, str) else None,
        created_at=str(document.get("created_at") or ""),
        **{name: _rate(rates.get(name), name, where) for name in _RATES},
        flops_per_s={
            str(name): _rate(value, f"flops_per_s {name}", where)
            for name, value in rates["flops_per_s"].items()
        },
        path=path,
    )


def _rate(value: Any, name: str, where: str) -> float | None:
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < 1e30:
        raise RunFileError(f"{where}: {name} is {value!r}; accepted: a number above 0, or null")
    return float(value)
