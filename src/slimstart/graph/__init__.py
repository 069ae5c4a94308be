"""Which tensor dimensions live and die together.

`trace` runs the user's own forward once on example inputs and returns a `ChannelGraph`: plain, picklable data about
*names* and *units*. Nothing here builds a narrow network (`slimstart.narrow` does) and nothing here knows about
probabilities (`slimstart.policies` does).

Open `channels.py` first (what a graph is), then `trace.py` (how it is found). On the way: `tracer.py` listens to a
forward, `rules/` has one rule per operation, `sizes.py` are integers that remember where they come from, `ledger.py` is
what a run writes down, and `solve.py` turns the notes into units with `solver.py`, `layouts.py` and `tables.py`.
"""

from slimstart.graph.channels import ChannelGraph, ChannelGroup, Port, Selection, Slice
from slimstart.graph.trace import COUPLINGS, trace

__all__ = ["COUPLINGS", "ChannelGraph", "ChannelGroup", "Port", "Selection", "Slice", "trace"]
