"""Dense <-> narrow: make a module the network of a mask, move everything that has channels, prove it right.

Which channels there are is known to `slimstart.graph`; what is learned about them is in `slimstart.policies`, and how a
step runs in `slimstart.steps`.

Open `compact.py` first: a narrow copy of a model. A training does the same to the user's own module, one mask after
another:

- `networks.py` prepares every change, from the dense tensors in `store.py`, as a transaction (`change.py`);
  `modules.py` is one module that follows, and `optimizer_state.py` the optimizer state that moves with it;
- `references.py` has the networks of other masks, for policies that compare losses;
- `removed_layers.py` replaces layers that are removed as a whole;
- `capacity.py` and `padding.py` are spare capacity, so that shapes survive a change;
- `state_dicts.py` are the state dicts of the narrow model and of its optimizers, `hooks.py` hooks that copies ignore.

`stream_ports.py` is the one thing that a narrow network has and the dense one has not. `init_scale.py` scales new
weights, `batchnorm.py` measures statistics, `shrink.py` fits a dense module to a narrow state dict, and `verify.py`
compares a narrow network with the masked dense one.
"""

from slimstart.narrow.batchnorm import recalibrate
from slimstart.narrow.capacity import Capacity, Executed, Planner
from slimstart.narrow.change import Change, Transactions
from slimstart.narrow.compact import compact
from slimstart.narrow.init_scale import compact_fresh, sign_of_training, suit_
from slimstart.narrow.networks import Networks
from slimstart.narrow.shrink import shrink_to
from slimstart.narrow.store import Key, Store
from slimstart.narrow.verify import Report, trace_verified, verify, without_verified

__all__ = [
    "Capacity",
    "Change",
    "Executed",
    "Key",
    "Networks",
    "Planner",
    "Report",
    "Store",
    "Transactions",
    "compact",
    "compact_fresh",
    "recalibrate",
    "shrink_to",
    "sign_of_training",
    "suit_",
    "trace_verified",
    "verify",
    "without_verified",
]
