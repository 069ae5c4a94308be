"""SlimmingCallback: narrow a model while Hugging Face's `Trainer` trains it; folders of narrow models.

    trainer = Trainer(model, settings, train_dataset=data, callbacks=[SlimmingCallback(slimstart.Flops(0.5))])
    trainer.train()                     # `model` is now a narrow, plain model
    save_pretrained(model, "small")     # also: the checkpoints of the trainer
    model = from_pretrained("small")

Tested with transformers 5.23.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import IterableDataset

from slimstart.errors import CheckpointError
from slimstart.flop_counter import flops
from slimstart.integrations.trainers import policy_of_gradients, tensors_in
from slimstart.io import atomic, checkpoints
from slimstart.io.network_files import is_network, load, save
from slimstart.narrow.compact import RECORD, Record
from slimstart.narrow.hooks import OwnHook
from slimstart.narrow.optimizer_state import unwrapped
from slimstart.narrow.shrink import METADATA
from slimstart.narrow.stream_ports import StreamPort
from slimstart.policies import Budget, Policy
from slimstart.training import SparseTraining

try:
    from transformers import TrainerCallback
except ImportError:
    TrainerCallback = object

STATE = "slimstart.pt"
_FILES = r"(generation_)?config\.json|model(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
_INSTEAD = """`compute_loss` of your Trainer, with `loss` the loss of `model`, and `sparse.update` in `on_step_end`:
    reference = sparse.reference(**inputs).loss.detach() if sparse.needs_reference else None
    self.losses = loss.detach(), reference      # in on_step_end: sparse.update(*trainer.losses)"""


