"""Branches whose residual sum is in the forward around them: which can go, and what the network is without them."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slimstart import compact, flops, trace, verify
from slimstart.narrow.removed_layers import Zero
from slimstart.policies import Flops, Params
from tests.zoo import ZOO, shake

COUPLINGS = ["stream", "filter"]


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("listed_vit", [(f"layers.{i}.{j}",) for i in range(3) for j in range(2)]),
        ("listed_mixer", [(f"norms.{2 * i + j}", f"{('tokens', 'channels')[j]}.{i}") for i in (0, 1) for j in (0, 1)]),
        ("summed_conv_net", [("branch",), ("conv1", "bn1", "conv2", "bn2"), ("last",)]),
        ("summed_gpt", [(f"ln_{j + 1}.{i}", f"{('attn', 'mlp')[j]}.{i}") for i in range(3) for j in (0, 1)]),
    ],
)
def test_branches_of_common_networks(name, layers, coupling):
    graph = trace(ZOO[name].factory(), ZOO[name].example_inputs(), coupling)
    assert [layer.modules for layer in graph.layers] == layers
    assert all(layer.added for layer in graph.layers)
    assert all(f"  {', '.join(modules)}\n" in str(graph) for modules in layers)
    assert verify(ZOO[name].factory(), ZOO[name].example_inputs(), coupling, num_masks=4).max_error < 1e-10


@pytest.mark.parametrize("norms", ["keep", "shrink"])
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_a_network_without_branches_is_that_whose_last_weights_are_zero(coupling, norms):
    """A reference that knows nothing of removed layers; the linear layers of a branch end it."""
    torch.manual_seed(0)
    model, tokens = shake(ZOO["summed_gpt"].factory()).double().eval(), ZOO["summed_gpt"].example_inputs()
    graph = trace(model, tokens, coupling, norms=norms)
    small = compact(model, graph.without(["attn.0", "mlp.1", "attn.2"]).select(torch.ones(graph.num_units)))
    for linear in (model.attn[0].out[0], model.mlp[1][3], model.attn[2].out[0]):
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
    torch.testing.assert_close(small(tokens), model(tokens), rtol=0, atol=1e-12)


# --- exact costs, by enumeration -------------------------------------------------------------------------------------


class Small(nn.Module):
    """Two branches with a norm and a functional activation in the forward around them."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(3, 2), nn.Linear(2, 2)
        self.norms = nn.ModuleList(nn.BatchNorm1d(2) for _ in range(2))
        self.ups, self.downs = (nn.ModuleList(nn.Linear(2, 2) for _ in range(2)) for _ in range(2))

    def forward(self, x):
        x = self.stem(x)
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(torch.relu(up(norm(x))))
        return self.head(x)


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_cost_of_every_mask_and_every_set_of_branches_is_what_the_narrow_network_has(coupling):
    model, x = Small().eval(), torch.randn(2, 3)
    graph = trace(model, x, coupling)
    assert [layer.modules for layer in graph.layers] == [(f"norms.{i}", f"ups.{i}", f"downs.{i}") for i in range(2)]
    masks = torch.tensor(list(itertools.product([False, True], repeat=graph.num_units)))
    for gone in ([], ["downs.0"], ["downs.1"], ["downs.0", "downs.1"]):
        derived = graph.without(gone)
        budgets = [budget(1.0).bind(derived.costs) for budget in (Flops, Params)]
        for mask in masks[:: 31 if coupling == "filter" else 7]:
            selection = derived.select(mask)
            small = compact(model, selection)
            assert budgets[0].cost(mask) == flops(small, x) == derived.flops_within(selection.happens[:-1])
            assert budgets[1].cost(mask) == sum(p.numel() for p in small.parameters())


# --- what can go -----------------------------------------------------------------------------------------------------


class Around(nn.Module):
    """A stream to which a function of the model and the stream adds something."""

    def __init__(self, forward, **modules):
        super().__init__()
        self.stem, self.head = nn.Linear(5, 6), nn.Linear(6, 4)
        self.f, self.g, self.norm = feed_forward(), feed_forward(), nn.LayerNorm(6)
        self.gamma = nn.Parameter(torch.rand(6))
        for name, module in modules.items():
            self.add_module(name, module)
        self.around = forward

    def forward(self, x):
        return self.head(self.around(self, self.stem(x)))


def feed_forward(hidden=8, end=6, first=()):
    return nn.Sequential(*first, nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, end))


class DropPath(nn.Module):
    """Drop whole examples, as in stochastic depth."""

    def forward(self, x):
        if not self.training:
            return x
        return x * torch.empty(x.shape[0], *[1] * (x.dim() - 1), dtype=x.dtype).bernoulli_(0.8) / 0.8


class Tupled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = feed_forward()

    def forward(self, x):
        y = self.inner(x)
        return y, y.mean()


def parallel(m, x):
    h = m.norm(x)
    return x + m.f(h) + m.g(h)


