"""A file of --config as the table that it holds."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from flashbench import paths, units
from flashbench.errors import UsageError

MAX_CONFIG_BYTES = 2**20


def read_toml(path: str | Path) -> dict[str, Any]:
    """The table of a file of --config. Raises UsageError where it cannot be read or is not TOML in UTF-8."""
    where = f"--config {units.quoted(path, 400)}"
    try:
        with paths.opened(path) as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
        if len(data) > MAX_CONFIG_BYTES:
            raise UsageError(f"{where}: too large; accepted: at most {MAX_CONFIG_BYTES} bytes of TOML")
        return tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: not UTF-8 (byte {error.start}); accepted: a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where}: not TOML: {error}; accepted: a TOML file") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{where}: {reason}; accepted: a TOML file that can be read") from None
