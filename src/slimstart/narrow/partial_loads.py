"""State dicts of another structure that are loaded one by one: the model's, an optimizer's, that of SparseTraining.

Each says which structure it is of. A model takes the structure of its state dict at once. Optimizer state of a
structure that the model does not have yet waits for it. Either alone is good for evaluation and `finish`; to train on,
the state of SparseTraining is needed, which has everything. So they may come in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slimstart.errors import CheckpointError
from slimstart.narrow.change import Change
from slimstart.narrow.networks import Networks
from slimstart.narrow.optimizer_state import held_by
from slimstart.narrow.shrink import METADATA


class PartialLoads:
    """Hooks on optimizers, and what has been loaded so far.

    Args:
        networks: of the model.
        optimizers: over its parameters.
        loaded: called with an optimizer that has loaded a state dict, whose settings came with it.

    Attributes:
        missing: what must be loaded before training goes on.
    """

    def __init__(
        self, networks: Networks, optimizers: Sequence[Optimizer], loaded: Callable[[Optimizer], None]
    ) -> None:
        self._networks, self._optimizers, self._after = networks, optimizers, loaded
        self.missing: frozenset[str] = frozenset()
        self._mask: Tensor | None = None  # of the optimizer's state dict that is being loaded
        # Optimizer state that waits for its structure, and the mask of that.
        self._waiting: dict[Tensor, tuple[dict[str, Any], Tensor | None]] = {}
        self._handles = [
            handle
            for optimizer in optimizers
            for handle in (
                optimizer.register_state_dict_post_hook(self._saved),
                optimizer.register_load_state_dict_pre_hook(self._loading),
                optimizer.register_load_state_dict_post_hook(self._loaded),
            )
        ]

    @property
    def model_alone(self) -> bool:
        """Whether the model has the structure of its own state dict, which the training does not know."""
        return "the optimizer" in self.missing

    def check(self) -> None:
        """Refuse to train on.

        Raises:
            RuntimeError: something is missing.
        """
        if self.missing:
            raise RuntimeError(
                f"a state dict of another structure was loaded without that of {' and '.join(sorted(self.missing))}. "
                "To go on training, load the state dict of SparseTraining, which has everything; `finish` works without"
            )

    def model_takes(self, change: Change) -> None:
        """Add to a change: the model gets the structure of a state dict that it is about to load."""
        change.set(self, "missing", self.missing | {"the optimizer", "SparseTraining"})
        change.call(self._hand_out)

    def clear(self) -> None:
        """Everything has been loaded."""
        self.missing, self._waiting = frozenset(), {}

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _hand_out(self) -> None:
        """Give parameters the state that has waited for their structure."""
        mask = self._networks.exact_selection.mask
        for parameter, (state, own) in list(self._waiting.items()):
            if fits(state, parameter) and (own is None or torch.equal(own, mask)):
                owner = next(one for one in self._optimizers if id(parameter) in held_by([one]))
                owner.state[parameter] = self._waiting.pop(parameter)[0]

    def _saved(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        # PyTorch ignores keys that it does not know.
        state_dict[METADATA] = {
            "structure": self._networks.graph.digest,
            "mask": self._networks.exact_selection.mask.clone(),
        }

    def _loading(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        found = state_dict.get(METADATA, {})
        if found.get("structure", self._networks.graph.digest) != self._networks.graph.digest:
            raise CheckpointError("the optimizer's state dict is of another network, coupling or `keep`")
        self._mask = found.get("mask")

    def _loaded(self, optimizer: Optimizer) -> None:
        self._after(optimizer)
        self._networks.tensors_replaced()
        mask, self._mask = self._mask, None
        other = mask is not None and not torch.equal(mask, self._networks.exact_selection.mask)
        for parameter, state in list(optimizer.state.items()):
            moves = isinstance(parameter, nn.Parameter) and self._networks.name_of(parameter) is not None
            if moves and (other or not fits(state, parameter)):
                self._waiting[parameter] = optimizer.state.pop(parameter), mask
                self.missing = self.missing | {"SparseTraining"}


def fits(state: Mapping[str, Any], parameter: Tensor) -> bool:
    """Whether optimizer state belongs to a parameter of this shape."""
    return all(v.shape == parameter.shape for v in state.values() if isinstance(v, Tensor) and v.dim() > 0)
