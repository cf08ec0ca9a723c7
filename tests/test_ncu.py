"""Nsight Compute, with fakes in its place: tables are read, refusals explained, nothing crashes."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flashbench._profilers import counters, ncu, ncu_csv, ncu_units
from flashbench.errors import RunFileError

WIDE = Path(__file__).parent / "data" / "ncu_wide.csv"

LONG = """==PROF== Connected to process 7 (/usr/bin/python3)
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"0","7","python3","h","softmax","1","7","(128, 1, 1)","(64, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","Mbyte","500"
"0","7","python3","h","softmax","1","7","(128, 1, 1)","(64, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_write.sum","Gbyte","1.5"
"0","7","python3","h","softmax","1","7","(128, 1, 1)","(64, 1, 1)","0","9.0","Command line profiler metrics","gpu__time_duration.sum","usecond","1,250.5"
"0","7","python3","h","softmax","1","7","(128, 1, 1)","(64, 1, 1)","0","9.0","Occupancy","","",""
"1","7","python3","h","softmax","1","7","(128, 1, 1)","(64, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","Kbyte","640"
"1","7","python3","h","softmax","1","7","(128, 1, 1)","(64, 1, 1)","0","9.0","Command line profiler metrics","lts__t_sectors_srcunit_tex_lookup_hit.sum","sector","n/a"
"""  # noqa: E501


def test_a_wide_table_has_a_kernel_per_row_its_units_and_its_ranges() -> None:
    first, second, third = ncu_csv.parse(WIDE.read_text(encoding="utf-8"))
    assert (first.ranges, first.metrics["dram__bytes_read.sum"]) == ((), 16_799_232)
    assert second.name.startswith("nvjet_sm90")
    assert second.ranges == ("cell", "bwd b1/2 x=3")
    assert second.metrics["gpu__time_duration.sum"] == pytest.approx(25.312e-6, rel=0.1)
    assert second.metrics["l1tex__m_xbar2l1tex_read_bytes.sum"] == 201_326_592
    assert not any(name.startswith("device__") for name in second.metrics)
    assert third.grid == "(2, 64, 1)"


def test_a_long_table_has_units_of_their_own_per_row() -> None:
    first, second = ncu_csv.parse(LONG)
    assert first.metrics["dram__bytes_read.sum"] == 500e6
    assert first.metrics["dram__bytes_write.sum"] == 1.5e9
    assert first.metrics["gpu__time_duration.sum"] == pytest.approx(1250.5e-6)
    assert second.metrics == {
        "dram__bytes_read.sum": 640_000, "lts__t_sectors_srcunit_tex_lookup_hit.sum": None
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("4,362,076,160", "byte", 4362076160), ("500", "Mbyte", 5e8), ("1.5", "Gbyte", 1.5e9),
        ("640", "Kbyte", 640000), ("1,000", "sector", 1000), ("12", "Kbyte/block", 12000),
        ("3", "ns", 3e-9), ("3", "msecond", 3e-3), ("55.5", "%", 55.5), ("2", "Tbyte", 2e12),
        ("n/a", "byte", None), ("", "byte", None), ("nan", "byte", None), ("inf", "", None),
        ("255", "register/thread", 255), ("-", "%", None),
        ("3", "MB", 3e6), ("3", "KB", 3e3), ("3", "kB", 3e3),
        ("3", "MiB", 3 * 2**20), ("3", "KiB", 3072), ("3", "B", 3), ("7", "cycle", 7), ("2", "Kcycle", 2000),
        ("2", "Gbyte/second", 2e9), ("2", "byte/ns", 2e9), ("2", "cycle/nsecond", 2e9), ("2", "GHz", 2e9),
        ("5", "us", 5e-6), ("1e+06", "byte", 1e6), ("1'000", "byte", 1000), ("0", "inst/cycle", 0),
    ],
)  # fmt: skip
def test_numbers_come_in_base_units(text: str, unit: str, value: float | None) -> None:
    assert ncu_units.number(text, unit) == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize(
    "unit", ["furlong", "Xbyte", "byte/furlong", "byte/second/second", "MBi", "meter", "KKbyte"]
)
def test_an_unknown_unit_is_no_factor_of_1(unit: str) -> None:
    with pytest.raises(ValueError, match="is not known"):
        ncu_units.number("1", unit)


@pytest.mark.parametrize(
    "text", ["1.234,5", "1,5", "12,34", "1,2345", "1.234.567", "1,234.567,8", "1 234", "1,,000"]
)
def test_a_decimal_comma_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ambiguous"):
        ncu_units.number(text, "byte")


def wide(*rows: str, units: str | None = '"","byte","ns"') -> str:
    head = '"Kernel Name","dram__bytes_read.sum","gpu__time_duration.sum"'
    return "\n".join([head, *([] if units is None else [units]), *rows]) + "\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (wide('"k","1","1"', units='"","furlong","ns"'), ["'dram__bytes_read.sum'", "unit 'furlong'"]),
        (wide('"k","1.234,5","1"'), ["'dram__bytes_read.sum'", "'1.234,5' is ambiguous"]),
        (wide('"k","-5","1"'), ["'dram__bytes_read.sum'", "'-5' is below zero"]),
        (wide('"k","5","1"', units=None), ["no row of units"]),
        (LONG.replace("Metric Unit", "Other"), ["no column 'Metric Unit'"]),
        (LONG.replace("Metric Value", "Other"), ["no column 'Metric Value'"]),
        (LONG.replace("Metric Name", "Other"), ["no column 'Metric Name'"]),
        (LONG.replace("Gbyte", "Gfurlong"), ["'dram__bytes_write.sum'", "unit 'Gfurlong'"]),
        ("[7] python3@h\n  softmax (64, 1, 1)x(128, 1, 1), Device 0\n    Section: GPU Speed Of Light\n"
         "    ----- ----- -----\n    Metric Name Metric Unit Metric Value\n",
         ["details page", "--page raw --csv"]),
    ],
)  # fmt: skip
def test_what_has_no_certain_value_is_refused_in_one_line(text: str, says: list[str]) -> None:
    with pytest.raises(RunFileError) as refused:
        ncu_csv.parse(text, source="x.csv")
    for part in ("x.csv: ", "accepted: ", *says):
        assert part in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "--page raw" in refused.value.hint


def test_a_cell_that_is_too_long_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = csv.field_size_limit()
    monkeypatch.setattr(ncu_csv, "_FIELD_BYTES", 1000)
    assert len(ncu_csv.parse(wide(f'"{"k" * 1000}","1","1"'))) == 1
    with pytest.raises(RunFileError, match=r"x\.csv: field larger .*accepted: cells of 1000"):
        ncu_csv.parse(wide(f'"{"k" * 1001}","1","1"'), source="x.csv")
    assert csv.field_size_limit() == usual


@pytest.mark.parametrize(
    ("metric", "unit"),
    [
        *(("dram__bytes_read.sum", unit) for unit in ("%", "sector", "usecond", "Gbyte/second", "", "inst")),
        *(("gpu__time_duration.sum", unit) for unit in ("Mbyte", "cycle", "%", "")),
        ("lts__t_sectors_srcunit_tex_lookup_hit.sum", "byte"),
    ],
)
def test_a_unit_of_another_kind_is_refused(metric: str, unit: str) -> None:
    text = f'"ID","Kernel Name","{metric}"\n"","","{unit}"\n"0","k","5"\n'
    with pytest.raises(RunFileError, match=rf"column '{metric}': the unit '{unit}' is of another kind"):
        ncu_csv.parse(text)


def test_what_is_not_asked_for_may_have_any_unit() -> None:
    text = wide('"k","-1","1"', units='"","furlong","ns"')
    (kernel,) = ncu_csv.parse(text, only={"gpu__time_duration.sum"})
    assert kernel.metrics == {"gpu__time_duration.sum": 1e-9}


def test_two_outputs_in_one_file_are_read_one_after_the_other() -> None:
    text = wide('"a","1","1"') + "==PROF== bye\n" + wide('"b","2","1"', units='"","Kbyte","us"')
    first, second = ncu_csv.parse(text)
    assert (first.name, first.metrics["dram__bytes_read.sum"]) == ("a", 1)
    assert (second.name, second.metrics["dram__bytes_read.sum"]) == ("b", 2000)
    assert len(ncu_csv.parse(LONG + LONG)) == 4
    assert len(ncu_csv.parse(LONG + wide('"a","1","1"'))) == 3


@pytest.mark.parametrize(
    ("line", "dropped"),
    [
        ('"k","5"', 1), ('"k","5","1', 1), ('"k","5","1","2"', 1), ('"k"x","5","1"', 1), ('"k,"5","1"', 1),
        ("something that the program printed", 1), ("==PROF== bye", 0), ("", 0), ("  ", 0),
    ],
)  # fmt: skip
def test_a_broken_line_costs_itself_only_and_is_told(line: str, dropped: int) -> None:
    found = ncu_csv.read(wide('"a","1","1"', line, '"b","2","1"'))
    assert ([kernel.name for kernel in found.kernels], found.dropped) == (["a", "b"], dropped)


def test_a_metric_that_stands_twice_is_told_and_the_last_counts() -> None:
    """Wide: two columns of one name; long: two rows of one kernel."""
    head, units, row = wide('"a","1","2"').strip().splitlines()
    again = f'{head},"dram__bytes_read.sum"\n{units},"Kbyte"\n{row},"3"\n'
    line = next(line for line in LONG.splitlines() if "bytes_write" in line)
    longer = LONG + line.replace("1.5", "2") + "\n"
    for text, metric, value in (
        (again, "dram__bytes_read.sum", 3000), (longer, "dram__bytes_write.sum", 2e9),
    ):  # fmt: skip
        found = ncu_csv.read(text)
        assert (found.twice, found.kernels[0].metrics[metric]) == ((metric,), value)
        assert ncu_csv.read(text, only={"gpu__time_duration.sum"}).twice == ()
    assert ncu_csv.read(LONG + LONG).twice == ncu_csv.read(LONG).twice == (), "two outputs, each once"


def test_only_the_row_of_units_is_taken_for_it() -> None:
    """A kernel may have no name; a second row of units, or a blank one, is no kernel."""
    found = ncu_csv.read(wide('"a","1","1"', '"","2","1"', '"","Kbyte","us"', '"","",""'))
    assert [(one.name, one.metrics["dram__bytes_read.sum"]) for one in found.kernels] == [
        ("a", 1), (ncu_csv.UNNAMED, 2),
    ]  # fmt: skip
    assert found.dropped == 2
    head, units, row = wide('"","5","1"').strip().splitlines()
    named = f'"ID",{head}\n"",{units}\n"7",{row}\n'
    assert [one.name for one in ncu_csv.parse(named)] == [ncu_csv.UNNAMED]
    with pytest.raises(RunFileError, match="no row of units"):
        ncu_csv.parse(f'"ID",{head}\n"7",{row}\n')
    nameless = LONG.replace('"softmax"', '""')
    assert [one.name for one in ncu_csv.parse(nameless)] == [ncu_csv.UNNAMED] * 2
    assert ncu_csv.parse(nameless)[0].metrics == ncu_csv.parse(LONG)[0].metrics


def test_a_kernels_name_is_shown_without_control_characters_and_however_long() -> None:
    found = ncu_csv.parse(wide('"ev\x1b[31mil\x07\x85\u202e\x0bname","1","1"', f'"{"k" * 200_000}","1","1"'))
    assert found[0].name == "ev[31milname"
    assert len(found[1].name) == 200_000


def test_a_row_that_was_cut_off_is_left_out() -> None:
    text = WIDE.read_text(encoding="utf-8")
    assert len(ncu_csv.parse(text[: text.rindex('"(2, 64, 1)"')])) == 2


@pytest.mark.parametrize("text", ["", "==PROF== Connected\n==WARNING== No kernels were profiled.\n"])
def test_no_kernels_is_no_error(text: str) -> None:
    assert ncu_csv.parse(text) == ()


@pytest.mark.parametrize("text", ["hello\n", '{"a": 1}', "a,b\n1,2\n", "\0\1\2"])
def test_another_file_is_refused_by_name(text: str) -> None:
    with pytest.raises(RunFileError, match=r"x\.csv: no table of Nsight Compute"):
        ncu_csv.parse(text, source="x.csv")


def test_counters_are_sums_of_metrics_and_missing_ones_are_none() -> None:
    read, write = "l1tex__m_xbar2l1tex_read_bytes", "l1tex__m_l1tex2xbar_write_bytes"
    metrics = {
        f"{read}.sum": 1000.0, f"{read}_mem_dshared.sum": 100.0, f"{write}.sum": 900.0,
        f"{write}_mem_global_op_red.sum": 300.0, f"{write}_mem_global_op_atom.sum": 32.0,
        "dram__bytes_read.sum": None,
    }  # fmt: skip
    (row,) = counters.count([ncu_csv.Kernel(name="k", metrics=metrics)])
    assert row.counters["l2_read_bytes"] == 900
    assert row.counters["l2_atomic_bytes"] == 332
    assert row.counters["l2_write_bytes"] == 568
    assert "dram_read_bytes" not in row.counters
    del metrics[f"{write}_mem_global_op_red.sum"]  # not counted: then neither is what it is part of
    (row,) = counters.count([ncu_csv.Kernel(name="k", metrics=metrics)])
    assert "l2_write_bytes" not in row.counters


def test_a_sum_over_kernels_lacks_what_one_of_them_lacks_and_weighs_shares_by_time() -> None:
    def kernel(seconds: float, share: float, dram: float | None) -> ncu_csv.Kernel:
        return ncu_csv.Kernel(
            name="k",
            metrics={
                "gpu__time_duration.sum": seconds,
                "sm__warps_active.avg.pct_of_peak_sustained_active": share,
                "dram__bytes_read.sum": dram,
                "launch__registers_per_thread": 255.0,
            },
        )

    whole = counters.total(counters.count([kernel(1.0, 10.0, 5.0), kernel(3.0, 50.0, 7.0)]))
    assert whole == {"time_s": 4.0, "dram_read_bytes": 12, "occupancy": pytest.approx(0.4)}
    assert counters.total(counters.count([kernel(1, 1, 5.0), kernel(1, 1, None)]))["dram_read_bytes"] is None


def test_every_counter_is_described_and_named_once() -> None:
    assert len(counters.BY_NAME) == len(counters.COUNTERS)
    assert set(counters.metrics(detail=False)) < set(counters.metrics(detail=True))
    for row in counters.COUNTERS:
        assert row.help
        assert set(row.optional) <= set(row.metrics)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a program of that text in the place of ncu."""

    def make(text: str) -> Path:
        path = tmp_path / "ncu"
        path.write_text(f"#!{sys.executable}\nimport sys\n{text}", encoding="utf-8")
        path.chmod(0o755)
        monkeypatch.setenv("FLASHBENCH_NCU", str(path))
        return path

    return make


