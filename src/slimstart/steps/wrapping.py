"""What runs in place of a network whose parameters come and go: `DistributedDataParallel`, a compiled module."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

Wrap = Callable[[nn.Module], nn.Module]


class Wrapping:
    """Wraps a network anew when its parameters have been exchanged for others, frozen or thawed, and only then.

    Args:
        wrap: None runs the network as it is.
    """

    def __init__(self, wrap: Wrap | None) -> None:
        self.wrap = wrap
        self._wrapped: nn.Module | None = None
        self._known: list[tuple[nn.Parameter, bool]] = []

    def __call__(self, net: nn.Module) -> nn.Module:
        if self.wrap is None:
            return net
        # Parameters themselves, which are compared by identity: an address is given to another when one is gone.
        now = [(parameter, parameter.requires_grad) for parameter in net.parameters()]
        known = len(now) == len(self._known) and all(
            a is b and x == y for (a, x), (b, y) in zip(now, self._known, strict=True)
        )
        if self._wrapped is None or not known:
            self._wrapped = None  # its hooks go before those of the next come: both may watch one parameter
            self._wrapped, self._known = self.wrap(net), now
        return self._wrapped
