"""Loops that are not a classifier's: detectors, adversaries, a teacher, batches that are no tuples of tensors."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slimstart import EqualWorth, Flops, Paper, SparseTraining, compact, flops, recalibrate, verify

Differences = Callable[[Any, Any], list[str]]
SEARCHING = EqualWorth(align=1, resample_every=2, rounds=4, rate=1.0, pull=0.0)  # after steps 2, 4, 6, 8
POLICIES = pytest.mark.parametrize("policy", [SEARCHING, Paper(resample_every=2)], ids=["equal_worth", "paper"])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


# --------------------------------------------------------------------------- losses in training mode, predictions else


class Detector(nn.Module):
    """Takes lists, as the detectors of torchvision do: losses in training mode, a list of predictions else."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 24, 3, padding=1, stride=2), nn.BatchNorm2d(24), nn.ReLU(),
        )  # fmt: skip
        self.objectness, self.box = nn.Conv2d(24, 1, 1), nn.Conv2d(24, 4, 1)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        features = self.body(torch.stack(images))
        scores, boxes = self.objectness(features).flatten(1), self.box(features).flatten(2)
        if self.training:
            assert targets is not None, "targets should not be none when in training mode"
            cells = torch.stack([target["cell"] for target in targets])
            wanted = torch.stack([target["box"] for target in targets])
            found = boxes.gather(2, cells[:, None, None].expand(-1, 4, 1)).squeeze(2)
            return {"score": F.cross_entropy(scores, cells), "box": F.smooth_l1_loss(found, wanted)}
        best = scores.argmax(1)
        return [{"scores": s[i].sigmoid(), "boxes": b[:, i]} for s, b, i in zip(scores, boxes, best, strict=True)]


def scenes(n: int) -> list[tuple[list[Tensor], list[dict[str, Tensor]]]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(n):
        cells = torch.randint(16, (6,), generator=generator)
        images = 0.3 * torch.randn(6, 3, 8, 8, generator=generator)
        for image, cell in zip(images, cells.tolist(), strict=True):
            image[:, 2 * (cell // 4) : 2 * (cell // 4) + 2, 2 * (cell % 4) : 2 * (cell % 4) + 2] += 2
        boxes = torch.stack([cells // 4, cells % 4, cells // 4 + 1, cells % 4 + 1], dim=1).float()
        found.append((list(images), [{"cell": c, "box": b} for c, b in zip(cells, boxes, strict=True)]))
    return found


def detection_loss(net: nn.Module, images: Any, targets: Any) -> tuple[Tensor, dict[str, Tensor]]:
    losses = net(images, targets)
    return sum(losses.values()), losses


@POLICIES
def test_a_model_with_losses_in_training_and_predictions_in_evaluation(policy: Any, differences: Differences) -> None:
    torch.manual_seed(0)
    model = Detector()
    images, targets = scenes(1)[0]
    dense = flops(model, (images,))
    optimizer = sgd(model)
    sparse = SparseTraining(model, optimizer, (images[:2], targets[:2]), Flops(0.4), policy=policy, total_steps=40)
    first = [float(sum(sparse.step(detection_loss, *scene)[1].values())) for scene in scenes(40)]
    assert sum(first[-5:]) < 0.7 * sum(first[:5])
    assert sparse.num_examples == len(images)
    model.eval()
    assert isinstance(model(images), list)  # in the middle of the training
    data = scenes(3)
    model.train()
    sparse.settle(data, detection_loss, num_samples=3)
    expected = compact(sparse.dense_copy(), sparse.graph.select(sparse.mask)).train()
    assert sparse.finish(data, detection_loss) is model
    assert flops(model.eval(), (images,)) <= 0.4 * dense
    model.train()
    assert torch.equal(detection_loss(model, images, targets)[0], detection_loss(expected, images, targets)[0])
    model.eval()
    found = model(images)
    assert [set(one) for one in found] == [{"scores", "boxes"}] * len(images)


def test_statistics_of_a_model_with_losses_in_training_mode_only() -> None:
    """The average over the batches, each counted once, without dropout; modes and generators are restored."""

    class Dropping(Detector):
        def __init__(self) -> None:
            super().__init__()
            self.body.insert(0, nn.Dropout(0.5))

    model = Dropping().eval()
    model.body[2].train()
    data, seen = scenes(4), torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    with torch.no_grad():
        inputs = [model.body[1](torch.stack(images)) for images, _ in data]
    assert recalibrate(model, data, detection_loss) == 4
    expected = torch.stack([x.mean((0, 2, 3)) for x in inputs]).mean(0)
    torch.testing.assert_close(model.body[2].running_mean, expected)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), seen)
    with pytest.raises(KeyError):  # an error of the loss function itself
        recalibrate(model, [([torch.zeros(3, 8, 8)] * 2, [{}, {}])], detection_loss)


# --------------------------------------------------------------------------- two networks


def adversaries() -> tuple[nn.Module, nn.Module]:
    maker = nn.Sequential(
        nn.ConvTranspose2d(8, 32, 4), nn.BatchNorm2d(32), nn.ReLU(),
        nn.ConvTranspose2d(32, 24, 2, stride=2), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 1, 3, padding=1),
    )  # fmt: skip
    judge = nn.Sequential(
        nn.Conv2d(1, 24, 3, stride=2), nn.LeakyReLU(0.2), nn.Conv2d(24, 32, 3, stride=2), nn.LeakyReLU(0.2),
        nn.Flatten(), nn.Linear(32, 1),
    )  # fmt: skip
    return maker, judge


def play(maker: nn.Module, judge: nn.Module, optimizers: Any, rounds: int, frozen: bool = False) -> None:
    generator = torch.Generator().manual_seed(1)
    of_maker, of_judge = optimizers
    for _ in range(rounds):
        real, noise = torch.randn(8, 1, 8, 8, generator=generator), torch.randn(8, 8, 1, 1, generator=generator)
        of_judge.zero_grad()
        (F.softplus(-judge(real)).mean() + F.softplus(judge(maker(noise).detach())).mean()).backward()
        of_judge.step()
        of_maker.zero_grad()
        judge.requires_grad_(not frozen)
        F.softplus(-judge(maker(noise))).mean().backward()  # leaves gradients in the judge too
        judge.requires_grad_(True)
        of_maker.step()


def test_a_generator_and_a_discriminator(differences: Differences) -> None:
    """Each learns from its own loss alone: gradients that the other's loss leaves in it have no effect."""

    def played(frozen: bool) -> tuple[SparseTraining, SparseTraining]:
        torch.manual_seed(0)
        maker, judge = adversaries()
        optimizers = [torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.5, 0.99)) for net in (maker, judge)]
        noise, images = torch.randn(2, 8, 1, 1), torch.randn(2, 1, 8, 8)
        settings: dict[str, Any] = {"policy": SEARCHING, "total_steps": 20}
        trainings = (
            SparseTraining(maker, optimizers[0], noise, Flops(0.5), **settings),
            SparseTraining(judge, optimizers[1], images, Flops(0.5), **settings),
        )
        starts = [one.mask for one in trainings]
        play(maker, judge, optimizers, 10, frozen)
        for one, start in zip(trainings, starts, strict=True):
            assert one.settled
            assert not torch.equal(one.mask, start)
        return trainings

    first, second = played(False), played(True)
    for one, other in zip(first, second, strict=True):
        assert differences(one.state_dict(), other.state_dict()) == []
    maker, judge = (one.finish() for one in first)
    for net, dense, shape in zip((maker, judge), adversaries(), ((2, 8, 1, 1), (2, 1, 8, 8)), strict=True):
        assert flops(net, torch.randn(shape)) <= 0.5 * flops(dense, torch.randn(shape))


