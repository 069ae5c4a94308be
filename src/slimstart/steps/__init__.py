"""Training steps: eager or as CUDA graphs, with hooks on the user's optimizers.

Open `eager.py` first: a step is a forward, a check of the loss, a backward and the optimizers' steps. `structure.py` is
what happens next: the structure is learned and, now and then, changed; `drawing.py` learns from losses and draws masks.
`optimizers.py` has the hooks on the user's optimizers, `unit_gradients.py` what these observe, `wrappers.py` what
follows around a model (`DistributedDataParallel`, `torch.compile`), `final_mask.py` the choice at the end.

`engine.py` chooses between eager and captured steps. `graphs.py` keeps the captured steps. Each of them (`captured.py`)
is a few CUDA graphs (`cuda_graph.py`), with fused operations (`fusion.py`, `chains.py`, on the calls that `calls.py`
sees) and one depthwise kernel for all widths (`depthwise_mode.py`). `host_memory.py` estimates memory for a dense model
on the host, `measuring.py` times networks for budgets of time, and `plain.py` trains an ordinary network on the same
engine.
"""

from slimstart.steps.eager import Backward, LossFunction
from slimstart.steps.engine import ENGINES, reason_for_eager
from slimstart.steps.graphs import Steps
from slimstart.steps.plain import PlainTraining

__all__ = ["ENGINES", "Backward", "LossFunction", "PlainTraining", "Steps", "reason_for_eager"]
