"""The exact gate's part ``tiles``: a changed default of any bundled kernel fails by name, compiled or not.

That the tree as it is passes is held in ``test_gate.py``, with the other parts that nothing is compiled for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from gates import BASELINE, ROOT, with_baseline
from judging import run

from flashbench import configfile, decode_configs, flash_configs, gating, hopper_configs, launched
from flashbench._cli import gate as command
from flashbench.errors import EXIT_GATE, EXIT_UNDECIDED
from flashbench.flash_configs import Config
from flashbench.kernels import _compile, _defaults

Change = Callable[[Any], Any]
FLASH = ("flash-v1", "flash-v2", "flash-v2-atomic", "flash-v2-fp8")
TABLES = [
    pytest.param(flash_configs, "TABLE", FLASH, (512,), id="flash"),
    pytest.param(decode_configs, "TABLE", ("flash-decode",), (512,), id="decode"),
    pytest.param(hopper_configs, "TABLE", ("flash-v3",), None, id="flash-v3 forward"),
    pytest.param(hopper_configs, "BACKWARD_TABLE", ("flash-v3",), None, id="flash-v3 backward"),
    pytest.param(hopper_configs, "FP8_TABLE", ("flash-v3-fp8",), None, id="flash-v3-fp8"),
]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[Callable[[], None]]:
    """What makes the choices from the tables be made anew; called around each test."""
    choices = (
        flash_configs.choose, decode_configs.choose, hopper_configs.choose, hopper_configs.choose_fp8,
        hopper_configs.choose_backward,
    )  # fmt: skip

    def forget() -> None:
        for choice in choices:
            choice.cache_clear()

    forget()
    yield forget
    forget()


def grid_of(*names: str) -> launched.Grid:
    """That of this repository's gate; names: of some implementations alone."""
    plan = command.plan_of(configfile.read_toml(ROOT / "configs" / "ci-static.toml"), "the config")
    (grid,) = plan.tiles
    return replace(grid, implementations=names) if names else grid


def judged(capsys: pytest.CaptureFixture[str], folder: Path, grid: launched.Grid) -> tuple[int, str]:
    """Exit code and stderr of ``make gate``'s comparison, where tiles of the grid alone are measured anew."""
    (path,) = BASELINE.glob("*/*/results.json")
    document = json.loads(path.read_text(encoding="utf-8"))
    names = grid.implementations
    kept = [row for row in document["tiles"] if row["cell"].split(" ")[0] not in names]
    document["tiles"] = [*kept, *gating.document(gating.Plan(tiles=(grid,)), lambda *_: None)["tiles"]]
    (folder / "gate.json").write_text(command.text_of(document))
    code, _, err = run(
        capsys, str(folder / "gate.json"), "--baseline", str(BASELINE), "-q", "--fail-on", "changed"
    )
    return code, err


def swap(old: object, new: object) -> Change:
    """A row with one of its configurations changed."""

    def changed(row: Any) -> Any:
        assert old in row.configs
        return replace(row, configs=tuple(new if one == old else one for one in row.configs))

    return changed


@with_baseline
@pytest.mark.parametrize(
    ("module", "table", "where", "change", "says"),
    [
        pytest.param(
            flash_configs, "TABLE", {"kernel": "dkdv", "family": "sm90", "math": "half", "max_dim": 128},
            swap(Config(32, 64, 4, 3), Config(64, 64, 4, 3)),
            "block_q: 3 of N cells are worse by more than 0%, first: tiles flash-v2 dkdv half d67 sm_90:"
            " 32, now 64; it must not change unseen",
            id="flash-v2 dK and dV on Hopper",
        ),
        pytest.param(
            flash_configs, "TABLE", {"kernel": "dq", "family": "any", "math": "half", "max_dim": 128},
            swap(Config(64, 64, 4, 2), Config(64, 64, 8, 1)),
            "num_warps: 21 of N cells are worse by more than 0%, first: tiles flash-v2 dq half d67 sm_80:"
            " 4, now 8;",
            id="flash-v2 dQ elsewhere",
        ),
        pytest.param(
            flash_configs, "TABLE", {"kernel": "dq", "family": "any", "math": "half", "max_dim": 256},
            swap(Config(64, 32, 8, 1), Config(32, 32, 8, 1)),
            " of N cells are worse by more than 0%, first: tiles flash-v2 dq half d192 sm_80: 64, now 32;",
            id="flash-v2 dQ of wide heads elsewhere",
        ),
        pytest.param(
            hopper_configs, "BACKWARD_TABLE", {"max_dim": 128, "causal": True},
            lambda row: replace(row, tiles=replace(row.tiles, lag=1, early_dv=False)),
            "lag: 12 of N cells are worse by more than 0%, first:"
            " tiles flash-v3 bwd half d96 causal n512 sm_90: 0, now 1;",
            id="flash-v3 causal backward",
        ),
    ],
)  # fmt: skip
def test_a_changed_default_fails_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    module: ModuleType, table: str, where: dict[str, Any], change: Change, says: str,
) -> None:  # fmt: skip
    rows = list(getattr(module, table))
    (at,) = (n for n, row in enumerate(rows) if all(getattr(row, key) == where[key] for key in where))
    rows[at] = change(rows[at])
    monkeypatch.setattr(module, table, tuple(rows))
    code, err = judged(capsys, tmp_path, grid_of(*says.split(" tiles ")[1].split(" ")[:1]))
    assert (code, says in re.sub(r"of \d+ cells", "of N cells", err)) == (EXIT_GATE, True), err


