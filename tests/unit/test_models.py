"""The networks of the paper: sizes as published, pruning, and names.

Exact sizes are in docs/program.md, and `test_program_document` compares them.
"""

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import slimstart
from slimstart.errors import ConfigError
from slimstart.lab.models import MODELS, build, from_factory, is_factory
from slimstart.lab.models.residual import BasicBlock, Bottleneck, WideBlock


def count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def convolutions(network: nn.Module) -> list[nn.Conv2d]:
    return [module for module in network.modules() if isinstance(module, nn.Conv2d)]


def images(in_channels: int, size: int, device: str | None = None) -> torch.Tensor:
    return torch.randn(2, in_channels, size, size, device=device)


# ------------------------------------------------------------------------------------------------ sizes

# Image size and channels; parameters and multiply-adds in millions as published, with as many digits.
PUBLISHED = {
    "vgg16": (32, 3, "14.7", "313"),
    "vgg19": (32, 3, "20.0", "398"),
    "resnet20": (32, 3, "0.27", "41"),
    "wrn28_10": (32, 3, "36.5", "5.2e3"),
    "resnet50": (224, 3, "25.557032", "4.1e3"),
    "mobilenet_v1": (224, 3, "4.231976", "569"),
}


def agrees(value: float, published: str) -> bool:
    """Whether a number, rounded to as many digits as the published one has, is that number."""
    digits = len(published.split("e")[0].replace(".", "").lstrip("0"))
    return float(f"{value:.{digits}g}") == float(published)


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_those_of_the_literature(name: str) -> None:
    size, in_channels, params, flops = PUBLISHED[name]
    with torch.device("meta"):  # counts without computing
        network = MODELS[name]()
        counted = slimstart.flops(network, images(in_channels, size)[:1])
    assert agrees(count(network) / 1e6, params)
    assert agrees(counted / 1e6, flops)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_width_scales_every_layer_and_the_other_arguments_reach_both_ends(name: str) -> None:
    size = PUBLISHED.get(name, (32,))[0]
    with torch.device("meta"):
        whole, half = (build(name, num_classes=100, in_channels=1, width=w) for w in (1.0, 0.5))
        flops = [slimstart.flops(network, images(1, size)[:1]) for network in (whole, half)]
    for one, other in zip(convolutions(whole)[1:], convolutions(half)[1:], strict=True):
        assert (other.in_channels, other.out_channels) == (one.in_channels / 2, one.out_channels / 2)
    # The first layer, the classifier and depthwise filters scale with the width, all others with its square.
    assert 0.25 < flops[1] / flops[0] < 0.27
    assert half(images(1, size, "meta")).shape == (2, 100)


# ------------------------------------------------------------------------------------------------ slimming

# Wide enough to be uneven, small enough to be quick.
TINY = {
    "vgg16": (0.05, 16),
    "vgg19": (0.05, 16),
    "resnet20": (0.25, 12),
    "resnet32": (0.125, 12),
    "wrn28_10": (0.025, 12),
    "resnet50": (0.03, 64),
    "mobilenet_v1": (0.1, 64),
    "small": (0.25, 14),
}


