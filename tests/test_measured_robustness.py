"""What was run on a card for robustness is committed whole, and clean."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import sanitize  # noqa: E402
import sanitizer_cases  # noqa: E402

CHECK = ROOT / "reports" / "h200-sxm" / "check"


def test_thousands_of_random_problems_were_within_the_bound() -> None:
    text = (CHECK / "random.txt").read_text("utf-8")
    for seed in (1, 2):
        counts = re.findall(rf"^(\d+) random problems of \S+, seed {seed}$", text, re.M)
        assert sum(map(int, counts)) >= 2000
    assert re.findall(r"^(\d+) passed: \1 tests$", text, re.M) == ["81", "81"]
    assert "failed" not in text


def passed(name: str) -> list[str]:
    """The tests that a log's last line counts."""
    text = (CHECK / name).read_text("utf-8")
    found = re.findall(r"^PASSED tests/\w+\.py::(.+)$", text, re.M)
    assert re.search(rf"^{len(found)} passed(, \d+ deselected)? in ", text, re.M)
    assert re.search("^ran on device_name NVIDIA H200, ", text, re.M)
    return found


def test_sweeps_outlived_every_fault_of_a_card() -> None:
    faults = (
        "cuda-assert",
        "cuda-illegal",
        "cuda-hang",
        "cuda-exit",
        "late-segfault",
        "oom-cuda",
        "overwrite",
    )
    assert {
        "test_the_card_has_its_memory_back",
        *(f"test_a_sweep_outlives_it[{name}]" for name in faults),
    } <= set(passed("faults.txt"))


def test_no_kernel_read_past_its_inputs() -> None:
    """And one that does was found."""
    tests = ("test_no_kernel_reads_past_its_inputs", "test_whoever_reads_past_them_is_found")
    assert {f"{name}[cuda]" for name in tests} <= set(passed("guard-pages.txt"))


@pytest.mark.parametrize(("kind", "least"), [("lines", 100_000), ("files", 20_000)])
def test_command_lines_and_files_of_every_kind_ended_as_documented(kind: str, least: int) -> None:
    text = (ROOT / "reports" / "cpu" / f"fuzz-{kind}.txt").read_text("utf-8")
    runs = re.findall(rf"^{kind} from seed \d+: (\d+) examples$", text, re.M)
    assert f"\n{kind}: {sum(map(int, runs))} examples, 0 of {len(runs)} fuzzers failed\n" in text
    assert sum(map(int, runs)) >= least


def test_cells_beside_a_crash_a_leak_and_a_full_card_measured_as_without_it() -> None:
    name = "test_on_a_gpu_the_others_measure_as_if_it_had_not_happened"
    faults = ("late-segfault", "cuda-assert", "cuda-illegal", "cuda-leak", "oom-cuda")
    assert {f"{name}[{one}]" for one in faults} <= set(passed("isolation.txt"))


def test_the_drop_in_functions_keep_the_packages_rule() -> None:
    """A run of each grid: a dot for each test, and no other sign, of all that the last line counts."""
    _, *runs = re.split("^pytest ", (CHECK / "drop-in-grids.txt").read_text("utf-8"), flags=re.M)
    for grid, least in (("cache_as_the_package", 117), ("packed_sequences_as_the_package", 78)):
        (run,) = (run for run in runs if f" tests/test_drop_in_grids.py -k {grid}, " in run)
        assert re.search("^ran on device_name NVIDIA H200, ", run, re.M)
        signs = "".join(re.findall(r"^(\S+) +\[ *\d+%\]$", run, re.M))
        assert signs == "." * len(signs)
        assert re.search(rf"^{len(signs)} passed in ", run, re.M)
        assert len(signs) >= least


def test_a_hundred_thousand_launches_kept_nothing() -> None:
    told = ast.literal_eval(re.findall(r"^{.*}$", (CHECK / "soak.txt").read_text("utf-8"), re.M)[0])
    assert told["launches"] >= 100_000
    assert told["tensor_bytes"] == told["card_bytes"] == 0


def test_every_kernel_was_clean_under_every_sanitizer() -> None:
    """Broken kernels were found; what is put aside was reported of kernels that are right, too."""
    lines = (CHECK / "sanitizer" / "sanitizer.jsonl").read_text("utf-8").splitlines()
    head, *rows = map(json.loads, lines)
    assert head["wrong"] == []
    assert not any(row["errors"] for row in rows if row["group"] != sanitize.CONTROL and not row["right"])
    for tool in sanitize.TOOLS:
        ran = {row["group"] for row in rows if row["tool"] == tool and row["status"] == "ran"}
        assert {one.group for one in sanitizer_cases.CASES} <= ran
