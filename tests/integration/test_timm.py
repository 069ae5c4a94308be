"""Models, optimizers, schedules, mixup and averages of timm, in the loop of its training script."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slimstart import EqualWorth, Flops, SparseTraining, flops
from slimstart.errors import OptimizerStateError

pytest.importorskip("timm", reason="timm is not installed")

import timm
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import Lookahead, create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STEPS = 20
SEARCHING = EqualWorth(align=1, search_steps=12, rounds=6, rate=1.0, pull=0.0)  # changes up to step 12
Differences = Callable[[Any, Any], list[str]]


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 3, 32, 32, generator=generator), torch.randint(10, (4,), generator=generator))
        for _ in range(STEPS)
    ]


@pytest.mark.parametrize(
    ("name", "optimizer_name", "settings"),
    [
        ("resnet18", "lookahead_sgd", {}),
        ("mobilenetv3_small_100", "nadamw", {}),
        ("vit_tiny_patch16_224", "adamw", {"img_size": 32, "patch_size": 8, "depth": 3}),
    ],
)
def test_the_parts_of_a_training_script(name: str, optimizer_name: str, settings: dict[str, Any]) -> None:
    """Layer decay, a schedule, mixup, and an average of weights, in one loop."""
    model = timm.create_model(name, num_classes=10, **settings)
    example = batches()[0][0][:2]
    dense = flops(model, example)
    optimizer = create_optimizer_v2(model, opt=optimizer_name, lr=1e-2, weight_decay=0.05, layer_decay=0.75)
    scheduler, _ = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=1, updates_per_epoch=STEPS, step_on_epochs=False
    )
    sparse = SparseTraining(model, optimizer, example, Flops(0.6), total_steps=STEPS, policy=SEARCHING)
    average = ModelEmaV3(model, decay=0.75)
    sparse.follow(average)
    mixup, criterion = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=10), SoftTargetCrossEntropy()
    scales = {group["lr_scale"] for group in optimizer.param_groups}
    assert len(scales) > 3
    structures = set()
    for step, (images, labels) in enumerate(batches()):
        mask, before = sparse.mask, [p.detach().clone() for p in average.module.parameters()]
        images, targets = mixup(images, labels)
        optimizer.zero_grad()
        criterion(model(images), targets).backward()
        optimizer.step()
        average.update(model)
        scheduler.step_update(step + 1)
        rate = optimizer.param_groups[0]["lr"] / optimizer.param_groups[0]["lr_scale"]
        assert all(group["lr"] == pytest.approx(rate * group["lr_scale"]) for group in optimizer.param_groups)
        shapes = [p.shape for p in model.parameters()]
        structures.add(tuple(shapes))
        assert [p.shape for p in average.module.parameters()] == shapes
        if torch.equal(sparse.mask, mask):  # by hand
            for mean, old, new in zip(average.module.parameters(), before, model.parameters(), strict=True):
                torch.testing.assert_close(mean, 0.75 * old + 0.25 * new, atol=1e-6, rtol=1e-4)
    assert rate < 1e-2
    assert len(structures) > 1
    sparse.finish()
    assert flops(model, example) == flops(average.module, example) <= 0.6 * dense


def small_training() -> tuple[Any, Any, SparseTraining]:
    model = timm.create_model("resnet10t", num_classes=10)
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), alpha=0.5, k=3)
    example = batches()[0][0][:2]
    sparse = SparseTraining(model, optimizer, example, Flops(0.5), total_steps=STEPS, policy=SEARCHING)
    return model, optimizer, sparse


def train(model: Any, optimizer: Any, data: list[tuple[Tensor, Tensor]]) -> None:
    for images, labels in data:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


def test_lookahead_resumes_exactly(differences: Differences) -> None:
    """The slow weights of channels come and go with them."""
    torch.manual_seed(0)
    model, optimizer, whole = small_training()
    train(model, optimizer, batches()[:8])
    assert not whole.settled
    state = whole.state_dict()
    train(model, optimizer, batches()[8:])
    torch.manual_seed(5)
    again, its_optimizer, resumed = small_training()
    resumed.load_state_dict(state)
    train(again, its_optimizer, batches()[8:])
    assert differences(dict(again.state_dict()), dict(model.state_dict())) == []


def test_slow_weights_by_hand() -> None:
    torch.manual_seed(0)
    model, optimizer, sparse = small_training()
    train(model, optimizer, batches()[:15])
    assert sparse.settled
    train(model, optimizer, batches()[:2])
    base = optimizer._base_optimizer
    slow = [base.state[p]["lookahead_slow_buff"].clone() for p in model.parameters()]
    twin = copy.deepcopy(model)
    plain = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    plain.load_state_dict(copy.deepcopy(base.state_dict()))
    train(twin, plain, batches()[2:3])  # the fast weights
    train(model, optimizer, batches()[2:3])
    for parameter, one, other in zip(model.parameters(), slow, twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach(), (one + other.detach()) / 2)


def test_factored_state_is_refused() -> None:
    model = timm.create_model("resnet10t", num_classes=10)
    with pytest.raises(OptimizerStateError, match="cannot follow the channels"):
        SparseTraining(model, create_optimizer_v2(model, opt="adafactor"), batches()[0][0][:2], Flops(0.5))


def test_the_example(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from examples import timm_training

    tiny = ["--model", "resnet10t", "--images", "1000", "--epochs", "3", "--out", str(tmp_path)]
    timm_training.main(tiny)
    accuracy, share = map(float, re.findall(r"finished: (\S+) % at (\S+)%", capsys.readouterr().out)[0])
    assert share <= 40
    assert accuracy > 15  # chance is 10
