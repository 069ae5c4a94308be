"""A peephole optimiser for a forward that is about to be captured: what takes many small kernels is done by few.

`record` runs a forward once and notes which calls of torch functions make and read which values. `fused` runs the same
forward again, with

- batch norms, together with the sum and the ReLU behind them, as one (`chains.py`);
- the parameters that autocast casts for every layer cast at once, and their gradients, too (`casting.py`);
- the counters of batches increased at once (`counting.py`).

A CUDA graph captured meanwhile holds fewer kernels and reads memory less often; Python is not there when it is
replayed, so noticing all this costs nothing. Whatever the network is: calls are seen where torch sees them, in modules,
functions and operators alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slimstart.steps.calls import Call, Calls, DivergedError, Function
from slimstart.steps.casting import Caster, CastFinder, Casts
from slimstart.steps.chains import Chain, ChainFinder, ChainRunner
from slimstart.steps.counting import Counters

__all__ = ["DivergedError", "Plan", "fused", "record"]


@dataclass(frozen=True, eq=False)
class Plan:
    """The calls of one forward in their order, and what can be done at once among them.

    Attributes:
        casts: of the parameters that the recorded forward used; others are cast by autocast, when they are used.
    """

    calls: tuple[Function, ...]
    chains: tuple[Chain, ...]
    casts: Casts


def record(forward: Callable[[], Any]) -> Plan:
    """Run a forward as it is, and find what can be fused in it. It has all the effects that a forward has."""
    recorder = _Recorder()
    with recorder:
        result = forward()
    plan = recorder.plan()
    del result  # not before: what the caller gets is read by somebody
    return plan


@contextmanager
def fused(plan: Plan) -> Iterator[None]:
    """Run the recorded forward within, and do at once what the plan says.

    Raises:
        DivergedError: the calls are not those that were recorded, as in a network that draws its own depth.
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
        self._counters.settle(call.operands)
        if self._counters.take(call):
            return call.args[0]
        return self._chains.run(self._caster.prepare(call))

    def expose(self, tensor: Tensor) -> None:
        self._counters.settle([tensor])
        self._chains.expose(tensor)

    def finish(self) -> None:
        if self.number != len(self._calls):
            raise DivergedError(f"it ended after {self.number} calls, {len(self._calls)} calls were recorded")
        self._counters.finish()
