"""The ledger agrees with PyTorch's own counter step by step; the formula is the paper's."""

import pytest
import torch
from torch import Tensor, nn

from slimstart.flop_counter import counting, flops
from slimstart.lab import models
from slimstart.lab.recipes.recipe import METHODS, Recipe
from slimstart.lab.run.make_method import Fixed, Relaxed, Search, make_method
from slimstart.lab.run.train_cost import Ledger, first_layers, formula_flops


def batch(num_images: int = 4, channels: int = 3, side: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(num_images, channels, side, side), torch.randint(0, 10, (num_images,))


@pytest.mark.parametrize(
    ("flops_percent", "saving"),
    [(28.57, 2.64), (19.33, 3.89), (10.27, 7.30), (4.94, 15.28), (1.70, 44.68), (8.7, 8.69), (36.1, 2.09), (7.9, 9.39)],
)
def test_the_formula_gives_the_savings_of_the_paper(flops_percent: float, saving: float) -> None:
    # The paper averages FLOPs over the training and reports those of the end: it differs by 1.5 % at most.
    assert 300 / formula_flops(2 * flops_percent, flops_percent) == pytest.approx(saving, rel=0.015)


def test_other_estimators_have_another_number_of_forwards() -> None:
    assert 300 / formula_flops(10.0, 10.0) == 10  # no second forward: 3 f_D / 3 f_S
    assert 300 / formula_flops(4 * 10.0, 10.0) == 5


@pytest.mark.parametrize(("sparse", "saving"), [(0.0, 1.5), (100.0, 1.0), (45.9, 1.22)])
def test_a_dense_backward_bounds_the_saving(sparse: float, saving: float) -> None:
    assert 300 / formula_flops(sparse, 100.0) == pytest.approx(saving, abs=0.005)  # 3 / (2 + f_S / f_D)


def test_a_step_is_counted_by_hand() -> None:
    ledger = Ledger()
    ledger.step(num_images=10, forward=7, input_gradient=2, reference=5)
    ledger.step(num_images=1, forward=3, input_gradient=0)
    assert (ledger.forward, ledger.backward, ledger.reference) == (73, 10 * (14 - 2) + 6, 50)
    ledger.selection += 4
    assert ledger.total == 73 + 126 + 50 + 4


def test_first_layers_of_a_network_with_two_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out_channels = 77  # blocks have such attributes, too
            self.a, self.b, self.c = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(5, 6), nn.Linear(4 + 6, 2)

        def forward(self, image: Tensor, row: Tensor) -> Tensor:
            return self.c(torch.cat([self.a(image).mean((2, 3)), self.b(row)], 1))

    found = first_layers(Two(), (torch.zeros(1, 3, 8, 8), torch.zeros(1, 5)))
    assert found.filters == {"a": 4, "b": 6}
    assert found.per_filter == {"a": 3 * 9 * 64, "b": 5}
    assert found.input_gradient() == 4 * 3 * 9 * 64 + 6 * 5
    assert found.input_gradient({"a": 1, "b": 2}) == 3 * 9 * 64 + 10


# Not MobileNet: PyTorch's counter takes the backward of a depthwise convolution for that of a full one.
@pytest.mark.parametrize("model", ["vgg16", "resnet20"])
@pytest.mark.parametrize(
    "settings",
    [
        {"budget": "flops=0.3", "policy": "paper"},
        *(
            pytest.param({"budget": "flops=0.3"} | settings, marks=pytest.mark.slow)
            for settings in (
                *({"method": name} for name in METHODS if name not in ("slimstart", "dense")),
                {"method": "dense", "budget": None},
                {"policy": "equal_worth"},
                {"policy": "paper", "coupling": "stream", "resample_every": 3},
                {"policy": "paper", "align": 4},
                {"policy": "paper", "estimator": "pge", "budget": "channels=0.5"},
                {"policy": "paper", "estimator": "gumbel"},
            )
        ),
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_the_ledger_equals_a_count_of_what_runs(model: str, settings: dict[str, object]) -> None:
    recipe = Recipe(model=model, width=0.125, data="cifar10", **settings)  # type: ignore[arg-type]
    images, labels = batch()
    network = models.build(model, num_classes=10, width=0.125)

    def sibling(width: float) -> nn.Module:
        return models.build(model, num_classes=10, width=width, stages=models.siblings(model)[0])

    method = make_method(recipe, network, images[:1], steps_per_epoch=10, make_sibling=sibling)
    for _ in range(2):
        before = method.ledger.total
        with counting() as count:
            method.step(images, labels)
        # Gates that are projected take a small product of their own for it: structure, not network.
        structure = 0.02 * count.total if isinstance(method, Relaxed) else 0
        assert 0 <= count.total - (method.ledger.total - before) <= structure
    before = method.ledger.total
    with counting() as count:
        method.begin_epoch(recipe.search_epochs, [(images, labels)])
        network = method.finish([(images, labels)])
    # A method that cuts traces and measures networks on the way, on one image: that is no training.
    dense = flops(models.build(model, num_classes=10, width=0.125), images[:1])
    looks = 0 if isinstance(method, Fixed | Search) else 10 * dense
    assert 0 <= count.total - (method.ledger.total - before) <= looks
    if method.graph.coupling == "stream":
        assert flops(network, images[:1]) == method.flops
