"""Build the wheel and the sdist, and try both in a clean environment.

    make package                 with the torch that constraints.txt pins
    make package TORCH=2.8.0     with another one (downloads its CUDA libraries where the index has no CPU build)

The wheel is installed first without extras: the library must work, and the program must say how to install it. Then
with `lab`: the program must train. Then with the trainers of other libraries: every recipe of the documentation must
run. TESTS="tests/unit -k ..." also runs tests of the sdist against the wheel.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "docs" / "recipes.md"

LIBRARY = """
import importlib.util, sys
import slimstart
for name in slimstart.__all__:
    getattr(slimstart, name)
assert slimstart.__version__ == {version!r}, slimstart.__version__
assert "site-packages" in slimstart.__file__, slimstart.__file__
for name in ("typer", "matplotlib", "tensorboard", "onnx"):
    assert importlib.util.find_spec(name) is None, f"{{name}} is installed: the environment is not clean"
assert not [name for name in sys.modules if name.startswith("slimstart.lab")], "the library imports slimstart.lab"
"""

PAPER = """
import torch
import slimstart

model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3), torch.nn.ReLU(),
    torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 10),
)
images, labels = torch.randn(8, 3, 16, 16), torch.randint(10, (8,))
dense = slimstart.flops(model, images)
slimstart.verify(model, images[:2])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
budget = slimstart.Flops(0.3)
sparse = slimstart.SparseTraining(model, optimizer, images[:2], budget=budget, policy="paper", total_steps=10)


def loss_fn(model, images, labels):
    return torch.nn.functional.cross_entropy(model(images), labels)


for _ in range(10):
    sparse.step(loss_fn, images, labels)
small = sparse.finish([(images, labels)], loss_fn)
assert slimstart.flops(small, images) <= 0.3 * dense
"""


def run(*command: str | Path, cwd: Path, fails: bool = False) -> str:
    """The output of a command, which must succeed, or must not."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=clean, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if (done.returncode != 0) is not fails:
        raise SystemExit(f"{shlex.join(map(str, command))}\n{done.stdout}\nexit status {done.returncode}")
    return done.stdout


def build(source: Path, out: Path, *targets: str) -> list[Path]:
    flags = [flag for target in targets for flag in ("-t", target)]
    run(sys.executable, "-m", "hatchling", "build", *flags, "-d", out, cwd=source)
    return [next(out.glob({"wheel": "*.whl", "sdist": "*.tar.gz"}[target])) for target in targets]


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


def check_files(wheel: Path, sdist: Path, folder: Path) -> Path:
    """Both have the files of the source tree, and the sdist builds the same wheel; its unpacked folder."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    tracked = run("git", "ls-files", cwd=ROOT).splitlines()
    package = {name.removeprefix("src/") for name in tracked if name.startswith("src/slimstart/")}
    in_wheel = {name for name in contents(wheel) if ".dist-info/" not in name}
    assert in_wheel == package, f"wheel and src/ differ: {sorted(in_wheel ^ package)}"
    included = {name for name in tracked if not name.startswith(".")}
    in_sdist = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    missing = included - in_sdist
    assert not missing, f"not in the sdist: {sorted(missing)}"
    extra = in_sdist - included - {"PKG-INFO", ".gitignore"}
    assert not extra, f"in the sdist, but not in the repository: {sorted(extra)}"
    (again,) = build(unpacked, folder.with_name("again"), "wheel")
    assert contents(again) == contents(wheel), "the sdist builds another wheel"
    return unpacked


def check_metadata(wheel: Path, sdist: Path, version: str) -> None:
    metadata = contents(wheel)[f"slimstart-{version}.dist-info/METADATA"]
    with tarfile.open(sdist) as archive:
        member = archive.extractfile(f"slimstart-{version}/PKG-INFO")
        assert member is not None
        assert member.read() == metadata, "wheel and sdist differ in metadata"
    lines = metadata.decode().splitlines()
    required = {
        line.split(maxsplit=1)[1] for line in lines if line.startswith("Requires-Dist:") and "extra" not in line
    }
    assert {re.split(r"[^\w-]", name)[0] for name in required} == {"torch", "numpy", "safetensors"}, required


def run_recipes(python: Path, folder: Path) -> None:
    """Run every recipe after the first block of the page, each in a process and a folder of its own."""
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    heading, count = "", 0
    (_, first), *found = re.findall(r"^## (.*?)\n|^```python\n(.*?)^```$", page, re.M | re.S)
    for title, code in found:
        heading = title or heading
        if "import timm" in code:
            print(f"not run: the recipe for {heading}, which needs the build of torchvision that goes with this torch")
        elif code:
            count += 1
            (folder / str(count)).mkdir(parents=True)
            run(python, "-c", f"{first}\n{code}", cwd=folder / str(count))
    print(f"{count} recipes run")


def main() -> None:
    parser = argparse.ArgumentParser(description="build the wheel and the sdist, and try both in a clean environment")
    parser.add_argument("--torch", default="", help="version of torch in place of the pinned one")
    parser.add_argument("--tests", default="", help="arguments for pytest: also run these tests against the wheel")
    options = parser.parse_args()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]

    with tempfile.TemporaryDirectory(prefix="slimstart-package-") as name:
        work = Path(name)
        wheel, sdist = build(ROOT, work / "dist", "wheel", "sdist")
        check_metadata(wheel, sdist, version)
        unpacked = check_files(wheel, sdist, work / "sdist")
        print("built", *(f"{path.name} ({path.stat().st_size >> 10} KiB)" for path in (wheel, sdist)))

        constraints = work / "constraints.txt"
        pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
        constraints.write_text(
            re.sub(r"^torch==.*$", f"torch=={options.torch}", pins, flags=re.M) if options.torch else pins
        )
        venv.create(work / "venv", with_pip=True)
        python = work / "venv" / "bin" / "python"

        def install(*what: str | Path) -> None:
            pip = [python, "-m", "pip", "--quiet", "--no-input", "--disable-pip-version-check", "--no-cache-dir"]
            run(*pip, "install", "--constraint", constraints, *what, cwd=work)

        install(wheel)
        run(python, "-m", "pip", "check", cwd=work)
        run(python, "-c", LIBRARY.format(version=version), cwd=work)
        block = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
        assert block is not None, "README.md has no Python block"
        run(python, "-c", block[1], cwd=work)
        run(python, "-c", PAPER, cwd=work)
        said = run(python, "-m", "slimstart", cwd=work, fails=True)
        assert "pip install 'slimstart[lab]'" in said, said
        installed = run(python, "-c", "import torch; print(torch.__version__)", cwd=work).strip()
        print(f"the library works without extras, with torch {installed}")

        install(f"{wheel}[lab]")
        run(python, "-m", "pip", "check", cwd=work)
        program = work / "venv" / "bin" / "slimstart"
        train = ["--recipe", "fashion", "--epochs", "2", "--width", "0.25", "--device", "cpu"]
        run(program, "train", *train, "--out", work / "run", cwd=work)
        assert (work / "run" / "record.json").exists()
        assert (work / "run" / "report.html").exists()
        print("the program trains")

        if not options.torch:
            install(f"{wheel}[onnx,lightning,transformers,accelerate]")
            run(python, "-m", "pip", "check", cwd=work)
            run_recipes(python, work / "recipes")

        if options.tests:
            install(f"{wheel}[test]")
            tests = ["-q", "-p", "no:cacheprovider", *shlex.split(options.tests)]
            print(run(python, "-m", "pytest", *tests, cwd=unpacked).splitlines()[-1])


if __name__ == "__main__":
    main()
