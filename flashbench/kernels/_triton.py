"""Triton's two modes: compiled for a GPU, or interpreted on a CPU; and whether either is to be had.

Triton decides once per process, while it is being imported: its own library functions are either
compiled or interpreted from then on. So the variable is set here, before the first import, and a
process that already holds Triton in the other mode is told so instead of computing nonsense.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType

from flashbench import paths, userdata
from flashbench.errors import UnavailableError, UsageError
from flashbench.installed import version_of
from flashbench.kernels import Target, _interpreter

VARIABLE = "TRITON_INTERPRET"
CACHE = "TRITON_CACHE_DIR"
OLDEST = (3, 6)
"""The oldest Triton whose compiler and interpreter the kernels are tested with."""


def interpreted(target: Target) -> bool:
    """True where the kernels run in Triton's interpreter: on a CPU, or where the user asked for it."""
    if "triton" in sys.modules:
        return _imported_interpreted()
    return target.type == "cpu" or _asked()


def why_missing() -> str | None:
    """Why this machine has no Triton that serves, one sentence, or None; imports nothing."""
    if sys.modules.get("triton", ...) is None or not _installed():
        return "triton is not installed (it exists for Linux only): pip install triton"
    version = _version()
    if _numbers(version) < OLDEST:
        return f"triton {version} is too old; it needs {_text(OLDEST)} or newer: pip install -U triton"
    return None


def why_broken(error: Exception) -> str:
    """One sentence on what importing Triton raised."""
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return f"triton cannot be imported: {said}; reinstall it: pip install --force-reinstall triton"


def why_unavailable(target: Target) -> str | None:
    """Why no Triton kernel can run on the target, one sentence, or None."""
    missing = why_missing()
    if missing is not None:
        return missing
    version = _version()
    if target.type != "cpu" and target.capability is None:
        return f"no GPU at {target.device}"
    if "triton" not in sys.modules and target.type == "cpu":
        os.environ[VARIABLE] = "1"
    try:
        importlib.import_module("triton.language")
    except Exception as error:  # a broken installation raises whatever it likes
        return why_broken(error)
    if _imported_interpreted():
        _interpreter.hasten()
    return _why_wrong_mode(target, version)


def settle_mode() -> None:
    """Have Triton interpret where torch sees no GPU, before a part of torch imports it for one."""
    import torch

    if "triton" not in sys.modules and not torch.cuda.is_available():
        os.environ.setdefault(VARIABLE, "1")


def check_cache() -> None:
    """Raise UsageError where Triton cannot keep what it compiles: no kernel would compile.

    The folder is TRITON_CACHE_DIR, else .triton/cache below TRITON_HOME or the home folder.
    """
    given, home = os.environ.get(CACHE), os.environ.get("TRITON_HOME")
    if os.environ.get("TRITON_CACHE_MANAGER"):  # the user's own, which need not have a folder
        return
    house = Path(home) if home else userdata.home()
    if given is None and house is None:  # Triton's would be a folder '~' below the current one
        raise UsageError(
            f"{CACHE} is not set, and {userdata.NO_HOME}; accepted: a folder that can be written"
        )
    folder = Path(given or (house or Path()) / ".triton" / "cache")
    reason = paths.why_no_folder(folder) if given != "" else "no name"
    if reason is None:
        return
    if given is not None:
        raise UsageError(f"{CACHE}={given!r}: {reason}; accepted: a folder that can be written, or unset")
    where = f"{folder}, of {'TRITON_HOME' if home else 'the home folder'}"
    raise UsageError(
        f"{CACHE} is not set, and Triton's usual cache ({where}): {reason}; accepted: a folder"
        " that can be written"
    )


@cache
def load(device_type: str, module: str = "_flash_v2") -> ModuleType:
    """A module of kernels, with Triton in the mode that the device needs, which stays the process'.

    Raises UnavailableError where ``why_unavailable`` has a reason.
    """
    capability = None if device_type == "cpu" else (0, 0)  # that there is a GPU is known: a tensor is on it
    reason = why_unavailable(Target(device=device_type, capability=capability))
    if reason is not None:
        raise UnavailableError(f"flash: {reason}")
    return importlib.import_module(f"flashbench.kernels.{module}")


def _why_wrong_mode(target: Target, version: str) -> str | None:
    if not _imported_interpreted():
        if target.type == "cpu":
            return (
                "this process imported triton for a GPU, and compiled kernels cannot take CPU tensors:"
                f" start a new process with {VARIABLE}=1"
            )
        return None
    if _numbers(version) < (3, 7):
        numpy = metadata.version("numpy")
        if _numbers(numpy) >= (2, 4):
            return (
                f"triton {version} interprets with numpy < 2.4 only, found {numpy}: pip install 'numpy<2.4'"
            )
    if target.type != "cpu" and not _asked():
        return "this process imported triton as an interpreter, for a CPU: start a new process for the GPU"
    return None


def _imported_interpreted() -> bool:
    """Whether the Triton of this process interprets; its own functions were made so on import."""
    language = importlib.import_module("triton.language")
    return type(language.cdiv).__name__ == "InterpretedFunction"


def _asked() -> bool:
    return os.environ.get(VARIABLE, "").lower() in ("1", "true", "on", "yes", "y")


def _installed() -> bool:
    return "triton" in sys.modules or importlib.util.find_spec("triton") is not None


@cache
def _version() -> str:
    """Of the installed Triton; the question is asked several times per cell and reads files."""
    return version_of("triton") or "0"


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def _text(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))
