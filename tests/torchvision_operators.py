"""Operators of torchvision that its wheel cannot load, so that it can be imported.

The wheel of torchvision on PyPI is compiled against PyTorch with CUDA. With PyTorch for CPUs its library does not load,
and `import torchvision` fails with "operator torchvision::nms does not exist"; so do timm, Lightning and transformers,
which import it. Import this module before them. It does nothing where the library loads, or is not installed.
"""

import importlib.util
from pathlib import Path

import torch
from torch import Tensor

_defined = torch.library.Library("torchvision", "FRAGMENT")


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Indices of the boxes that overlap no better one by more than the threshold, by falling score."""
    low, high = boxes[:, :2], boxes[:, 2:]
    both = (torch.minimum(high[:, None], high) - torch.maximum(low[:, None], low)).clamp(min=0).prod(-1)
    area = (high - low).prod(-1)
    overlap = both / (area[:, None] + area - both)
    kept: list[int] = []
    for one in scores.argsort(descending=True).tolist():
        if all(overlap[one, other] <= iou_threshold for other in kept):
            kept.append(one)
    return torch.tensor(kept, dtype=torch.long)


def _define() -> None:
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    try:
        torch.ops.load_library(Path(found.origin).with_name("_C.so"))
    except OSError:
        for name in ("nms", "qnms"):
            _defined.define(f"{name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
        _defined.impl("nms", nms, "CPU")


_define()
