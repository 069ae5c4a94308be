"""What shrinks in 117 models of torchvision, timm and transformers, beside Torch-Pruning. Run from the repository root.

    python benchmarks/zoo.py --out results/zoo.json
    python benchmarks/zoo.py --out results/zoo.json --again --only Swin Llama    # again, for models with such names

Every model has random weights, small inputs, and a process of its own with limits on time and memory. Rows of an
existing record are kept, so an interrupted sweep goes on where it was; `--again` replaces those of slimstart.
torchvision, timm and transformers must be installed, Torch-Pruning may be.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import logging
import math
import multiprocessing
import re
import resource
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import benchmark_record
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zoo_models import MODELS, Entry

import slimstart
from slimstart.graph import ChannelGraph
from slimstart.inputs import as_call
from slimstart.lab.run.environment import facts
from slimstart.narrow.compact import compact

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import tests.torchvision_operators  # noqa: F401  # before timm and transformers, which import torchvision

STEPS = 10
BUDGET = 0.5
PRUNING_SECONDS = 8  # of processor time; on some networks Torch-Pruning does not end
TOLD = ("coverage", "attention_layers", "with_fewer_heads", "verify_error", "flops_left")
Row = dict[str, Any]
Tell = Callable[[Row], None]


@dataclass(frozen=True)
class Limits:
    """Of one process: seconds of processor time, and memory."""

    seconds: int
    gigabytes: float


def message(error: BaseException) -> str:
    """The first sentences of an error, in one line."""
    return f"{type(error).__name__}: " + re.sub(r"\s+", " ", str(error))[:400]


# --- attention: the number of heads of every layer, from the operations that run --------------------------------------


class Attentions(TorchDispatchMode):
    """Counts the score matrices of every attention that runs: heads times batch (and windows)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []  # module, number of matrices
        self._modules = [""]
        self._handles = []
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._modules.append(name)))
            self._handles.append(
                module.register_forward_hook(lambda *_: self._modules.pop() and None, always_call=True)
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        attends = "softmax" in name or "scaled_dot_product" in name
        if attends and isinstance(args[0], Tensor) and args[0].dim() >= 3:
            self.found.append((self._modules[-1], args[0].shape[:-2].numel()))
        return func(*args, **(kwargs or {}))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


@torch.no_grad()
def attentions(model: nn.Module, inputs: Any) -> list[tuple[str, int]]:
    """Module and number of score matrices of every attention in one forward."""
    args, kwargs = as_call(inputs)
    model.eval()
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with Attentions(model) as mode:
            model(*args, **kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
    mode.close()
    return mode.found


def several_heads(model: nn.Module, name: str) -> bool:
    """Whether an attention has more than one head, by the attribute of the module around it."""
    places = [name[:end] for end in range(len(name), -1, -1) if end == len(name) or name[end] == "." or end == 0]
    for place in map(model.get_submodule, dict.fromkeys(places)):
        for attribute in ("num_heads", "heads", "n_heads", "n_head", "num_attention_heads"):
            if isinstance(count := getattr(place, attribute, None), int):
                return count > 1
    return True


def heads(model: nn.Module, graph: ChannelGraph, inputs: Any) -> Row:
    """In how many attention layers of the narrowest network there are fewer heads."""
    dense = attentions(model, inputs)
    narrowest = graph.select(torch.zeros(graph.num_units, dtype=torch.bool))
    narrow = attentions(compact(model, narrowest), inputs)
    pairs = zip(dense, narrow, strict=True)
    layers = [(name, before, after) for (name, before), (_, after) in pairs if several_heads(model, name)]
    return {"attention_layers": len(layers), "with_fewer_heads": sum(after < before for _, before, after in layers)}


# --- what is tried ----------------------------------------------------------------------------------------------------


def floating(output: Any) -> list[Tensor]:
    """All floating-point tensors of an output, the first four at most: logits and what comes with them."""
    found = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point() and t.requires_grad]
    return found[:4]


def loss_of(output: Any) -> Tensor:
    """A loss with a gradient everywhere: the mean square of the distance to fixed random numbers."""
    generator = torch.Generator().manual_seed(1)
    tensors = floating(output)
    total = sum((t - torch.randn(t.shape, generator=generator)).square().mean() for t in tensors)
    assert isinstance(total, Tensor)
    return total


def trains(model: nn.Module, inputs: Any) -> Row:
    """Ten steps at `Flops(0.5)`, as a user writes them."""
    args, kwargs = as_call(inputs)
    dense = slimstart.flops(model, inputs)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    sparse = slimstart.SparseTraining(model, optimizer, inputs, budget=slimstart.Flops(BUDGET), total_steps=STEPS)
    widths = {tuple(map(tuple, (p.shape for p in model.parameters())))}
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model(*args, **kwargs))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        widths.add(tuple(map(tuple, (p.shape for p in model.parameters()))))
    finished = sparse.finish()
    return {
        "trained": all(map(math.isfinite, losses)),
        "structures": len(widths),
        "flops_left": slimstart.flops(finished, inputs) / dense,
    }


