"""What the device does before a sample, while the host launches it: make the L2 cold, or nothing at all."""

from __future__ import annotations

L2_FALLBACK_BYTES = 128 * 2**20
"""Flushed where torch does not tell the size of the L2; no known GPU has more."""

ROWS = 4096
"""Rows that are summed: so many that each is one thread block's, which needs no scratch memory."""


PAUSE_CYCLES = 100_000
"""Of the SM clock: 50 us and more, longer than a launch."""


class Pause:
    """Keeps the device busy and leaves the caches as they are: a hot sample must not wait for its launch.

    seconds: how long the device takes, once somebody measured it.
    """

    KERNELS = 1

    def __init__(self, cycles: int = PAUSE_CYCLES) -> None:
        self.cycles = cycles
        self.seconds: float | None = None

    def __call__(self) -> None:
        """Enqueue the pause on the current stream."""
        import torch

        torch.cuda._sleep(self.cycles)


class Flush:
    """A cold L2: nothing of the call's data in it, and nothing that waits to be written back.

    Reads a buffer of twice the L2 when called; allocates nothing then. Written lines are evicted by reads as
    well as by writes, but a buffer that is written leaves the L2 full of lines that the timed call's own
    reads have to push out to memory first (docs/method.md).
    seconds: how long the device takes, once somebody measured it.
    """

    KERNELS = 1
    """How many kernels a flush is."""

    def __init__(self, device: str, l2_bytes: int | None = None) -> None:
        """l2_bytes: of the device's L2, asked of torch if None."""
        import torch

        if l2_bytes is None:
            l2_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        columns = -(-2 * (l2_bytes or L2_FALLBACK_BYTES) // (4 * ROWS))
        self.buffer = torch.zeros(ROWS, columns, dtype=torch.float32, device=device)
        self.sums = torch.empty(ROWS, dtype=torch.float32, device=device)
        self.seconds: float | None = None

    def __call__(self) -> None:
        """Enqueue the flush on the current stream."""
        import torch

        torch.sum(self.buffer, dim=1, out=self.sums)


Before = Flush | Pause
"""What runs before each sample."""
