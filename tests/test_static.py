"""The static profile: every bundled kernel, compiled for architectures that this machine need not have."""

from __future__ import annotations

import csv
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashbench import cli, kernels
from flashbench._cli import options, profile_static
from flashbench._profilers import sass, static
from flashbench._profilers.occupancy import LIMITS
from flashbench.errors import EXIT_GATE, FlashbenchError, UnavailableError, UsageError
from flashbench.kernels import Target, _compile, _triton

pytest.importorskip("triton")

ARCHES = ((8, 0), (9, 0), (10, 0))
TENSOR = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05"}


def grid(**changes: Any) -> static.Grid:
    values = {
        "implementations": ("flash-v2",), "head_dims": (64,), "dtypes": ("bf16",), "causal": (True,),
        "passes": ("bwd", "fwd"), "limits": {one: LIMITS[one] for one in reversed(ARCHES)},
    }  # fmt: skip
    return static.Grid(**{**values, **changes})


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return static.profile(grid())


def test_a_row_per_kernel_and_architecture_in_a_fixed_order(rows) -> None:
    assert [(row["arch"], row["kernel"], row["pass"]) for row in rows] == [
        (arch, kernel, "fwd" if kernel == "fwd" else "bwd")
        for arch in TENSOR
        for kernel in ("fwd", "delta", "dkdv", "dq")
    ]
    assert len({tuple(row) for row in rows}) == 1
    assert all(row["status"] == "ok" and row["reason"] is None for row in rows)


def test_each_architecture_multiplies_with_its_own_instructions(rows) -> None:
    for row in rows:
        used = {name for name in TENSOR.values() if row[f"{name}_instructions"]}
        multiplies = row["kernel"] != "delta"
        assert used == ({TENSOR[row["arch"]]} if multiplies else set()), row
        assert (row["tensor_memory_columns"] or 0) > 0 or row["arch"] != "sm_100" or not multiplies


def test_a_thread_exponentiates_at_least_its_share_of_a_tile(rows) -> None:
    for row in rows:
        if row["kernel"] == "delta":
            assert row["ex2_instructions"] == 0
        else:
            share = row["block_q"] * row["block_k"] // (32 * row["num_warps"])
            assert row["ex2_instructions"] >= share


def test_no_bundled_kernel_adds_atomically(rows) -> None:
    assert {row["atomic_instructions"] for row in rows} == {0}


def test_resources_are_within_the_limits_and_decide_the_occupancy(rows) -> None:
    for row in rows:
        limits = LIMITS[next(one for one in ARCHES if static.architecture(one) == row["arch"])]
        blocks = row["blocks_per_sm"]
        assert 0 < row["registers_per_thread"] <= 255
        assert blocks >= 1
        assert row["warps_per_sm"] == blocks * row["num_warps"] <= limits.warps_per_sm
        assert row["occupancy_percent"] == pytest.approx(100 * row["warps_per_sm"] / limits.warps_per_sm)
        shared = row["static_shared_bytes"] + row["dynamic_shared_bytes"]
        assert blocks * (shared + 1024) <= limits.smem_per_sm_bytes
        assert blocks * 32 * row["num_warps"] * row["registers_per_thread"] <= limits.registers_per_sm
        assert all(row[f"blocks_per_sm_by_{name}"] == blocks for name in row["occupancy_limited_by"])
        assert row["code_bytes"] >= 16 * row["instructions"] > 0
        assert (row["limits_of"], row["limits_source"]) == (limits.name, limits.source)


def test_what_the_implementation_refuses_is_a_row_with_the_reason() -> None:
    (row,) = static.profile(grid(head_dims=(320,), passes=("fwd",), limits={(9, 0): LIMITS[9, 0]}))
    assert (row["status"], row["reason"]) == ("unsupported", "head_dim 320 is larger than 256")
    assert row["registers_per_thread"] is row["ex2_instructions"] is row["occupancy_percent"] is None


def test_a_kernel_that_does_not_compile_is_a_row_with_the_reason_and_fails_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = _compile.BUNDLED["flash-v2"].launch
    monkeypatch.setitem(_compile.BUNDLED, "flash-v2", _compile.Bundled({"fwd": ("fwd", "no such")}, launch))
    code, out, err = run(capsys, "--arch", "sm_90", "--passes", "fwd", "--json", "--quiet")
    good, bad = json.loads(out)
    assert (good["status"], bad["status"]) == ("ok", "failed")
    assert bad["reason"].startswith("StopIteration")
    assert bad["instructions"] is None
    assert good.keys() == bad.keys()
    assert code == EXIT_GATE
    first = "flash-v2 no such sm_90 bf16 d64 causal: StopIteration"
    assert err.startswith(f"error: 1 of 2 kernels did not compile, first: {first}")
    assert err.count("\n") == 1


def test_a_kernel_that_is_refused_does_not_fail_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--arch", "sm_90", "--head-dims", "320", "--passes", "fwd", "--json")
    assert (code, [row["status"] for row in json.loads(out)]) == (0, ["unsupported"])