@pytest.mark.parametrize("coupling", ["filter", "stream"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_a_narrow_network_equals_the_masked_one_and_all_of_it_can_shrink(name: str, coupling: str) -> None:
    width, size = TINY[name]
    inputs = images(3, size)
    network = build(name, num_classes=5, width=width)
    report = slimstart.verify(network, inputs, coupling=coupling, num_masks=1)
    assert report.max_error < 1e-10
    graph = report.graph
    assert graph.coverage == 1.0
    assert set(graph.not_prunable.values()) == {"it is an output of the network"}
    everything = torch.ones(graph.num_units, dtype=torch.bool)
    assert slimstart.Flops(1.0).bind(graph.costs).cost(everything) == slimstart.flops(network, inputs)
    assert slimstart.Params(1.0).bind(graph.costs).cost(everything) == count(network)
    if coupling == "filter":  # every filter has a mask of its own
        assert graph.num_units == sum(conv.out_channels for conv in convolutions(network) if conv.groups == 1)


# ------------------------------------------------------------------------------------------------ blocks and start


def test_blocks_add_to_their_input() -> None:
    """A block whose branch is silent passes its input: through ReLU, or untouched where activation comes first."""
    x = torch.randn(2, 6, 5, 5)
    basic, bottleneck, wide = BasicBlock(6, 6, 1), Bottleneck(3, 6, 6, 1), WideBlock(6, 6, 1)
    for last in (basic.conv2, bottleneck.conv3, wide.conv2):
        nn.init.zeros_(last.weight)
    assert torch.equal(basic(x), x.clamp(min=0))
    assert torch.equal(bottleneck(x), x.clamp(min=0))
    assert torch.equal(wide(x), x)


def test_a_pre_activation_shortcut_reads_the_normalised_input() -> None:
    block = WideBlock(3, 4, 2).eval()
    nn.init.zeros_(block.conv2.weight)
    nn.init.constant_(block.bn1.running_mean, 0.5)
    nn.init.constant_(block.bn1.running_var, 4.0)
    x = torch.randn(2, 3, 6, 6)
    active = ((x - 0.5) / math.sqrt(4 + 1e-5)).clamp(min=0)
    assert block.shortcut is not None
    expected = torch.einsum("oi,nihw->nohw", block.shortcut.weight[:, :, 0, 0], active[:, :, ::2, ::2])
    torch.testing.assert_close(block(x), expected)


def test_convolutions_start_with_the_size_that_keeps_gradients() -> None:
    for network, layer, reached in (
        (MODELS["vgg16"](), "features.37", 512 * 9),
        (MODELS["resnet20"](), "stage3.2.conv2", 64 * 9),
        (MODELS["mobilenet_v1"](), "features.75", 9),  # depthwise: an input reaches one filter
        (MODELS["mobilenet_v1"](), "features.78", 1024),
    ):
        weight = network.get_parameter(f"{layer}.weight").detach()
        assert float(weight.std()) == pytest.approx(math.sqrt(2 / reached), rel=0.05)


def test_normalisation_starts_as_the_identity() -> None:
    # Zeros at the end of a branch would hide the branch, and its masks, from the loss.
    for name in MODELS:
        norms = [m for m in build(name, num_classes=2, width=0.1).modules() if isinstance(m, nn.BatchNorm2d)]
        assert all(bool((m.weight == 1).all() and (m.bias == 0).all()) for m in norms)


def test_resnet50_takes_published_weights_by_name() -> None:
    def norm(prefix: str) -> set[str]:
        parts = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        return {f"{prefix}.{part}" for part in parts}

    keys = {"conv1.weight", "fc.weight", "fc.bias"} | norm("bn1")
    for layer, blocks in enumerate((3, 4, 6, 3), start=1):
        keys |= {f"layer{layer}.0.downsample.0.weight"} | norm(f"layer{layer}.0.downsample.1")
        for block in range(blocks):
            for i in (1, 2, 3):
                keys |= {f"layer{layer}.{block}.conv{i}.weight"} | norm(f"layer{layer}.{block}.bn{i}")
    with torch.device("meta"):
        assert MODELS["resnet50"]().state_dict().keys() == keys


# ------------------------------------------------------------------------------------------------ by name


@pytest.mark.parametrize(
    ("argument", "value"),
    [("num_classes", 0), ("in_channels", 0), *(("width", value) for value in (0.0, -1.0, math.inf, math.nan))],
)
def test_impossible_sizes_are_refused(argument: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"`{argument}` is {value}; .*must be"):
        build("vgg16", **{"num_classes": 10, argument: value})


def test_an_unknown_name_is_refused_with_suggestions() -> None:
    with pytest.raises(
        ConfigError, match=r"`name` is 'mobilenet'; the networks are vgg16, .*; did you mean 'mobilenet_v1'\?"
    ) as caught:
        build("mobilenet", num_classes=10)
    assert all(name in str(caught.value) for name in MODELS)
    with pytest.raises(ConfigError, match="the networks are") as caught:
        build("zzz", num_classes=10)
    assert "did you mean" not in str(caught.value)


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """A stand-in for timm; the calls of `create_model`."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def create_model(name: str, **kwargs: Any) -> nn.Module:
        calls.append((name, kwargs))
        if kwargs["in_chans"] == 2:
            raise RuntimeError("two channels\nare odd")
        return nn.Linear(1, 1)

    module = SimpleNamespace(list_models=lambda: ["resnet18", "resnet34"], create_model=create_model)
    monkeypatch.setitem(sys.modules, "timm", module)
    return calls


def test_networks_of_timm_start_untrained_and_take_the_sizes(timm: list[tuple[str, dict[str, Any]]]) -> None:
    assert isinstance(build("timm:resnet18", num_classes=7, in_channels=1), nn.Linear)
    assert timm == [("resnet18", {"pretrained": False, "num_classes": 7, "in_chans": 1})]


def test_errors_of_timm_are_one_line(timm: list[tuple[str, dict[str, Any]]]) -> None:
    with pytest.raises(ConfigError, match=r"timm has no such network; did you mean 'resnet18'"):
        build("timm:resnet1", num_classes=7)
    with pytest.raises(ConfigError, match=r"timm has no such network$"):  # timm would fetch it
        build("timm:hf-hub:someone/something", num_classes=7)
    with pytest.raises(ConfigError, match=r"`width` is 0.5, but networks of timm have the width of their name"):
        build("timm:resnet18", num_classes=7, width=0.5)
    assert timm == []
    message = "timm cannot build 'resnet18' for 7 classes and 2 channels: RuntimeError: two channels are odd"
    with pytest.raises(ConfigError, match=message) as caught:
        build("timm:resnet18", num_classes=7, in_channels=2)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_timm_is_asked_for_only_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)  # as if it were not installed
    build("small", num_classes=10)
    with pytest.raises(ConfigError, match=r"`name` is 'timm:resnet18', but timm cannot be imported: .*Install timm"):
        build("timm:resnet18", num_classes=10)


# ------------------------------------------------------------------------------------------------ the user's own


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Writes `own_nets.py` into the current folder, which is on no path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "own_nets", raising=False)

    def write(source: str) -> None:
        (tmp_path / "own_nets.py").write_text("from torch import nn\n" + source)

    yield write
    sys.modules.pop("own_nets", None)


def test_factories_and_names_are_distinguished() -> None:
    assert is_factory("package.module:factory")
    assert not is_factory("vgg16")
    assert not is_factory("timm:resnet18")


def test_build_never_runs_user_code(write_module: Callable[[str], None]) -> None:
    write_module("raise SystemExit('this must not run')")
    with pytest.raises(ConfigError, match=r"a factory of your own; .*Call `slimstart.lab.models.from_factory`"):
        build("own_nets:make", num_classes=10)
    assert "own_nets" not in sys.modules


@pytest.mark.parametrize(
    ("signature", "in_channels", "expected"),
    [
        ("num_classes, in_channels", 3, {"num_classes": 7, "in_channels": 3}),
        ("*, in_channels=5, depth=2", 3, {"in_channels": 3}),
        ("", 3, {}),
        ("num_classes=10, /", 3, {"num_classes": 10}),  # cannot be given by name
        ("depth=3, **kwargs", 3, {"num_classes": 7}),
        ("depth=3, **kwargs", 1, {"num_classes": 7, "in_channels": 1}),
        ("in_channels, **kwargs", 3, {"num_classes": 7, "in_channels": 3}),
    ],
)
def test_a_factory_is_given_what_its_signature_takes(
    write_module: Callable[[str], None], signature: str, in_channels: int, expected: dict[str, int]
) -> None:
    write_module(
        f"def make({signature}):\n"
        "    seen = dict(locals())\n"
        "    net = nn.Identity()\n"
        "    net.seen = seen | seen.get('kwargs', {})\n"
        "    return net\n"
    )
    seen = from_factory("own_nets:make", num_classes=7, in_channels=in_channels).seen
    assert {name: value for name, value in seen.items() if name in ("num_classes", "in_channels")} == expected


def test_a_class_a_method_and_a_module_on_the_path_are_factories_too(write_module: Callable[[str], None]) -> None:
    write_module("class Nets:\n    make = staticmethod(lambda num_classes: nn.Linear(2, num_classes))\n")
    assert from_factory("own_nets:Nets.make", num_classes=7, in_channels=3).out_features == 7
    assert isinstance(from_factory("torch.nn:Identity", num_classes=7, in_channels=3), nn.Identity)


@pytest.mark.parametrize(
    ("source", "spec", "message", "cause"),
    [
        ("", "own_nets", r"`spec` is 'own_nets'; it must be 'module:factory'", None),
        ("", "own_nets:", r"it must be 'module:factory'", None),
        ("", ":make", r"it must be 'module:factory'", None),
        ("", "own_nets:a:b", r"it must be 'module:factory'", None),
        ("", "no_such_nets:make", "'no_such_nets' cannot be imported: ModuleNotFoundError", ModuleNotFoundError),
        ("", ".own_nets:make", "'.own_nets' cannot be imported: TypeError", TypeError),
        ("1 / 0", "own_nets:make", "'own_nets' cannot be imported: ZeroDivisionError", ZeroDivisionError),
        ("raise SystemExit(2)", "own_nets:make", "'own_nets' cannot be imported: SystemExit: 2", SystemExit),
        ("def make(:", "own_nets:make", "'own_nets' cannot be imported: SyntaxError", SyntaxError),
        ("", "own_nets:make", "'own_nets:make': AttributeError: .* no attribute 'make'", AttributeError),
        ("make = 3", "own_nets:make", "'own_nets:make' is a int; a factory must be callable", None),
        ("def make(): return [1]", "own_nets:make", "'own_nets:make' returns a list; .* an nn.Module", None),
        ("def make(): raise KeyError('a\\nb')", "own_nets:make", "'own_nets:make' fails: KeyError", KeyError),
        ("def make(depth): pass", "own_nets:make", "'own_nets:make' fails: TypeError: .*'depth'", TypeError),
    ],
)
def test_errors_of_factories_are_one_line(
    write_module: Callable[[str], None], source: str, spec: str, message: str, cause: type[BaseException] | None
) -> None:
    write_module(source)
    with pytest.raises(ConfigError, match=message) as caught:
        from_factory(spec, num_classes=10, in_channels=3)
    assert "\n" not in str(caught.value)
    assert cause is None or isinstance(caught.value.__cause__, cause)
