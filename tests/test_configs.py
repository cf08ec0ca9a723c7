"""Every file in configs/ is a sweep that could be run as it is, or a plan of the exact gate."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashbench import kernels, sweep

FOLDER = Path(__file__).resolve().parent.parent / "configs"
GATE = FOLDER / "ci-static.toml"
CONFIGS = sorted(set(FOLDER.glob("*.toml")) - {GATE})


def test_the_advertised_configs_are_there() -> None:
    assert {path.stem for path in CONFIGS} >= {"smoke", "default", "paper", "ci"}
    assert GATE.is_file()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_config_makes_cells(path: Path, device_type: str) -> None:
    parsed = sweep.parse(sweep.load_config(path), lambda name: name, kernels.registry())
    cells = sweep.sweep_of(sweep.combine(parsed, sweep.defaults(device_type))).cells()
    assert cells
    assert f"configs/{path.name}" in path.read_text(encoding="utf-8"), "says how it is run"


def test_default_toml_is_the_default_on_a_gpu() -> None:
    path = next(path for path in CONFIGS if path.stem == "default")
    parsed = sweep.parse(sweep.load_config(path), lambda name: name, kernels.registry())
    assert sweep.sweep_of(parsed).cells() == sweep.sweep_of(sweep.defaults("cuda")).cells()


def test_default_implementations_exist() -> None:
    for device_type in sweep.DEFAULTS:
        assert set(sweep.defaults(device_type)["impls"]) <= set(kernels.registry())
