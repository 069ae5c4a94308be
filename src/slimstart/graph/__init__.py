"""Which tensor dimensions, and which layers, are kept or dropped together.

`trace` runs the user's own forward once per mode on example inputs and returns a `ChannelGraph`: plain, picklable data
about *names* and *units*. Narrow networks are built in `slimstart.narrow`; what is learned is in `slimstart.policies`.

Open `channels.py` first (the result), then `trace.py` (how it is found). A run goes through these files in order:

- `trace.py` runs the forward and sees every operation; `tracer.py` is what is known of its tensors;
- `rules/` has one rule per operation; `sizes.py` are integers that remember where they come from;
- `constraints.py` is what the rules write down (the `Constraints`);
- `solver.py` and `reshapes.py` turn these constraints into ties between filters, and `build.py` into a graph;
- `removable.py` finds the layers that can go as a whole.

`readers.py` answers a question about a finished graph: which layers read a unit.
"""

from slimstart.graph.channels import ChannelGraph, ChannelGroup, Port, RemovableLayer, Selection, Slice
from slimstart.graph.rules import register_rule
from slimstart.graph.trace import COUPLINGS, trace

__all__ = [
    "COUPLINGS",
    "ChannelGraph",
    "ChannelGroup",
    "Port",
    "RemovableLayer",
    "Selection",
    "Slice",
    "register_rule",
    "trace",
]
