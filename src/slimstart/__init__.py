"""slimstart trains neural networks narrow from step one.

Start with `SparseTraining`; `trace`, `verify` and `compact` are what it stands on, for use on their own.
"""

from importlib.metadata import PackageNotFoundError, version

from slimstart.accounting import flops
from slimstart.errors import (
    BudgetError,
    CheckpointError,
    NonFiniteLossError,
    OptimizerStateError,
    SlimstartError,
    TraceError,
)
from slimstart.files import load, save
from slimstart.graph import ChannelGraph, Selection, trace
from slimstart.structure import Channels, Flops, Params
from slimstart.subnet import compact, recalibrate, verify
from slimstart.training import SparseTraining

try:
    __version__ = version("slimstart")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0+unknown"

__all__ = [
    "BudgetError",
    "ChannelGraph",
    "Channels",
    "CheckpointError",
    "Flops",
    "NonFiniteLossError",
    "OptimizerStateError",
    "Params",
    "Selection",
    "SlimstartError",
    "SparseTraining",
    "TraceError",
    "compact",
    "flops",
    "load",
    "recalibrate",
    "save",
    "trace",
    "verify",
]
