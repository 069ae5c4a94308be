"""Checkpoints of Accelerate that contain a `SparseTraining`.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    sparse = SparseTraining(model, optimizer, example, budget, total_steps=steps)   # before or after `prepare`
    register(accelerator, sparse)
    accelerator.save_state("checkpoint")
    accelerator.load_state("checkpoint")

Tested with Accelerate 1.15.
"""

from __future__ import annotations

from typing import Any

from slimstart.steps.wrappers import unwrapped_model
from slimstart.training import SparseTraining


def register(accelerator: Any, sparse: SparseTraining) -> None:
    """Let `accelerator.save_state` and `load_state` contain a training.

    Accelerate loads the weights of the model before anything else, when the model still has another structure. They are
    part of the training's state, so `load_state` takes them from there.
    """

    def skip(models: list[Any], input_dir: str) -> None:
        models[:] = [one for one in models if unwrapped_model(one) is not sparse.model]

    accelerator.register_for_checkpointing(sparse)
    accelerator.register_load_state_pre_hook(skip)
