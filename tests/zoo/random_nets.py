"""Random small networks: a program of operations is drawn, and an ordinary module interprets it.

`build(seed)` gives the network of an integer; `networks()` is a hypothesis strategy over the same programs.
Every operation reads the newest tensor and perhaps earlier ones, so nothing that is computed goes unused.
The simplest choice is always listed first: hypothesis shrinks towards it.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

from . import shake

INPUT_SHAPE = (2, 3, 8, 8)
CLASSES = 5
WIDTHS = (4, 6, 8, 10, 12)
MAX_CHANNELS = 24
MAX_SIZE = 16
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}
Choose = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Op:
    """One step. `sources` are tensor numbers: 0 is the image, i + 1 the result of step i; the newest comes last."""

    kind: str
    sources: tuple[int, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self):
        inputs = ", ".join(f"t{s}" for s in self.sources)
        extra = "".join(f", {key}={value}" for key, value in self.settings.items())
        return f"{self.kind}({inputs}{extra})"


@dataclass(frozen=True)
class Program:
    """The steps, the head, and the (channels, size) of every tensor."""

    ops: tuple[Op, ...]
    head: Op
    shapes: tuple[tuple[int, int], ...]

    def __str__(self):
        lines = [f"t0 = image {self.shapes[0]}"]
        lines += [f"t{i + 1} = {op} {self.shapes[i + 1]}" for i, op in enumerate(self.ops)]
        return "\n".join([*lines, f"out = {self.head}"])


# --------------------------------------------------------------------------- drawing a program


def _divisors(n: int, largest: int = 6) -> list[int]:
    return [d for d in range(2, min(n, largest) + 1) if n % d == 0]


def _finish(choose: Choose) -> dict[str, Any]:
    """What follows a convolution."""
    return {"norm": choose((False, True)), "act": choose(("relu", "none", "gelu", "silu", "sigmoid"))}


def _conv(choose, shapes, last):
    _, s = shapes[last]
    out = choose(WIDTHS)
    kernel = choose((3, 1))
    stride = choose((1, 1, 2)) if s >= 4 else 1
    settings = {"out": out, "kernel": kernel, "stride": stride, "bias": choose((True, False)), **_finish(choose)}
    return Op("conv", (last,), settings), (out, s // stride)


def _grouped_conv(choose, shapes, last):
    c, s = shapes[last]
    groups = choose(_divisors(c, 4))
    out = groups * choose([m for m in (1, 2, 3, 4) if 4 <= groups * m <= 12])
    stride = choose((1, 1, 2)) if s >= 4 else 1
    settings = {"out": out, "groups": groups, "stride": stride, **_finish(choose)}
    return Op("grouped_conv", (last,), settings), (out, s // stride)


def _depthwise_conv(choose, shapes, last):
    c, s = shapes[last]
    multiplier = choose((1, 2)) if 2 * c <= MAX_CHANNELS else 1
    return Op("depthwise_conv", (last,), {"multiplier": multiplier, **_finish(choose)}), (c * multiplier, s)


def _residual(choose, shapes, last):
    settings = {"hidden": choose(WIDTHS), "norm": choose((False, True)), "act": choose(("none", "relu"))}
    return Op("residual", (last,), settings), shapes[last]


def _block(choose, shapes, last):
    """A residual block that is a module of its own."""
    settings = {"hidden": choose(WIDTHS), "norm": choose((False, True)), "act": choose(("none", "relu"))}
    return Op("block", (last,), {**settings, "form": choose(("plain", "keyword", "tuple", "in_place"))}), shapes[last]


def _same(choose, shapes, last):
    """A convolution of equal input and output, with modules around it; perhaps its result is used twice."""
    settings = {"depthwise": choose((False, True)), "norm": choose((False, True)), "act": choose((None, "relu"))}
    return Op("same", (last,), {**settings, "form": choose(("flat", "module")), "kernel": choose((3, 1))}), shapes[last]


def _add(choose, shapes, last):
    c, s = shapes[last]
    same = [i for i in range(last) if shapes[i] == (c, s)]
    larger = [i for i in range(last) if shapes[i] != (c, s) and shapes[i][1] >= s]
    other = choose(same) if same and (not larger or choose((True, True, False))) else choose(larger or same)
    settings = {"project": shapes[other] != (c, s), "norm": choose((False, True)), "act": choose(("none", "relu"))}
    return Op("add", (other, last), settings), (c, s)


def _concat_candidates(shapes, last):
    c, s = shapes[last]
    return [i for i in range(last, -1, -1) if shapes[i][1] == s and shapes[i][0] + c <= MAX_CHANNELS]


def _concat(choose, shapes, last):
    c, s = shapes[last]
    other = choose(_concat_candidates(shapes, last))
    return Op("concat", (other, last), {"newest_first": choose((True, False))}), (c + shapes[other][0], s)


def _chunk(choose, shapes, last):
    c, s = shapes[last]
    mode = choose(("swap", "conv", "gate", "split"))
    if mode == "gate":
        return Op("chunk", (last,), {"mode": mode}), (c // 2, s)
    if mode == "split":
        first = choose(range(1, c))
        return Op("chunk", (last,), {"mode": mode, "sizes": (first, c - first), "act": "relu"}), (c, s)
    return Op("chunk", (last,), {"mode": mode, "act": "relu"}), (c, s)


def _se_gate(choose, shapes, last):
    c, _ = shapes[last]
    settings = {"squeeze": max(2, c // 2), "linear": choose((False, True)), "gate": choose(("sigmoid", "hardsigmoid"))}
    return Op("se_gate", (last,), settings), shapes[last]


def _pixel_shuffle(choose, shapes, last):
    c, s = shapes[last]
    if c % 4 or choose((True, False)):
        out = choose((2, 4, 6))
        return Op("pixel_shuffle", (last,), {"expand": 4 * out}), (out, 2 * s)
    return Op("pixel_shuffle", (last,), {"expand": 0}), (c // 4, 2 * s)


def _pool(choose, shapes, last):
    c, s = shapes[last]
    return Op("pool", (last,), {"mode": choose(("max", "avg"))}), (c, s // 2)


def _channel_shuffle(choose, shapes, last):
    return Op("channel_shuffle", (last,), {"groups": choose(_divisors(shapes[last][0]))}), shapes[last]


def _twice(choose, shapes, last):
    settings = {"kernel": choose((1, 3)), "norm": choose((False, True)), "residual": choose((False, True))}
    return Op("twice", (last,), settings), shapes[last]


def _group_norm(choose, shapes, last):
    groups = choose([1, *_divisors(shapes[last][0])])
    return Op("group_norm", (last,), {"groups": groups}), shapes[last]


def _batch_norm(choose, shapes, last):
    return Op("batch_norm", (last,), {"act": choose(("none", "relu"))}), shapes[last]


def _activation(choose, shapes, last):
    return Op("activation", (last,), {"act": choose(("relu", "gelu", "silu", "sigmoid"))}), shapes[last]


def _always(shapes, last):
    return True


# Each operation with what it needs of the tensors so far.
_OPS: tuple[tuple[Callable, Callable], ...] = (
    (_conv, _always),
    (_residual, lambda shapes, last: last > 0),
    (_add, lambda shapes, last: any(s >= shapes[last][1] for _, s in shapes[:-1])),
    (_concat, lambda shapes, last: last > 0 and bool(_concat_candidates(shapes, last))),
    (_grouped_conv, lambda shapes, last: bool(_divisors(shapes[last][0], 4))),
    (_depthwise_conv, _always),
    (_chunk, lambda shapes, last: shapes[last][0] % 2 == 0 and shapes[last][0] >= 4),
    (_se_gate, lambda shapes, last: last > 0),
    (_pixel_shuffle, lambda shapes, last: 2 * shapes[last][1] <= MAX_SIZE and last > 0),
    (_pool, lambda shapes, last: shapes[last][1] >= 4),
    (_channel_shuffle, lambda shapes, last: len(_divisors(shapes[last][0])) > 0 and shapes[last][0] >= 4),
    (_twice, lambda shapes, last: last > 0),
    (_group_norm, lambda shapes, last: last > 0),
    (_batch_norm, lambda shapes, last: last > 0),
    (_activation, lambda shapes, last: last > 0),
    (_block, lambda shapes, last: last > 0),
    (_same, lambda shapes, last: last > 0),
)


def draw_program(choose: Choose) -> Program:
    """Draw a program of 3 to 9 operations; `choose` picks one element of a sequence."""
    shapes = [INPUT_SHAPE[1:3]]
    ops: list[Op] = []
    for i in range(choose(range(3, 10))):
        # Convolutions and removable layers are common; the first step always is a convolution, so that there are
        # channels to work with.
        allowed = [make for make, possible in _OPS if possible(shapes, i)]
        make = _conv if i == 0 else choose([_conv, _conv, *allowed, _same, _block])
        op, shape = make(choose, shapes, i)
        ops.append(op)
        shapes.append(shape)
    settings = {"mode": choose(("mean", "adaptive", "flatten")), "hidden": choose((0, 8)), "act": "relu"}
    return Program(tuple(ops), Op("head", (len(ops),), settings), tuple(shapes))


# --------------------------------------------------------------------------- the network


class Block(nn.Module):
    """A residual block; `form` says how it is called, and what it returns."""

    def __init__(self, c, hidden, norm, act, form):
        super().__init__()
        self.act, self.form = act, form
        self.conv1 = nn.Conv2d(c, hidden, 3, padding=1)
        self.norm = nn.BatchNorm2d(hidden) if norm else nn.Identity()
        self.conv2 = nn.Conv2d(hidden, c, 1)

    def forward(self, x, scale=1.0):
        y = scale * self.conv2(F.relu(self.norm(self.conv1(x))))
        y = ACTIVATIONS[self.act](y.add_(x) if self.form == "in_place" else x + y)
        return (y, None) if self.form == "tuple" else y


class RandomNet(nn.Module):
    """Interprets a program. Modules are held by name: the number of their step and their role."""

    def __init__(self, program: Program):
        super().__init__()
        self.program = program
        self.parts = nn.ModuleDict()
        for i, op in enumerate(program.ops):
            getattr(self, f"_make_{op.kind}")(str(i), op, *(program.shapes[s][0] for s in op.sources))
        self._make_head(program.head)

    def extra_repr(self):
        return str(self.program)

    def forward(self, x):
        values = [x]
        for i, op in enumerate(self.program.ops):
            values.append(getattr(self, f"_run_{op.kind}")(str(i), op.settings, *(values[s] for s in op.sources)))
        return self._run_head(values[-1])

    def _finish(self, name, settings, x):
        if f"{name}_norm" in self.parts:
            x = self.parts[f"{name}_norm"](x)
        return ACTIVATIONS[settings.get("act", "none")](x)

    # convolutions

    def _make_conv(self, name, op, c):
        s = op.settings
        padding = s["kernel"] // 2
        self.parts[f"{name}_conv"] = nn.Conv2d(c, s["out"], s["kernel"], s["stride"], padding, bias=s["bias"])
        if s["norm"]:
            self.parts[f"{name}_norm"] = nn.BatchNorm2d(s["out"])

    def _run_conv(self, name, s, x):
        return self._finish(name, s, self.parts[f"{name}_conv"](x))

    def _make_grouped_conv(self, name, op, c):
        s = op.settings
        self.parts[f"{name}_conv"] = nn.Conv2d(c, s["out"], 3, s["stride"], 1, groups=s["groups"], bias=not s["norm"])
        if s["norm"]:
            self.parts[f"{name}_norm"] = nn.BatchNorm2d(s["out"])

    _run_grouped_conv = _run_conv

    def _make_depthwise_conv(self, name, op, c):
        s = op.settings
        out = c * s["multiplier"]
        self.parts[f"{name}_conv"] = nn.Conv2d(c, out, 3, padding=1, groups=c, bias=not s["norm"])
        if s["norm"]:
            self.parts[f"{name}_norm"] = nn.BatchNorm2d(out)

    _run_depthwise_conv = _run_conv

    def _make_residual(self, name, op, c):
        s = op.settings
        self.parts[f"{name}_conv1"] = nn.Conv2d(c, s["hidden"], 3, padding=1)
        self.parts[f"{name}_inner"] = nn.BatchNorm2d(s["hidden"]) if s["norm"] else nn.Identity()
        self.parts[f"{name}_conv2"] = nn.Conv2d(s["hidden"], c, 3, padding=1)

    def _run_residual(self, name, s, x):
        y = F.relu(self.parts[f"{name}_inner"](self.parts[f"{name}_conv1"](x)))
        return ACTIVATIONS[s["act"]](x + self.parts[f"{name}_conv2"](y))

    def _make_block(self, name, op, c):
        self.parts[f"{name}_block"] = Block(c, **op.settings)

    def _run_block(self, name, s, x):
        block = self.parts[f"{name}_block"]
        y = block(x, scale=0.5) if s["form"] == "keyword" else block(x)
        return y[0] if block.form == "tuple" else y

    def _make_same(self, name, op, c):
        s = op.settings
        made = {"conv": nn.Conv2d(c, c, s["kernel"], padding=s["kernel"] // 2)}
        if s["depthwise"]:
            made = {"depthwise": nn.Conv2d(c, c, 3, padding=1, groups=c), **made}
        if s["norm"]:
            made["norm"] = nn.BatchNorm2d(c)
        if s["act"]:
            made["act"] = nn.ReLU(inplace=s["norm"])
        if s["form"] == "module":
            made = {"layers": nn.Sequential(*made.values())}
        for key, module in made.items():
            self.parts[f"{name}_{key}"] = module

    def _run_same(self, name, s, x):
        for key in ("layers", "depthwise", "conv", "norm", "act"):
            if f"{name}_{key}" in self.parts:
                x = self.parts[f"{name}_{key}"](x)
        return x

    def _make_twice(self, name, op, c):
        kernel = op.settings["kernel"]
        self.parts[f"{name}_conv"] = nn.Conv2d(c, c, kernel, padding=kernel // 2)
        if op.settings["norm"]:
            self.parts[f"{name}_norm"] = nn.BatchNorm2d(c)

    def _run_twice(self, name, s, x):
        for _ in range(2):
            y = F.relu(self._finish(name, s, self.parts[f"{name}_conv"](x)))
            x = x + y if s["residual"] else y
        return x

    # combinations of tensors

    def _make_add(self, name, op, other, c):
        if op.settings["project"]:
            stride = self.program.shapes[op.sources[0]][1] // self.program.shapes[op.sources[1]][1]
            self.parts[f"{name}_project"] = nn.Conv2d(other, c, 1, stride, bias=not op.settings["norm"])
            if op.settings["norm"]:
                self.parts[f"{name}_norm"] = nn.BatchNorm2d(c)

    def _run_add(self, name, s, other, x):
        if s["project"]:
            other = self._finish(name, {}, self.parts[f"{name}_project"](other))
        return ACTIVATIONS[s["act"]](x + other)

    def _make_concat(self, name, op, other, c):
        pass

    def _run_concat(self, name, s, other, x):
        return torch.cat([x, other] if s["newest_first"] else [other, x], dim=1)

    def _make_chunk(self, name, op, c):
        mode = op.settings["mode"]
        if mode in ("conv", "split"):
            part = op.settings["sizes"][0] if mode == "split" else c // 2
            self.parts[f"{name}_conv"] = nn.Conv2d(part, part, 3, padding=1)

    def _run_chunk(self, name, s, x):
        if s["mode"] == "split":
            a, b = torch.split(x, list(s["sizes"]), dim=1)
        else:
            a, b = x.chunk(2, dim=1)
        if s["mode"] == "gate":
            return a * torch.sigmoid(b)
        if s["mode"] == "swap":
            return torch.cat([b, a], dim=1)
        return torch.cat([self._finish(name, s, self.parts[f"{name}_conv"](a)), b], dim=1)

    def _make_se_gate(self, name, op, c):
        squeeze = op.settings["squeeze"]
        if op.settings["linear"]:
            self.parts[f"{name}_fc1"], self.parts[f"{name}_fc2"] = nn.Linear(c, squeeze), nn.Linear(squeeze, c)
        else:
            self.parts[f"{name}_fc1"], self.parts[f"{name}_fc2"] = nn.Conv2d(c, squeeze, 1), nn.Conv2d(squeeze, c, 1)

    def _run_se_gate(self, name, s, x):
        y = F.adaptive_avg_pool2d(x, 1)
        if s["linear"]:
            y = y.flatten(1)
        y = self.parts[f"{name}_fc2"](F.relu(self.parts[f"{name}_fc1"](y)))
        y = torch.sigmoid(y) if s["gate"] == "sigmoid" else F.hardsigmoid(y)
        return x * (y[:, :, None, None] if s["linear"] else y)

    # rearrangements

    def _make_pixel_shuffle(self, name, op, c):
        if op.settings["expand"]:
            self.parts[f"{name}_expand"] = nn.Conv2d(c, op.settings["expand"], 1)

    def _run_pixel_shuffle(self, name, s, x):
        if s["expand"]:
            x = self.parts[f"{name}_expand"](x)
        return F.pixel_shuffle(x, 2)

    def _make_channel_shuffle(self, name, op, c):
        pass

    def _run_channel_shuffle(self, name, s, x):
        n, c, h, w = x.shape
        groups = s["groups"]
        return x.view(n, groups, c // groups, h, w).transpose(1, 2).reshape(n, c, h, w)

    def _make_pool(self, name, op, c):
        self.parts[f"{name}_pool"] = nn.MaxPool2d(2) if op.settings["mode"] == "max" else nn.AvgPool2d(2)

    def _run_pool(self, name, s, x):
        return self.parts[f"{name}_pool"](x)

    # normalisation and activation

    def _make_group_norm(self, name, op, c):
        self.parts[f"{name}_gn"] = nn.GroupNorm(op.settings["groups"], c)

    def _run_group_norm(self, name, s, x):
        return self.parts[f"{name}_gn"](x)

    def _make_batch_norm(self, name, op, c):
        self.parts[f"{name}_norm"] = nn.BatchNorm2d(c)

    def _run_batch_norm(self, name, s, x):
        return self._finish(name, s, x)

    def _make_activation(self, name, op, c):
        pass

    def _run_activation(self, name, s, x):
        return self._finish(name, s, x)

    # the head

    def _make_head(self, op):
        c, size = self.program.shapes[-1]
        features = c * size * size if op.settings["mode"] == "flatten" else c
        if op.settings["hidden"]:
            self.hidden = nn.Linear(features, op.settings["hidden"])
            features = op.settings["hidden"]
        else:
            self.hidden = None
        self.fc = nn.Linear(features, CLASSES)

    def _run_head(self, x):
        mode = self.program.head.settings["mode"]
        if mode == "mean":
            x = x.mean([2, 3])
        elif mode == "adaptive":
            x = F.adaptive_avg_pool2d(x, 1).view(x.size(0), -1)
        else:
            x = x.flatten(1)
        if self.hidden is not None:
            x = F.relu(self.hidden(x))
        return self.fc(x)


# --------------------------------------------------------------------------- entry points


def _instantiate(program: Program, seed: int) -> RandomNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = RandomNet(program)
    return shake(net, seed)


def example_input(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(INPUT_SHAPE, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def build(seed: int) -> RandomNet:
    """The network of this seed: the same program and the same weights every time."""
    return _instantiate(draw_program(random.Random(seed).choice), seed)


@st.composite
def programs(draw) -> Program:
    return draw_program(lambda options: draw(st.sampled_from(list(options))))


@st.composite
def networks(draw) -> RandomNet:
    """A strategy of networks; the program is in `.program`."""
    return _instantiate(draw(programs()), draw(st.integers(0, 2**16)))
