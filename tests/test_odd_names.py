"""A folder may have any bytes as its name: every command works there, and shows what is no text escaped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import faults
import pytest

from flashbench import runfile

SEVERAL = """
import json, sys
from flashbench.cli import main
for line in json.loads(sys.argv[1]):
    try:
        main(line)
    except SystemExit as stop:
        print(json.dumps([line[0], stop.code]), flush=True)
"""
RUN = ["--quick", "run", "--device", "cpu", "--impls", "naive,sdpa", "--seqlens", "8", "--passes", "fwd"]
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("raw", "more"),
    [
        pytest.param(b"z\xe9", {"PYTHONUTF8": "1"}, id="latin-1"),
        pytest.param("z\u00e9".encode(), C_LOCALE, id="C", marks=pytest.mark.slow),
    ],
)
def test_commands_work_in_a_folder_whose_name_is_no_text(
    raw: bytes, more: dict[str, str], tmp_path: Path
) -> None:
    if sys.platform == "darwin":
        pytest.skip("this system's file names are UTF-8")
    known = {name: text for name, text in os.environ.items() if name not in ("LANG", "LC_CTYPE")}
    for resume in ([], ["--resume"]):
        subprocess.run(
            [sys.executable, faults.__file__, *RUN, "--out", raw, *resume],
            cwd=tmp_path, env={**known, **more}, check=True,
        )  # fmt: skip
    folder = os.fsencode(tmp_path) + b"/" + raw
    given = raw.decode(errors="surrogateescape") if more is not C_LOCALE else "z\udcc3\udca9"
    header = runfile.load(Path(os.fsdecode(folder)) / "results.jsonl").header
    assert header["argv"][-2 if "--resume" in header["argv"] else -1] == given

    file, base = f"{given}/results.jsonl", ["compare", f"{given}/results.jsonl", f"{given}/results.jsonl"]
    asked = [
        ["verify", file],
        ["report", file],
        [*base, "--noise", "1%", "--json", "-o", f"html={given}/c.html", "-o", f"junit={given}/c.xml"],
        ["baseline", "save", file, "--name", "b", "--store", f"{given}/store"],
        ["io-model", "--seqlens", "8", "--html", f"{given}/i.html"],
        ["new-impl", f"{given}/new.py"],
        ["list", "implementations", "--impl", f"{given}/new.py:attention"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL, json.dumps(asked)], cwd=tmp_path, env={**known, **more},
        capture_output=True, check=False,
    )  # fmt: skip
    said = done.stdout.decode(errors="strict")
    assert [json.loads(text)[1] for text in said.splitlines() if text.startswith('["')] == [0] * len(asked), (
        done.stderr.decode(errors="replace")
    )
    shown = "z\\udce9" if more is not C_LOCALE else "z\\udcc3\\udca9"
    assert f"{shown}/results.jsonl: as written" in said
    for name in (b"report.html", b"c.html", b"c.xml", b"i.html", b"new.py"):
        text = Path(os.fsdecode(folder + b"/" + name)).read_bytes().decode("utf-8")
        assert name == b"c.xml" or shown in text, name  # which tells cells alone