def torch_pruning(entry: Entry, tell: Tell) -> None:
    """Torch-Pruning by the recipes of its examples: magnitude, one share for all layers, heads where they are known.

    Its examples for timm and transformers keep the classifier, and name the number of heads of each projection to
    queries, keys and values.
    """
    import torch_pruning as tp

    torch.manual_seed(0)
    model, inputs = entry.build(), entry.inputs()
    args, kwargs = as_call(inputs)
    dense = slimstart.flops(model, inputs)
    model.eval()
    num_heads: dict[nn.Module, int] = {}
    ignored: list[nn.Module] = []
    for module in model.modules():
        count = next((getattr(module, n) for n in ("num_heads", "num_attention_heads", "n_heads", "n_head")
                      if isinstance(getattr(module, n, None), int)), None)  # fmt: skip
        config = getattr(module, "config", None)
        if count is None and config is not None and hasattr(module, "q_proj"):
            count = getattr(config, "num_attention_heads", None)
        for name in ("qkv", "q", "k", "v", "kv", "query", "key", "value", "q_proj", "k_proj", "v_proj", "c_attn"):
            child = getattr(module, name, None)
            if count and isinstance(child, nn.Linear):
                fewer = getattr(config, "num_key_value_heads", None) if name in ("k_proj", "v_proj") else None
                num_heads[child] = fewer or count
        outputs = getattr(module, "out_features", getattr(module, "out_channels", None))
        if isinstance(module, nn.Linear | nn.Conv2d) and outputs in (2, 5, 10, 96):
            ignored.append(module)
    pruner = tp.pruner.MagnitudePruner(
        model,
        example_inputs=kwargs or args,
        importance=tp.importance.GroupMagnitudeImportance(p=2),
        pruning_ratio=0.3,
        ignored_layers=ignored,
        num_heads=num_heads,
        prune_num_heads=bool(num_heads),
        prune_head_dims=not num_heads,
        head_pruning_ratio=0.3,
        output_transform=lambda output: sum(t.sum() for t in floating(output)),
    )
    pruner.step()
    for module in model.modules():  # as its examples do: the numbers that forwards reshape with
        for name in ("qkv", "query", "q_proj"):
            child = getattr(module, name, None)
            if isinstance(child, nn.Module) and child in pruner.num_heads and entry.package == "timm":
                module.num_heads = pruner.num_heads[child]  # type: ignore[assignment]
                module.head_dim = child.out_features // (3 * module.num_heads)  # type: ignore[assignment,operator]
    left = slimstart.flops(model, inputs) / dense
    tell({"torch_pruning_flops_left": left})
    model.train()
    loss_of(model(*args, **kwargs)).backward()
    tell({"torch_pruning_trains": left < 1.0})


