"""slimstart trains neural networks at a budget from step one.

Start with `SparseTraining`; `trace`, `verify` and `compact` are what it stands on, for use on their own. Names are
loaded when they are first asked for, so that the command line answers at once.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slimstart.errors import BudgetError as BudgetError
    from slimstart.errors import CheckpointError as CheckpointError
    from slimstart.errors import ConfigError as ConfigError
    from slimstart.errors import DataError as DataError
    from slimstart.errors import DesynchronisedError as DesynchronisedError
    from slimstart.errors import ExportError as ExportError
    from slimstart.errors import NonFiniteLossError as NonFiniteLossError
    from slimstart.errors import OptimizerStateError as OptimizerStateError
    from slimstart.errors import ProcessGroupError as ProcessGroupError
    from slimstart.errors import RecordError as RecordError
    from slimstart.errors import SlimstartError as SlimstartError
    from slimstart.errors import TraceError as TraceError
    from slimstart.flop_counter import flops as flops
    from slimstart.graph import ChannelGraph as ChannelGraph
    from slimstart.graph import Selection as Selection
    from slimstart.graph import trace as trace
    from slimstart.io.network_files import load as load
    from slimstart.io.network_files import save as save
    from slimstart.narrow import compact as compact
    from slimstart.narrow import recalibrate as recalibrate
    from slimstart.narrow import shrink_to as shrink_to
    from slimstart.narrow import verify as verify
    from slimstart.policies import Channels as Channels
    from slimstart.policies import EqualWorth as EqualWorth
    from slimstart.policies import Flops as Flops
    from slimstart.policies import Paper as Paper
    from slimstart.policies import Params as Params
    from slimstart.training import SparseTraining as SparseTraining

try:
    __version__ = metadata.version("slimstart")
except metadata.PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"

_HOME = {
    "flop_counter": ("flops",),
    "errors": (
        "BudgetError", "CheckpointError", "ConfigError", "DataError", "DesynchronisedError", "ExportError",
        "NonFiniteLossError", "OptimizerStateError", "ProcessGroupError", "RecordError", "SlimstartError", "TraceError",
    ),
    "io.network_files": ("load", "save"),
    "graph": ("ChannelGraph", "Selection", "trace"),
    "policies": ("Channels", "EqualWorth", "Flops", "Paper", "Params"),
    "narrow": ("compact", "recalibrate", "shrink_to", "verify"),
    "training": ("SparseTraining",),
}  # fmt: skip
_ROOM = {name: room for room, names in _HOME.items() for name in names}

__all__ = sorted(_ROOM)


def __getattr__(name: str) -> Any:
    if name not in _ROOM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_ROOM[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*globals(), *__all__]
