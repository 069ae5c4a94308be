"""Deployment: train a network at a quarter of its FLOPs, and write files that are read without slimstart.

    pip install 'slimstart[lab,onnx]'
    python examples/deployment.py --out out

Writes small.pt2 (torch.export), small.onnx, script.pt (TorchScript), small.py and small-HASH.pt (a class in plain
PyTorch, and its weights), and quantises to eight bits. About one minute on two CPU cores with the embedded data.
"""

import argparse
import copy
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnxruntime
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.ao.quantization import get_default_qconfig_mapping, quantize_fx

import slimstart
from slimstart.io.python_file import to_python
from slimstart.lab import data, models


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("out"))
    settings = parser.parse_args(arguments)

    found = data.load("fashion", batch_size=settings.batch_size)
    model: Any = models.build("small", num_classes=10, in_channels=1, width=settings.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    batches = list(found.train.epoch(0))
    image, steps = batches[0][0][:2], settings.epochs * len(batches)
    sparse = slimstart.SparseTraining(model, optimizer, image, slimstart.Flops(0.25), total_steps=steps)
    for epoch in range(settings.epochs):
        for images, labels in found.train.epoch(epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    model = sparse.finish(plain=True).eval()

    out = settings.out
    out.mkdir(parents=True, exist_ok=True)
    batch = {"images": {0: torch.export.Dim("batch")}}
    torch.export.save(torch.export.export(model, (image,), dynamic_shapes=(batch["images"],)), out / "small.pt2")
    options = {"dynamo": True, "verbose": False, "input_names": ["images"], "dynamic_shapes": (batch["images"],)}
    torch.onnx.export(model, (image,), str(out / "small.onnx"), **options)
    torch.jit.script(model).save(str(out / "script.pt"))
    to_python(model, out / "small.py", image)
    prepared = quantize_fx.prepare_fx(copy.deepcopy(model), get_default_qconfig_mapping("onednn"), (image,))
    for images, _ in batches[:10]:
        prepared(images)

    session = onnxruntime.InferenceSession(str(out / "small.onnx"))
    spec: Any = importlib.util.spec_from_file_location("small", out / "small.py")
    small = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(small)
    networks: dict[str, Callable[[Tensor], Tensor]] = {
        "finished": model,
        "torch.export": torch.export.load(out / "small.pt2").module(),
        "onnx": lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0]),
        "TorchScript": torch.jit.load(out / "script.pt"),
        "Python file": small.load(),
        "eight bits": quantize_fx.convert_fx(prepared),
    }
    for name, network in networks.items():
        with torch.no_grad():
            correct = torch.cat([network(images).argmax(1) == labels for images, labels in found.test.epoch(0)])
        print(f"{name}: {100 * float(correct.float().mean()):.2f} %")


if __name__ == "__main__":
    main()