@pytest.mark.parametrize("coupling", ["stream", "filter"])
def test_a_generator_that_starts_with_a_linear_layer(coupling: str) -> None:
    """Its outputs become an image, whose channels are several of them: they are kept, and what follows can shrink."""
    maker = nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16 * 16), nn.Unflatten(1, (16, 4, 4)), nn.ReLU(),
        nn.ConvTranspose2d(16, 12, 2, stride=2), nn.ReLU(), nn.Conv2d(12, 1, 3, padding=1),
    )  # fmt: skip
    report = verify(maker, torch.randn(2, 8), coupling)
    assert [(group.name, len(group.units)) for group in report.graph.groups] == [("0", 32), ("5", 12)]
    assert report.graph.not_prunable["2"] == "each channel that 5 reads has several of its outputs"
    assert report.max_error < 1e-10


def test_a_dense_teacher(differences: Differences) -> None:
    """The teacher is a copy of the dense model; a training with it equals one with its logits, computed before."""
    images = [torch.randn(8, 1, 8, 8) for _ in range(10)]
    _, dense = adversaries()

    def distil(logits: list[Tensor] | None) -> SparseTraining:
        student = copy.deepcopy(dense)
        teacher = copy.deepcopy(dense).eval()
        optimizer = sgd(student)
        sparse = SparseTraining(student, optimizer, images[0][:2], Flops(0.5), policy=SEARCHING)
        for number, batch in enumerate(images):
            if logits is None:
                with torch.no_grad():
                    wanted = teacher(batch)
            else:
                wanted = logits[number]
            optimizer.zero_grad()
            F.mse_loss(student(batch), wanted).backward()
            optimizer.step()
        assert differences(dict(teacher.state_dict()), dict(dense.state_dict())) == []
        return sparse

    with torch.no_grad():
        logits = [dense(batch) for batch in images]
    assert differences(distil(None).state_dict(), distil(logits).state_dict()) == []


