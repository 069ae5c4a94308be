"""A peephole optimiser for a forward that is about to be captured: fewer and larger kernels, the same numbers.

`record` runs a forward once and notes the calls of torch functions and the values that they read. `fused` runs the same
forward again, with

- each batch norm, the sum and the ReLU after it as one kernel (`chains.py`);
- the parameters that autocast would cast layer by layer cast together, and their gradients too (`Caster`);
- the batch counters of all batch norms incremented together (`Counters`).

A CUDA graph that is captured meanwhile has fewer kernels and reads memory less often. Replays run without Python, so
this analysis costs nothing per step. It sees calls where torch dispatches them, in modules, functions and operators
alike, so it needs no knowledge of the network.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from slimstart.steps.calls import LAYER_FUNCTIONS, Call, Calls, DivergedError, Function
from slimstart.steps.chains import Chain, ChainFinder, ChainRunner

__all__ = ["DivergedError", "Plan", "fused", "record"]

INCREMENTS = frozenset({Tensor.add_, Tensor.__iadd__})

# `.data` shares the memory but not the version counter: writes through it are not noticed.
ALIASES = frozenset({Tensor.data.__get__, Tensor.data.__set__})  # type: ignore[attr-defined]


class Setting(NamedTuple):
    """The target of a cast, and whether a gradient comes back; parameters with equal settings are cast together."""

    device: torch.device
    dtype: torch.dtype
    with_gradient: bool


Casts = Mapping[Setting, Sequence[Tensor]]


@dataclass(frozen=True, eq=False)
class Plan:
    """The calls of one forward in their order, and what can be fused among them.

    Attributes:
        calls: torch functions that were called.
        chains: batch norms with what follows them.
        casts: parameters that the recorded forward used; autocast casts any others when they are used.
    """

    calls: tuple[Function, ...]
    chains: tuple[Chain, ...]
    casts: Casts


def record(forward: Callable[[], Any]) -> Plan:
    """Run a forward unchanged, with all its effects, and find what can be fused."""
    recorder = _Recorder()
    with recorder:
        result = forward()
    plan = recorder.plan()
    del result  # only after the plan: a value that is returned counts as read
    return plan


@contextmanager
def fused(plan: Plan) -> Iterator[None]:
    """Fuse the recorded forward, which must run in the block.

    Raises:
        DivergedError: the calls differ from the recorded ones, as in a network with stochastic depth.
    """
    runner = _Runner(plan)
    with runner:
        yield
    runner.finish()


class _Recorder(Calls):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Function] = []
        self._chains, self._casts = ChainFinder(), CastFinder()

    def call(self, call: Call) -> Any:
        self._calls.append(call.func)
        self._chains.see(call)
        self._casts.see(call)
        result = call.run()
        self._chains.made(call, result)
        return result

    def expose(self, tensor: Tensor) -> None:
        self._chains.expose(tensor)
        self._casts.expose(tensor)

    def plan(self) -> Plan:
        return Plan(tuple(self._calls), self._chains.chains(), self._casts.casts())


class _Runner(Calls):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._calls = plan.calls
        self._chains, self._caster, self._counters = ChainRunner(plan.chains), Caster(plan.casts), Counters()

    def call(self, call: Call) -> Any:
        if call.number >= len(self._calls) or call.func != self._calls[call.number]:
            raise DivergedError(f"call {call.number} is {call.func}")
        self._counters.flush(call.operands)
        if self._counters.defer(call):
            return call.args[0]
        return self._chains.run(self._caster.prepare(call))

    def expose(self, tensor: Tensor) -> None:
        self._counters.flush([tensor])
        self._chains.expose(tensor)

    def finish(self) -> None:
        if self.number != len(self._calls):
            raise DivergedError(f"it ended after {self.number} calls, {len(self._calls)} calls were recorded")
        self._counters.finish()


# --- casts ------------------------------------------------------------------------------------------------------------


class CastFinder:
    """Finds the parameters that autocast casts in a forward."""

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
        if isinstance(tensor, nn.Parameter):  # a reference to an activation would keep its memory
            self._exposed.add(tensor)

    def casts(self) -> Casts:
        return {setting: [t for t in found if t not in self._exposed] for setting, found in self._found.items()}


class Caster:
    """Casts all parameters at the first layer that needs one.

    Autocast casts the weights of a layer when the layer is called, and backward casts their gradients back: two kernels
    of a few microseconds for each layer. Here one multi-tensor kernel does it in each direction.

    The numbers are those of autocast with its cache: a parameter that is used twice is cast once, and its gradients are
    summed before they are cast back.
    """

    def __init__(self, casts: Casts) -> None:
        self._casts = casts
        self._done: dict[Setting, dict[Tensor, tuple[Tensor, int]]] = {}  # with the version that was cast

    def prepare(self, call: Call) -> Call:
        """Replace the parameters in a call by their casts, which autocast leaves alone."""
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
        return low if version == tensor._version else tensor  # the parameter was written to after the cast

    def _cast(self, setting: Setting) -> dict[Tensor, tuple[Tensor, int]]:
        parameters = self._casts[setting]
        with torch.set_grad_enabled(setting.with_gradient):
            low = _cast_all(setting.dtype, parameters)
        return {p: (its, p._version) for p, its in zip(parameters, low, strict=True)}


def _setting(tensor: Tensor) -> Setting | None:
    """The cast that autocast would do here and now; None where it would do none, or where this is no parameter."""
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
    """Casts of many tensors of one type; backward is the same with the types exchanged."""

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


# --- counters ---------------------------------------------------------------------------------------------------------


class Counters:
    """Increments by 1 that are deferred to the end of the forward, or until the number may be read.

    Every batch norm counts its batches, with a kernel for a single number.
    """

    def __init__(self) -> None:
        self._deferred: set[Tensor] = set()

    def flush(self, operands: Sequence[Tensor]) -> None:
        """Increment the counters that a call may read through its operands."""
        integers = [tensor for tensor in operands if not tensor.is_floating_point()]
        for counter in [c for c in self._deferred if any(_share_memory(c, tensor) for tensor in integers)]:
            self._deferred.remove(counter)
            counter.add_(1)

    def defer(self, call: Call) -> bool:
        """Defer a call that increments a counter by 1, after `flush`; returns whether it is one."""
        if not _increments(call):
            return False
        self._deferred.add(call.args[0])
        return True

    def finish(self) -> None:
        """Increment all deferred counters, with one kernel."""
        if self._deferred:
            torch._foreach_add_(list(self._deferred), 1)
            self._deferred.clear()


def _increments(call: Call) -> bool:
    if call.func not in INCREMENTS or call.kwargs or len(call.args) != 2:
        return False
    counter, one = call.args
    return (
        type(one) is int
        and one == 1
        and type(counter) is Tensor
        and counter.dim() == 0
        and not (counter.is_floating_point() or counter.is_complex() or counter.dtype == torch.bool)
        and not counter.is_inference()  # it cannot be written after the forward, outside of inference mode
    )


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return bool(torch._C._is_alias_of(one, other))  # type: ignore[attr-defined]