LOG = "log = sys.argv[sys.argv.index('--log-file') + 1]\n"


@pytest.mark.parametrize("code", [0, 1])
@pytest.mark.parametrize(
    ("said", "meaning", "remedy"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance"
         " Counters on the target device 0.", "ERR_NVGPUCTRPERM", "NVreg_RestrictProfilingToAdminUsers=0"),
        ("==ERROR== Failed to initialize: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES", "from this user", "root"),
        ("==ERROR== Profiling failed because a driver resource was unavailable. Ensure that no other tool"
         " (like DCGM) is concurrently collecting profiling data.", "in use by another tool", "dcgm"),
        ("==ERROR== Profiling is not supported on MIG devices", "MIG", "whole GPU"),
        ("==ERROR== Profiling is not supported on this device under WSL", "WSL", "Control Panel"),
        ("==ERROR== The application uses an unsupported device", "does not know this GPU", "driver"),
        ("==ERROR== Cuda driver is not compatible with Nsight Compute", "fit each other", "the driver"),
        ("==ERROR== UnknownError", "could not prepare", "dcgmi profile --pause"),
        ("==ERROR== Failed to prepare kernel for profiling", "could not prepare", "DCGM"),
        ("==ERROR== unrecognised option '--nvtx-include'. Use --help for further details.",
         "too old: unrecognised option '--nvtx-include'", "newer"),
        ("==ERROR== Failed to write /tmp/x: No space left on device", "disk is full", "TMPDIR"),
        ("==ERROR== Failed to access the following 2 metrics: dram__bytes_read.sum, x__tma.sum",
         "lacks metrics: dram__bytes_read.sum, x__tma.sum", "newest"),
        ("==ERROR== Profiling is not supported on this vGPU", "virtual GPU", "hypervisor"),
        ("==ERROR== Failed to open/create lock file /tmp/nsight-compute-lock", "lock file", "TMPDIR"),
    ],
)  # fmt: skip
def test_each_refusal_is_named_with_its_remedy_whatever_the_exit_code(
    fake, tmp_path: Path, code: int, said: str, meaning: str, remedy: str
) -> None:
    fake(f"{LOG}open(log, 'w').write({said!r} + '\\n')\nsys.exit({code})\n")
    found = ncu.profile(("dram__bytes_read.sum",), tmp_path / "log.csv", ["true"], 120)
    assert meaning in found.reason
    assert remedy in found.reason
    assert "\n" not in found.reason
    assert ncu_csv.parse(found.csv) == ()