def test_without_a_disassembler_there_are_no_counts_but_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: str) -> str:
        raise FileNotFoundError(2, "No such file or directory", "nvdisasm")

    junk = _compile._read({"cubin": b"no cubin"})[2]
    assert junk.startswith("cuobjdump failed: ")
    monkeypatch.setattr(_compile, "_run", missing)
    usage, code, unread = _compile._read({"cubin": b""})
    assert (usage, code) == ("", "")
    assert unread.startswith("no disassembler: ")
    options = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3}
    monkeypatch.setattr(
        _compile,
        "compile_all",
        lambda tasks, *_, **__: [_compile.Compiled(t, 65536, options=options, unread=unread) for t in tasks],
    )
    (row,) = static.profile(grid(passes=("fwd",), limits={(9, 0): LIMITS[9, 0]}))
    assert (row["status"], row["reason"], row["dynamic_shared_bytes"]) == ("ok", unread, 65536)
    assert {row[f"{name}_instructions"] for name in sass.CLASSES} == {None}
    assert row["registers_per_thread"] is row["blocks_per_sm"] is None
    assert static.summary([row]) == [f"no counts: {unread}"]


NOTHING = dict.fromkeys(("impls", "head_dims", "dtypes", "causal", "passes", "arches", "gpu"))


@pytest.mark.parametrize(
    ("option", "text", "words"),
    [
        ("arches", "sm_91", ["--arch", "sm_91", "sm_80", "sm_120"]),
        ("arches", "sm_90,sm90a", ["--arch", "sm_90", "twice"]),
        ("arches", "", ["--arch", "empty", "sm_80"]),
        ("gpu", "h100", ["--gpu" , "h100", "h100-sxm"]),
        ("gpu", "mi300x", ["--gpu 'mi300x'", "gfx942", "sm_90"]),
        ("gpu", "t4", ["--gpu 't4'", "sm75", "sm_80"]),
        ("gpu", "h100-sxm,h200", ["--gpu 'h200'", "h100-sxm", "one card of each"]),
        ("impls", "naive", ["--impls", "naive", "flash"]),
        ("dtypes", "fp9", ["--dtypes", "fp9", "bf16"]),
        ("head_dims", "0", ["--head-dims", "0", "accepted"]),
        ("causal", "maybe", ["--causal", "maybe", "both"]),
        ("passes", "forward", ["--passes", "forward", "fwd"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(option: str, text: str, words: list[str]) -> None:
    with pytest.raises(FlashbenchError) as caught:
        profile_static.show(**{**NOTHING, option: text}, json=False, csv=False, quiet=False)
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_without_triton_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UnavailableError, match="pip install triton") as caught:
        profile_static.show(**NOTHING, json=False, csv=False, quiet=False)
    assert caught.value.exit_code == 3


def test_a_cache_that_triton_cannot_use_is_bad_input_and_no_kernel_that_does_not_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(file))
    code, out, err = run(capsys, "--arch", "sm_90", "--passes", "fwd", "--quiet")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        f"error: TRITON_CACHE_DIR='{file}': '{file}' is no folder; accepted: a folder that can be written,"
        " or unset"
    ]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new" / "below"))
    _triton.check_cache()
    assert list(tmp_path.iterdir()) == [file], "nothing is made"
    for folder, words in ((file / "below", "is no folder"), ("/proc/none", "takes no file"), ("", "no name")):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
        with pytest.raises(UsageError, match=f"TRITON_CACHE_DIR='{folder}': .*{words}"):
            _triton.check_cache()
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(file))
    with pytest.raises(UsageError, match=r"TRITON_CACHE_DIR is not set, .*of TRITON_HOME\).* is no folder"):
        _triton.check_cache()


def test_the_cache_is_looked_at_where_kernels_will_be_compiled_only(monkeypatch: pytest.MonkeyPatch) -> None:
    h100 = Target(device="cuda:0", capability=(9, 0))
    monkeypatch.setattr(_triton, "interpreted", lambda target: target.type == "cpu")
    monkeypatch.setattr(_triton, "why_unavailable", lambda target: None)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/none")
    flash, naive = (
        replace(kernels.get(name), interpreted=_triton.interpreted, why_unavailable=lambda target: None)
        for name in ("flash", "naive")
    )
    monkeypatch.setattr(kernels, "get", {"flash": flash, "naive": naive}.__getitem__)
    options.settle(["naive"], h100)
    options.settle(["flash"], Target())
    with pytest.raises(UsageError, match="TRITON_CACHE_DIR"):
        options.settle(["naive", "flash"], h100)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        cli.main(
            ["profile", "--static", "--impls", "flash-v2", "--head-dims", "64", "--causal", "yes", *arguments]
        )
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def test_json_is_the_rows_and_the_same_every_time(capsys, rows) -> None:
    code, out, err = run(capsys, "--arch", "sm100,sm_80,sm_90a", "--json", "--quiet")
    assert (code, err) == (0, "")
    assert json.loads(out) == rows


@pytest.mark.slow
def test_a_named_card_decides_the_occupancy_of_its_architecture(capsys) -> None:
    code, out, err = run(capsys, "--gpu", "h100-sxm,rtx-4090", "--passes", "fwd", "--csv")
    assert code == 0
    found = {row["arch"]: row for row in csv.DictReader(io.StringIO(out))}
    assert {arch: row["limits_of"] for arch, row in found.items()} == {
        "sm_89": "rtx-4090", "sm_90": "h100-sxm"
    }  # fmt: skip
    assert "data sheet" in found["sm_90"]["limits_source"]
    assert float(found["sm_89"]["occupancy_percent"]) > 0
    assert "compiling 2 kernels" in err


def test_the_table_says_what_its_numbers_are(capsys) -> None:
    code, out, err = run(capsys, "--arch", "sm_80", "--gpu", "h100-sxm", "--passes", "fwd")
    assert code == 0
    for word in ("sm_80", "fwd", "128x64", "mma", "cp.async", "limited by"):
        assert word in out
    assert "--gpu h100-sxm: is sm_90, not compiled for" in err
    assert "CUDA C++ Programming Guide" in err
    assert "not of executions" in err
