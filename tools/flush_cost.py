"""What a flush of the L2 costs the call that is timed after it, on this machine's GPU.

python tools/flush_cost.py --out flush.json

Buffers larger than the L2 are read, as a CUDA graph, after the flush that flashbench uses (which reads) and
after one that zeroes as large a buffer. Their difference is what the call had to write back for the flush.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from flashbench import environment  # noqa: E402
from flashbench._profilers.timers import between_events  # noqa: E402
from flashbench.decoding import graphed  # noqa: E402
from flashbench.profilers import Flush  # noqa: E402

MIB = (128, 256, 512)
ROUNDS, SAMPLES = 5, 20
"""The flushes take turns, so that a drift of the clocks is both's."""


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="flush.json")
    out, target, rows = Path(parser.parse_args().out), environment.target("cuda"), []
    flush = Flush(target.device)
    written = torch.empty_like(flush.buffer)
    flushes = {"write": written.zero_, "read": flush}
    for mib in MIB:
        buffer = torch.zeros(8192, mib * 2**20 // 4 // 8192, device=target.device)
        read = partial(torch.sum, buffer, dim=1, out=torch.empty(8192, device=target.device))
        read()
        call, samples = graphed(read, target.device), {name: [] for name in flushes}
        for _ in range(ROUNDS):
            for name, one in flushes.items():
                samples[name] += between_events(call, one, SAMPLES)
        medians = {name: statistics.median(found) for name, found in samples.items()}
        rows.append({"bytes": buffer.nbytes, "median_s": medians, "samples_s": samples})
        said = "  ".join(f"after a {name} {1e6 * seconds:7.1f} us" for name, seconds in medians.items())
        print(f"read {mib} MiB  {said}", flush=True)
    document = {"type": "flush-cost", "environment": environment.collect(target),
                "flushed_bytes": flush.buffer.nbytes, "rows": rows}  # fmt: skip
    out.write_text(json.dumps(document) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
