"""A rank's process: joins the group, then does what the parent says, cell by cell.

    python -m flashbench.ring.rank

The parent says ``{"rank", "ranks", "device", "store", "seed", "limit_s"}``, then ``{"cell", "timed"}`` any
number of times; it hears ``{"ready": true}``, then ``{"row": …}`` for each, or at last ``{"raised": why}``.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
from datetime import timedelta
from typing import Any

from flashbench.isolation import lifeline
from flashbench.isolation.child import Channel
from flashbench.problem import Cell
from flashbench.runner import unworried, what


def main() -> None:
    """Serve the parent until it closes the pipe."""
    lifeline.guarded()
    faulthandler.enable(all_threads=False)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1)
    channel = Channel()
    try:
        with unworried():
            session = _joined(channel.receive())
            channel.send(ready=True)
            while True:
                message = channel.receive()
                row = session.cell(Cell.from_json(message["cell"]), timed=message["timed"])
                channel.send(row=row)
    except BaseException as error:
        channel.send(raised=what(error))
        os._exit(1)


def _joined(setup: dict[str, Any]) -> Any:
    """The session of a rank whose group is complete."""
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # multicast over NVLink is not ours to switch on
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    import torch
    import torch.distributed as dist

    from flashbench.ring.measuring import Session

    rank, ranks, device = setup["rank"], setup["ranks"], setup["device"]
    if device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
        backend = "gloo"
    else:
        device, backend = f"cuda:{rank}", "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{setup['store']}", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=setup["limit_s"]),
    )  # fmt: skip
    session = Session(rank=rank, ranks=ranks, device=device, seed=setup["seed"])
    session.largest(0.0)
    return session


if __name__ == "__main__":
    main()
