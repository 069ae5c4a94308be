"""The layout of the package: a library without imports of the lab, few entries at the root, unique module names."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import slimstart

PACKAGE = Path(slimstart.__file__).parent
LIBRARY = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if path.name != "__main__.py" and "lab" not in path.relative_to(PACKAGE).parts
)

IMPORT_WITHOUT_EXTRAS = """
import importlib, sys

for name in ("slimstart.lab", "typer", "rich", "matplotlib", "PIL", "tensorboard", "onnx", "onnxruntime"):
    sys.modules[name] = None  # importing it raises ImportError
for name in sys.argv[1:]:
    importlib.import_module(name)
import slimstart
for name in slimstart.__all__:
    getattr(slimstart, name)
"""


def module_name(path: Path) -> str:
    parts = ("slimstart", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> set[str]:
    """The modules that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_the_library_never_imports_the_lab() -> None:
    assert len(LIBRARY) > 50
    users = [module_name(path) for path in LIBRARY if any(name.startswith("slimstart.lab") for name in imported(path))]
    assert users == []


def test_the_library_imports_without_extras() -> None:
    """Every module, except Triton's kernels where there is no Triton."""
    names = [module_name(path) for path in LIBRARY if not path.stem.endswith("_triton")]
    done = subprocess.run([sys.executable, "-c", IMPORT_WITHOUT_EXTRAS, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_root_has_few_entries() -> None:
    ignored = {"__init__.py", "__main__.py", "__pycache__", "py.typed"}
    entries = sorted(path.name for path in PACKAGE.iterdir() if path.name not in ignored)
    assert len(entries) <= 15, entries


def test_no_two_modules_have_the_same_name() -> None:
    packages = [path.parent.name for path in PACKAGE.rglob("__init__.py")]
    modules = [path.stem for path in PACKAGE.rglob("*.py") if not path.stem.startswith("__")]
    assert [name for name, count in Counter(packages + modules).items() if count > 1] == []


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("__init__.py")), ids=module_name)
def test_every_package_says_what_it_has(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{path} has no docstring"
