"""What a command is started with may be broken: closed or full streams, one column, a deleted folder."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import faults
import pytest
from tiers import tiers

from flashbench import paths, runfile

FLASHBENCH = [sys.executable, "-m", "flashbench"]
ROOT = Path(__file__).resolve().parents[1]
SURROUNDINGS = {
    **os.environ,
    # an empty part would be the folder that Python starts in, which must be there
    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
}
SWEEP = [
    sys.executable, faults.__file__, "--quick", "run", "--device", "cpu", "--impls", "naive,right",
    "--seqlens", "8,16", "--head-dims", "8", "--dtypes", "fp32", "--causal", "no", "--passes", "fwd",
]  # fmt: skip
GONE = "No such file or directory"


def shell(argv: list[str], more: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """The command with redirections, as a shell starts it."""
    return subprocess.run(
        ["sh", "-c", f"{shlex.join(argv)} {more}"], capture_output=True, text=True, timeout=120, check=False,
        env={**SURROUNDINGS, **variables},
    )  # fmt: skip


@pytest.mark.parametrize("closed", tiers(["2>/dev/full", "2>&- <&-"], ["2>&-"]))
def test_a_sweep_goes_on_without_notes(closed: str, tmp_path: Path) -> None:
    if "full" in closed and not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    done = shell([*SWEEP, "--verbose", "--out", str(tmp_path / "out")], closed)
    assert (done.returncode, done.stderr) == (0, "")
    found = runfile.load(tmp_path / "out" / "results.jsonl")
    assert [record.status for record in found.records] == ["ok"] * 4
    assert runfile.verify(tmp_path / "out" / "results.jsonl").ok


@pytest.mark.parametrize("closed", tiers(["2>/dev/full"], ["2>&-"]))
def test_an_error_that_nobody_can_read_still_has_its_exit_code(closed: str) -> None:
    assert shell([*FLASHBENCH, "nope"], closed).returncode == 2


def test_a_stderr_that_fills_up_later_costs_nothing_either(tmp_path: Path) -> None:
    """A file that may grow to so many bytes, of which results are none."""
    program = "from flashbench import console; [console.note('x' * 1000) for _ in range(100)]; print('end')"
    log = tmp_path / "log"
    line = f"ulimit -f 8; {shlex.join([sys.executable, '-c', program])} 2> {log}"
    done = subprocess.run(
        ["sh", "-c", f"trap '' XFSZ; {line}"], capture_output=True, text=True, env=SURROUNDINGS, check=False
    )
    assert (done.returncode, done.stdout) == (0, "end\n")
    assert 0 < log.stat().st_size <= 8 * 1024


@pytest.mark.parametrize(
    "line", tiers(["--version", "io-model --seqlens 1k"], ["--help", "doctor", "claims"])
)
def test_a_closed_stdout_is_one_line(line: str) -> None:
    done = shell([*FLASHBENCH, *line.split()], ">&-")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: the output cannot be written: stdout is closed\n"


def test_no_file_of_a_run_is_taken_for_a_stdout_that_was_closed(tmp_path: Path) -> None:
    done = shell([*SWEEP, "--out", str(tmp_path / "out")], "<&- >&-")
    assert done.returncode == 0, done.stderr  # the quick sweep prints no table
    assert runfile.verify(tmp_path / "out" / "results.jsonl").ok


@pytest.mark.parametrize("columns", tiers(["2", "²"], ["", "0", "1", "9" * 20]))
@pytest.mark.parametrize("line", tiers(["io-model --seqlens 1k"], ["--help"]))
def test_no_width_is_too_small_or_no_number(line: str, columns: str) -> None:
    done = shell([*FLASHBENCH, *line.split()], COLUMNS=columns, LINES="²")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 100
    assert max(map(len, done.stdout.splitlines())) <= 20 or columns not in ("1", "2")


@pytest.mark.parametrize("columns", tiers([1], [2]))
def test_nor_is_a_terminal(columns: int) -> None:
    import fcntl
    import pty
    import struct
    import termios

    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 1, columns, 0, 0))
    variables = {name: text for name, text in SURROUNDINGS.items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen(
        [*FLASHBENCH, "io-model", "--seqlens", "1k"], stdin=there, stdout=there, stderr=subprocess.PIPE,
        env=variables, text=True,
    ) as process:  # fmt: skip
        os.close(there)
        said = b""
        try:
            while more := os.read(here, 4096):
                said += more
        except OSError:  # Linux says so of a terminal whose other end is closed
            pass
        assert process.stderr is not None
        assert process.wait() == 0, process.stderr.read()
    os.close(here)
    assert len(said) > 100


@pytest.mark.parametrize(
    "line",
    tiers(
        ["run --out loop --device cpu --seqlens 16", "compare {run} {run} -o json=loop"],
        ["run --out loop/below --device cpu --seqlens 16", "run --resume --out loop",
         "check --out loop --device cpu", "ring --check --out loop"],
    ),
)  # fmt: skip
def test_links_in_a_circle_are_one_line(line: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    run = ROOT / "reports" / "h200-sxm"
    done = subprocess.run(
        [*FLASHBENCH, *line.format(run=run).split()], cwd=tmp_path, capture_output=True, text=True,
        env=SURROUNDINGS, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "loop" in done.stderr
    assert ": Too many levels of symbolic links; accepted: a f" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_path_is_resolved_unless_it_goes_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    assert paths.resolved(tmp_path / "link") == paths.resolved(tmp_path / "file")
    assert paths.resolved(tmp_path / "new" / ".." / "other") == paths.resolved(tmp_path) / "other"
    with pytest.raises(OSError, match="Too many levels"):
        paths.resolved(tmp_path / "loop")


def nowhere(line: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """The command in a folder that is deleted before it starts."""
    folder = tmp_path / "gone"
    folder.mkdir()
    return subprocess.run(
        ["sh", "-c", f"cd {folder} && rmdir {folder} && exec {shlex.join([*FLASHBENCH, *line.split()])}"],
        capture_output=True, text=True, env=SURROUNDINGS, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("line", tiers(["run --device cpu"], ["report x", "list", "check --device cpu"]))
def test_a_deleted_folder_is_one_line(line: str, tmp_path: Path) -> None:
    done = nowhere(line, tmp_path)
    assert done.returncode == 2
    assert (
        done.stderr
        == f"error: the working directory is gone ({GONE}); accepted: one that exists (cd to it)\n"
    )


def test_which_doctor_finds_and_help_does_without(tmp_path: Path) -> None:
    assert nowhere("--version", tmp_path).returncode == 0
    done = nowhere("doctor --csv", tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"folder,problem,the working directory is gone ({GONE})," in done.stdout
