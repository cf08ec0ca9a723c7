"""FlashAttention-4 in the CuTe DSL as its authors ship it.

Signatures: github.com/Dao-AILab/flash-attention, flash_attn/cute/interface.py, August 2026: a side of a
window that hides nothing is None, and (o, lse) is returned.
"""

from functools import partial

from flashbench.kernels._flash_attn import FUNCTION, PACKED, make
from flashbench.kernels._peer import Peer

PEER = Peer(
    name="fa4",
    package="flash-attn-4",
    module="flash_attn.cute",
    summary="FlashAttention-4 in the CuTe DSL, of the flash-attn-4 package",
    make=partial(make, None),
    function=FUNCTION,
    packed=PACKED,
)
IMPLEMENTATIONS = (PEER.row(),)
