"""Trainings of networks whose widths change under a norm, against networks that are built with these widths."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slimstart import CheckpointError, EqualWorth, Flops, Paper, SparseTraining, load, save, shrink_to
from tests.zoo.cnn import ConvNeXt

VOCABULARY, LENGTH, STEPS = 20, 6, 24


class Norm(nn.Module):
    """The norm of Llama."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    def __init__(self, norm, width, inner, hidden, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = norm(width), norm(width)
        self.q, self.k, self.v = (nn.Linear(width, inner) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(inner, width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (m(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Tokens, learned positions, blocks; every width can be given."""

    def __init__(self, norm=nn.LayerNorm, width=16, inner=(16, 16), hidden=(24, 24), heads=(4, 4)):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(1, LENGTH, width) * 0.1)
        self.blocks = nn.Sequential(*[Block(norm, width, *sizes) for sizes in zip(inner, hidden, heads, strict=True)])
        self.norm, self.head = norm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions)))


def batch(step):
    return torch.randint(VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(step))


def loss_of(model, step):
    tokens = batch(step)
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def start(norm=nn.LayerNorm, budget=0.3, total_steps=STEPS, **settings):
    torch.manual_seed(0)
    model = Transformer(norm)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    settings.setdefault("policy", EqualWorth(align=1))
    return SparseTraining(model, optimizer, batch(0)[:2], Flops(budget), total_steps=total_steps, **settings), optimizer


def step(model, optimizer, number):
    loss = loss_of(model, number)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def by_hand(norm, model):
    """A network of the widths of `model`, built by its constructor, with the same weights."""
    widths = {
        "width": model.tokens.weight.shape[1],
        "inner": [block.out.weight.shape[1] for block in model.blocks],
        "hidden": [block.up.weight.shape[0] for block in model.blocks],
        "heads": [block.heads for block in model.blocks],
    }
    built = Transformer(norm, **widths)
    built.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return built, widths


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, Norm])
def test_every_step_is_that_of_a_network_built_with_these_widths(norm):
    """Between structure updates, losses, weights and the optimizer's state are those of the network built by hand."""
    sparse, optimizer = start(norm, policy=EqualWorth(align=1, search_steps=18, rate=1.0, pull=0.0, depth=0))
    assert sparse.graph.norms == "shrink"
    model, seen, reference, own = sparse.model, [], None, None
    for number in range(STEPS):
        reference, widths = by_hand(norm, model)
        own = torch.optim.AdamW(reference.parameters(), 3e-3)
        for mine, its in zip(reference.parameters(), model.parameters(), strict=True):
            if its in optimizer.state:
                own.state[mine] = {key: value.clone() for key, value in optimizer.state[its].items()}
        seen.append(widths["width"])
        expected, before = step(reference, own, number), sparse.mask.clone()
        actual = step(model, optimizer, number)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
        if torch.equal(before, sparse.mask):
            for (name, mine), its in zip(reference.named_parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(its, mine, rtol=1e-5, atol=1e-6, msg=name)
    assert seen[0] < 16
    assert len(set(seen)) > 1, "the width under the norms has to change for this test to mean something"
    small = sparse.finish()
    assert small.norm.weight.shape == (small.tokens.embedding_dim,)
    if norm is not Norm:
        assert small.norm.normalized_shape == (small.tokens.embedding_dim,)


@pytest.mark.parametrize(("norm", "what"), [(nn.LayerNorm, "weight"), (nn.LayerNorm, "bias"), (Norm, "weight")])
def test_norms_with_different_weights_are_a_sign_of_training(norm, what, caplog):
    """A pretrained transformer has no counters. Without `pretrained=True` its layers would be removed."""
    model = Transformer(norm)
    getattr(model.blocks[1].norm2, what).data[3] += 0.01
    inputs, optimizer = batch(0), torch.optim.AdamW(model.parameters())
    with caplog.at_level(logging.INFO, "slimstart"):
        sparse = SparseTraining(model, optimizer, inputs, Flops(0.9), total_steps=STEPS)
    assert "`blocks.1.norm2` differ, so the model counts as pretrained" in caplog.text
    assert sparse.graph.norms == "keep"
    model, other = Transformer(norm), Transformer(norm)
    assert SparseTraining(model, torch.optim.AdamW(model.parameters()), inputs, Flops(0.9)).graph.norms == "shrink"
    getattr(other.blocks[1].norm2, what).data[3] += 0.01
    optimizer = torch.optim.AdamW(other.parameters())
    assert SparseTraining(other, optimizer, inputs, Flops(0.9), pretrained=False).graph.norms == "shrink"


class NormedLinear(nn.Linear):
    """A name with a norm in it, and a bias that is new with different values."""


def convolutional(tracked=True):
    norm = nn.BatchNorm2d(16, track_running_stats=tracked)
    return nn.Sequential(nn.Conv2d(3, 16, 3), norm, nn.ReLU(), nn.Flatten(), NormedLinear(576, 4))


def norms_of(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return SparseTraining(model, optimizer, torch.randn(2, 3, 8, 8), Flops(0.5)).graph.norms


@pytest.mark.parametrize("tracked", [True, False])
def test_batch_norms_that_are_initialised_at_random_are_new(tracked):
    model = convolutional(tracked)
    nn.init.normal_(model[1].weight, 1.0, 0.02)
    assert norms_of(model) == "shrink"


@pytest.mark.parametrize("name", ["num_batches_tracked", "running_mean", "running_var"])
def test_batch_norms_with_statistics_are_a_sign_of_training(name):
    """Old state dicts have no counter."""
    model = convolutional()
    getattr(model[1], name).add_(1)
    assert norms_of(model) == "keep"


def test_pretrained_networks_keep_the_widths_under_their_norms():
    sparse, _ = start(budget=0.8, pretrained=True)
    assert sparse.graph.norms == "keep"
    assert sparse.model.norm.normalized_shape == (16,)
    assert sparse.model.tokens.embedding_dim == 16
    assert sparse.executed_flops < 0.8 * Flops(1.0).bind(sparse.graph.costs).dense


def test_a_budget_below_the_floor_of_whole_streams_is_feasible():
    dense = Flops(1.0).bind(start()[0].dense_graph.costs).dense
    sparse, optimizer = start(budget=0.05)
    for number in range(4):
        assert torch.isfinite(step(sparse.model, optimizer, number))
    assert sparse.executed_flops <= 0.05 * dense


@pytest.mark.parametrize("engine", ["auto", "eager"])
@pytest.mark.parametrize("align", [None, 4])
def test_networks_with_norms_are_never_padded(engine, align):
    """Padding would count in the norm: the paper's policy runs at exact widths, whatever `align` it asks for."""
    sparse, _ = start(policy=Paper(align=align), engine=engine, budget=0.5, coupling="filter")
    widths = set()
    for number in range(6):
        sparse.step(lambda net, tokens: F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()), batch(number))
        kept = sparse.graph.select(sparse.mask)
        assert not sparse._networks.selection.padded
        assert sparse.model.norm.weight.shape == kept.shape("norm.weight", torch.Size([16]))
        widths.add(sparse.model.norm.normalized_shape)
    assert len(widths) > 1
    reference = next(sparse._networks.references.of_draw())
    assert reference.norm.normalized_shape == (reference.norm.weight.numel(),)
    sparse.settle()
    small = sparse.finish()
    assert not any("stream" in name for name, _ in small.named_buffers())


def test_state_dicts_and_files_have_the_shapes_of_norms(tmp_path):
    sparse, optimizer = start()
    for number in range(10):
        step(sparse.model, optimizer, number)
    torch.save({"model": sparse.model.state_dict(), "sparse": sparse.state_dict()}, tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    fitted = shrink_to(Transformer(), saved["model"])
    assert fitted.norm.normalized_shape == sparse.model.norm.normalized_shape
    assert torch.equal(fitted(batch(0)), sparse.model(batch(0)))
    resumed, other = start()
    resumed.load_state_dict(saved["sparse"])
    assert resumed.model.norm.normalized_shape == sparse.model.norm.normalized_shape
    for number in range(10, STEPS):
        assert torch.equal(step(sparse.model, optimizer, number), step(resumed.model, other, number))
    small = sparse.finish()
    save(small, tmp_path / "small")
    assert torch.equal(load(tmp_path / "small", Transformer)(batch(1)), small(batch(1)))


def test_a_training_of_another_mode_is_refused():
    sparse, _ = start(budget=0.9)
    state = copy.deepcopy(sparse.state_dict())
    with pytest.raises(CheckpointError, match="`pretrained`"):
        start(budget=0.9, pretrained=True)[0].load_state_dict(state)


def test_layers_go_and_widths_under_norms_shrink_in_one_training():
    sparse, optimizer = start(policy=EqualWorth(depth=0.5, align=1), budget=0.2)
    removed = [layer.name for layer in sparse.graph.removed]
    assert removed == ["blocks.1"]
    for number in range(STEPS):
        step(sparse.model, optimizer, number)
    assert sparse.model.norm.normalized_shape[0] < 16
    small = sparse.finish()
    assert isinstance(small.blocks[1], nn.Identity)
    assert torch.isfinite(small(batch(0))).all()


def test_a_convolutional_network_with_norms_over_channels_shrinks():
    torch.manual_seed(0)
    model = ConvNeXt()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    images = torch.randn(4, 3, 16, 16)
    sparse = SparseTraining(model, optimizer, images[:2], Flops(0.2), total_steps=12, policy=EqualWorth(align=1))
    for _ in range(12):
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()
    assert sparse.graph.coverage > 0.99
    assert torch.isfinite(sparse.finish()(images)).all()


def test_the_width_of_a_stream_with_norms_is_learned():
    """Positions that are added to the stream do not hide how important its channels are."""
    sparse, _ = start()
    assert not bool(sparse._structure.gradients.unobservable.any())
