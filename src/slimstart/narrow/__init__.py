"""Dense <-> narrow: build a narrow network from a selection, move everything that has channels, prove it right.

Open `compact.py` first. `streams.py` is the one thing a narrow network has that the dense one has not; `subnet.py`
keeps a narrow network whose tensors change with every draw; `optimizer_state.py` makes an optimizer follow it, and
`state_hooks.py` keeps state dicts dense meanwhile. `networks.py` has all networks of a draw together, just as wide as
it is; `slotted.py` has them in static slots (`slots.py`: how many; `seating.py`: who sits where). `resident.py` and
`resident_slots.py` are the same two for a dense model that stays on the host: `crossing.py` says what crosses the bus,
`page_locked.py` keeps the dense tensors where a GPU reaches them. `fan_in.py` scales fresh weights; `batchnorm.py`
refreshes statistics; `verify.py` compares a narrow network with the masked dense one. Two that stay dense:
`masking.py`, whose mask changes in place, for many forwards of sampled networks; `gating.py`, whose gates learn by the
chain rule.
"""

from slimstart.narrow.batchnorm import recalibrate
from slimstart.narrow.compact import compact
from slimstart.narrow.fan_in import compact_fresh, has_learned, suit_
from slimstart.narrow.masking import MaskedNetwork
from slimstart.narrow.networks import Executed, Networks, Traffic
from slimstart.narrow.optimizer_state import OptimizerLink
from slimstart.narrow.resident import ResidentNetworks
from slimstart.narrow.resident_slots import ResidentSlotNetworks
from slimstart.narrow.slotted import SlotNetworks
from slimstart.narrow.subnet import Subnet
from slimstart.narrow.verify import Report, trace_verified, verify

__all__ = [
    "Executed",
    "MaskedNetwork",
    "Networks",
    "OptimizerLink",
    "Report",
    "ResidentNetworks",
    "ResidentSlotNetworks",
    "SlotNetworks",
    "Subnet",
    "Traffic",
    "compact",
    "compact_fresh",
    "has_learned",
    "recalibrate",
    "suit_",
    "trace_verified",
    "verify",
]
