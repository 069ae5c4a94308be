"""Learning from losses and drawing masks, on the host or on the device.

The next masks are drawn as soon as s has been learned, at the beginning of a window: s does not change until its end.
`advance` ends the window. It returns masks for the training to change to, or, where the device has done that by itself,
None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slimstart.narrow import Networks
from slimstart.policies import DeviceLearner, Learner
from slimstart.steps.capture import Graphed

LOOK_EVERY = 100  # draws, after which it is looked at whether less capacity would do


class Draw(NamedTuple):
    """Masks (n, U) of the next window, and whether to find out if less capacity would do."""

    masks: Tensor
    look: bool


class Drawing:
    """On the host: any learner, any networks."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.pending: Tensor | None = None  # masks that were drawn and wait for the end of the window
        self._num_draws = 0

    def learn(self, losses: Tensor) -> None:
        """Learn from the losses (num_masks,) of the present networks, and draw the next."""
        losses = losses.cpu()
        if bool(losses.isfinite().all()):  # otherwise whoever computed them will say so
            self.learner.update(losses)
        self.pending = self.learner.draw()

    def advance(self) -> Draw | None:
        """The next draw."""
        masks = self.learner.draw() if self.pending is None else self.pending
        self._num_draws += 1
        self.pending = None
        return Draw(masks, self._num_draws % LOOK_EVERY == 0)

    def end(self) -> None:
        """There will be no other draw."""
        self.pending = None

    def state(self) -> Any:
        """Everything that `learn` and `advance` change, for `restore`."""
        return self.learner.state_dict(), self.pending, self._num_draws

    def restore(self, state: Any) -> None:
        """Be as when `state` was called."""
        self.learner.load_state_dict(state[0])
        self.pending, self._num_draws = state[1:]


class DeviceDrawing(Drawing):
    """On a GPU: learning, drawing and moving are graphs, and the host looks only at whether a draw fits.

    Learning and drawing run on a stream of their own, in parallel with the backward. The host waits for the draw, which
    is done long before the backward, and so never lets the device wait.

    Args:
        learner: that can do without the host.
        networks: static, with capacity to spare.
        losses: (num_masks,) float64, on the device; `learn` reads them there.
        ok: bool, on the device; where it is false nothing is learned.
        stream: to run on.
    """

    learner: DeviceLearner

    def __init__(
        self, learner: DeviceLearner, networks: Networks, losses: Tensor, ok: Tensor, stream: torch.cuda.Stream
    ) -> None:
        self.learner, self._networks = learner, networks
        self._num_draws = 0
        self._losses, self._ok, self._stream = losses, ok, stream
        learner.to(losses.device)
        self._numbers = torch.zeros(learner.numbers_shape, dtype=torch.float64, device=losses.device)
        self._upload = torch.zeros(learner.numbers_shape, dtype=torch.float64).pin_memory()
        self._uploaded, self._drawn = torch.cuda.Event(), torch.cuda.Event()
        self._fits = torch.zeros((), dtype=torch.bool).pin_memory()
        self._waiting = False  # whether a draw waits for the end of the window
        self._made: _Graphs | None = None

    def learn(self, losses: Tensor) -> None:
        if losses is not self._losses:  # of an eager step, which may have made the optimizer's state
            self._losses.copy_(losses)
            self._networks.refresh()
        self._launch(self._graphs.learn)
        if torch.cuda.current_stream() != self._stream:
            torch.cuda.current_stream().wait_stream(self._stream)

    def advance(self) -> Draw | None:
        if not self._waiting:
            self._launch(self._graphs.draw)
        if not self._drawn.query():  # then there is time
            self.learner.prepare()
        self._drawn.synchronize()
        torch.cuda.current_stream().wait_event(self._drawn)
        self._waiting = False
        self._num_draws += 1
        if bool(self._fits) and self._num_draws % LOOK_EVERY:
            self._networks.refresh()  # an eager step within the window may have made optimizer state
            self._graphs.move()
            return None
        return Draw(self._networks.on_device.proposed_masks.clone(), look=True)

    def _launch(self, graph: Graphed) -> None:
        """Run learning or drawing on the other stream, after everything that the current one has been given."""
        self._uploaded.synchronize()  # the last numbers have long been taken over
        self._upload.copy_(self.learner.random_numbers())
        if torch.cuda.current_stream() != self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._numbers.copy_(self._upload, non_blocking=True)
            self._uploaded.record()
            graph()
            self._drawn.record()
        self._waiting = True

    def end(self) -> None:
        self._waiting = False
        self._made = None

    def state(self) -> Any:
        return None  # what a device does alone is done by one launch, or not at all

    def restore(self, state: Any) -> None:
        pass

    @property
    def _graphs(self) -> _Graphs:
        """Captured again for networks with other tensors."""
        if self._made is None or self._made.version != self._networks.version:
            warm = self._made is not None
            self._networks.refresh()
            self._made = _Graphs(
                version=self._networks.version,
                learn=Graphed(self._learn, warm=warm),
                draw=Graphed(self._draw),
                move=Graphed(self._networks.on_device.move, warm=warm),
            )
        return self._made

    def _learn(self) -> None:
        self.learner.learn_(self._losses, self._ok & torch.isfinite(self._losses).all())
        self._draw()

    def _draw(self) -> None:
        self._networks.on_device.propose(self.learner.draw_with(self._numbers))
        self._fits.copy_(self._networks.on_device.proposed.fits, non_blocking=True)

    @property
    def pending(self) -> Tensor | None:
        self._drawn.synchronize()
        return self._networks.on_device.proposed_masks.to("cpu", copy=True) if self._waiting else None

    @pending.setter
    def pending(self, masks: Tensor | None) -> None:
        self._waiting = masks is not None
        if masks is not None:
            self._networks.on_device.propose(masks.to(self._losses.device))
            self._fits.copy_(self._networks.on_device.proposed.fits)
            self._drawn.record()


@dataclass(frozen=True)
class _Graphs:
    version: int  # of the networks
    learn: Graphed  # and draw
    draw: Graphed
    move: Graphed
