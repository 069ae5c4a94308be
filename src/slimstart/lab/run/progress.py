"""How far a run is: what a checkpoint holds beside the method's own state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slimstart.lab import records
from slimstart.lab.run import environment as surroundings


@dataclass
class Progress:
    """Where the next step is, and what has been summed up so far."""

    epoch: int = 0  # from 0
    batch: int = 0  # of this epoch: the next one
    loss_sum: float = 0.0
    flops_sum: int = 0  # of the trained network, over the steps of this epoch
    seconds: float = 0.0  # of this epoch, training alone
    formula_flops: float = 0.0  # of one image, by the paper's formulas, over all steps that they count
    formula_steps: int = 0
    train_flops: int = 0  # up to the beginning of this epoch
    accuracy: float | None = None
    peak_memory: int = 0
    gradient_bytes: int = 0  # that ranks have exchanged, each, over all steps
    command: str = field(default_factory=surroundings.command)  # that began the run
    started: str = field(default_factory=surroundings.now)
    history: list[records.Epoch] = field(default_factory=list)
    structures: list[records.Structure] = field(default_factory=list)

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Progress:
        """The inverse of `dataclasses.asdict`."""
        history = [records.Epoch(**epoch) for epoch in state["history"]]
        structures = [records.Structure(**structure) for structure in state.get("structures", ())]
        return cls(**{**state, "history": history, "structures": structures})
