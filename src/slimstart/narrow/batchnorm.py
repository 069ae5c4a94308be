"""Recalibration of batch norm statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from slimstart.devices import cuda_devices, evaluating
from slimstart.inputs import as_batch


def recalibrate(module: nn.Module, batches: Iterable[tuple[Any, ...]], loss_fn: Callable[..., Any]) -> int:
    """Replace running statistics by their plain average over the given batches.

    Use it for a sampled network, whose statistics come from training with many other masks. Only the normalisation
    layers are in training mode meanwhile, and no gradient is computed. If `loss_fn` fails then, the module may have
    losses in training mode only, as detectors do: all of it but dropout is in training mode for all batches.

    Args:
        module: changed in place; its training modes are restored, and so are PyTorch's generators.
        batches: tuples of the arguments of `loss_fn` after the network.
        loss_fn: called as `loss_fn(module, *batch)`; its value is not used.

    Returns:
        The number of batches; if it is 0, statistics are unchanged.
    """
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not norms:
        return 0
    momenta = {norm: norm.momentum for norm in norms}
    statistics = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers()]
    seen, training = 0, False

    def measure(batch: Any) -> None:
        module.train(training)
        for part in module.modules():
            if isinstance(part, _DropoutNd):
                part.eval()
        for norm in norms:
            if seen == 0:
                norm.reset_running_stats()
                norm.momentum = None  # a cumulative average
            norm.train()
        loss_fn(module, *as_batch(batch))

    try:
        with evaluating(module), torch.no_grad(), torch.random.fork_rng(devices=cuda_devices(module)):
            for batch in batches:
                try:
                    measure(batch)
                except Exception:
                    if seen:
                        raise
                    training = True
                    measure(batch)
                seen += 1
    except BaseException:  # statistics of some of the batches would be worse than those from before
        for buffer, value in statistics:
            buffer.copy_(value)
        raise
    finally:
        for norm, momentum in momenta.items():
            norm.momentum = momentum
    return seen
