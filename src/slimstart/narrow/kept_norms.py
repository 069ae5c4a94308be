"""Norms and means over the kept channels of a masked dense network: the reference for `trace(..., norms="shrink")`.

A dropped channel is zero in a masked dense network, whose norms divide by the number of all channels. Here every
such call takes the kept channels out, runs on them, and puts the result back among zeros: slow, and obvious. Attention
with a single head runs on all channels, with the scale of those that are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slimstart.graph import Selection
from slimstart.graph.tracer import OVER_CHANNELS

_ARGUMENTS = {
    "layer_norm": ("normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("normalized_shape", "weight", "eps"),
    "group_norm": ("num_groups", "weight", "bias", "eps"),
    "batch_norm": ("running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
}


def over_kept_channels(model: nn.Module, selection: Selection) -> None:
    """Let the norms and means of a masked dense network run over kept channels only, in place."""
    if selection.graph.over_channels:
        forward: Callable[..., Any] = model.forward

        @wraps(forward)
        def over_kept(*args: Any, **kwargs: Any) -> Any:
            with _listening(model, selection):
                return forward(*args, **kwargs)

        model.forward = over_kept


@contextmanager
def _listening(model: nn.Module, selection: Selection) -> Iterator[None]:
    mode = _KeptNorms(model.training, selection)
    handles: list[Any] = []
    for name, module in model.named_modules():
        if module is not model:
            handles.append(module.register_forward_pre_hook(partial(mode.enter, name)))
            handles.append(module.register_forward_hook(mode.leave, always_call=True))
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # a fused encoder layer, whose norms would not be seen
    try:
        with mode:
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        for handle in handles:
            handle.remove()


class _KeptNorms(TorchFunctionMode):
    """Calls are numbered within each module, as in the trace."""

    def __init__(self, training: bool, selection: Selection) -> None:
        super().__init__()
        self.training, self.selection = training, selection
        self.modules = [""]
        self.calls: Counter[str] = Counter()

    def enter(self, name: str, *_: Any) -> None:
        self.modules.append(name)

    def leave(self, *_: Any) -> None:
        self.modules.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if name not in OVER_CHANNELS:
            return func(*args, **kwargs)
        module = self.modules[-1]
        key = (self.training, module, self.calls[module])
        self.calls[module] += 1
        if key not in self.selection.graph.over_channels:
            return func(*args, **kwargs)
        dim, axis = self.selection.graph.over_channels[key]
        if name == "scaled_dot_product_attention":
            return func(*args, **kwargs | {"scale": int(self.selection.present(axis).sum()) ** -0.5})
        tensor = args[0] if args else kwargs.pop("input")
        kept = self.selection.present(axis).nonzero().squeeze(1).to(tensor.device)
        if name == "_weight_norm":
            rows = func(tensor.index_select(dim, kept), args[1].index_select(dim, kept), *args[2:], **kwargs)
            return torch.zeros_like(tensor).index_copy(tensor.dim() + dim, kept, rows)
        if name in _ARGUMENTS:
            given = dict(zip(_ARGUMENTS[name], args[1:], strict=False)) | kwargs
            return _normed(func, tensor, dim, kept, given)
        return func(tensor.index_select(dim, kept), *args[1:], **kwargs)


def _normed(func: Any, tensor: Tensor, dim: int, kept: Tensor, given: dict[str, Any]) -> Tensor:
    """A norm of the kept channels, among zeros."""
    shape = given.get("normalized_shape")
    if shape is not None:
        given["normalized_shape"] = [len(kept) if d - len(shape) == dim else size for d, size in enumerate(shape)]
    for name in () if "running_mean" in given else ("weight", "bias"):  # a standardised weight has one for each filter
        if given.get(name) is not None:
            given[name] = given[name].index_select(0 if shape is None else dim, kept)
    y = func(tensor.index_select(dim, kept), **given)
    return torch.zeros_like(tensor, dtype=y.dtype).index_copy(tensor.dim() + dim, kept, y)
