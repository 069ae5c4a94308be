"""Learning from losses, and drawing the next masks, on the host or on the device.

The next masks are drawn as soon as s has been updated, at the beginning of a window; s does not change until its end.
`advance` ends the window. It returns the masks of the next networks, or None where the device has already moved to
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slimstart.narrow import Networks
from slimstart.policies import DeviceLearner, Learner
from slimstart.steps.cuda_graph import Graphed

LOOK_EVERY = 100  # draws between two checks whether less capacity is enough


class Draw(NamedTuple):
    """Masks (n, U) of the next window, and whether to check if less capacity is enough."""

    masks: Tensor
    look: bool


class Drawing:
    """Learning and drawing on the host, for any learner and any networks."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.pending: Tensor | None = None  # masks for the next window
        self._num_draws = 0

    def learn(self, losses: Tensor) -> None:
        """Learn from the losses (num_masks,) of the present networks, and draw the next masks."""
        losses = losses.cpu()
        if bool(losses.isfinite().all()):  # the caller reports other losses
            self.learner.update(losses)
        self.pending = self.learner.draw()

    def advance(self) -> Draw | None:
        """End the window; the next draw."""
        masks = self.learner.draw() if self.pending is None else self.pending
        self._num_draws += 1
        self.pending = None
        return Draw(masks, self._num_draws % LOOK_EVERY == 0)

    def end(self) -> None:
        """Drop the pending masks: nothing further is drawn."""
        self.pending = None

    def state(self) -> Any:
        """All that `learn` and `advance` change, for `restore`."""
        return self.learner.state_dict(), self.pending, self._num_draws

    def restore(self, state: Any) -> None:
        """Inverse of `state`."""
        self.learner.load_state_dict(state[0])
        self.pending, self._num_draws = state[1:]


class DeviceDrawing(Drawing):
    """Learning, drawing and moving of weights as CUDA graphs; the host reads only whether a draw fits the capacity.

    Learning and drawing run on a second stream, in parallel with the backward. The host waits for the draw, which ends
    long before the backward, so the device never idles.

    Args:
        learner: learner that needs no host.
        networks: static networks with spare capacity.
        losses: (num_masks,) float64, on the device; `learn` reads them there.
        ok: bool, on the device; where it is false nothing is learned.
        stream: the second stream.
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
        self._is_drawn = False  # whether the masks of the next window are drawn
        self._captured: _Graphs | None = None

    def learn(self, losses: Tensor) -> None:
        if losses is not self._losses:  # from an eager step, which may have created optimizer state
            self._losses.copy_(losses)
            self._networks.refresh()
        self._launch(self._graphs.learn)
        if torch.cuda.current_stream() != self._stream:
            torch.cuda.current_stream().wait_stream(self._stream)

    def advance(self) -> Draw | None:
        if not self._is_drawn:
            self._launch(self._graphs.draw)
        if not self._drawn.query():  # use the waiting time
            self.learner.prepare()
        self._drawn.synchronize()
        torch.cuda.current_stream().wait_event(self._drawn)
        self._is_drawn = False
        self._num_draws += 1
        if bool(self._fits) and self._num_draws % LOOK_EVERY:
            self._networks.refresh()  # an eager step within the window may have created optimizer state
            self._graphs.move()
            return None
        return Draw(self._networks.on_device.proposed_masks.clone(), look=True)

    def _launch(self, graph: Graphed) -> None:
        """Run learning or drawing on the second stream, after all work that is queued on the current one."""
        self._uploaded.synchronize()  # the pinned buffer must not change before its last copy has ended
        self._upload.copy_(self.learner.random_numbers())
        if torch.cuda.current_stream() != self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._numbers.copy_(self._upload, non_blocking=True)
            self._uploaded.record()
            graph()
            self._drawn.record()
        self._is_drawn = True

    def end(self) -> None:
        self._is_drawn = False
        self._captured = None

    def state(self) -> Any:
        return None  # one launch does all of it, so there is nothing to undo

    def restore(self, state: Any) -> None:
        pass

    @property
    def _graphs(self) -> _Graphs:
        """The graphs for the present tensors of the networks."""
        if self._captured is None or self._captured.version != self._networks.version:
            warm = self._captured is not None
            self._networks.refresh()
            self._captured = _Graphs(
                version=self._networks.version,
                learn=Graphed(self._learn, warm=warm),
                draw=Graphed(self._draw),
                move=Graphed(self._networks.on_device.move, warm=warm),
            )
        return self._captured

    def _learn(self) -> None:
        self.learner.learn_(self._losses, self._ok & torch.isfinite(self._losses).all())
        self._draw()

    def _draw(self) -> None:
        self._networks.on_device.propose(self.learner.draw_with(self._numbers))
        self._fits.copy_(self._networks.on_device.proposed.fits, non_blocking=True)

    @property
    def pending(self) -> Tensor | None:
        self._drawn.synchronize()
        return self._networks.on_device.proposed_masks.to("cpu", copy=True) if self._is_drawn else None

    @pending.setter
    def pending(self, masks: Tensor | None) -> None:
        self._is_drawn = masks is not None
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
