"""What a training whose dense model stays on the host has on its device, counted beforehand.

Shapes are enough: the narrow network of a first draw runs on the meta device, and `Peak` counts what it makes there.
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
from slimstart.narrow.page_locked import num_bytes
from slimstart.narrow.resident_slots import shared_out
from slimstart.narrow.seating import Seating
from slimstart.narrow.slots import Slots
from slimstart.policies import DeviceLearner, get_policy
from slimstart.steps.assembly import ALIGN

# Of cuBLAS, in KiB and pieces: 8 MiB for every thread on every stream. On an H200 PyTorch takes 32 MiB by default, for
# matrices that are as small as on any other GPU.
WORKSPACE = ":4096:2:16:8"
STREAMS = 5  # a forward and a backward, each also while it is captured; and the policy
# A guess at what cuDNN asks for beside the tensors of a 3x3 convolution, which depends on the kernel that it takes: by
# Winograd's method, 3x3 weights become 6x6 numbers, and so do 4x4 pixels.
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


def inventory(model: nn.Module, images: Tensor, budget: float, policy: str = "paper") -> dict[str, int]:
    """Bytes on the device by kind, when a step is captured as a CUDA graph: in static slots, by SGD with momentum.

    Not among them is what the allocator cannot use because it lies scattered: leave it a good part of the device.

    Args:
        model: dense; on the meta device will do.
        images: of one batch.
    """
    model, images = copy.deepcopy(model).to("meta"), images.to("meta")
    settings = get_policy(policy)
    graph = slimstart.trace(model, images[:1], coupling=settings.coupling)
    learner = settings.start(graph.costs, slimstart.Flops(budget), None)
    padding = learner.padding
    slots = Slots(graph, *((1, None) if padding is None else (ALIGN, padding.spread)))
    kept = graph.costs.at_least_one(learner.draw())
    slots.adjust(kept, learner.keep_probs)
    seating = Seating(graph, slots.room, torch.device("cpu"))
    net = compact(model, graph.select_within(kept[0], seating.frame(kept[0])))

    dense = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    parameters = [(name, dense[name], one) for name, one in net.named_parameters()]
    buffers = [(name, dense[name], one) for name, one in net.named_buffers()]
    cut = [one for one in (*parameters, *buffers, *parameters) if one[0] in graph.tensors]  # the last are momentum
    ahead, _ = shared_out(cut)
    whole = [one for one in parameters if one[0] not in graph.tensors]

    def size(tensors: Any) -> int:
        return sum(one.numel() * one.element_size() for _, _, one in tensors)

    with Peak() as step:
        F.cross_entropy(net(images), torch.zeros(len(images), dtype=torch.int64, device="meta")).backward()
    known = {
        "weights": size(parameters) + size(buffers),
        "gradients": size(parameters),
        "momentum": size(parameters),
        "occupied": sum(one.numel() for _, _, one in parameters),
        "ahead": size(ahead),
        "scratch": max(num_bytes(one) for _, _, one in cut),
        "activations": step.most - size(parameters),
        "convolutions": largest_convolution(net, images),
        "cublas": STREAMS * workspace(),
    }
    if not isinstance(learner, DeviceLearner):
        # Shapes change with every draw. What graphs of the last ones had is still theirs when a step runs in new ones.
        return {**known, "last step": known["activations"] + known["gradients"]}
    with Peak() as reference, torch.no_grad():
        net(images)
    with Peak() as learning:
        learner.learn_(torch.zeros(learner.num_masks, dtype=torch.float64), torch.ones((), dtype=torch.bool))
        seating(graph.costs.at_least_one(learner.draw()))
    return {
        **known,
        "reference": size(parameters) + size(buffers) - size(whole),  # which are shared
        "reference activations": reference.most,
        "policy": learning.most,
    }


def largest_convolution(net: nn.Module, images: Tensor) -> int:
    """Bytes beside the tensors of a convolution, of that which needs most."""
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
    """Bytes that cuBLAS has for one thread on one stream."""
    numbers = [int(one) for one in os.environ.get("CUBLAS_WORKSPACE_CONFIG", WORKSPACE).strip(":").split(":")]
    return 1024 * sum(size * count for size, count in zip(numbers[::2], numbers[1::2], strict=True))
