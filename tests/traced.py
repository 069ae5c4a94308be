"""Graphs of networks that several tests read, traced when first asked for."""

import functools

import torch

from slimstart import trace
from slimstart.graph import ChannelGraph
from slimstart.lab import models


@functools.cache
def traced(name: str, size: int, coupling: str = "stream", width: float = 1.0) -> ChannelGraph:
    """The graph of a network of the paper, for images of 3 x size x size; tests must not change it."""
    with torch.random.fork_rng(devices=[]):  # a test draws the same numbers whether it is the first to ask or not
        return trace(models.build(name, num_classes=10, width=width), torch.zeros(1, 3, size, size), coupling)
