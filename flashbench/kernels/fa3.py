"""FlashAttention-3 as its authors ship it, built from the folder hopper of their repository.

Signatures: github.com/Dao-AILab/flash-attention, hopper/flash_attn_interface.py, August 2026. Older ones
return (o, lse), which is taken, too.
"""

from functools import partial

from flashbench.kernels._flash_attn import FUNCTION, PACKED, make
from flashbench.kernels._peer import Peer

PEER = Peer(
    name="fa3",
    package="flash_attn_3",
    module="flash_attn_interface",
    summary="FlashAttention-3 of flash-attention's folder hopper",
    make=partial(make, -1),
    function=FUNCTION,
    packed=PACKED,
    install="python setup.py install in hopper/ of github.com/Dao-AILab/flash-attention",
)
IMPLEMENTATIONS = (PEER.row(),)
