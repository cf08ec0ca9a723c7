"""The flash-attn package: FlashAttention-2 as its authors ship it.

Signatures: github.com/Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py of release 2.8.
"""

from functools import partial

from flashbench.kernels._flash_attn import FUNCTION, PACKED, make
from flashbench.kernels._peer import Peer

PEER = Peer(
    name="fa2",
    package="flash-attn",
    module="flash_attn",
    summary="FlashAttention-2 of the flash-attn package",
    make=partial(make, -1),
    function=FUNCTION,
    packed=PACKED,
    install="pip install flash-attn --no-build-isolation",
)
IMPLEMENTATIONS = (PEER.row(),)