def _other(row: Any) -> Iterator[Any]:
    """The row with another default, one for each that it has."""
    if hasattr(row, "configs"):
        first, *rest = row.configs
        yield replace(row, configs=(replace(first, num_warps=2 * first.num_warps), *rest))
        return
    for name in ("tiles", "fp16"):
        if tiles := getattr(row, name):
            flag = "max3" if hasattr(tiles, "max3") else "held"
            yield replace(row, **{name: replace(tiles, **{flag: not getattr(tiles, flag)})})


@pytest.mark.parametrize(("module", "table", "names", "seqlens"), TABLES)
def test_no_row_of_a_table_is_out_of_sight(
    monkeypatch: pytest.MonkeyPatch, forgotten: Callable[[], None], module: ModuleType, table: str,
    names: tuple[str, ...], seqlens: tuple[int, ...] | None,
) -> None:  # fmt: skip
    """Whatever first choice is changed, some row of the gate is another one."""
    grid = grid_of(*names)
    if seqlens:  # tables without lengths and masks; every first choice fits one of these cards
        grid = replace(grid, seqlens=seqlens, causal=(False,), capabilities=((8, 0), (8, 9), (9, 0)))
    before, own = launched.rows(grid), getattr(module, table)
    unseen = []
    for at, row in enumerate(own):
        for other in _other(row):
            monkeypatch.setattr(module, table, (*own[:at], other, *own[at + 1 :]))
            forgotten()
            unseen += [row] if launched.rows(grid) == before else []
    assert not unseen


def test_every_bundled_implementation_has_its_rows() -> None:
    """A new one needs a row in ``_defaults``."""
    assert set(_defaults.NAMES) == set(_compile.BUNDLED)
    told = {row["cell"].split(" ")[0] for row in launched.rows(grid_of())}
    assert told == set(_compile.BUNDLED)


@with_baseline
def test_what_is_written_down_is_what_is_compiled() -> None:
    (path,) = BASELINE.glob("*/*/results.json")
    document = json.loads(path.read_text(encoding="utf-8"))
    told = {(row["cell"], arch): row for row in document["tiles"] for arch in row["archs"]}
    compiled = [row for row in document["static"] if row["implementation"] == "flash-v2"]
    assert {row["kernel"] for row in compiled} == {"fwd", "delta", "dkdv", "dq"}
    for row in compiled:
        own = told[f"flash-v2 {row['kernel']} half d{row['head_dim']}", row["arch"]]
        for name in ("block_q", "num_warps", *(["block_k"] if row["block_k"] else [])):
            assert own[name] == row[name], (row["kernel"], row["head_dim"], row["arch"])


def test_a_cell_names_what_its_kernel_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that begins to depend on more is another cell: the old one is missing."""
    grid = replace(grid_of("flash-v2", "flash-v3"), head_dims=(64,), capabilities=((9, 0),))
    cells = {row["cell"] for row in launched.rows(grid)}
    assert {"flash-v2 dq half d64", "flash-v2 dq tf32 d64"} <= cells
    assert {"flash-v3 fwd fp16 d64 causal n4096", "flash-v3 bwd half d64 full n512"} <= cells
    assert not any(cell.startswith("flash-v3 dq") for cell in cells)
    right = flash_configs.chosen

    def by_mask(problem: Any, kernel: str, *card: Any) -> Config:
        own = right(problem, kernel, *card)
        return replace(own, num_stages=9) if problem.causal and kernel == "dq" else own

    monkeypatch.setattr("flashbench.kernels._kernels_of.chosen", by_mask)
    apart = {row["cell"] for row in launched.rows(grid)}
    assert {"flash-v2 dq half d64 full", "flash-v2 dq half d64 causal"} <= apart
    assert "flash-v2 dq half d64" not in apart


def test_a_file_of_before_this_part_is_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    grid = replace(grid_of("flash-v2"), head_dims=(64,), dtypes=("bf16",))
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    document = gating.document(gating.Plan(tiles=(grid,)), lambda *_: None)
    document["check"] = [{"cell": "naive", "status": "ok", "reason": None}]
    new.write_text(command.text_of(document))
    del document["tiles"]
    old.write_text(command.text_of(document))
    assert run(capsys, str(old), str(old), "-q")[0] == 0
    assert run(capsys, str(new), str(old), "-q")[0] == EXIT_UNDECIDED
    assert run(capsys, str(old), str(new), "-q", "--fail-on", "changed")[0] == EXIT_GATE
