"""The references of a draw: networks of its other masks, which only run forward, on the same batch as the model.

One module becomes the network of one mask after the other. It shares the model's parameters that cannot shrink and has
buffers of its own, so that its forward leaves no trace in the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from slimstart.devices import set_modes
from slimstart.graph import ChannelGraph
from slimstart.narrow.change import Change
from slimstart.narrow.compact import tensor_names
from slimstart.narrow.hooks import remove_hooks
from slimstart.narrow.modules import Network
from slimstart.narrow.store import Key

if TYPE_CHECKING:
    from slimstart.narrow.networks import Networks


class References:
    """The references of the present draw, and a snapshot of the model's buffers from the beginning of a step.

    References start from the snapshot: the forward of the model may change the buffers before a reference runs, or
    while it runs.

    Args:
        networks: networks of the training; the model is still dense.

    Attributes:
        buffers: owners and names of the model's buffers that cannot shrink.
    """

    def __init__(self, networks: Networks) -> None:
        self._networks = networks
        self._network: ReferenceNetwork | None = None  # except of static networks, which keep one of their own
        shrinking = {id(networks.network.tensor(name)) for name in networks.graph.tensors}
        self.buffers = [
            (owner, key)
            for owner in networks.model.modules()
            for key, buffer in owner._buffers.items()
            if buffer is not None and id(buffer) not in shrinking
        ]
        self._copies: dict[int, tuple[Tensor, int]] = {}  # values, and the versions of the buffers they are copies of
        self._changing: set[int] = set()

    def of_draw(self, snapshot: bool = True) -> Iterator[nn.Module]:
        """The networks of all masks of the draw but the first, one after the other.

        Args:
            snapshot: begin with the present values of buffers; otherwise with those of the last `take_snapshot`.
        """
        networks = self._networks
        if snapshot:
            self.take_snapshot()
        if any(networks.store[Key(n)].dtype != networks.network.tensor(n).dtype for n in networks.graph.tensors):
            networks.flush()  # the user has called `model.to(...)` since the draw
        if networks.are_static:
            for fill, module in self.static:
                fill()
                torch.clear_autocast_cache()
                yield module
        else:
            yield from self._of_masks(networks.masks[1:], self.snapshot)

    @property
    def static(self) -> Sequence[tuple[Callable[[], None], nn.Module]]:
        """The reference network of a captured step once per mask, with the function that fills it for that mask."""
        networks = self._networks
        if len(networks.masks) == 1:
            return []
        networks.refresh()
        if len(self._copies) < len(self.buffers):  # a training was loaded in the middle of a window
            self.take_snapshot()
        padded = networks.on_device
        padded.reference.synchronise(self.snapshot)
        numbers = range(1, len(networks.masks))
        return [(partial(padded.load_reference, number), padded.reference.module) for number in numbers]

    def of_masks(self, masks: Tensor) -> Iterator[nn.Module]:
        """Networks of other masks (n, U), one after the other, with the present weights and buffers."""
        self._networks.flush()
        yield from self._of_masks(masks, [getattr(owner, key) for owner, key in self.buffers])

    @torch.inference_mode(False)
    @torch.no_grad()
    def _of_masks(self, masks: Tensor, values: Sequence[Tensor]) -> Iterator[nn.Module]:
        networks = self._networks
        reference = self._network or ReferenceNetwork(networks.model, networks.graph, self.buffers)
        if not networks.are_static:
            self._network = reference
        for mask in masks:
            change, selection = Change(), networks.select_like_present(mask)
            reference.fill(change, networks.store, selection, networks.device, in_place=False)
            reference.point_ports(change, selection)
            change.apply()
            torch.clear_autocast_cache()  # it knows tensors by identity, and they have new values
            reference.synchronise(values)
            yield reference.module

    @property
    def snapshot(self) -> list[Tensor]:
        """The values of the buffers at the last `take_snapshot`."""
        return [self._copies[number][0] for number in range(len(self.buffers))]

    @property
    def changing(self) -> list[int]:
        """The numbers of the buffers that have been seen to change."""
        return sorted(self._changing)

    @torch.no_grad()
    def take_snapshot(self) -> None:
        """Copy the present values of the buffers.

        Buffers that never change are copied once. Captured steps rely on that: they copy only those in `changing`, and
        are captured again if a further one changes.
        """
        stale = False
        copies: list[Tensor] = []
        values: list[Tensor] = []
        for number, (owner, key) in enumerate(self.buffers):
            buffer: Tensor = getattr(owner, key)
            copied, version = self._copies.get(number, (None, -1))
            if copied is None or not _same_kind(copied, buffer):
                self._copies[number] = buffer.detach().clone(), buffer._version
                stale |= number in self._changing
                continue
            if version != buffer._version:
                stale |= number not in self._changing
                self._changing.add(number)
                self._copies[number] = copied, buffer._version
            if number in self._changing:  # whatever the version: the replay of a graph does not increase it
                copies.append(copied)
                values.append(buffer)
        if copies:
            torch._foreach_copy_(copies, values)
        self._networks.version += stale

    def release(self) -> None:
        """Free the memory of the reference network."""
        self._network = None

    def end(self) -> None:
        """Free the memory of the snapshot too."""
        self.release()
        self._copies.clear()


class ReferenceNetwork(Network):
    """A copy of the model that becomes the network of one reference mask after the other.

    `buffers` as of `References`.
    """

    def __init__(self, model: nn.Module, graph: ChannelGraph, buffers: Sequence[tuple[nn.Module, str]]) -> None:
        memo: dict[int, object] = {}
        for name, tensor in tensor_names(model).items():
            if name in graph.tensors:
                empty = tensor.detach().new_empty(0)
                memo[id(tensor)] = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
            elif isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = tensor
        module = copy.deepcopy(model, memo)
        remove_hooks(module)
        super().__init__(module, graph)
        self._pairs = list(zip(model.modules(), module.modules(), strict=True))
        # For each buffer, the value that it was last set to, and the versions of both at that time.
        self._seen: dict[int, tuple[int, int, int]] = {}
        copies = dict(self._pairs)
        self._buffers = [(copies[owner], key) for owner, key in buffers]

    @torch.no_grad()
    def synchronise(self, values: Sequence[Tensor]) -> None:
        """Take the training modes of the model, and these values for the buffers that cannot shrink."""
        set_modes((own, original.training) for original, own in self._pairs)
        for number, (value, (owner, key)) in enumerate(zip(values, self._buffers, strict=True)):
            buffer = self.buffer(number)
            if self._seen.get(number) == (id(value), value._version, buffer._version):
                continue
            if _same_kind(buffer, value):
                buffer.copy_(value)
            else:
                buffer = owner._buffers[key] = value.detach().clone()
            self._seen[number] = (id(value), value._version, buffer._version)

    def buffer(self, number: int) -> Tensor:
        """One of the buffers that cannot shrink."""
        owner, key = self._buffers[number]
        buffer: Tensor = getattr(owner, key)
        return buffer


def _same_kind(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors agree in shape, type and device."""
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