def in_place(m, x):
    x += m.f(x)
    return x


def attended(m, x):
    x = x[:, None]
    h = m.norm(x)
    return x + m.attn(h, h, h)[0]


def projected(m, x):
    h = m.norm(x)
    y = F.scaled_dot_product_attention(m.q(h), m.k(h), m.v(h))
    return x + m.out(y)


def after_head(m, x):
    x = m.norm(x + m.f(x))
    return m.norm2(x + m.g(x))


GOES = {
    "plain": (lambda m, x: x + m.f(x), {}, [("f",)]),
    "other side": (lambda m, x: m.f(x) + x, {}, [("f",)]),
    "torch.add": (lambda m, x: torch.add(input=x, other=m.f(x), alpha=1), {}, [("f",)]),
    "method": (lambda m, x: x.add(m.f(x)), {}, [("f",)]),
    "in place": (in_place, {"f": feed_forward(first=[nn.Sigmoid()])}, [("f",)]),
    "norm": (lambda m, x: x + m.f(m.norm(x)), {}, [("norm", "f")]),
    "shared norm": (parallel, {}, [("f",), ("g",)]),
    "branches first": (lambda m, x: (m.f(x) + m.g(x)) + x, {}, [("f",), ("g",)]),
    "scale": (lambda m, x: x + m.gamma * m.f(x), {}, [("f",)]),
    "number": (lambda m, x: x + 0.5 * m.f(x) / 2, {}, [("f",)]),
    "activation": (lambda m, x: x + F.gelu(m.f(x)), {}, [("f",)]),
    "dropout": (lambda m, x: x + m.drop(m.f(x)), {"drop": nn.Dropout(0.3)}, [("f", "drop")]),
    "functional dropout": (lambda m, x: x + F.dropout(m.f(x), 0.3, m.training), {}, [("f",)]),
    "one dropout": (
        lambda m, x: (y := x + m.drop(m.f(x))) + m.drop(m.g(y)), {"drop": nn.Dropout(0.3)}, [("f",), ("g",)]
    ),
    "drop path": (lambda m, x: x + m.drop(m.f(m.norm(x))), {"drop": DropPath()}, [("norm", "f", "drop")]),
    "identity": (lambda m, x: x + m.drop(m.f(m.norm(x))), {"drop": nn.Identity()}, [("norm", "f", "drop")]),
    "tuple": (lambda m, x: x + m.f(x)[0], {"f": Tupled()}, [("f",)]),
    "attention": (attended, {"attn": nn.MultiheadAttention(6, 2, batch_first=True)}, [("norm", "attn")]),
    "projections": (
        lambda m, x: x + m.out(m.q(x), m.k(x)),
        {"q": nn.Linear(6, 9), "k": nn.Linear(6, 7), "out": nn.Bilinear(9, 7, 6)},
        [("q", "k", "out")],
    ),
    "post-norm": (after_head, {"norm": nn.BatchNorm1d(6), "norm2": nn.BatchNorm1d(6)}, [("f",), ("g",)]),
}  # fmt: skip


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("case", GOES)
def test_branches_that_can_go(case, coupling):
    forward, modules, expected = GOES[case]
    torch.manual_seed(0)
    report = verify(Around(forward, **modules), torch.randn(4, 5), coupling, num_masks=4)
    assert [layer.modules for layer in report.graph.layers if layer.added] == expected
    assert report.max_error < 1e-10
    assert report.num_comparisons > 40  # gradients, too


def twice(m, x):
    y = m.f(x)
    return x + y + y.mean()


def sized(m, x):
    y = m.f(x)
    return (x + y) * y.shape[-1]


def called_twice(m, x):
    return x + m.f(x + m.f(x))


def result_in_place(m, x):
    y = m.f(x)
    y += x
    return y


def read_after(m, x):
    h = m.norm(x)
    return x + m.f(h) + h


def in_training(m, x):
    y = m.f(x)
    return x + y if not m.training else x + y * torch.rand(len(y), 1, dtype=y.dtype)


class Keeping(nn.Module):
    """A branch with a loss of its own, which the model reads."""

    def __init__(self):
        super().__init__()
        self.inner = feed_forward()

    def forward(self, x):
        y = self.inner(x)
        self.loss = y.square().mean()
        return y


def auxiliary(m, x):
    x = x + m.f(x)
    return x + m.f.loss


def tied(m, x):
    x = x + m.f(x)
    return F.linear(F.linear(x, m.f[0].weight), m.f[2].weight)


def part(m, x):
    y = m.f[2](torch.relu(m.f[0](x.sigmoid())))
    return x + m.f(x) + y