def test_a_good_profile_has_no_reason_though_kernels_are_called_error(fake, tmp_path: Path) -> None:
    text = WIDE.read_text(encoding="utf-8").replace("nvjet_sm90", "ERR_NVGPUCTRPERM_error_kernel")
    fake(f"{LOG}open(log, 'w').write({text!r})\nsys.exit(0)\n")
    found = ncu.profile(("dram__bytes_read.sum",), tmp_path / "log.csv", ["true"], 120)
    assert found.reason == ""
    assert len(ncu_csv.parse(found.csv)) == 3


def test_metrics_that_the_chip_lacks_are_left_out_in_a_second_try(fake, tmp_path: Path) -> None:
    fake(
        f"{LOG}asked = sys.argv[sys.argv.index('--metrics') + 1]\n"
        "if 'tma' in asked:\n"
        "    print('==ERROR== Failed to find metric x__tma.sum'); sys.exit(1)\n"
        f"open(log, 'w').write({WIDE.read_text(encoding='utf-8')!r})\n"
    )
    found = ncu.profile(("a__b.sum", "x__tma.sum"), tmp_path / "log.csv", ["true"], 120)
    assert (found.missing, found.reason) == (("x__tma.sum",), "")
    assert len(ncu_csv.parse(found.csv)) == 3


