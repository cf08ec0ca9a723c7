"""Exact attention across cards: each rank holds a shard of the sequence, bundled kernels compute the blocks.

    python -m flashbench ring --world-size 2 --seqlens 64k-1m --impls ring,ulysses,allgather

- ``link``: what ranks say to each other, with every byte counted.
- ``ring_attention``, ``ulysses``, ``gathered``: the three algorithms, forward and backward.
- ``torch_cp``: torch's own, the peer.
- ``rank``: a rank's process; ``group``: the parent's end of all of them.
- ``measuring``: what a rank does with a cell: check, time, take apart.
- ``rows``: cells of a command line, and the row of each.

Which rows a rank holds and the bytes that must move are the model's (``_iomodel/shards.py``, ``across.py``).
"""
