"""Copies of a model that change their structure with it: averages of weights."""

from __future__ import annotations

from torch import nn

from slimstart.narrow.compact import tensor_names
from slimstart.narrow.modules import Network
from slimstart.narrow.networks import Networks
from slimstart.narrow.store import Store


def follower(copy: nn.Module, networks: Networks) -> tuple[Network, Store]:
    """The copy of a model inside a module, with a store of its own for what is not in the network.

    Raises:
        ValueError: the module holds no copy of the model as it is now.
    """
    own = {name: tensor.shape for name, tensor in tensor_names(networks.model).items()}
    for module in (copy, getattr(copy, "module", None), getattr(copy, "ema_model", None)):
        if isinstance(module, nn.Module) and module is not networks.model:
            found = {name: tensor.shape for name, tensor in tensor_names(module).items()}
            if found == own:
                networks.flush()
                return Network(module, networks.graph), networks.store.copy()
    raise ValueError(
        "`copy` is no copy of the model as it is now: names or shapes differ. Make it after the SparseTraining, with "
        "copy.deepcopy(model), AveragedModel(model) or the like"
    )
