"""What can go wrong, by name: one small family, so that a program can catch what it can mend."""

from __future__ import annotations


class SlimstartError(Exception):
    """Base of every error that slimstart raises on purpose."""


class TraceError(SlimstartError, RuntimeError):
    """The network could not be followed, or a narrow network is not what its dense one says it must be."""


class BudgetError(SlimstartError, ValueError):
    """No sub-network meets the budget; the message gives the feasible range."""


class OptimizerStateError(SlimstartError, RuntimeError):
    """An optimizer keeps state that cannot follow the channels; the message names the key."""


class CheckpointError(SlimstartError, RuntimeError):
    """A file or a state dict is truncated, foreign, or belongs to another network."""


class NonFiniteLossError(SlimstartError, FloatingPointError):
    """A loss is NaN or infinite; the message gives the step, and the state is that of the step before."""


class ConfigError(SlimstartError, ValueError):
    """Settings that cannot be meant: an unknown name, a value out of range, two that contradict each other."""


class DataError(SlimstartError, RuntimeError):
    """A data set is missing, truncated or corrupt; the message says what to do."""


class ExportError(SlimstartError, RuntimeError):
    """A network was written for another program, and does not compute the same there."""


class RecordError(SlimstartError, ValueError):
    """A file is not the record of a run, or not of this schema."""


class ProcessGroupError(SlimstartError, RuntimeError):
    """One of the processes that train together has fallen out, or has failed."""


class DesynchronisedError(SlimstartError, RuntimeError):
    """Processes that train together hold different things; the message names them."""