@pytest.mark.parametrize("said", [
    "Failed to find metric x__tma.sum", "Failed to access the following metrics: x__tma.sum, y__other.sum",
    "Failed to access the following 1 metrics:\n  x__tma.sum",
])  # fmt: skip
def test_metrics_that_cannot_be_read_are_left_out_however_they_are_named(
    fake, tmp_path: Path, said: str
) -> None:
    fake(
        f"{LOG}asked = sys.argv[sys.argv.index('--metrics') + 1]\n"
        f"if 'tma' in asked:\n    print('==ERROR== ' + {said!r}); sys.exit(1)\n"
        f"open(log, 'w').write({WIDE.read_text(encoding='utf-8')!r})\n"
    )
    found = ncu.profile(("a__b.sum", "x__tma.sum"), tmp_path / "log.csv", ["true"], 120)
    assert (found.missing, found.reason) == (("x__tma.sum",), "")


def test_metrics_are_named_also_where_each_has_a_line() -> None:
    said = "==ERROR== Failed to access the following metrics:\n  x__tma.sum\n"
    assert "lacks metrics: x__tma.sum; install" in ncu.explain(said)


CHILD_FAILED = "==ERROR== The application returned an error code (1)."
RAISED = """Traceback (most recent call last):
  File "child.py", line 1, in <module>
    import torch
ModuleNotFoundError: No module named 'torch'
==PROF== Disconnected from process 7
"""


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (
            f"==ERROR== Cannot make sense of it\n==ERROR== More of it\n{CHILD_FAILED}\nbye",
            "Cannot make sense",
        ),
        (f"{RAISED}{CHILD_FAILED}", "ModuleNotFoundError: No module named 'torch'"),
        (f"{RAISED.replace('torch', 'first')}\nDuring handling:\n\n{RAISED}{CHILD_FAILED}", "named 'torch'"),
        (f"{RAISED}==ERROR== Cannot make sense of it\n", "Cannot make sense"),
        (CHILD_FAILED, "error code (1)"),
        ("", "it said nothing"),
    ],
)
def test_a_failure_shows_its_cause_and_not_what_followed(fake, tmp_path: Path, said: str, cause: str) -> None:
    fake(f"print({said!r})\nsys.exit(1)\n")
    found = ncu.profile(("a__b.sum",), tmp_path / "log.csv", ["true"], 120)
    assert found.reason.startswith("ncu exited with 1: ")
    assert cause in found.reason


