"""Predicted device memory of a training whose dense model is on the host.

The narrow network of a first draw runs on the meta device, where tensors have shapes only, and `Peak` counts them.
"""

from __future__ import annotations

import copy
import os
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import slimstart
from slimstart.narrow import compact
from slimstart.policies import Policy, get_policy
from slimstart.policies.base import removed_layers

# Of cuBLAS, in KiB and pieces: 8 MiB for every thread on every stream. On an H200 PyTorch takes 32 MiB by default, for
# matrices that are as small as on any other GPU.
WORKSPACE = ":4096:2:16:8"
STREAMS = 5  # a forward and a backward, each also while it is captured; and the policy
# A guess at the workspace of cuDNN for a 3x3 convolution, which depends on the kernel that it chooses: by Winograd's
# method, 3x3 weights become 6x6 numbers, and so do 4x4 pixels.
OF_WEIGHTS, OF_IMAGES = 36 / 9, 36 / 16


class Peak(TorchDispatchMode):
    """Counts the bytes of all tensors that are made within, for as long as they live; also on the meta device.

    Attributes:
        now, most: bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._alive: dict[int, int] = {}  # bytes of each storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and (key := one.untyped_storage()._cdata) not in {*given, *self._alive}:
                self._alive[key] = one.untyped_storage().nbytes()
                self.now += self._alive[key]
                weakref.finalize(one.untyped_storage(), self._forget, key)
        self.most = max(self.most, self.now)
        return result

    def _forget(self, key: int) -> None:
        self.now -= self._alive.pop(key)


def inventory(
    model: nn.Module, images: Tensor, budget: float, policy: str | Policy = "paper", total_steps: int | None = None
) -> dict[str, int]:
    """Bytes on the device by kind, with SGD and momentum; fragments that the allocator cannot use are not counted.

    Args:
        model: dense; it may be on the meta device.
        images: of one batch.
        budget: in FLOPs, as a fraction of the dense model's.
        policy: "paper", whose steps are eager where the dense model is on the host, or "equal_worth", in CUDA graphs.
        total_steps: as for `SparseTraining`.
    """
    model, images = copy.deepcopy(model).to("meta"), images.to("meta")
    settings = get_policy(policy)
    graph = slimstart.trace(model, images[:1], coupling=settings.coupling)
    learner = settings.start(graph.costs, slimstart.Flops(budget), total_steps)
    graph, masks = graph.without(graph.layers[i].name for i in removed_layers(learner)), learner.draw()
    net, *others = (compact(model, graph.select(mask)) for mask in masks)

    def size(tensors: Any) -> int:
        return sum(one.numel() * one.element_size() for one in tensors)

    parameters = size(net.parameters())
    weights = parameters + size(net.buffers())
    with Peak() as step:
        F.cross_entropy(net(images), torch.zeros(len(images), dtype=torch.int64, device="meta")).backward()
    known = {
        "weights": weights,
        "gradients": parameters,
        "momentum": parameters,
        "next": weights + parameters,  # during a change of structure, with its momentum
        "activations": step.most - parameters,
        "convolutions": largest_convolution(net, images),
        "cublas": STREAMS * workspace(),
    }
    if others:
        return {**known, "reference": max(size([*one.parameters(), *one.buffers()]) for one in others)}
    # Graphs of the last shapes hold their memory until the first step in new ones has been captured.
    return {**known, "last step": known["activations"] + parameters}


def largest_convolution(net: nn.Module, images: Tensor) -> int:
    """Workspace of the convolution that needs most, in bytes."""
    found = [0]

    def see(layer: Any, inputs: Any, output: Any) -> None:
        numbers = OF_WEIGHTS * layer.weight.numel() + OF_IMAGES * (inputs[0].numel() + output.numel())
        found.append(int(numbers) * output.element_size())

    hooks = [one.register_forward_hook(see) for one in net.modules() if isinstance(one, nn.Conv2d)]
    net(images)
    for hook in hooks:
        hook.remove()
    return max(found)


def workspace() -> int:
    """Workspace of cuBLAS for one thread on one stream, in bytes."""
    numbers = [int(one) for one in os.environ.get("CUBLAS_WORKSPACE_CONFIG", WORKSPACE).strip(":").split(":")]
    return 1024 * sum(size * count for size, count in zip(numbers[::2], numbers[1::2], strict=True))
