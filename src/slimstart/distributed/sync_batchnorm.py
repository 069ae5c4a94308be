r"""Batch norm with the statistics of the whole batch over all processes, on any device.

With n examples (and positions) in total,

.. math:: \mu = \tfrac1n \sum x, \quad \sigma^2 = \tfrac1n \sum x^2 - \mu^2, \quad
          \frac{\partial L}{\partial x} = \frac{\gamma}{\sigma}
          \bigl(g - \tfrac1n \sum g - \hat x \, \tfrac1n \sum g \hat x \bigr),

where all sums run over all processes: one exchange of 2C + 1 numbers forwards and one of 2C backwards. PyTorch's
`SyncBatchNorm` does the same on GPUs only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from slimstart.distributed.process_group import reporting


class SynchronisedBatchNorm(_BatchNorm):
    """Batch norm over the processes of the default group; in evaluation mode and in a single process, the usual one.

    Under `torch.inference_mode` it is never synchronised, so that a single process can use it there.
    """

    same_as_base = True  # for `trace`: except in a training step, the forward is that of PyTorch's batch norm

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"`input` has {input.dim()} dimensions; batch norm needs at least 2")

    def forward(self, input: Tensor) -> Tensor:
        together = self.training and not torch.is_inference_mode_enabled()
        if not together or not dist.is_initialized() or dist.get_world_size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        out, mean, var, count = _Normalise.apply(input, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
        if self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            factor = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.to(self.running_mean), factor)
            self.running_var.lerp_((var * (count / (count - 1))).to(self.running_var), factor)
        normalised: Tensor = out
        return normalised


def synchronise_batch_norm(model: nn.Module) -> nn.Module:
    """Replace every batch norm in a model by a synchronised one with the same parameters, in place.

    Returns:
        The model, or its replacement if it is itself a batch norm.
    """
    if isinstance(model, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
        device = next((tensor.device for tensor in model.state_dict().values()), None)
        fresh = SynchronisedBatchNorm(
            model.num_features, model.eps, model.momentum, model.affine, model.track_running_stats, device
        )
        fresh._parameters, fresh._buffers = model._parameters, model._buffers
        return fresh.train(model.training)
    for name, child in model.named_children():
        setattr(model, name, synchronise_batch_norm(child))
    return model


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) * weight + bias, with mean and var (biased) over all processes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count = torch.tensor([x.numel() / x.shape[1]], dtype=torch.float64, device=x.device)
        double = x.double()
        sums = torch.cat([double.sum(_others(x)), double.square().sum(_others(x)), count])
        with reporting():
            dist.all_reduce(sums)
        mean, square, count = sums.split([x.shape[1], x.shape[1], 1])
        mean, square = mean / count, square / count
        var = (square - mean.square()).clamp(min=0)
        if float(count) <= 1:
            raise ValueError("batch norm in training needs more than one value per channel, over all processes")
        scale = (var + eps).rsqrt()
        hat = ((double - _row(mean, x)) * _row(scale, x)).to(x.dtype)
        ctx.save_for_backward(hat, weight, scale, count)
        out = hat if weight is None else hat * _row(weight, x)
        ctx.mark_non_differentiable(mean, var, count)
        return (out if bias is None else out + _row(bias, x)), mean, var, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        hat, weight, scale, count = ctx.saved_tensors
        own = torch.cat([grad.double().sum(_others(grad)), (grad * hat).double().sum(_others(grad))])
        sums = own.clone()
        with reporting():
            dist.all_reduce(sums)
        slope, tilt = (sums / count).chunk(2)
        grad_bias, grad_weight = own.chunk(2)
        through = grad - _row(slope, grad) - hat * _row(tilt, grad)
        factor = scale if weight is None else scale * weight
        return (
            (through * _row(factor, grad)).to(grad.dtype),
            None if weight is None else grad_weight.to(weight.dtype),
            None if weight is None else grad_bias.to(weight.dtype),
            None,
        )


def _others(x: Tensor) -> list[int]:
    """All dimensions except the channels."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _row(values: Tensor, x: Tensor) -> Tensor:
    """One value per channel, in a shape that broadcasts with `x`."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
