"""Export of finished networks to ONNX and torch.export, with a comparison of the outputs."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from slimstart.errors import ConfigError, ExportError
from slimstart.io import atomic


def to_onnx(network: nn.Module, path: str | os.PathLike[str], example: Tensor) -> float | None:
    """Write an ONNX file that takes any batch size.

    Returns:
        The largest difference from the network's own output, or None if onnxruntime is not installed.

    Raises:
        ConfigError: the packages that PyTorch's exporter needs are not installed.
    """
    network.eval()
    try:
        with _quiet():
            program = torch.onnx.export(
                network,
                (several(example),),
                dynamo=True,
                verbose=False,
                input_names=["images"],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
            )
    except ImportError as error:
        raise ConfigError(
            f"ONNX needs more packages ({error}); install them with: pip install slimstart[onnx]"
        ) from error
    assert program is not None
    content = program.model_proto.SerializeToString()
    try:
        import onnxruntime
    except ImportError:
        difference = None
    else:
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        images = several(example)
        (logits,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
        difference = compare(network, images, torch.from_numpy(logits), path)
    atomic.write(path, content)
    return difference


def to_torch(network: nn.Module, path: str | os.PathLike[str], example: Tensor) -> float:
    """Write a torch.export file (.pt2) that takes any batch size; returns the largest difference when read back."""
    if Path(path).suffix != ".pt2":
        raise ConfigError(f"`out` is {os.fspath(path)!r}; a file of torch.export must be called *.pt2")
    network.eval()
    images = several(example)
    with _quiet():
        program = torch.export.export(network, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        content = io.BytesIO()
        torch.export.save(program, content)
        again = torch.export.load(io.BytesIO(content.getvalue())).module()
    difference = compare(network, images, again(images), path)
    atomic.write(path, content.getvalue())
    return difference


def several(example: Tensor) -> Tensor:
    """Three different images: the exporters take a batch size of one for a constant."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, *example.shape[1:], generator=generator)


@torch.no_grad()
def compare(network: nn.Module, images: Tensor, output: Any, path: str | os.PathLike[str]) -> float:
    """The largest difference between outputs, one or several.

    Raises:
        ExportError: the difference is larger than rounding errors.
    """
    pairs = list(zip(tree_leaves(network(images)), tree_leaves(output), strict=True))
    difference = max(float((expected - found).abs().max()) for expected, found in pairs)
    if not difference <= 1e-3 * max(1.0, *(float(expected.abs().max()) for expected, _ in pairs)):
        raise ExportError(f"{os.fspath(path)} does not compute the same as the network: outputs differ by {difference}")
    return difference


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the output and the warnings of PyTorch's exporters."""
    exporter = logging.getLogger("torch.onnx")
    level = exporter.level
    exporter.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        exporter.setLevel(level)
