"""Size of the code, and how far a reader has to go: modules, imports, arguments, and the files of one step.

    python benchmarks/architecture.py --opacus UNPACKED --out results/architecture.json

`--before` is a commit of this repository, `--opacus` a folder in which the wheel of opacus is unpacked
(`pip download --no-deps opacus && unzip opacus-*.whl`).

- Modules are the `.py` files of a package without its tests, lines are all lines of them.
- Entries are files and folders at the root of the package, without `__init__`, `__main__`, `py.typed` and tests.
- An import chain follows imports at module level, without those for type checkers. Modules that import each other count
  as one, a package counts with its `__init__`.
- Files of a step are those with a function that runs in it, and crossings are the distinct pairs of functions where one
  calls the other from a different folder. Both are counted with `sys.setprofile` in a training of a network of two
  convolutions and one linear layer on a CPU.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

NUM_STEPS = 100


# --- what can be read from files --------------------------------------------------------------------------------------


def modules(package: Path) -> dict[str, Path]:
    """The modules of a package by name, without tests."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        if "tests" not in parts:
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, name: str) -> Iterator[tuple[str, str]]:
    """(module, attribute or "") for each import at module level."""

    def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
        for node in body:
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                continue
            yield node
            for part in ("body", "orelse", "handlers", "finalbody"):
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield from statements(getattr(node, part, []))

    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in statements(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            yield from ((".".join(filter(None, (base, node.module))), alias.name) for alias in node.names)


def import_graph(found: dict[str, Path]) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {name: set() for name in found}
    for name, path in found.items():
        for module, attribute in imports(path, name):
            target = f"{module}.{attribute}" if f"{module}.{attribute}" in found else module
            if target in found and target != name:
                graph[name].add(target)
    return graph


def longest_chain(graph: dict[str, set[str]]) -> int:
    """Number of modules on the longest path, where modules that import each other count as one."""
    reachable: dict[str, set[str]] = {}
    for name in graph:
        seen, todo = set(), [name]
        while todo:
            new = graph[todo.pop()] - seen
            seen |= new
            todo += new
        reachable[name] = seen
    lengths: dict[str, int] = {}
    for name in sorted(graph, key=lambda name: len(reachable[name] | {name})):  # what it imports comes first
        below = [lengths[other] for other in reachable[name] if name not in reachable[other]]
        lengths[name] = 1 + max(below, default=0)
    return max(lengths.values())


def size(package: Path, without: str = "") -> dict[str, int]:
    """The counts of a package, or of the rest if one folder is left out."""
    found = {name: path for name, path in modules(package).items() if not without or without not in path.parts}
    ignored = {"__init__.py", "__main__.py", "__pycache__", "py.typed", "tests"}
    return {
        "modules": len(found),
        "lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in found.values()),
        "entries": sum(path.name not in ignored for path in package.iterdir()),
        "longest_chain": longest_chain(import_graph(found)),
    }


# --- what happens in a step -------------------------------------------------------------------------------------------


def way(step: Callable[[], Any], package: Path) -> tuple[int, int]:
    """The number of files of the package in which a function runs, and of pairs of functions in different folders."""
    files, crossings = set(), set()

    def place(frame: FrameType) -> tuple[str, str] | None:
        """The function of a frame, and its folder or file at the root of the package."""
        name = frame.f_code.co_filename
        if not name.startswith(f"{package}{os.sep}"):
            return None
        return f"{name}:{frame.f_code.co_qualname}", Path(name).relative_to(package).parts[0]

    def called(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (callee := place(frame)) is None:
            return
        files.add(frame.f_code.co_filename)
        caller, outer = None, frame.f_back
        while outer is not None and (caller := place(outer)) is None:
            outer = outer.f_back
        if caller is not None and caller[1] != callee[1]:
            crossings.add((caller[0], callee[0]))

    sys.setprofile(called)
    try:
        step()
    finally:
        sys.setprofile(None)
    return len(files), len(crossings)


def run_steps(name: str, policy: str) -> dict[str, Any]:
    """Train, and count on the way of the shortest and the longest step. Runs in a process of its own."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )
    images, labels = torch.randn(8, 3, 12, 12), torch.randint(10, (8,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss_fn(net: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(net(images), labels)

    step: Callable[[], Any]
    if name == "opacus":
        import opacus
        from torch.utils.data import DataLoader, TensorDataset

        package, constructor = opacus, opacus.PrivacyEngine.make_private
        loader = DataLoader(TensorDataset(images, labels), batch_size=4)
        private, optimizer, _ = opacus.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )

        def step() -> None:
            optimizer.zero_grad()
            loss_fn(private, images, labels).backward()
            optimizer.step()
    else:
        import slimstart

        package, constructor = slimstart, slimstart.SparseTraining.__init__
        budget = slimstart.Flops(0.3)
        sparse = slimstart.SparseTraining(
            model, optimizer, images[:2], budget=budget, policy=policy, total_steps=NUM_STEPS
        )

        def step() -> None:
            sparse.step(loss_fn, images, labels)

    folder = Path(str(package.__file__)).parent
    step()  # lazy imports and caches of the first step do not count
    ways = [way(step, folder) for _ in range(NUM_STEPS // 5 - 1)]  # the structure is learned in these
    (files, crossings), (most_files, most_crossings) = min(ways), max(ways)
    arguments = [name for name in inspect.signature(constructor).parameters if name != "self"]
    return {
        "version": str(package.__version__),
        "arguments": len(arguments),
        "files": files,
        "crossings": crossings,
        "most_files": most_files,
        "most_crossings": most_crossings,
    }


def measured(source: Path, name: str, policy: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(source)}
    command = [sys.executable, __file__, "--steps-of", name, "--policy", policy]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(label: str, source: Path, name: str, policies: tuple[str, ...]) -> dict[str, Any]:
    steps = {policy: measured(source, name, policy) for policy in policies}
    found: dict[str, Any] = {"code": label, **size(source / name)}
    if (source / name / "lab").is_dir():
        found["library"] = size(source / name, without="lab")
    for step in steps.values():  # which are the same under all policies
        found |= {"version": step.pop("version"), "arguments": step.pop("arguments")}
    return {**found, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="88606c2", help="commit to compare with")
    parser.add_argument("--opacus", type=Path, help="folder in which the wheel of opacus is unpacked")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps-of", help=argparse.SUPPRESS)  # a process of its own for each version of the code
    parser.add_argument("--policy", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps_of:
        print(json.dumps(run_steps(args.steps_of, args.policy)))
        return
    root, policies = Path(__file__).resolve().parents[1], ("equal_worth", "paper")
    with tempfile.TemporaryDirectory() as name:
        archive = subprocess.run(["git", "archive", args.before, "src"], cwd=root, capture_output=True, check=True)
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(name, filter="data")
        rows = [
            row("before", Path(name) / "src", "slimstart", policies),
            row("now", root / "src", "slimstart", policies),
        ]
    if args.opacus:
        rows.append(row("opacus", args.opacus, "opacus", ("",)))
    print(json.dumps(rows, indent=1))
    if args.out:
        import benchmark_record

        benchmark_record.write(args.out, "architecture", rows, before=args.before)


if __name__ == "__main__":
    main()
