"""Methods to compare with, one file each. `narrow` is the one that a sceptic asks for first."""

from slimstart.baselines.narrow import narrow, uniform_mask

__all__ = ["narrow", "uniform_mask"]
