"""A sweep on several cards: of this host (``local``), of a cluster (``on_ray``, ``on_slurm``).

    with Local(cards.cards_of("0,1"), options) as fleet:
        fleet.run(cells, on_record, on_progress)

All do what ``isolation.Bench`` does, with several of them. Cells are dealt out by groups, those of one
problem and pass, so that what is compared is measured on one card; the longest first, each to the card that
is free next. The process that called ``run`` alone sees records, one at a time, and writes them down. Each
row says on which host and card it was measured (``host``, ``device``, ``uuid`` of its environment), and its
``neighbours``: the other cards of that host that were measuring at some time while its group was.
"""

from flashbench.fleet.cards import Card, cards_of
from flashbench.fleet.deal import longest_first
from flashbench.fleet.local import Local

__all__ = ["Card", "Local", "cards_of", "longest_first"]
