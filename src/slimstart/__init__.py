"""slimstart trains neural networks at a budget from step one.

- `SparseTraining` trains a model; `Flops`, `Params` and `Channels` are budgets, `EqualWorth` and `Paper` policies.
- `Latency` is a budget of time, from a table that `measure_latency` measures on your device; `Memory` one of the bytes
  that a training step keeps, which `measure_memory` counts.
- `save` and `load` write and read finished networks; `shrink_to` fits a dense module to a narrow state dict.
- `trace`, `verify`, `compact`, `recalibrate` and `flops` are parts of it for separate use; `register_rule` is for
  operations that `trace` does not know.
- Errors are subclasses of `SlimstartError`.

Names are imported on first use, so that `import slimstart` does not import PyTorch.
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
    from slimstart.graph import register_rule as register_rule
    from slimstart.graph import trace as trace
    from slimstart.io.latency_tables import load_table as load_table
    from slimstart.io.latency_tables import save_table as save_table
    from slimstart.io.network_files import load as load
    from slimstart.io.network_files import save as save
    from slimstart.narrow import compact as compact
    from slimstart.narrow import recalibrate as recalibrate
    from slimstart.narrow import shrink_to as shrink_to
    from slimstart.narrow import verify as verify
    from slimstart.policies import Channels as Channels
    from slimstart.policies import EqualWorth as EqualWorth
    from slimstart.policies import Flops as Flops
    from slimstart.policies import Latency as Latency
    from slimstart.policies import Memory as Memory
    from slimstart.policies import Paper as Paper
    from slimstart.policies import Params as Params
    from slimstart.steps.measuring import measure_latency as measure_latency
    from slimstart.steps.saved_bytes import measure_memory as measure_memory
    from slimstart.training import SparseTraining as SparseTraining

try:
    __version__ = metadata.version("slimstart")
except metadata.PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"

_NAMES_IN = {
    "flop_counter": ("flops",),
    "errors": (
        "BudgetError", "CheckpointError", "ConfigError", "DataError", "DesynchronisedError", "ExportError",
        "NonFiniteLossError", "OptimizerStateError", "ProcessGroupError", "RecordError", "SlimstartError", "TraceError",
    ),
    "io.latency_tables": ("load_table", "save_table"),
    "io.network_files": ("load", "save"),
    "graph": ("ChannelGraph", "Selection", "register_rule", "trace"),
    "policies": ("Channels", "EqualWorth", "Flops", "Latency", "Memory", "Paper", "Params"),
    "narrow": ("compact", "recalibrate", "shrink_to", "verify"),
    "steps.measuring": ("measure_latency",),
    "steps.saved_bytes": ("measure_memory",),
    "training": ("SparseTraining",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*globals(), *__all__]