class SlimmingCallback(TrainerCallback):
    """Train the model of a `Trainer` at a budget.

    The model becomes narrow when training begins, and is a plain model at its end. Give the callback to the constructor
    of the `Trainer`. After an interrupt, call `callback.sparse.finish()`.

    Args:
        budget: `Channels`, `Params` or `Flops`, as a fraction of the dense model's; or a list, if several must hold.
        policy: "equal_worth", or a policy that learns from gradients.
        example_inputs: inputs of the model; by default the first two examples of the training data.
        checkpoint: folder of the checkpoint that is resumed from, if it is not in `output_dir`.
        coupling: as for `SparseTraining`.
        keep: as for `SparseTraining`.
        pretrained: as for `SparseTraining`.

    Attributes:
        sparse: the `SparseTraining`, from the start of training on.

    Raises:
        ValueError: the policy learns from losses; the error has the lines to write instead.
    """

    def __init__(
        self,
        budget: Budget | Sequence[Budget],
        policy: str | Policy = "equal_worth",
        *,
        example_inputs: Any = None,
        checkpoint: str | os.PathLike[str] | None = None,
        coupling: str | None = None,
        keep: Iterable[str] = (),
        pretrained: bool | None = None,
    ) -> None:
        if TrainerCallback is object:
            raise ImportError("`SlimmingCallback` needs transformers: pip install 'slimstart[transformers]'")
        self._budget, self._policy = budget, policy_of_gradients(policy, "SlimmingCallback", _INSTEAD)
        self._examples, self._checkpoint = example_inputs, checkpoint
        self._settings: dict[str, Any] = {"coupling": coupling, "keep": tuple(keep), "pretrained": pretrained}
        self.sparse: SparseTraining | None = None
        self._finished = False
        self._resumed: dict[str, Tensor] = {}  # narrow tensors that the trainer loads before `on_train_begin`
        self._state: Any = None
        self._hook: Any = None
        self._dense_flops = 0

    def on_init_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        """Let the model load the narrow checkpoints of the trainer."""
        self._hook = model.register_load_state_dict_pre_hook(OwnHook(self._loading))

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, train_dataloader: Any, **_: Any
    ) -> None:
        """Make the model narrow, or resume."""
        self._state = state
        if self._finished:  # trained on, as a plain model
            return
        saved = self._saved_state(args, state) if self._resumed else None
        if saved is not None:
            for one in unwrapped(optimizer):
                one.state.clear()  # of the narrow parameters; `saved` has all
        if self._examples is None:
            with torch.random.fork_rng():
                self._examples = train_dataloader.collate_fn(_first_examples(train_dataloader.dataset))
        examples = tree_map(lambda leaf: leaf.to(args.device) if isinstance(leaf, Tensor) else leaf, self._examples)
        examples = examples if isinstance(examples, Tensor | tuple | list) else dict(examples)
        self._dense_flops = flops(model, examples)
        self.sparse = SparseTraining(
            model,
            optimizer,
            examples,
            self._budget,
            total_steps=state.max_steps,
            policy=self._policy,
            **self._settings,
        )
        if saved is not None:
            self.sparse.load_state_dict(saved)
            own = model.state_dict()
            if any(not torch.equal(own[key].cpu(), value.cpu()) for key, value in self._resumed.items()):
                raise CheckpointError(
                    f"{self._folder(args, state)} has other weights than those that the trainer has loaded; give the "
                    "folder that is resumed from: SlimmingCallback(checkpoint=...)"
                )
            self._resumed = {}

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Make the model a plain module."""
        if self.sparse is not None and not self._finished:
            self.sparse.finish()
            self._finished = True
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, Any], **_: Any) -> None:
        """Add the FLOPs, as a fraction of the dense model's, and the phase of the search."""
        if self.sparse is not None:
            share = round(self.sparse.executed_flops / max(self._dense_flops, 1), 4)
            for entry in (logs, state.log_history[-1]):
                entry.update(flops_ratio=share, phase="fixed" if self.sparse.settled else "search")

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def on_save(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """Write the state of the training, and the structure of the model, to the trainer's checkpoint."""
        if self.sparse is None or self._finished:
            return
        folder, found = _checkpoint_folder(args, state), self.sparse.state_dict()
        if args.should_save:
            checkpoints.write(found, folder / STATE)
            save(self.sparse.snapshot(), folder / "model")  # the same tensors, and the structure

    def _folder(self, args: Any, state: Any) -> Path:
        return Path(self._checkpoint) if self._checkpoint is not None else _checkpoint_folder(args, state)

    def _saved_state(self, args: Any, state: Any) -> Mapping[str, Any]:
        folder = self._folder(args, state)
        if not (folder / STATE).is_file():
            raise CheckpointError(
                f"{folder / STATE} does not exist; give the folder that is resumed from: SlimmingCallback("
                "checkpoint=...)"
            )
        return checkpoints.read(folder / STATE)

    def _loading(
        self, model: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
    ) -> None:
        own = model.state_dict()
        other = {key: value for key, value in tensors_in(state_dict) if key in own and own[key].shape != value.shape}
        if not other or self._finished:
            return
        if self.sparse is None:  # `on_train_begin` loads everything
            self._resumed = other
            state_dict.update({key: own[key] for key, _ in tensors_in(state_dict) if key in own})
            return
        best = getattr(self._state, "best_model_checkpoint", None)
        if best is not None and (Path(best) / STATE).is_file():
            saved = checkpoints.read(Path(best) / STATE)
            metadata[METADATA] = {
                "structure": saved["structure"],
                "mask": saved["masks"][0],
                "removed": saved["removed"],
            }
            for key in state_dict.keys() - own.keys():  # buffers that the trainer does not save
                del state_dict[key]
            names = {tensor.data_ptr(): key for key, tensor in own.items() if key in state_dict}
            for key in own.keys() - state_dict.keys():  # tensors with two names are saved once
                if (first := names.get(own[key].data_ptr())) is not None:
                    state_dict[key] = state_dict[first]


def _checkpoint_folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _first_examples(dataset: Any) -> list[Any]:
    def found() -> Iterator[Any]:
        if isinstance(dataset, IterableDataset):
            yield from dataset
        else:
            yield from (dataset[i] for i in range(len(dataset)))

    return list(islice(found(), 2))


# --- folders of models ------------------------------------------------------------------------------------------------


def save_pretrained(model: Any, folder: str | os.PathLike[str]) -> None:
    """Write a narrow model to a folder that `from_pretrained` reads.

    If a size in the config can express the structure, such as one `intermediate_size` for all layers, or a list of them
    where the class takes one, it is a folder of transformers like any other. Otherwise it has the config of the dense
    model, and the structure in `model.safetensors`. At any moment, `from_pretrained` finds the old model or the new.

    Args:
        model: a model after training with `SlimmingCallback`, or another result of `finish`.
    """
    config = _narrow_config(model)
    with atomic.replacing(Path(folder), _FILES) as new:
        if config is not None:
            config.architectures = [type(model).__name__]
            dense, model.config = model.config, config
            try:
                model.save_pretrained(new)
            finally:
                model.config = dense
            return
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(new)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(new)
        save(model, new / "model")


def from_pretrained(folder: str | os.PathLike[str], cls: Any = None) -> Any:
    """Read a model from a folder of `save_pretrained`, from a checkpoint of a training, or any other of transformers.

    Args:
        cls: class of the model; by default the one in the config.

    Raises:
        CheckpointError: a file is missing, truncated, or of another model.
    """
    import transformers

    folder = Path(folder)
    if not folder.is_dir():  # transformers would look for a model of that name on the Hub
        raise CheckpointError(f"{os.fspath(folder)!r} is not a folder")
    folder = atomic.newest(folder)
    # Code in the folder is not run, and transformers does not ask whether it may be.
    options = {"trust_remote_code": False, "local_files_only": True}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **options)
        name = config.architectures[0] if config.architectures else "the config has none"
    except Exception as error:  # transformers has no one error for damaged files
        raise CheckpointError(f"{os.fspath(folder)!r} has no config that can be read: {error}") from error
    if cls is None:
        cls = getattr(transformers, name, None) if isinstance(name, str) else None
        if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
            raise CheckpointError(f"transformers has no model {name!r}; give `cls`")
    file = folder / "model.safetensors"
    try:
        if file.is_file() and is_network(file):
            return load(file, lambda: cls(config)).eval()
        return cls.from_pretrained(folder, use_safetensors=True, **options).eval()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{os.fspath(folder)!r} cannot be read: {error}") from error


