"""Memory of a training whose dense model stays on the host, with its narrow networks on a device.

It is estimated from shapes before anything is allocated, so a model on the meta device is enough:

    with torch.device("meta"):
        model = make_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    print(slimstart.steps.host_memory.estimate(model, optimizer, Flops(0.05)))
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from slimstart.devices import free_on_device
from slimstart.narrow.optimizer_state import first_state
from slimstart.policies import Budget, Channels, JointBudget

NETWORKS = 4  # copies of the narrow weights on the device: network, gradients, the next network, reference
STATES = 2  # copies of the narrow optimizer state: of the network and of the next one
VERIFICATION = 4  # copies of the weights in float32 on the host during `trace`: two copies in float64
GIB = 2**30


@dataclass(frozen=True)
class Needs:
    """Bytes, by kind, without activations, which depend on the batch.

    Attributes:
        weights: weights and buffers of the dense model, on the host.
        state: dense optimizer state, on the host.
        verification: copies of the dense model on the host while it is traced, before there is any optimizer state.
        subnet: narrow networks and their optimizer state on the device, estimated from the budget.
    """

    weights: int
    state: int
    verification: int
    subnet: int

    @property
    def host(self) -> int:
        """The peak on the host."""
        return self.weights + max(self.state, self.verification)

    def __str__(self) -> str:
        return (
            f"dense weights {_size(self.weights)} and optimizer state {_size(self.state)} on the host "
            f"(at most {_size(self.host)} with copies), about {_size(self.subnet)} for narrow networks on "
            "the device"
        )


def estimate(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], budget: Budget | None = None) -> Needs:
    """The memory of a training with `full_model_device="cpu"`.

    Args:
        model: the dense model, on any device, also meta.
        optimizer: optimizer of its parameters, or several.
        budget: budget of the narrow networks; without it they count as if they were dense.
    """
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    state = 0
    for one in [optimizer] if isinstance(optimizer, Optimizer) else optimizer:
        for group in one.param_groups:
            for dtype in {p.dtype for p in group["params"]}:
                held = first_state(one, group, torch.zeros(1, dtype=dtype)).values()
                per_entry = sum(value.element_size() for value in held if isinstance(value, Tensor) and value.dim() > 0)
                state += per_entry * sum(p.numel() for p in group["params"] if p.dtype == dtype)
    kept = 1.0
    for part in budget.budgets if isinstance(budget, JointBudget) else filter(None, [budget]):
        # A weight is narrowed along its inputs and its outputs.
        kept = min(kept, part.smallest**2 if isinstance(part, Channels) else part.smallest)
    floating = [p for p in model.parameters() if p.is_floating_point()]
    verification = VERIFICATION * 4 * sum(p.numel() for p in floating)
    return Needs(weights, state, verification, int(kept * (NETWORKS * weights + STATES * state)))


def place(
    model: nn.Module,
    optimizer: Sequence[Optimizer],
    example_inputs: Any,
    budget: Budget | None,
    full_model_device: Any,
) -> torch.device | None:
    """The device of the narrow networks of a dense model on the host; None without `full_model_device`."""
    if full_model_device is None:
        return None
    if torch.device(full_model_device).type != "cpu":
        raise ValueError(
            f"`full_model_device` is {str(full_model_device)!r}; it must be 'cpu', or None for a dense model and its "
            "narrow networks on one device"
        )
    needs = estimate(model, optimizer, budget)
    where = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    to_come = needs.host - (0 if "meta" in where else needs.weights)
    if to_come > (free := free_on_host()):
        raise MemoryError(
            f"the dense model does not fit on the host: it needs {_size(to_come)} more, and {_size(free)} are free. In "
            f"total: {needs}. Make the model narrower, or use an optimizer with less state"
        )
    if "meta" in where:
        raise ValueError(
            f"`model` is on the meta device and has no values yet. It needs {needs}: build it on the CPU, or call "
            "`model.to_empty(device='cpu')` and initialise it, and make the optimizer from it then"
        )
    if where != {"cpu"}:
        raise ValueError(
            f"`full_model_device` is 'cpu', but `model` is on {', '.join(sorted(where))}; build it on the CPU, and the "
            "optimizer from it"
        )
    found = next((leaf.device for leaf in tree_leaves(example_inputs) if isinstance(leaf, Tensor)), None)
    if found is None:
        raise ValueError("`example_inputs` holds no tensor; narrow networks will be on the device of its first one")
    if found.type == "cuda" and needs.subnet > (free := free_on_device(found)):
        raise MemoryError(
            f"narrow networks of this size do not fit on {found}: they need about {_size(needs.subnet)} without "
            f"activations, and {_size(free)} are free. In total: {needs}. Lower the budget"
        )
    return found


def free_on_host() -> int:
    """Bytes that a process can allocate now, including memory that only caches files."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 100 else f"{count / 2**20:.2f} MiB"
