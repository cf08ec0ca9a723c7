"""A user without HOME and without an entry in passwd, as ``docker run --user 12345`` makes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fuzzing import check
from judging import cell, written

from flashbench import ceilings, userdata
from flashbench._cli import surroundings
from flashbench.errors import UsageError
from flashbench.judge import profile
from flashbench.kernels import _triton

pwd = pytest.importorskip("pwd")


@pytest.fixture(autouse=True)
def _nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unknown(uid: int) -> Any:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "XDG_DATA_HOME", "TRITON_HOME", _triton.CACHE, ceilings.VARIABLE, profile.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)


def test_nothing_is_kept_and_nothing_is_found() -> None:
    assert userdata.home() is None
    assert ceilings.stored("H100") is None
    assert profile.stored("H100") is None
    for path_for in (lambda: ceilings.path_for("H100", None), lambda: profile.path_for("H100")):
        with pytest.raises(UsageError, match=r"no home folder is known: .*accepted: --out FILE, or FLASHB"):
            path_for()
    with pytest.raises(UsageError, match=r"TRITON_CACHE_DIR is not set, and no home folder is known"):
        _triton.check_cache()


@pytest.mark.parametrize("name", [ceilings.VARIABLE, "XDG_DATA_HOME"])
def test_a_folder_that_is_named_is_enough(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(name, str(tmp_path))
    assert ceilings.path_for("H100", None).is_relative_to(tmp_path)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    _triton.check_cache()


def test_commands_do_without_or_name_what_they_need() -> None:
    a = written(Path("a.jsonl"), [cell(1e-3)])
    Path("runs").mkdir()
    for number in range(2):
        written(Path(f"runs/{number}.jsonl"), [cell(1e-3 + number * 1e-5)])
    assert check(["compare", a, a]).code in (0, 6)
    found = check(["noise", "runs"])
    assert (found.code, "accepted: --out FILE, or FLASHBENCH_NOISE=DIR" in found.err) == (2, True)
    assert check(["noise", "runs", "--out", "n.json"]).code == 0
    found = check(["calibrate", "--device", "cpu"])
    assert (found.code, found.out) == (2, "")
    assert "accepted: --out FILE, or FLASHBENCH_CALIBRATION=DIR" in found.err
    assert check(["bisect", "--base", a, "--", "cp", a, "{out}/r.jsonl"]).code == 0


def test_doctor_names_it_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = surroundings.home()
    assert (found.state, "export HOME=DIR" in found.todo) == ("warn", True)
    assert found.detail.startswith("no home folder is known: HOME is not set")
    monkeypatch.setenv("HOME", "/somewhere")
    assert [(one.state, one.detail) for one in surroundings.home()] == [("ok", "/somewhere")]
