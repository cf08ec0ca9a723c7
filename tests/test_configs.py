"""Every file in configs/ is a sweep that could be run, grids to count, a plan of the gate, or the claims."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashbench import compared, iomodel, kernels, sweep
from flashbench._cli import grids, profile
from flashbench.devices import find
from flashbench.kernels import Target

FOLDER = Path(__file__).resolve().parent.parent / "configs"
GATE = FOLDER / "ci-static.toml"
COUNTED = sorted(FOLDER.glob("counters-*.toml"))
CONFIGS = sorted(set(FOLDER.glob("*.toml")) - {GATE, FOLDER / "claims.toml", *COUNTED})
H100 = find("h100-sxm")


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


@pytest.mark.parametrize("path", COUNTED, ids=lambda path: path.stem)
def test_each_cell_to_count_has_a_model_kernel_by_kernel(path: Path) -> None:
    """Counts that are as modelled would be shown with a ratio of 1 at every level."""
    assert f"--config configs/{path.name}" in path.read_text(encoding="utf-8"), "says how it is counted"
    card = Target(
        device="cuda:0", name=H100.name, capability=(9, 0), l2_bytes=H100.l2_bytes, num_sms=H100.num_sms,
        smem_per_block_bytes=H100.smem_per_block_bytes,
    )  # fmt: skip
    for cell in grids.read(str(path), profile.COUNTED, {}):
        implementation = kernels.get(cell.implementation)
        if implementation.prepare_tiles is None:  # torch's own
            continue
        assert implementation.why_unsupported(cell.problem, cell.pass_, card) is None, cell.key
        tiles = dict(implementation.on_card(cell.problem, cell.pass_, card))
        ran = str(tiles.get("kernels", "")).partition(":")[0]  # those that flash chooses on the card
        model = kernels.get(ran or cell.implementation).io_model
        assert model is not None
        row = iomodel.estimate(model, cell.problem, cell.pass_, tiles=tiles, device=H100)
        kernels_ = [
            {"kernel": step.name, "grid": str(index), "block": "", "l2_read_bytes": step.crossing("read"),
             "l2_write_bytes": step.crossing("write"), "l2_atomic_bytes": step.crossing("atomic"),
             "dram_read_bytes": alone.read.value,
             "dram_write_bytes": alone.write.value + compared.left_by_the_profiler(alone, H100).value}
            for index, (step, alone) in enumerate(
                zip(row.steps, iomodel.kernels_alone(row, H100), strict=True)
            )
        ]  # fmt: skip
        total = {name: sum(one[name] for one in kernels_) for name in kernels_[0] if name.endswith("bytes")}
        found = compared.compare(cell, {"total": total, "kernels": kernels_}, model, tiles, H100)
        assert {level.ratio for level in found if level.value} == {1}, cell.key
        steps = {level.kernel.partition(":")[0] for level in found if level.kernel}
        assert len(steps) == (len(row.steps) if len(row.steps) > 1 else 0)


def test_default_toml_is_the_default_on_a_gpu() -> None:
    path = next(path for path in CONFIGS if path.stem == "default")
    parsed = sweep.parse(sweep.load_config(path), lambda name: name, kernels.registry())
    assert sweep.sweep_of(parsed).cells() == sweep.sweep_of(sweep.defaults("cuda")).cells()


def test_default_implementations_exist() -> None:
    for device_type in sweep.DEFAULTS:
        assert set(sweep.defaults(device_type)["impls"]) <= set(kernels.registry())
