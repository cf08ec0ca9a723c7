"""Many fuzzers side by side, none of whose examples is another's, and what they did in all.

python tools/fuzz.py --seconds 300 --out fuzz.txt                 as many as there are cores
python tools/fuzz.py --seconds 300 --jobs 15 --seed 1000000       other examples
python tools/fuzz.py --seconds 300 --only files --out fuzz.txt    of one kind

Each runs tests/test_fuzz.py, that is the real command in one process after the other, with seeds of its own
(a million apart) and without a GPU; two of three take command lines, the third files. A failure's shrunk
example is in the log, which ends with the sums. Exits 0 where nothing failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
APART = 1_000_000
"""Between the first seeds of two fuzzers; none has so many rounds."""
KINDS = {"lines": "test_command_lines", "files": "test_files"}
SAID = re.compile(r"^(\d+) examples, seeds (\d+) to (\d+)", re.M)


@dataclass(frozen=True)
class Done:
    """What one fuzzer did. failed: it ended with a failure, or did not end."""

    kind: str
    seed: int
    examples: int
    failed: bool
    said: str


def one(kind: str, seed: int, seconds: float) -> Done:
    """Run a fuzzer to its end."""
    environment = {
        **os.environ,
        "FLASHBENCH_FUZZ_S": str(2 * seconds),  # of which a kind takes half
        "FLASHBENCH_FUZZ_SEED": str(seed),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-q", "-rP",
             f"--basetemp={folder}/pytest", "tests/test_fuzz.py", "-k", KINDS[kind]],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", check=False,
        )  # fmt: skip
    examples = sum(int(count) for count, *_ in SAID.findall(run.stdout))
    return Done(kind, seed, examples, run.returncode != 0, run.stdout)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--seconds", type=float, default=600.0)
    arguments.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--only", choices=KINDS)
    arguments.add_argument("--out", type=Path, required=True)
    given = arguments.parse_args()
    began = time.monotonic()
    kinds = [given.only or ("lines", "lines", "files")[n % 3] for n in range(given.jobs)]
    asked = [(kind, given.seed + n * APART, given.seconds) for n, kind in enumerate(kinds)]
    with ThreadPoolExecutor(given.jobs) as pool:
        done = list(pool.map(lambda each: one(*each), asked))
    lines = [
        f"{row.kind} from seed {row.seed}: {row.examples} examples{', FAILED' * row.failed}" for row in done
    ]
    for kind in KINDS:
        own = [row for row in done if row.kind == kind]
        failed = sum(row.failed for row in own)
        examples = sum(row.examples for row in own)
        lines.append(f"{kind}: {examples} examples, {failed} of {len(own)} fuzzers failed")
    lines.append(f"{time.monotonic() - began:.0f} s, {given.jobs} fuzzers, Python {sys.version.split()[0]}")
    told = [f"# {row.kind} from seed {row.seed}\n{row.said}" for row in done if row.failed]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("\n".join([*told, *lines, ""]), "utf-8", errors="backslashreplace")
    print("\n".join(lines))
    sys.exit(any(row.failed for row in done))


if __name__ == "__main__":
    main()
