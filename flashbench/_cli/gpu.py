"""``--gpu``: a card of the table, a TOML file with another one, or ``auto``, the card of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashbench.errors import SpecError, UnavailableError, UsageError

if TYPE_CHECKING:
    from flashbench.devices import Device
    from flashbench.kernels import Target

AUTO = "auto"
SUFFIX = ".toml"


def choose(text: str, option: str = "--gpu", library: Any = None) -> list[Device]:
    """The cards of a comma list of names, paths that end in .toml, and ``auto``, in that order.

    auto takes what the driver reports over the table, and the ceilings that ``flashbench calibrate``
    stored for this very card. library stands in for pynvml. Raises SpecError or UnknownName for a bad
    list, UnavailableError for auto without an NVIDIA GPU.
    """
    from flashbench import devicefile, devices, units

    items = [item.strip() for item in text.split(",")]
    known = [*(row.name for row in devices.DEVICES), AUTO, *(item for item in items if _is_file(item))]
    found = []
    for name in units.parse_names(text, option, known):
        if name == AUTO:
            found.append(here(option, library))
        else:
            found.append(devicefile.load(name) if _is_file(name) else devices.find(name))
    return found


def here(option: str = "--gpu", library: Any = None) -> Device:
    """The card of this machine: the driver's numbers, then its own calibration, over the table's row."""
    from flashbench import ceilings, devices
    from flashbench._cli import driver

    card = driver.card(library)
    if card is None:
        raise UnavailableError(f"{option} {AUTO!r}: no NVIDIA driver shows a GPU here; name a card instead")
    device = devices.match(card.name, sms=card.num_sms, memory_bytes=card.memory_bytes)
    if device is None:
        raise SpecError(
            f"{option} {AUTO!r}: {card.name!r} is not in the table; accepted: a card of 'flashbench list"
            f" devices', or a {SUFFIX} file with one"
        )
    measured = ceilings.stored(card.name, card.uuid)
    return device if measured is None else devices.with_ceilings(device, measured)


def target_of(name: str) -> Target:
    """A card of the table as a target for tiles. Raises UnknownName, UsageError for another make."""
    from flashbench import devices, units
    from flashbench.kernels import Target

    row = devices.find(units.parse_choice(name, "--gpu", [row.name for row in devices.DEVICES]))
    if row.capability is None:
        raise UsageError(f"--gpu {name!r}: Triton's tiles here are NVIDIA's; accepted: an NVIDIA card")
    return Target(
        device="cuda:0", name=row.name, capability=row.capability,
        smem_per_block_bytes=row.smem_per_block_bytes, num_sms=row.num_sms,
    )  # fmt: skip


def _is_file(name: str) -> bool:
    return name.casefold().endswith(SUFFIX)
