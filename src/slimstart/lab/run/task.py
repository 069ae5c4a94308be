"""A recipe at a place, before the first step: device, data, and the dense network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn

from slimstart.distributed import synchronise_batch_norm
from slimstart.distributed.process_group import SINGLE_PROCESS, ProcessGroup, gradient_bytes
from slimstart.flop_counter import flops
from slimstart.lab.data import Batches, ImageData, Share
from slimstart.lab.data.augmentation import Mixed
from slimstart.lab.recipes.recipe import Recipe, make_model
from slimstart.lab.run import environment as surroundings
from slimstart.lab.run.environment import Place
from slimstart.lab.run.method import Batch
from slimstart.lab.run.train_cost import first_layers, layer_flops

NUM_CALIBRATION_BATCHES = 20


@dataclass(frozen=True)
class Dense:
    """Costs of the dense network.

    Attributes:
        flops: FLOPs of one image.
        layer_flops: FLOPs of one image, by layer.
        step_flops: FLOPs of a training step.
        gradient_bytes: bytes that processes would exchange in a step.
    """

    flops: int
    layer_flops: Mapping[str, int]
    params: int
    step_flops: int
    gradient_bytes: int


class Task:
    """One recipe at one place.

    Args:
        recipe: settings of the run.
        place: device, folders and engine.
        ranks: the process group; each process has its share of every batch.
        downloading: called with the progress of a download.

    Attributes:
        device: device that trains.
        home: device of the dense network.
        train: training batches.
        example: one image of zeros, on the device.
        dense: known when the dense network has been made once.

    Raises:
        ConfigError, DataError: there is no such device, or there are no such data.
    """

    dense: Dense

    def __init__(
        self,
        recipe: Recipe,
        place: Place,
        ranks: ProcessGroup = SINGLE_PROCESS,
        downloading: Callable[[int, int | None], None] | None = None,
    ) -> None:
        self.recipe, self.place, self.ranks = recipe, place, ranks
        self.device = surroundings.find_device(place.device)
        self.home = torch.device(recipe.full_model_device or self.device)
        surroundings.set_precision(recipe.precision)
        self.data = self._load_data(downloading)
        self.train: Batches = self.data.train
        if recipe.mixup or recipe.cutmix:
            self.train = Mixed(self.train, self.data.num_classes, recipe.mixup, recipe.cutmix, recipe.seed)
        self.steps_per_epoch = len(self.data.train)
        self.example = torch.zeros(1, *self.data.image_shape, device=self.device)

    def _load_data(self, downloading: Callable[[int, int | None], None] | None) -> ImageData:
        """The share of this process; the first process loads first, for it may have to download."""
        share = Share(self.ranks.rank, self.ranks.size)

        def load() -> ImageData:
            return surroundings.load_data(self.recipe, self.place, self.device, downloading, share)

        own = load() if share.rank == 0 else None
        self.ranks.barrier()
        return own or load()

    def begin(self) -> nn.Module:
        """The dense network, as the recipe's seed makes it."""
        torch.manual_seed(self.recipe.seed)
        model, example = self.make_model(), self.example.to(self.home)
        own = flops(model, example)
        saved = first_layers(model, example).input_gradient()
        self.dense = Dense(
            flops=own,
            layer_flops=layer_flops(model, example),
            params=sum(parameter.numel() for parameter in model.parameters()),
            step_flops=self.recipe.batch_size * (3 * own - saved),
            gradient_bytes=gradient_bytes(model.parameters()),
        )
        return model

    def make_model(self, width: float | None = None, stages: str | None = None) -> nn.Module:
        """The dense network, freshly initialised, at home; or a sibling of it, of another width."""
        model = make_model(
            self.recipe.model,
            num_classes=self.data.num_classes,
            in_channels=self.data.image_shape[0],
            width=width or self.recipe.width,
            stages=stages,
        )
        if self.ranks.size > 1 and self.place.batch_norm == "synchronised":
            model = synchronise_batch_norm(model)
        return surroundings.suited(model, self.home, self.device)

    def calibration_batches(self) -> Iterator[Batch]:
        """Training batches that belong to no epoch of the training, and are not mixed."""
        return islice(self.data.train.epoch(self.recipe.total_epochs), NUM_CALIBRATION_BATCHES)