def test_another_failure_shows_the_last_line(fake, tmp_path: Path) -> None:
    fake("print('==PROF== Connected')\nprint('target: segmentation fault')\nsys.exit(11)\n")
    found = ncu.profile(("a__b.sum",), tmp_path / "log.csv", ["true"], 120)
    assert found.reason == "ncu exited with 11: target: segmentation fault"


def test_a_hanging_profile_is_stopped_with_its_children(
    fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, communicate = tmp_path / "pid", subprocess.Popen.communicate
    fake(
        "import os, time\n"
        "child = os.fork()\n"
        f"if child:\n    open({str(path)!r}, 'w').write(f'{{child}}\\n')\n"
        "time.sleep(600)\n"
    )

    def once_it_hangs(self: Any, *given: Any, timeout: float | None = None) -> Any:
        while not (path.exists() and path.read_text().endswith("\n")):
            time.sleep(0.02)
        return communicate(self, *given, timeout=timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", once_it_hangs)
    found = ncu.profile(("a__b.sum",), tmp_path / "log.csv", ["true"], 0.5)
    assert "did not end within 0.5 s" in found.reason
    for _ in range(600):
        if not _alive(int(path.read_text())):
            return
        time.sleep(0.1)
    pytest.fail("its child lives on")


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # also while it is read
        return False
    return state != "Z"


def test_without_ncu_it_says_where_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHBENCH_NCU", str(tmp_path / "none"))
    assert "install it" in str(ncu.why_unavailable())
    assert "install it" in ncu.profile(("a__b.sum",), tmp_path / "log.csv", ["true"], 2).reason
    assert f"is not at FLASHBENCH_NCU ({str(tmp_path / 'none')!r}); " in str(ncu.why_unavailable())
    monkeypatch.delenv("FLASHBENCH_NCU")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(ncu, "_PLACES", ())
    assert "ncu (Nsight Compute) is not here; install it" in str(ncu.why_unavailable())


def test_an_ncu_that_cannot_be_started_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "ncu"
    path.write_bytes(b"\x7fELF not really")
    path.chmod(0o755)
    monkeypatch.setenv("FLASHBENCH_NCU", str(path))
    assert "ncu exited with 127" in ncu.profile(("a__b.sum",), tmp_path / "log.csv", ["true"], 2).reason
    assert ncu.version(str(path)) is None


def test_conditions_are_passed_on_the_line_and_kept_in_the_results() -> None:
    line = ncu.command("/bin/ncu", ("a__b.sum", "c__d.sum"), Path("log"), ["python", "x"])
    for option, value in (
        ("--clock-control", "none"), ("--cache-control", "all"), ("--replay-mode", "kernel"),
        ("--nvtx-include", ncu.RANGE), ("--metrics", "a__b.sum,c__d.sum"),
    ):  # fmt: skip
        assert line[line.index(option) + 1] == value
    assert line[-2:] == ["python", "x"]
    assert ncu.CONDITIONS == {"cache_control": "all", "clock_control": "none", "replay": "kernel"}


def test_ctrl_c_stops_the_profiler_too(fake, tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    fake(f"import os, time\nopen({str(marker)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    code = (
        "from pathlib import Path\nfrom flashbench._profilers import ncu\n"
        f"ncu.profile(('a__b.sum',), Path({str(tmp_path / 'log.csv')!r}), ['true'], 600)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not (marker.exists() and marker.read_text()):
        assert time.monotonic() < deadline
        assert child.poll() is None
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    child.wait(timeout=60)
    assert not _alive(int(marker.read_text()))
