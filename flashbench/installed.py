"""Which version of a package is installed, without importing it."""

from __future__ import annotations


def version_of(package: str) -> str | None:
    """The installed version of a package, or None; reads files."""
    from importlib import metadata  # not at start-up: few commands ask

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
