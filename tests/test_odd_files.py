"""What is no file, or too large a one, is refused in one line and in bounded time and memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import child
import pytest
from fuzzing import answer, check, fault
from tiers import tiers

from flashbench import paths, runfile
from flashbench._runfile import lines
from flashbench.errors import RunFileError, UsageError

RESULTS = Path(__file__).resolve().parent.parent / "reports" / "cpu" / "results.jsonl"
posix = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@posix
@pytest.mark.parametrize(
    "line",
    [
        "verify {}", "report {}", "compare {0} {0}", "history {0} {0}", "baseline save {} --name x",
        "run --config {}", "gate --config {} --out g.json", "profile --trace --config {}",
        "profile --import {}", "claims {}", "io-model --gpu {}",
        "report --ceilings {} r.jsonl", "report --timeline {} r.jsonl",
        "compare r.jsonl r.jsonl --noise {}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["pipe", "zeros"])
def test_a_pipe_with_a_name_and_a_device_are_refused(line: str, kind: str) -> None:
    name = f"{kind}.toml" if "--gpu" in line else f"{kind}.json" if "--noise" in line else kind
    if kind == "pipe":
        os.mkfifo(name)
    else:
        os.symlink("/dev/zero", name)
    Path("r.jsonl").write_bytes(RESULTS.read_bytes())
    found = check(line.format(name).split(), (name,))
    assert found.code in (2, 4)
    assert {"pipe": "is a named pipe, no file", "zeros": "is a device, no file"}[kind] in found.err


@posix
def test_what_a_shell_opened_is_read(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    try:
        text = RESULTS.read_bytes()[:4096]
        os.write(writing, text)
        os.close(writing)
        assert paths.whole(f"/dev/fd/{reading}") == text
    finally:
        os.close(reading)
    assert paths.whole(os.devnull) == b""
    command = [sys.executable, "-m", "flashbench", "verify", "/dev/stdin"]
    with RESULTS.open("rb") as file:
        said = subprocess.run(command, stdin=file, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert said.stdout == "/dev/stdin: as written; 36 rows\n"


def test_a_line_that_is_too_long_is_damage_and_costs_no_more_than_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, first, second = RESULTS.read_bytes().splitlines(keepends=True)[:3]
    monkeypatch.setattr(lines, "MAX_LINE", 2**16)
    path = Path("r.jsonl")
    path.write_bytes(head + first + b"\0" * 2**22 + b"\n" + second)
    assert [number for number, _ in runfile.verify(path).damage] == [3]
    with pytest.raises(RunFileError, match=r"line 3: longer than 0 MiB"):
        runfile.load(path)
    found = list(lines.each(path))
    assert [len(line) for line, _ in found] == [len(head) - 1, len(first) - 1, 2**16 + 2, len(second) - 1]
    assert all(ended for _, ended in found)
    path.write_bytes(head + first + b"\0" * 2**22)
    assert runfile.verify(path).torn
    monkeypatch.setattr(lines, "MAX_LINES", 1)
    with pytest.raises(UsageError, match="has more than 1 lines"):
        runfile.load(path)


def test_a_file_that_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("big").write_bytes(b"x" * (2**21 + 1))
    monkeypatch.setattr(paths, "MOST", 2**21)
    for said in (lambda: paths.whole("big", 2**21), lambda: list(lines.each(Path("big")))):
        with pytest.raises(OSError, match="larger than 2 MiB"):
            said()
    assert paths.whole("big", 2**21 + 1) == b"x" * (2**21 + 1)
    Path("claims.toml").write_bytes(b"#" * 2**21)
    assert "is larger than 1 MiB" in check(["claims", "claims.toml"], ("claims.toml",)).err


def test_out_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def starved(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(runfile, "verify", starved)
    found = answer(["verify", "r.jsonl"])
    assert found.code == 3
    assert found.err.startswith("error: out of memory: ")
    assert fault(found)  # no file of a fuzzer's is so large


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not hold to the limit")
def test_a_file_beyond_the_memory_is_one_line() -> None:
    import resource

    with open("zeros.csv", "wb") as file:
        file.truncate(900 << 20)  # sparse

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (800 << 20, 800 << 20))

    command = [sys.executable, "-m", "flashbench", "profile", "--import", "zeros.csv"]
    said = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, check=False)
    assert (said.returncode, said.stdout) == (3, "")
    assert said.stderr.startswith("error: out of memory: ")
    assert "Traceback" not in said.stderr


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("report r.jsonl -o page.html", "page.html"), ("report r.jsonl --figures f", "f/*.json"),
        ("compare r.jsonl r.jsonl --noise 1% -o csv=page.csv", "page.csv"),
        ("io-model --sweep-sram 16KB-64KB --html page.html", "page.html"),
    ],
)  # fmt: skip
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not hold to the limit")
def test_a_disk_that_fills_up_leaves_no_torn_file(line: str, name: str) -> None:
    import resource

    Path("r.jsonl").write_bytes(RESULTS.read_bytes())
    assert check(line.split()).code == 0
    (before, *_) = [path for path in sorted(Path().glob(name)) if path.stat().st_size > 4096]
    before.write_text("as it was")
    files = sorted(map(str, Path().rglob("*")))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        found = answer(line.split())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert found.code == 2
    assert "File too large" in found.err
    assert before.read_text() == "as it was"
    assert sorted(map(str, Path().rglob("*"))) == files


def _peak_bytes(*arguments: str) -> int:
    """Of the resident memory of a command that answers 4."""
    command = [sys.executable, "-c", child._CODE, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 4, run.stderr
    found = re.search(r"VmHWM:\s+(\d+) kB", run.stderr)
    assert found, run.stderr
    return int(found[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks /proc for the peak")
@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("verify hostile.jsonl", "lines"), ("verify hostile.jsonl", "values"),
        ("report hostile.jsonl -o r.html", "objects"),
    ],
)  # fmt: skip
def test_memory_is_bounded_by_a_line_and_not_by_what_is_wrong_with_it(line: str, kind: str) -> None:
    """Lines of two bytes, and one of millions of values: each took some 100 bytes and more."""
    head = RESULTS.read_bytes().splitlines(keepends=True)[0]
    values = {"values": b"[]," * 2_000_000, "objects": b'{"a":{}},' * 1_200_000}
    body = b"{}\n" * 100_000 if kind == "lines" else b'{"type":"record","x":[%s0]}\n' % values[kind]
    Path("hostile.jsonl").write_bytes(head + body)
    Path("small.jsonl").write_bytes(head + b"{}\n")
    usual = _peak_bytes(*line.replace("hostile", "small").split())
    assert _peak_bytes(*line.split()) - usual < (2**22 if kind == "lines" else 4 * len(body))


def test_what_is_wrong_with_a_million_lines_is_counted() -> None:
    head = RESULTS.read_bytes().splitlines(keepends=True)[0]
    Path("r.jsonl").write_bytes(head + b"{}\n" * 3000)
    verdict = runfile.verify("r.jsonl")
    assert (verdict.damaged, len(verdict.damage)) == (3000, 1000)
    assert "r.jsonl: 3000 damaged lines" in check(["verify", "r.jsonl"], ("r.jsonl",)).out
    found = runfile.load("r.jsonl", damaged=True)
    assert (found.left_out, len(found.unread), found.damaged) == (3000, 5, 3000)
    assert "lines 2, 3, 4, 5, 6, …: not as written" in found.notes[-1]


KEPT = {
    "lists": "[" + "[]," * 99 + "[]]", "objects": "[" + '{"a":{}},' * 99 + "{}]",
    "numbers": "[" + "0.5," * 99 + "1]", "texts": "[" + '"é1",' * 99 + '""]',
}  # fmt: skip


@pytest.mark.parametrize("kind", tiers(["objects"], ["lists", "numbers", "texts"]))
def test_what_a_results_file_takes_is_at_most_30_times_its_size(kind: str) -> None:
    rows = RESULTS.read_bytes().splitlines(keepends=True)
    value = json.loads(next(row for row in rows if b'"status":"ok"' in row))
    value["clocks"] = {"during": {"x": json.loads(KEPT[kind])}}
    value["timing"] = {"rounds": [], **{f"x{at}": json.loads(KEPT[kind]) for at in range(40)}}
    path = Path("r.jsonl")
    with path.open("wb") as file:
        file.write(rows[0])
        for number in range(1, 20):
            value["cell"]["problem"] |= {"seqlen_q": number, "seqlen_k": number}
            file.write(lines.seal(value))
    tracemalloc.start()
    try:
        found = runfile.load(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found.records) == 19
    assert 2 * path.stat().st_size < peak < 30 * path.stat().st_size