# --------------------------------------------------------------------------- batches


class Words(nn.Module):
    """Sequences of any length, with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.layers = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU())
        self.head = nn.Linear(24, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        weights = mask.float() / mask.sum(1, keepdim=True)
        return self.head((self.layers(self.embedding(ids)) * weights[..., None]).sum(1))


@dataclass
class Batch:
    ids: Tensor
    mask: Tensor
    labels: Tensor


def sentences(n: int) -> list[Batch]:
    """Every batch has another length."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for number in range(n):
        length = 4 + number % 5
        ids = torch.randint(30, (6, length), generator=generator)
        lengths = torch.randint(1, length + 1, (6, 1), generator=generator)
        found.append(Batch(ids, torch.arange(length) < lengths, ids[:, 0] % 3))
    return found


@POLICIES
@pytest.mark.parametrize("kind", ["dict", "dataclass"])
def test_batches_of_any_kind_and_length(kind: str, policy: Any, differences: Differences) -> None:
    """As a training on tuples, bit by bit."""

    def of_tuple(net: nn.Module, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(net(ids, mask), labels)

    def of_dict(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(net(ids=batch["ids"], mask=batch["mask"]), batch["labels"])

    def of_dataclass(net: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(net(batch.ids, batch.mask), batch.labels)

    def trained(loss_fn: Any, convert: Callable[[Batch], tuple[Any, ...]], example: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Words()
        sparse = SparseTraining(model, sgd(model), example, Flops(0.5), policy=policy, total_steps=40)
        start = sparse.mask
        for batch in sentences(8):
            sparse.step(loss_fn, *convert(batch))
            assert sparse.num_examples == len(batch.labels)
        assert not torch.equal(sparse.mask, start)
        data = [convert(batch) for batch in sentences(3)]
        return dict(sparse.finish(data, loss_fn, num_samples=3).state_dict())

    first = sentences(1)[0]
    expected = trained(of_tuple, lambda batch: (batch.ids, batch.mask, batch.labels), (first.ids, first.mask))
    if kind == "dict":
        found = trained(of_dict, lambda batch: (vars(batch),), {"ids": first.ids, "mask": first.mask})
    else:
        found = trained(of_dataclass, lambda batch: (batch,), (first.ids, first.mask))
    assert differences(found, expected) == []


class Packed(Words):
    def forward(self, batch: Batch) -> Tensor:  # type: ignore[override]
        return super().forward(batch.ids, batch.mask)


def test_a_model_that_takes_a_dataclass() -> None:
    model = Packed()
    optimizer = sgd(model)
    batch = sentences(1)[0]
    dense = flops(model, (batch,))
    sparse = SparseTraining(model, optimizer, (batch,), Flops(0.5), policy=SEARCHING)
    for one in sentences(8):
        optimizer.zero_grad()
        F.cross_entropy(model(one), one.labels).backward()
        optimizer.step()
    assert flops(sparse.finish(), (batch,)) <= 0.5 * dense


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_faster_rcnn_of_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchvision", reason="torchvision is not installed")
    from torchvision.models.detection import FasterRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    if not hasattr(torch.ops.torchvision, "roi_align"):  # tests/torchvision_operators.py
        monkeypatch.setattr("torchvision.ops.boxes._assert_has_ops", lambda: None)
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width, before in ((16, 3), (24, 16), (32, 24)):
        layers += [nn.Conv2d(before, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    body: Any = nn.Sequential(*layers)
    body.out_channels = 32
    few = {f"rpn_{when}_nms_top_n_{mode}": 20 for when in ("pre", "post") for mode in ("train", "test")}
    anchors = AnchorGenerator(((16, 32),), ((0.5, 1.0, 2.0),))
    model = FasterRCNN(body, 3, rpn_anchor_generator=anchors, min_size=64, max_size=64, **few)
    images = [torch.rand(3, 64, 64), torch.rand(3, 48, 64)]
    targets = [{"boxes": torch.tensor([[5.0, 5.0, 30.0, 30.0]]), "labels": torch.tensor([1])} for _ in images]
    with torch.compiler.set_stance("force_eager"):  # what torchvision has in Python, it would compile
        dense = flops(model.eval(), (images,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        model.train()
        sparse = SparseTraining(model, optimizer, (images, targets), Flops(0.5), policy=SEARCHING, total_steps=12)
        start, losses = sparse.mask, []
        for _ in range(12):
            loss = sum(model(images, targets).values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[0]
        assert not torch.equal(sparse.mask, start)
        sparse.finish([(images, targets)], lambda net, *batch: sum(net(*batch).values()))
        model.eval()
        assert flops(model, (images,)) <= 0.5 * dense
        assert [set(one) for one in model(images)] == [{"boxes", "labels", "scores"}] * 2