def tried(entry: Entry, tell: Tell) -> None:
    """All that is measured of a model; every piece is told at once, so that it is kept if a later one fails."""
    torch.manual_seed(0)
    model, inputs = entry.build(), entry.inputs()
    tell({"parameters": sum(p.numel() for p in model.parameters()), "dense_flops": slimstart.flops(model, inputs)})

    @contextmanager
    def part(name: str) -> Iterator[None]:
        began = time.process_time()
        try:
            yield
        except Exception as error:  # its own explanation is what is recorded
            tell({f"{name}_error": message(error)})
        tell({f"{name}_s": round(time.process_time() - began, 2)})

    graph = None
    with part("trace"):
        graph = slimstart.trace(model, inputs, norms="shrink")
        least = slimstart.Flops(1.0).bind(graph.costs).minimum / graph.costs.dense(graph.costs.flops)
        reasons = Counter(graph.not_prunable.values()).most_common(4)
        tell({"coverage": graph.coverage, "least_budget": least, "reasons": dict(reasons)})
    if entry.attention and graph is not None:
        with part("heads"):
            tell(heads(copy.deepcopy(model), graph, inputs))
    if graph is not None:
        with part("verify"):
            report = slimstart.verify(copy.deepcopy(model), inputs, norms="shrink", num_masks=2)
            tell({"verify_error": report.max_error})
    with part("train"):
        tell(trains(copy.deepcopy(model), inputs))


# --- one process per model --------------------------------------------------------------------------------------------


def _child(work: Callable[[Entry, Tell], None], entry: Entry, pipe: Connection, limits: Limits) -> None:
    memory = int(limits.gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.seconds, limits.seconds + 5))
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        work(entry, pipe.send)
    except BaseException as error:
        pipe.send({f"{work.__name__}_error": message(error)})
    pipe.close()


def in_a_process(work: Callable[[Entry, Tell], None], entry: Entry, limits: Limits) -> Row:
    """What `work` tells of a model, from a process that is ended when it takes too long or too much memory."""
    context = multiprocessing.get_context("fork")  # the packages are imported once
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(work, entry, theirs, limits))
    process.start()
    theirs.close()
    row: Row = {}
    with contextlib.suppress(EOFError):
        while True:
            row |= mine.recv()
    process.join()
    if process.exitcode == -signal.SIGXCPU:
        row[f"{work.__name__}_error"] = f"ended after {limits.seconds} seconds of processor time"
    elif process.exitcode:
        row[f"{work.__name__}_error"] = f"ended with exit code {process.exitcode}"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names")
    parser.add_argument("--again", action="store_true", help="make rows again that the record has")
    parser.add_argument("--seconds", type=int, default=180, help="limit of processor time for one model")
    parser.add_argument("--gigabytes", type=float, default=6, help="limit of memory for one model")
    args = parser.parse_args()
    import timm  # noqa: F401
    import torchvision  # noqa: F401
    import transformers

    transformers.logging.set_verbosity_error()
    rows: dict[str, Row] = {}
    if args.out.exists():
        rows = {row["model"]: row for row in json.loads(args.out.read_text(encoding="utf-8"))["rows"]}
    packages = ("torchvision", "timm", "transformers", "torch-pruning")
    versions = {name: metadata.version(name) for name in packages if util.find_spec(name.replace("-", "_"))}
    commit = facts(torch.device("cpu"))["commit"]
    for entry in MODELS:
        if not any(part in entry.name for part in args.only):
            continue
        before = rows.get(entry.name, {})
        other = {key: value for key, value in before.items() if key.startswith("torch_pruning")}
        row: Row = {key: value for key, value in before.items() if key not in other}
        if args.again or "tried_s" not in row:
            row = {"package": entry.package, "model": entry.name, "attention": entry.attention, "commit": commit}
            began = time.perf_counter()
            row |= in_a_process(tried, entry, Limits(args.seconds, args.gigabytes))
            row["tried_s"] = round(time.perf_counter() - began, 1)
        elif other or "torch-pruning" not in versions:
            continue
        if not other and "torch-pruning" in versions:
            other = in_a_process(torch_pruning, entry, Limits(PRUNING_SECONDS, args.gigabytes))
        rows[entry.name] = row | other
        ordered = [rows[one.name] for one in MODELS if one.name in rows]
        benchmark_record.write(args.out, "zoo", ordered, steps=STEPS, budget=BUDGET, versions=versions)
        told = {k: v for k, v in row.items() if k in TOLD or k.endswith("error")}
        print(f"{entry.name}: {row['tried_s']} s, {told}", flush=True)


if __name__ == "__main__":
    main()
