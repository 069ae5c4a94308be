"""Fusion of batch norms with the sum and the ReLU after them.

A chain is a batch norm whose result only a ReLU reads, or only a sum, which a ReLU may follow; or a batch norm alone.
One kernel (`kernels.norm`) computes the whole chain when the batch norm is called, and the later calls return their
input unchanged. So the tensor between two calls of a chain holds the final value too early. This is valid only while
nothing else can read it: a second reader, a hook, a list that keeps it, a view, or a pointer to its memory.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from slimstart.kernels.norm import batch_norm_act, supports
from slimstart.steps.calls import Call, DivergedError, inside_checkpoint

RELUS = frozenset({F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_})
ADDS_IN_PLACE = frozenset({Tensor.add_, Tensor.__iadd__})
ADDS = ADDS_IN_PLACE | {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}


@dataclass(frozen=True)
class Chain:
    """One chain, by the numbers of its calls; `residual` is the call that made the other summand."""

    norm: int
    add: int | None = None
    residual: int | None = None
    relu: int | None = None


class ChainFinder:
    """Finds chains in a recorded forward.

    A value is the result of one call and is named by the number of the call, not by a tensor: an in-place operation
    gives the same tensor a new value.
    """

    def __init__(self) -> None:
        self._grad_enabled: list[bool] = []
        self._values: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
        self._versions: dict[int, int] = {}
        self._readers: dict[int, list[int]] = defaultdict(list)
        self._norms: list[int] = []
        self._relus: set[int] = set()
        self._exposed: set[int] = set()
        self._sums: dict[tuple[int, int], int] = {}  # (value, call that adds to it) -> the other summand

    def see(self, call: Call) -> None:
        """Record the values that a call reads; to be called before it runs."""
        self._grad_enabled.append(torch.is_grad_enabled())
        known = {self._values[t]: t for t in call.operands if t in self._values}
        for value, tensor in known.items():
            self._readers[value].append(call.number)
            other = _addend(tensor, call)
            if other is None or other not in self._values:
                continue
            # A later version means a write that is no value of its own: through a view, or by a call that returned
            # something else.
            if other._version == self._versions[self._values[other]]:
                self._sums[value, call.number] = self._values[other]
        if call.func is F.batch_norm and _fusable(_Norm(*call.args, **call.kwargs)):
            self._norms.append(call.number)
        if call.func in RELUS:
            self._relus.add(call.number)

    def made(self, call: Call, result: Any) -> None:
        """Record the value that a call returned."""
        if isinstance(result, Tensor) and not result.is_inference():
            self._values[result], self._versions[call.number] = call.number, result._version

    def expose(self, tensor: Tensor) -> None:
        if tensor in self._values:
            self._exposed.add(self._values[tensor])

    def chains(self) -> tuple[Chain, ...]:
        """The chains; to be called while the result of the forward is alive."""
        # Values whose tensors are still alive (in a list, a hook, the caller) could be read later, so they end a chain.
        seen = self._exposed | set(self._values.values())
        grad_enabled = self._grad_enabled
        only = {
            value: readers[0]
            for value, readers in self._readers.items()
            if len(readers) == 1 and value not in seen and grad_enabled[value] == grad_enabled[readers[0]]
        }

        def chain(norm: int) -> Chain:
            reader = only.get(norm)
            residual = None if reader is None else self._sums.get((norm, reader))
            if reader is None:
                return Chain(norm)
            if reader in self._relus:
                return Chain(norm, relu=reader)
            if residual is None or residual >= norm:  # the other summand must exist when the batch norm is called
                return Chain(norm)
            relu = only.get(reader)
            return Chain(norm, reader, residual, relu if relu in self._relus else None)

        return tuple(chain(norm) for norm in self._norms)


class _Computed(NamedTuple):
    """The result of a chain whose later calls have not run yet."""

    out: Tensor
    residual: Tensor | None


class ChainRunner:
    """Runs the calls of a forward with its chains fused."""

    def __init__(self, chains: Sequence[Chain]) -> None:
        self._chains = {chain.norm: chain for chain in chains}
        self._uses = Counter(chain.residual for chain in chains if chain.residual is not None)
        self._residuals: dict[int, Tensor] = {}
        self._computed: dict[int, _Computed] = {}  # by the number of a later call

    def run(self, call: Call) -> Any:
        computed = self._computed.pop(call.number, None)
        if any(t is other.out for t in call.operands for other in self._computed.values() if other is not computed):
            raise DivergedError(f"call {call.number} reads the result of a batch norm")
        if call.number in self._chains:
            result: Any = self._start(self._chains[call.number], _Norm(*call.args, **call.kwargs))
        elif computed is None:
            result = call.run()
        elif any(t is computed.out for t in call.operands) and (
            call.func in RELUS or _addend(computed.out, call) is computed.residual
        ):
            result = computed.out
        else:
            raise DivergedError(f"call {call.number} does not read the result of its batch norm")
        if call.number in self._uses:
            self._residuals[call.number] = result
        return result

    def _start(self, chain: Chain, norm: _Norm) -> Tensor:
        """Compute a chain, at its first call."""
        if not norm.training:
            raise DivergedError(f"the batch norm of call {chain.norm} is in eval mode")
        residual = None
        if chain.residual is not None:
            residual = self._residuals[chain.residual]
            self._uses[chain.residual] -= 1
            if self._uses[chain.residual] == 0:
                del self._residuals[chain.residual]
        x, running_mean, running_var, weight, bias, _, momentum, eps = norm
        relu = chain.relu is not None
        out = batch_norm_act(x, residual, weight, bias, running_mean, running_var, momentum, eps, relu)
        later = [number for number in (chain.add, chain.relu) if number is not None]
        self._computed |= dict.fromkeys(later, _Computed(out, residual))
        return out

    def expose(self, tensor: Tensor) -> None:
        if any(tensor is computed.out for computed in self._computed.values()):
            raise DivergedError("the memory of a batch norm's result is read")


class _Norm(NamedTuple):
    """The arguments of F.batch_norm."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


def _addend(tensor: Tensor, call: Call) -> Tensor | None:
    """The other summand of a sum, if it is like `tensor` and the result goes into `tensor` or a new tensor."""
    func, args, kwargs = call.func, call.args, call.kwargs
    if func not in ADDS or kwargs or len(args) != 2 or (func in ADDS_IN_PLACE and args[0] is not tensor):
        return None
    other = args[1] if args[0] is tensor else args[0]
    alike = isinstance(other, Tensor) and other.shape == tensor.shape and other.dtype == tensor.dtype
    return other if alike else None


def _fusable(norm: _Norm) -> bool:
    x, running_mean, running_var, weight, bias, training, _, _ = norm
    return (
        training
        and type(x) is Tensor
        and supports(x, None, weight, bias, running_mean, running_var)
        and not inside_checkpoint()
    )
