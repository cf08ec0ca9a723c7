"""An ncu that plays the watched process: every job is two kernels, or what a test has it play."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HEAD = ('"ID","Start/Stop_Range","Kernel Name","Grid Size","Block Size","gpu__time_duration.sum",'
        '"dram__bytes_read.sum","dram__bytes_write.sum","l1tex__m_xbar2l1tex_read_bytes.sum"')  # fmt: skip

FAKE = """
import json, sys
if "--version" in sys.argv:
    print("NVIDIA Nsight Compute Version 2025.3.1.0"); sys.exit()
spec = json.load(open(sys.argv[-1]))
said = open(spec["said"], "a")
rows = [HEAD, '"","","","","","ns","byte","byte","byte"']
for index, job in enumerate(spec["jobs"]):
    PLAY
open(sys.argv[sys.argv.index("--log-file") + 1], "w").write("\\n".join(rows) + "\\n")
END
"""
COUNT = """
    said.write(json.dumps({"index": index, "reason": ""}) + "\\n")
    for kernel in ("one", "two"):
        name = f'" ""1:<default domain>:flashbench#{index}:none:none:none:none:none:none"" "'
        rows.append(f'"0",{name},"{kernel}","(1, 1, 1)","(128, 1, 1)","1,000","{1000 + index}","8","32"')
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, play: str = COUNT, end: str = "") -> None:
    """Put it into the folder as the ncu to use. play: what it does of each job; end: when all are done."""
    path = folder / "ncu"
    text = FAKE.replace("HEAD", repr(HEAD)).replace("    PLAY", play).replace("END", end)
    path.write_text(f"#!{sys.executable}\n{text}", encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setenv("FLASHBENCH_NCU", str(path))
