"""Between two draws: learn the structure from the losses, draw, and become the networks of the draw.

The next masks are drawn as soon as s has been learned, at the beginning of a window: s does not change until its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slimstart.narrow import Networks, SlotNetworks
from slimstart.policies import DeviceLearner, Learner
from slimstart.steps.capture import Graphed

LOOK_EVERY = 100  # draws, after which it is looked at whether less room would do


class Search:
    """On the host: any policy, any networks."""

    def __init__(self, policy: Learner, networks: Networks) -> None:
        self.policy, self.networks = policy, networks
        self._pending: Tensor | None = None
        self._num_draws = 0

    @property
    def pending(self) -> Tensor | None:
        """Masks that were drawn and wait for the end of the window."""
        return self._pending

    @pending.setter
    def pending(self, masks: Tensor | None) -> None:
        self._pending = masks

    def begin(self) -> None:
        """Become the networks of the first draw."""
        self.networks.enter(self.policy.draw(), self.policy.keep_probs)

    def learn(self, losses: Tensor) -> None:
        """Learn from the losses (num_masks,) of the present networks, and draw the next."""
        losses = losses.cpu()
        if bool(losses.isfinite().all()):  # otherwise whoever computed them will say so
            self.policy.update(losses)
        self.pending = self.policy.draw()
        self.networks.prepare(self.pending)

    def end(self) -> None:
        """There will be no other draw."""
        self.pending = None

    def advance(self) -> None:
        """Become the networks of the next draw."""
        masks = self.policy.draw() if self.pending is None else self.pending
        self._num_draws += 1
        self.networks.exchange(masks, self.policy.keep_probs, look=self._num_draws % LOOK_EVERY == 0)
        self.pending = None


class DeviceSearch(Search):
    """On a GPU: learning, drawing and moving are graphs, and the host looks only at whether a draw had room.

    Learning and drawing run on a stream of their own, beside the backward. The host waits for the draw, which is done
    long before the backward, and so never lets the device wait.

    Args:
        policy: that can do without the host.
        networks: in slots.
        losses: (num_masks,) float64, on the device; `learn` reads them there.
        ok: bool, on the device; where it is false nothing is learned.
        stream: to run on.
    """

    policy: DeviceLearner
    networks: SlotNetworks

    def __init__(
        self, policy: DeviceLearner, networks: SlotNetworks, losses: Tensor, ok: Tensor, stream: torch.cuda.Stream
    ) -> None:
        super().__init__(policy, networks)
        self._losses, self._ok, self._stream = losses, ok, stream
        policy.to(losses.device)
        self._numbers = torch.zeros(policy.numbers_shape, dtype=torch.float64, device=losses.device)
        self._upload = torch.zeros(policy.numbers_shape, dtype=torch.float64).pin_memory()
        self._uploaded, self._drawn = torch.cuda.Event(), torch.cuda.Event()
        self._fits = torch.zeros((), dtype=torch.bool).pin_memory()
        self._waiting = False  # whether a draw waits for the end of the window
        self._made: _Graphs | None = None

    def learn(self, losses: Tensor) -> None:
        if losses is not self._losses:  # of an eager step, which may have made the optimizer's state
            self._losses.copy_(losses)
            self.networks.refresh()
        self._launch(self._graphs.learn)
        with torch.cuda.stream(self._stream):
            self.networks.prefetch()
        if torch.cuda.current_stream() != self._stream:
            torch.cuda.current_stream().wait_stream(self._stream)

    def advance(self) -> None:
        if not self._waiting:
            self._launch(self._graphs.draw)
        if not self._drawn.query():  # then there is time
            self.policy.prepare()
        self._drawn.synchronize()
        torch.cuda.current_stream().wait_event(self._drawn)
        self._waiting = False
        self._num_draws += 1
        if bool(self._fits) and self._num_draws % LOOK_EVERY:
            with self.networks.crossing():
                self._graphs.move()
        else:
            self.networks.store()
            self.networks.enter(self.networks.proposed_masks.clone(), self.policy.keep_probs)

    def _launch(self, graph: Graphed) -> None:
        """Run learning or drawing on the stream beside, behind everything that the current one has been given."""
        self._uploaded.synchronize()  # the last numbers have long been taken over
        self._upload.copy_(self.policy.random_numbers())
        if torch.cuda.current_stream() != self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._numbers.copy_(self._upload, non_blocking=True)
            self._uploaded.record()
            graph()
            self._drawn.record()
        self._waiting = True

    def end(self) -> None:
        super().end()
        self._made = None

    @property
    def _graphs(self) -> _Graphs:
        """Made anew for networks with other tensors."""
        if self._made is None or self._made.version != self.networks.version:
            warm = self._made is not None
            self.networks.refresh()
            self._made = _Graphs(
                version=self.networks.version,
                learn=Graphed(self._learn, warm=warm),
                draw=Graphed(self._draw),
                move=Graphed(self.networks.move, warm=warm),
            )
        return self._made

    def _learn(self) -> None:
        self.policy.learn_(self._losses, self._ok & torch.isfinite(self._losses).all())
        self._draw()

    def _draw(self) -> None:
        self.networks.propose(self.policy.draw_with(self._numbers))
        self._fits.copy_(self.networks.proposed.fits, non_blocking=True)

    @property
    def pending(self) -> Tensor | None:
        self._drawn.synchronize()
        return self.networks.proposed_masks.to("cpu", copy=True) if self._waiting else None

    @pending.setter
    def pending(self, masks: Tensor | None) -> None:
        self._waiting = masks is not None
        if masks is not None:
            self.networks.propose(masks.to(self._losses.device))
            self._fits.copy_(self.networks.proposed.fits)
            self._drawn.record()


@dataclass(frozen=True)
class _Graphs:
    version: int  # of the networks
    learn: Graphed  # and draw
    draw: Graphed
    move: Graphed
