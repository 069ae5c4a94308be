"""Dense <-> narrow: make a module the network of a mask, move everything that has channels, prove it right.

Open `compact.py` first: a narrow copy of a model. `networks.py` does the same to the user's own module during a
training, mask after mask (`modules.py`), from the dense tensors in `store.py`, as transactions (`change.py`), with the
optimizer state that belongs to it (`optimizer_state.py`). `stream_ports.py` is the one thing a narrow network has that
the dense one has not; `capacity.py` pads networks so that shapes survive a draw. `init_scale.py` scales new weights;
`batchnorm.py` measures statistics; `verify.py` compares a narrow network with the masked dense one; `shrink.py` fits a
dense module to a narrow state dict; `hooks.py` has hooks that do nothing in copies.
"""

from slimstart.narrow.batchnorm import recalibrate
from slimstart.narrow.capacity import Capacity, Executed, Planner
from slimstart.narrow.change import Change, Transactions
from slimstart.narrow.compact import compact
from slimstart.narrow.init_scale import compact_fresh, is_pretrained, suit_
from slimstart.narrow.networks import Networks
from slimstart.narrow.shrink import shrink_to
from slimstart.narrow.store import Key, Store
from slimstart.narrow.verify import Report, trace_verified, verify

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
    "is_pretrained",
    "recalibrate",
    "shrink_to",
    "suit_",
    "trace_verified",
    "verify",
]
