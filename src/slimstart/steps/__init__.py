"""How one step runs, and what happens between two draws. Chosen by SparseTraining, invisible to the user.

`assembly.py` puts the parts of a search together. `eager.py` runs the user's loss function as it is; `graphs.py`
captures it in CUDA graphs (`captured.py`, by `capture.py`), with fewer and larger kernels (`fusion.py`, made of
`chains.py`, `casting.py` and `counting.py`), and with some that do for all widths (`depthwise.py`); `backward.py` is
what follows a forward, with what optimizers need to be captured in `optimizers.py`. `search.py` learns, draws and
exchanges networks, on the host or on the device. `plain.py` trains an ordinary network on the same engine;
`stepping.py` is what both trainings say of their steps. `wrapping.py` and `together.py` are for several ranks: what
stands around a network, and who runs which reference.
"""

from slimstart.steps.assembly import Assembly, assemble
from slimstart.steps.backward import Backward
from slimstart.steps.choice import ENGINES, choose
from slimstart.steps.eager import LossFunction, check_finite, forward_without_trace, undoing_statistics
from slimstart.steps.graphs import Steps
from slimstart.steps.plain import PlainTraining
from slimstart.steps.search import DeviceSearch, Search

__all__ = [
    "ENGINES",
    "Assembly",
    "Backward",
    "DeviceSearch",
    "LossFunction",
    "PlainTraining",
    "Search",
    "Steps",
    "assemble",
    "check_finite",
    "choose",
    "forward_without_trace",
    "undoing_statistics",
]
