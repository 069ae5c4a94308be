"""All exceptions that slimstart raises on purpose, each also one of Python's own classes."""

from __future__ import annotations


class SlimstartError(Exception):
    """Base class of all errors of slimstart."""


class TraceError(SlimstartError, RuntimeError):
    """The network could not be traced, or a narrow network differs from the masked dense one."""


class BudgetError(SlimstartError, ValueError):
    """No sub-network is within the budget; the message gives the feasible range."""


class OptimizerStateError(SlimstartError, RuntimeError):
    """An optimizer has state that cannot follow the channels; the message names the key."""


class CheckpointError(SlimstartError, RuntimeError):
    """A file or a state dict is truncated, of another format, or belongs to another network."""


class NonFiniteLossError(SlimstartError, FloatingPointError):
    """A loss is NaN or infinite; the message gives the step, and the training is in the state before it."""


class ConfigError(SlimstartError, ValueError):
    """Invalid settings: an unknown name, a value out of range, two that contradict each other."""


class DataError(SlimstartError, RuntimeError):
    """A data set is missing, truncated or corrupt; the message says what to do."""


class ExportError(SlimstartError, RuntimeError):
    """An exported network does not compute the same as the original."""


class RecordError(SlimstartError, ValueError):
    """A file is not the record of a run, or not of this schema."""


class ProcessGroupError(SlimstartError, RuntimeError):
    """A process of the process group is lost or has failed."""


class DesynchronisedError(SlimstartError, RuntimeError):
    """Processes of a group have different weights, masks or settings; the message names them."""
