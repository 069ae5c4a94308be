"""Slimming: a callback that narrows the network of a LightningModule while Lightning's `Trainer` trains it.

    trainer = lightning.Trainer(max_epochs=30, callbacks=[Slimming(budget=slimstart.Flops(0.25))])
    trainer.fit(task, train_loader, val_loader)     # `task` is now a narrow, plain network
    task = load_from_checkpoint(Task, "best.ckpt")  # a checkpoint, in another process

Tested with Lightning 2.6.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from slimstart.errors import CheckpointError
from slimstart.flop_counter import flops
from slimstart.integrations.trainers import (
    example_of,
    fit_to,
    narrow_part,
    policy_of_gradients,
    tensors_in,
)
from slimstart.narrow.hooks import OwnHook
from slimstart.narrow.optimizer_state import held_by
from slimstart.narrow.shrink import METADATA, metadata_of
from slimstart.narrow.store import is_dense
from slimstart.policies import Budget, Policy
from slimstart.training import SparseTraining

try:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
except ImportError:
    LightningModule = Callback = object

_INSTEAD = """`training_step`, with self.automatic_optimization = False:
    loss = F.cross_entropy(self.net(images), labels)
    reference = F.cross_entropy(sparse.reference(images), labels) if sparse.needs_reference else None
    optimizer.zero_grad(); self.manual_backward(loss); optimizer.step(); sparse.update(loss, reference)"""
_COPIES = ("WeightAveraging", "EMAWeightAveraging", "StochasticWeightAveraging")


class Slimming(Callback):
    """Train the network of a LightningModule at a budget.

    When `fit` starts, the network becomes narrow; when it ends, it is a plain module. Checkpoints have the narrow
    network, and the whole state of the training for `fit(..., ckpt_path=...)`. After an interrupt, call
    `callback.sparse.finish()`.

    Args:
        budget: `Channels`, `Params` or `Flops`, as a fraction of the dense network's; or a list, if several must hold.
        policy: "equal_worth", or a policy that learns from gradients.
        module: name of the module to narrow in the LightningModule; "" is the LightningModule itself. By default, its
            only child with parameters, or, if there are several and it has a `forward`, the LightningModule itself.
        example_inputs: inputs of that module; by default those of the first batch.
        total_steps: number of optimizer steps; by default the trainer's estimate.
        coupling: as for `SparseTraining`.
        keep: as for `SparseTraining`.
        pretrained: as for `SparseTraining`.

    Attributes:
        sparse: the `SparseTraining`, from the start of `fit` on.

    Raises:
        ValueError: the policy learns from losses; the error has the lines to write instead.
    """

    def __init__(
        self,
        budget: Budget | Sequence[Budget],
        policy: str | Policy = "equal_worth",
        *,
        module: str | None = None,
        example_inputs: Any = None,
        total_steps: int | None = None,
        coupling: str | None = None,
        keep: Iterable[str] = (),
        pretrained: bool | None = None,
    ) -> None:
        if Callback is object:
            raise ImportError("`Slimming` needs Lightning: pip install 'slimstart[lightning]'")
        self._budget, self._policy = budget, policy_of_gradients(policy, "Slimming", _INSTEAD)
        self._module, self._examples, self._total_steps = module, example_inputs, total_steps
        self._settings: dict[str, Any] = {"coupling": coupling, "keep": tuple(keep), "pretrained": pretrained}
        self.sparse: SparseTraining | None = None
        self._finished: dict[str, Any] | None = None  # structure of the finished network
        self._resumed: Mapping[str, Any] = {}
        self._weights: Mapping[str, Any] = {}  # narrow state dict that was loaded before the SparseTraining was made
        self._dense_flops = 0
        self._hook: Any = None

    @property
    def state_key(self) -> str:
        """The key of the state in checkpoints: one for every module, so that there may be several callbacks."""
        return str(self._generate_state_key(module=self._module))

    # --- start and end ------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let the module load narrow checkpoints, which happens before `on_fit_start`."""
        self.teardown(trainer, pl_module, stage)
        self._resumed, self._weights = {}, {}

        def load(module: nn.Module, state_dict: dict[str, Any], *_: Any) -> None:
            if stage != "fit" or self._finished is not None:
                fit_to(module, state_dict)
                return
            self._weights = state_dict.copy()
            self._weights._metadata = getattr(state_dict, "_metadata", {})  # type: ignore[attr-defined]
            if narrow_part(state_dict) is not None:  # `on_fit_start` loads dense tensors from the callback's state
                own = module.state_dict()
                state_dict.update({key: own[key] for key, _ in tensors_in(state_dict) if key in own})

        self._hook = pl_module.register_load_state_dict_pre_hook(OwnHook(load))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Remove the hook of `setup`."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the network narrow, or resume; before Lightning restores the state of the optimizers."""
        if self._finished is not None:  # a second `fit`, of the finished network
            return
        if self._resumed.get("finished"):
            fit_to(pl_module, self._weights)
            pl_module.load_state_dict(self._weights)
            self._finished = dict(self._resumed["finished"])
            return
        if narrow_part(self._weights) is not None and "sparse" not in self._resumed:
            raise ValueError(
                "`ckpt_path` is a checkpoint of narrow weights alone, which cannot be resumed; use one without "
                "`save_weights_only`"
            )
        self._check(trainer)
        net: nn.Module = pl_module.get_submodule(_name(pl_module, self._module))
        optimizers = [one for one in trainer.optimizers if held_by([one]) & {id(p) for p in net.parameters()}]
        steps = self._total_steps or self._resumed.get("total_steps") or trainer.estimated_stepping_batches
        if not 0 < steps < float("inf"):
            raise ValueError("the trainer does not know the number of its steps; give `Slimming(total_steps=...)`")
        self._total_steps = int(steps)
        if self._examples is None:
            self._examples = self._resumed.get("examples")
        if self._examples is None:
            self._examples = example_of(net, lambda: _first_step(trainer, pl_module))
        self._examples = trainer.strategy.batch_to_device(self._examples)
        held, pl_module._trainer = pl_module._trainer, None  # which SparseTraining would copy with the module
        try:
            self._dense_flops = flops(net, self._examples)
            self.sparse = SparseTraining(
                net,
                optimizers,
                self._examples,
                self._budget,
                total_steps=self._total_steps,
                policy=self._policy,
                **self._settings,
            )
        finally:
            pl_module._trainer = held
        if "sparse" in self._resumed:
            self.sparse.load_state_dict(self._resumed["sparse"])
        self._show_progress(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Make the network a plain module."""
        if self.sparse is not None and self._finished is None:
            self._finished = metadata_of(self.sparse.model.state_dict())[""][METADATA]
            self.sparse.finish()

    @staticmethod
    def _check(trainer: Any) -> None:
        strategy = trainer.strategy
        launcher = type(getattr(strategy, "launcher", None)).__name__
        if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy) or launcher == "_MultiProcessingLauncher":
            raise TypeError(
                f"`strategy` is {type(strategy).__name__} with {launcher}, which cannot follow a change of structure; "
                "use strategy='ddp'"
            )
        for callback in trainer.callbacks:
            if any(cls.__name__ in _COPIES for cls in type(callback).__mro__):
                raise TypeError(
                    f"{type(callback).__name__} has a copy of the dense network, which cannot follow; make an "
                    "AveragedModel in `on_train_start`, and call `follow(averaged)` of the callback's `sparse`"
                )

    # --- progress -----------------------------------------------------------------------------------------------------

    @property
    def flops_ratio(self) -> float:
        """FLOPs of the present network, as a fraction of the dense network's."""
        return 1.0 if self.sparse is None else self.sparse.executed_flops / max(self._dense_flops, 1)

    @property
    def phase(self) -> str:
        """ "search" while the structure is learned, "fixed" afterwards."""
        return "fixed" if self.sparse is None or self.sparse.settled else "search"

    def _show_progress(self, trainer: Any) -> None:
        bar = trainer.progress_bar_callback
        if bar is None:
            return
        get_metrics = bar.get_metrics

        def with_structure(*args: Any) -> dict[str, Any]:
            return {**get_metrics(*args), "flops": f"{self.flops_ratio:.0%}", "phase": self.phase}

        bar.get_metrics = with_structure

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log the FLOPs of the network, as a fraction."""
        if self.sparse is not None and self._finished is None:
            self.log("flops_ratio", self.flops_ratio)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of the training, or the structure of the finished network."""
        if self._finished is not None:
            return {"finished": self._finished}
        if self.sparse is None:
            return {}
        plain = all(isinstance(leaf, Tensor | int | float | str | None) for leaf in tree_leaves(self._examples))
        return {
            "sparse": self.sparse.state_dict(),
            "total_steps": self._total_steps,
            "examples": self._examples if plain else None,
        }

    def load_state_dict(self, state_dict: Any) -> None:
        """Keep the state for `on_fit_start`, which is checked there."""
        kinds = {"sparse": Mapping, "finished": Mapping, "total_steps": int, "examples": object}
        fits = isinstance(state_dict, Mapping) and state_dict.keys() <= kinds.keys()
        if not fits or any(not isinstance(value, kinds[key]) for key, value in state_dict.items()):
            raise CheckpointError("the checkpoint's state of `Slimming` is damaged, or of another version")
        examples = [leaf for leaf in tree_leaves(state_dict.get("examples")) if isinstance(leaf, Tensor)]
        if state_dict.get("total_steps", 1) < 1 or not all(map(is_dense, examples)):
            raise CheckpointError("the checkpoint's state of `Slimming` has no possible `total_steps` or `examples`")
        self._resumed = state_dict

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Write the structure of the finished network to the metadata of its state dict."""
        metadata = getattr(checkpoint["state_dict"], "_metadata", None)
        if self._finished is not None and metadata is not None:
            metadata[_name(pl_module, self._module)][METADATA] = self._finished


def load_from_checkpoint(cls: Any, checkpoint_path: Any, **options: Any) -> Any:
    """`cls.load_from_checkpoint` for a checkpoint of a narrow network, which it makes the module fit.

    Args:
        cls: class of the LightningModule.
        checkpoint_path: a checkpoint of a training with `Slimming`.
        options: arguments of `cls.load_from_checkpoint`.
    """

    def load_state_dict(self: Any, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        fit_to(self, state_dict)
        return cls.load_state_dict(self, state_dict, *args, **kwargs)

    fitting = type(cls.__name__, (cls,), {"load_state_dict": load_state_dict, "__module__": cls.__module__})
    found = fitting.load_from_checkpoint(checkpoint_path, **options)  # type: ignore[attr-defined]
    found.__class__ = cls
    return found


def _name(pl_module: Any, given: str | None) -> str:
    """The name of the module to narrow."""
    if given is not None:
        return given
    children = [name for name, child in pl_module.named_children() if any(True for _ in child.parameters())]
    if len(children) == 1:
        return str(children[0])
    if type(pl_module).forward is not LightningModule.forward:
        return ""
    raise ValueError(
        f"{type(pl_module).__name__} has {', '.join(children) or 'no modules'} with parameters, and no `forward`; name "
        "the module to narrow: Slimming(module=...)"
    )


def _first_step(trainer: Any, pl_module: Any) -> None:
    """Run `training_step` on the first batch, as the trainer would."""
    if trainer.train_dataloader is None:
        trainer.fit_loop.setup_data()
    batch = next(iter(trainer.train_dataloader))
    batch = trainer.precision_plugin.convert_input(batch)
    batch = pl_module._on_before_batch_transfer(batch, dataloader_idx=0)
    batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
    with trainer.precision_plugin.train_step_context(), torch.random.fork_rng():
        pl_module.training_step(batch, 0)
