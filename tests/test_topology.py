"""Where a card sits in its host: what NVML and Linux say, and what is left out where they do not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashbench import environment, record_shape
from flashbench._profilers import topology
from flashbench.fleet.cards import row_facts
from flashbench.kernels import Target

BUSES = ("00000000:18:00.0", "00000000:2A:00.0", "00000000:9D:00.0")


class Host:
    """Three cards: NVLink joins the first two, the third is on another NUMA node. refuses: what it does not
    tell."""

    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0

    def __init__(self, *refuses: str) -> None:
        for name in refuses:
            setattr(self, name, self._refuse)

    def _refuse(self, *_: object) -> None:
        raise RuntimeError("Not Supported")

    def nvmlDeviceGetCount(self) -> int:
        return len(BUSES)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=BUSES[handle].encode())

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 5

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, kind: int) -> int:
        assert kind == self.NVML_P2P_CAPS_INDEX_NVLINK
        return self.NVML_P2P_STATUS_OK if {one, other} == {0, 1} else 5

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        return 50 if 2 in (one, other) else 40


@pytest.fixture
def system(tmp_path: Path) -> Path:
    for bus, node in (("0000:18:00.0", "0\n"), ("0000:2a:00.0", "-1\n")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "numa_node").write_text(node)
    return tmp_path


def test_a_card_tells_its_slot_and_what_joins_it_to_the_others(system: Path) -> None:
    assert topology.read(Host(), 0, system) == {
        "pci": "0000:18:00.0", "pcie": "gen 5 x16", "numa_node": 0,
        "peers": {"0000:2a:00.0": "NVLink", "0000:9d:00.0": "between NUMA nodes"},
    }  # fmt: skip
    assert topology.read(Host(), 2, system)["numa_node"] is None


@pytest.mark.parametrize(
    ("refuses", "lost"),
    [
        ("nvmlDeviceGetCurrPcieLinkWidth", {"pcie": None}),
        ("nvmlDeviceGetCount", {"peers": {}}),
        ("nvmlDeviceGetHandleByIndex", {"peers": {}}),
        ("nvmlDeviceGetTopologyCommonAncestor", {"peers": {"0000:2a:00.0": "NVLink"}}),
        ("nvmlDeviceGetP2PStatus",
         {"peers": {"0000:2a:00.0": "NUMA node", "0000:9d:00.0": "between NUMA nodes"}}),
        ("nvmlDeviceGetPciInfo", {"pci": None, "numa_node": None, "peers": {}}),
    ],
)  # fmt: skip
def test_a_refusal_leaves_its_part_out(refuses: str, lost: dict[str, Any], system: Path) -> None:
    assert topology.read(Host(refuses), 0, system) == topology.read(Host(), 0, system) | lost


def test_rows_of_a_fleet_and_headers_carry_it(monkeypatch: pytest.MonkeyPatch, system: Path) -> None:
    class Telemetry:
        nvml, handle, card = Host(), "of a slice", 0

        def facts(self) -> dict[str, Any]:
            return {}

        def read(self) -> dict[str, Any]:
            return {}

    monkeypatch.setattr(topology, "SYSTEM", system)
    monkeypatch.setattr(environment, "open_clocks", lambda device: Telemetry())
    known = SimpleNamespace(multi_processor_count=132, uuid="12")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: known)
    facts = environment.collect(Target(device="cuda:0", name="card"))
    assert facts["topology"]["peers"]["0000:2a:00.0"] == "NVLink"
    row = row_facts(facts, ["cuda:1"])
    assert row["topology"] == facts["topology"]
    record_shape.check(json.loads(json.dumps({"type": "record", "environment": row})))
    with pytest.raises(ValueError, match=r"topology\.peers\.x"):
        record_shape.check({"type": "header", "environment": {"topology": {"peers": {"x": 3}}}})
