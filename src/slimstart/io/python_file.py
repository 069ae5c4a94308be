"""Export of finished networks to a Python file that needs PyTorch alone.

The forward is read off by `torch.fx`, and the layers are written as calls of their constructors:

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(nn.Conv2d(3, 14, 3), nn.ReLU(), ...)

        def forward(self, images):
            ...
"""

from __future__ import annotations

import hashlib
import inspect
import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from slimstart.errors import ConfigError, ExportError
from slimstart.io import atomic
from slimstart.io.export import compare, several
from slimstart.io.files import Folder
from slimstart.narrow.stream_ports import StreamPort

_INSTEAD = "write the class with narrow arguments yourself, or fit the dense class with slimstart.shrink_to"
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_EVERYWHERE = ("kernel_size", "stride", "padding", "dilation", "output_padding")  # one number for all dimensions

_FILE = '''"""{name}, made narrow by slimstart. `load()` reads its weights from {weights}."""

from pathlib import Path

import torch
from torch import nn


{definition}

def load(path=None):
    if path is None:
        path = Path(__file__).with_name({weights!r})
    model = {make}
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()
'''


def to_python(network: nn.Module, path: str | os.PathLike[str], example: Tensor) -> float:
    """Write a Python file that defines a network, and its state dict next to it.

    The state dict is called `NAME-HASH.pt`, and the one of an older file of the same name is removed. At any moment,
    the file's `load` finds the old network or the new one.

    The network consists of PyTorch's own layers, and its forward can be traced by `torch.fx`: it has no branches that
    depend on tensors. Layers with ports (`finish` without `plain=True`) cannot be written.

    Returns:
        The largest difference between the outputs of the network and of the file, when it is read back.

    Raises:
        ExportError: the network cannot be written; the error says why.
    """
    path = Path(path)
    if path.suffix != ".py":
        raise ConfigError(f"`out` is {os.fspath(path)!r}; a Python file must be called *.py")
    network.eval()
    definition, make = _definition(network)
    content = io.BytesIO()
    torch.save(network.state_dict(), content)
    weights = f"{path.stem}-{hashlib.sha256(content.getvalue()).hexdigest()[:16]}.pt"
    source = _FILE.format(name=type(network).__name__, weights=weights, definition=definition, make=make)
    namespace: dict[str, Any] = {"__name__": path.stem, "__file__": os.fspath(path)}
    images = several(example)
    try:
        exec(compile(source, os.fspath(path), "exec", dont_inherit=True), namespace)
        again = eval(make, namespace)
        again.load_state_dict(network.state_dict())
        with torch.no_grad():
            output = again.eval()(images)
    except Exception as error:
        raise ExportError(
            f"{type(network).__name__} cannot be written as Python: {type(error).__name__}: {error}; {_INSTEAD}"
        ) from error
    difference = compare(network, images, output, path)
    with atomic.turn(path.parent):
        atomic.write(path.with_name(weights), content.getvalue())
        atomic.write(path, source.encode())  # decides which weights `load` finds
        with Folder(path.parent) as folder:
            older = rf"{re.escape(path.stem)}-[0-9a-f]{{16}}\.pt(\.[0-9a-f]{{16}}\.partial)?"
            for name in filter(re.compile(older).fullmatch, folder.names()):
                if name != weights:
                    folder.remove(name)
    return difference


class _Tracer(fx.Tracer):
    """Treats a chain of PyTorch's layers as one layer."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return _is_chain(m) or _is_layer(m)


def _is_layer(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, _CONTAINERS)


def _is_chain(module: nn.Module) -> bool:
    """Whether a module is a Sequential of PyTorch's layers and of others like it."""
    if type(module) is not nn.Sequential or not _are_counted(module._modules):
        return False
    return all(_is_chain(child) or _is_layer(child) for child in module)


def _are_counted(names: Iterable[str]) -> bool:
    return list(names) == [str(number) for number, _ in enumerate(names)]


def _definition(network: nn.Module) -> tuple[str, str]:
    """The definition of a network's class or function, and the call that makes it."""
    if any(isinstance(module, StreamPort) for module in network.modules()):
        raise ExportError("the network has ports on residual streams; write it after `finish(plain=True)`")
    if _is_chain(network):
        body = _made(network, "", 1)
        return f"def make():\n    return {body}\n", "make()"
    try:
        graph = _Tracer().trace(network)
    except Exception as error:
        raise ExportError(f"torch.fx cannot trace {type(network).__name__}: {error}; {_INSTEAD}") from error
    for node in graph.nodes:
        node.type = None  # an annotation, which may be a name that the file does not have
        if node.op == "get_attr":
            raise ExportError(
                f"{type(network).__name__} uses {node.target!r} outside of PyTorch's layers, which cannot be written; "
                f"{_INSTEAD}"
            )
    tree: dict[str, Any] = {}
    for path, module in _layers(network):
        *parents, name = path.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = module
    lines = [f"        self.{name} = {_made(part, name, 2)}" for name, part in tree.items()]
    forward = re.sub(r";  .* = None", "", graph.python_code("self").src).strip()
    forward = "\n".join(f"    {line}".rstrip() for line in forward.splitlines())
    name = type(network).__name__
    init = "\n".join(["    def __init__(self):", "        super().__init__()", *lines])
    return f"class {name}(nn.Module):\n{init}\n\n{forward}\n", f"{name}()"


def _layers(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The layers and chains of a network, with their names, and other modules that have tensors of their own."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if _is_chain(child) or _is_layer(child) or child._parameters or child._buffers:
            yield path, child
        else:
            yield from _layers(child, f"{path}.")


def _made(part: nn.Module | Mapping[str, Any], path: str, depth: int) -> str:
    """The expression that makes a layer, a chain, or a container of them."""
    if isinstance(part, nn.Module) and not _is_chain(part):
        return _call(part, path)
    children: Mapping[str, Any] = part._modules if isinstance(part, nn.Module) else part
    opening, closing, named = "nn.Sequential(", ")", False
    if not isinstance(part, nn.Module):
        named = not _are_counted(part)
        opening, closing = ("nn.ModuleDict({", "})") if named else ("nn.ModuleList([", "])")
    indent = "    " * depth
    lines = [opening]
    for name, child in children.items():
        expression = _made(child, f"{path}.{name}", depth + 1)
        lines.append(f"{indent}    {f'{name!r}: ' if named else ''}{expression},")
    return "\n".join([*lines, f"{indent}{closing}"])


def _call(module: nn.Module, path: str) -> str:
    """The constructor's call that makes a layer of PyTorch's."""
    cls = type(module)
    if not _is_layer(module):
        raise ExportError(f"{path!r} is a {cls.__name__}, which is no layer of PyTorch; {_INSTEAD}")
    arguments = []
    for name, parameter in inspect.signature(cls).parameters.items():
        if name in ("device", "dtype") or name.startswith("_") or parameter.kind is parameter.VAR_KEYWORD:
            continue
        if parameter.kind is parameter.VAR_POSITIONAL and not any(True for _ in module.parameters()):  # Identity, Tanh
            continue
        if not hasattr(module, name):
            raise ExportError(f"{path!r} is a {cls.__name__}, whose {name!r} cannot be read; {_INSTEAD}")
        value = getattr(module, name)
        if name == "bias":
            value = value is not None
        elif name in _EVERYWHERE and isinstance(value, tuple) and len(set(value)) == 1:
            value = value[0]
        if parameter.default is parameter.empty:
            arguments.append(repr(value))
        elif value != parameter.default:
            arguments.append(f"{name}={value!r}")
    return f"nn.{cls.__name__}({', '.join(arguments)})"
