"""What ptxas says of a kernel for Hopper, asked as Triton asks it."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout


def complaints(ptx: str) -> list[str]:
    """The lines (C7510 to C7520) that say that products wait for one another, or for a wait put in; and why.

    Of Triton's own ptxas with Triton's own options, by the call that Triton makes: it prints the words where
    a knob is set and keeps them nowhere, least of all in its cache.
    """
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", 90, 32))
    options = backend.parse_options({"enable_fp_fusion": True})
    with knobs.nvidia.scope(), redirect_stdout(io.StringIO()) as printed:
        knobs.nvidia.dump_ptxas_log = True
        backend.make_cubin(ptx, {}, options, 90)
    said = printed.getvalue()
    assert "Compiling entry function" in said, f"these are not ptxas' words: {said!r}"
    return [line for line in said.splitlines() if re.search(r"\(C75(1\d|20)\)", line)]