ALONE = "the forward around it computes what it reads from the results of other layers; put the branch into one module"
STAYS = {
    "called twice": (called_twice, {}, "f.0", "it is called more than once"),
    "used twice": (twice, {}, "f.0", "its result is used more than once before it is added to a stream"),
    "size": (sized, {}, "f.0", "its size is read before it is added to a stream"),
    "no stream": (lambda m, x: m.f(x) + m.g(x), {}, "f.0", "its input is"),
    "projection": (lambda m, x: torch.relu(m.f(x) + m.g(x)), {"g": nn.Linear(6, 6)}, "f.0", "its input is"),
    "broadcast": (lambda m, x: x + m.f(x), {"f": feed_forward(end=1)}, "f.0", "its input is"),
    "subtracted": (lambda m, x: x - m.f(x), {}, "f.0", "its input is"),
    "weighted": (lambda m, x: torch.add(x, m.f(x), alpha=2), {}, "f.0", "its input is"),
    "result in place": (result_in_place, {}, "f.0", "the stream is added to its result in place"),
    "sigmoid": (lambda m, x: x + torch.sigmoid(m.f(x)), {}, "f.0", "sigmoid is applied to its result before"),
    "flipped": (lambda m, x: x + m.f(x).flip(1), {}, "f.0", "flip is applied to its result before"),
    "two results": (lambda m, x: (y := m.f(x))[0] + x + y[1], {"f": Tupled()}, "f.inner.0", "another of its results"),
    "training": (in_training, {}, "f.0", "in training mode its result is used in another way"),
    "input written": (
        lambda m, x: x + m.f(x), {"f": feed_forward(first=[nn.ReLU(inplace=True)])}, "f.1", "it writes into its input"
    ),
    "projections": (
        projected, {name: nn.Linear(6, 6, bias=False) for name in ("q", "k", "v", "out")}, "out", ALONE
    ),
    "other source": (
        lambda m, x: x + m.f(m.other(x.new_ones(4, 6)) + m.norm(x)), {"other": nn.Linear(6, 6)}, "f.0", ALONE
    ),
    "attribute": (auxiliary, {"f": Keeping()}, "f.inner.0", "a tensor that it computes and does not return is used"),
    "weights": (tied, {}, "f.0", "f.0.weight is used from outside, too"),
    "called from outside": (part, {}, "f.2", "f.0 is called from outside, too"),
    "fused": (
        lambda m, x: m.f(x[:, None])[:, 0], {"f": nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)},
        "f.linear1", "its input is",
    ),
}  # fmt: skip


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("case", STAYS)
def test_reasons_why_branches_cannot_go(case, coupling):
    forward, modules, name, reason = STAYS[case]
    torch.manual_seed(0)
    graph = trace(Around(forward, **modules), torch.randn(4, 5), coupling)
    assert not [layer.modules for layer in graph.layers if layer.added]
    assert graph.not_removable[name].startswith(reason)
    assert f"  {name}: {reason}" in str(graph)


def stochastic(m, x):
    for branch in (m.f, m.g, m.h):
        if not m.training or torch.rand(()) < 0.5:
            x = x + branch(x)
    return x


def test_what_can_go_does_not_depend_on_the_random_state():
    """Processes have different ones, and so has a training that is resumed."""
    found = set()
    for seed in range(8):
        torch.manual_seed(seed)
        model, x = Around(stochastic, h=feed_forward()), torch.randn(4, 5)
        before = torch.get_rng_state()
        found.add(tuple(layer.modules for layer in trace(model, x).layers))
        assert torch.equal(torch.get_rng_state(), before)
    assert len(found) == 1


def test_verification_does_not_seed_devices_that_have_nothing_of_the_model(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("all devices are seeded"))
    verify(Around(GOES["norm"][0]), torch.randn(4, 5))


def test_branches_that_are_protected_or_have_hooks_cannot_go():
    x = torch.randn(4, 5)
    kept = trace(Around(GOES["norm"][0]), x, keep=["f.0"])
    assert not kept.layers
    assert kept.not_removable["f.2"] == "asked for by `keep`"
    model = Around(GOES["norm"][0])
    model.f.register_forward_hook(lambda *_: None)
    assert "forward hooks" in trace(model, x).not_removable["f.0"]
    model = Around(GOES["plain"][0])
    model.g = nn.Sequential(model.f[0])
    assert "is used in another place" in trace(model, x).not_removable["f.2"]


def test_a_branch_that_is_added_to_the_input_of_the_network_cannot_go():
    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1))

        def forward(self, x):
            return x + self.net(x)

    graph = trace(Denoiser(), torch.randn(2, 3, 8, 8))
    assert not graph.layers
    assert graph.not_removable["net.0"] == "it is added to an input of the network"


def test_zero_is_neutral_in_a_sum():
    for x in (torch.randn(2, 3), torch.randn(2, 3, dtype=torch.float16), torch.arange(4)):
        assert torch.equal(x + Zero()(torch.randn(2, 7)), x)
        assert (x + Zero()(x)).dtype == x.dtype
    zero, nothing = Zero(2)(torch.randn(3), torch.ones(1), mask=None)
    assert zero.shape == ()
    assert zero == 0
    assert nothing is None
