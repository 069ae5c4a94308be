"""How one step runs. Chosen by SparseTraining, invisible to the user.

`eager.py` runs the user's loss function as it is; `graphs.py` captures it in CUDA graphs (`captured.py`, by
`capture.py`), with fewer and larger kernels (`fusion.py`, made of `chains.py`, `casting.py` and `counting.py`), and
with some that work for all widths (`depthwise.py`); `backward.py` is what follows a forward, with what optimizers need
to be captured in `optimizers.py`. `iterations.py` has the hooks on the user's optimizers, and `unit_gradients.py` what
is observed in them. `drawing.py` learns from losses and draws masks, on the host or on the device. `wrappers.py` lets
what is around a model follow. `plain.py` trains an ordinary network on the same engine; `stepping.py` is what both
trainings say of their steps.
"""

from slimstart.steps.backward import Backward
from slimstart.steps.choice import ENGINES, choose
from slimstart.steps.eager import LossFunction, check_finite, forward_without_trace, undoing_statistics
from slimstart.steps.graphs import Steps
from slimstart.steps.plain import PlainTraining

__all__ = [
    "ENGINES",
    "Backward",
    "LossFunction",
    "PlainTraining",
    "Steps",
    "check_finite",
    "choose",
    "forward_without_trace",
    "undoing_statistics",
]
