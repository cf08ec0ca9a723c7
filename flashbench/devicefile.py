"""A card that the table lacks, from a TOML file: ``--gpu my-card.toml``.

Keys are those of ``devices.Device``, in its units (bytes, B/s, FLOP/s, Hz, W). ``base`` names a row
of the table whose values hold where the file is silent; without it every value must be given:

    name = "h800"
    base = "h100-sxm"
    hbm_bytes_per_s = 3.35e12
    source = "vendor's data sheet, table 2"
    [peak_flops_per_s]
    bf16 = 989.4e12
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashbench import devices, paths, units
from flashbench.devices import Device
from flashbench.errors import SpecError, UnknownName

DTYPES = ("fp16", "bf16", "tf32", "fp32", "fp8")
_TEXTS = ("name", "arch", "source", "uncertain")
_INTS = ("num_sms", "smem_per_sm_bytes", "smem_per_block_bytes", "registers_per_sm_bytes", "l2_bytes",
         "hbm_bytes", "mufu_per_clk_per_sm", "tdp_w")  # fmt: skip
_RATES = ("hbm_bytes_per_s", "clock_hz", "l2_bytes_per_s")
_OTHER = ("base", "reported", "capability", "peak_flops_per_s")
KEYS = (*_TEXTS, *_INTS, *_RATES, *_OTHER)
_DEFAULTS = {"uncertain": "", "reported": (), "capability": None, "l2_bytes_per_s": None,
             "registers_per_sm_bytes": 256 * devices.KIB, "mufu_per_clk_per_sm": 16}  # fmt: skip
MAX_BYTES = 2**20
MAX_RATE = 1e18
MAX_COUNT = 2**50


def load(path: str | Path) -> Device:
    """The card in that file.

    Raises SpecError or UnknownName, one line that names the file, the key and what is accepted.
    """
    where = f"device file {str(path)!r}"
    document = _read(path, where)
    for key in document:
        if key not in KEYS:
            raise UnknownName(f"{where}: key", units.cut(key), KEYS)
    values: dict[str, Any] = dict(_DEFAULTS)
    if (base := document.get("base")) is not None:
        row = _base(_text(base, "base", where), where)
        values = {key: value for key, value in vars(row).items() if key in KEYS} | {"reported": ()}
        values["source"] = f"{row.name} ({row.source}), changed by {path}"
    values |= {key: _value(key, value, where) for key, value in document.items() if key != "base"}
    if "peak_flops_per_s" in document and base is not None:
        values["peak_flops_per_s"] = dict(row.peak_flops_per_s) | values["peak_flops_per_s"]
    missing = [key for key in KEYS if key not in values and key != "base"]
    if "name" not in document:
        missing = ["name", *(key for key in missing if key != "name")]
    if missing:
        raise SpecError(f"{where}: {', '.join(missing)} missing; accepted: every key of a device, or a base")
    _check(values, where)
    return Device(**values)


def _base(name: str, where: str) -> Device:
    """The row of the table that the file builds on."""
    for row in devices.DEVICES:
        if row.name == name:
            return row
    raise UnknownName(f"{where}: base", units.cut(name), [row.name for row in devices.DEVICES])


def _read(path: str | Path, where: str) -> dict[str, Any]:
    try:
        with paths.opened(path) as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SpecError(
            f"{where}: {error.strerror or error}; accepted: a TOML file that can be read"
        ) from None
    if len(data) > MAX_BYTES:
        raise SpecError(f"{where}: larger than 1 MiB; accepted: a TOML file with one device")
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        said = units.cut(" ".join(str(error).split()), 120)
        raise SpecError(f"{where}: not TOML ({said}); accepted: a TOML file with one device") from None


def _value(key: str, value: Any, where: str) -> Any:
    """The checked value of one key, as Device takes it."""
    if key in _TEXTS:
        return _text(value, key, where)
    if key in _INTS:
        return _count(value, key, where)
    if key in _RATES:
        return _rate(value, key, where)
    if key == "reported":
        if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
            raise _wrong(value, key, where, "a list of names")
        return tuple(value)
    if key == "capability":
        if (
            not isinstance(value, list)
            or len(value) != 2
            or not all(type(n) is int and 0 <= n < 100 for n in value)
        ):
            raise _wrong(value, key, where, "two whole numbers such as [9, 0]")
        return tuple(value)
    return _peaks(value, where)


def _peaks(value: Any, where: str) -> dict[str, float | None]:
    """Dense peaks by dtype; a dtype that is left out or 0 is one that the card lacks."""
    if not isinstance(value, Mapping) or not value:
        raise _wrong(value, "peak_flops_per_s", where, f"a table with {', '.join(DTYPES)}")
    for dtype in value:
        if dtype not in DTYPES:
            raise UnknownName(f"{where}: peak_flops_per_s", units.cut(dtype), DTYPES)
    return {
        dtype: None if rate == 0 else _rate(rate, f"peak_flops_per_s.{dtype}", where)
        for dtype, rate in value.items()
    }


def _check(values: dict[str, Any], where: str) -> None:
    """What must hold between keys; fills the dtypes that the card lacks."""
    values["peak_flops_per_s"] = {dtype: values["peak_flops_per_s"].get(dtype) for dtype in DTYPES}
    if not any(values["peak_flops_per_s"].values()):
        raise SpecError(
            f"{where}: peak_flops_per_s has no dtype; accepted: one of {', '.join(DTYPES)} or more"
        )
    if values["name"] in {row.name for row in devices.DEVICES}:
        raise SpecError(f"{where}: name {values['name']!r} is in the table; accepted: a new name")
    if values["smem_per_block_bytes"] > values["smem_per_sm_bytes"]:
        raise SpecError(f"{where}: smem_per_block_bytes exceeds smem_per_sm_bytes; accepted: at most as much")


def _text(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise _wrong(value, key, where, "a line of text")
    return value.strip()


def _count(value: Any, key: str, where: str) -> int:
    whole = type(value) is int or (type(value) is float and value.is_integer())
    if not whole or not 1 <= value <= MAX_COUNT:
        raise _wrong(value, key, where, "a whole number above 0")
    return int(value)


def _rate(value: Any, key: str, where: str) -> float:
    if type(value) not in (int, float) or not 0 < value <= MAX_RATE:
        raise _wrong(value, key, where, "a number above 0, in SI units")
    return float(value)


def _wrong(value: Any, key: str, where: str, accepted: str) -> SpecError:
    return SpecError(f"{where}: {key} {units.quoted(value)}; accepted: {accepted}")