def _narrow_config(model: Any) -> Any:
    """A config of which the dense model is the narrow one; None if there is none."""
    record = vars(model).get(RECORD)
    if not isinstance(record, Record) or any(isinstance(module, StreamPort) for module in model.modules()):
        return None
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    changes: dict[int | None, set[tuple[int, int]]] = {}  # of widths, by the number of the layer
    for name, dense in record.dense.items():
        found = {(wide, narrow) for wide, narrow in zip(dense, shapes.get(name, dense), strict=False) if wide != narrow}
        layer = re.search(r"\.(\d+)\.", name)
        if found:
            changes.setdefault(int(layer[1]) if layer else None, set()).update(found)
    for attribute, value in model.config.to_dict().items():
        narrow = _narrow_size(value, changes)
        if narrow is not None:
            config = type(model.config).from_dict({**model.config.to_dict(), attribute: narrow})
            try:
                with torch.device("meta"):
                    built = type(model)(config)
            except (ValueError, RuntimeError, TypeError, AssertionError):
                continue  # such as heads that do not divide the width
            if {name: tuple(tensor.shape) for name, tensor in built.state_dict().items()} == shapes:
                return config
    return None


def _narrow_size(value: Any, changes: Mapping[int | None, set[tuple[int, int]]]) -> int | list[int] | None:
    """The narrow value of a size in a config, one for all layers or a list with one for each; None if there is none."""
    if type(value) is int:
        pairs = set().union(*changes.values())
        return next((narrow for wide, narrow in pairs if wide == value), None) if len(pairs) == 1 else None
    if not isinstance(value, list) or not all(type(size) is int for size in value):
        return None
    sizes = [dict(changes.get(number, ())).get(wide, wide) for number, wide in enumerate(value)]
    unique = all(len(dict(pairs)) == len(pairs) for pairs in changes.values())  # one narrow size for each wide one
    return sizes if unique and sizes != value else None
