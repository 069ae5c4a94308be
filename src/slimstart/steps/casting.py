"""Casts of parameters that autocast would do one by one, done at once.

Autocast casts the weights of a layer when the layer is called, and backward casts their gradients back: two kernels of
a few microseconds for each. Here the first layer that is called has the parameters of all layers cast, by one kernel
that works on many tensors, and so are their gradients.

The numbers are those of autocast with its cache: a parameter that is used twice is cast once, and its gradients are
summed before they are cast back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from slimstart.steps.calls import LAYER_FUNCTIONS, Call

# A tensor that shares the memory, but not the count of its versions: what is written there is not noticed.
ALIASES = frozenset({Tensor.data.__get__, Tensor.data.__set__})  # type: ignore[attr-defined]


class Setting(NamedTuple):
    """What a parameter is cast to, and whether a gradient comes back; parameters that agree in it are cast together."""

    device: torch.device
    dtype: torch.dtype
    with_gradient: bool


Casts = Mapping[Setting, Sequence[Tensor]]


class CastFinder:
    """Notes the parameters that autocast casts in a forward."""

    def __init__(self) -> None:
        self._found: dict[Setting, dict[Tensor, None]] = defaultdict(dict)
        self._exposed: set[Tensor] = set()

    def see(self, call: Call) -> None:
        if call.func in ALIASES:
            self.expose(call.operands[0])
        elif call.func in LAYER_FUNCTIONS:
            for tensor in call.operands:
                if (setting := _setting(tensor)) is not None:
                    self._found[setting][tensor] = None

    def expose(self, tensor: Tensor) -> None:
        if isinstance(tensor, nn.Parameter):  # anything else must not be kept alive
            self._exposed.add(tensor)

    def casts(self) -> Casts:
        return {setting: [t for t in found if t not in self._exposed] for setting, found in self._found.items()}


class Caster:
    """Gives layers their parameters cast already."""

    def __init__(self, casts: Casts) -> None:
        self._casts = casts
        self._done: dict[Setting, dict[Tensor, tuple[Tensor, int]]] = {}  # with the version that was cast

    def prepare(self, call: Call) -> Call:
        """The call with the parameters in it cast as autocast would, which leaves them alone then."""
        if call.func not in LAYER_FUNCTIONS:
            return call
        args, kwargs = tree_map_only(Tensor, self._low, (call.args, call.kwargs))
        return call._replace(args=args, kwargs=kwargs)

    def _low(self, tensor: Tensor) -> Tensor:
        setting = _setting(tensor)
        if setting is None or not self._casts.get(setting):
            return tensor
        if setting not in self._done:
            self._done[setting] = self._cast(setting)
        low, version = self._done[setting].get(tensor, (tensor, tensor._version))
        return low if version == tensor._version else tensor  # it may have been written since

    def _cast(self, setting: Setting) -> dict[Tensor, tuple[Tensor, int]]:
        parameters = self._casts[setting]
        with torch.set_grad_enabled(setting.with_gradient):
            low = _cast_all(setting.dtype, parameters)
        return {p: (its, p._version) for p, its in zip(parameters, low, strict=True)}


def _setting(tensor: Tensor) -> Setting | None:
    """How autocast would cast a tensor here and now; None where it would not, or where that is no parameter."""
    kind = tensor.device.type
    parameter = type(tensor) is nn.Parameter and tensor.is_leaf and not tensor.is_inference()
    if not (parameter and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return None
    dtype = torch.get_autocast_dtype(kind)
    if tensor.dtype != torch.float32 or dtype == torch.float32:
        return None
    return Setting(tensor.device, dtype, with_gradient=tensor.requires_grad and torch.is_grad_enabled())


def _cast_all(dtype: torch.dtype, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    result: tuple[Tensor, ...] = _Cast.apply(dtype, *tensors)  # type: ignore[no-untyped-call]
    return result


class _Cast(torch.autograd.Function):
    """Many tensors of one type as another type. Backward is the same with the types exchanged."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = tensors[0].dtype
        casts = tuple(torch.empty_like(tensor, dtype=dtype) for tensor in tensors)
        torch._foreach_copy_(casts, tensors)
        return casts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        some = [gradient for gradient in gradients if gradient is not None]
        casts = iter(_cast_all(ctx.dtype, some) if some else ())
        return None, *(None if gradient is None else next(casts) for gradient in gradients)
