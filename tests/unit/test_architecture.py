"""benchmarks/architecture.py: what is counted, on packages that are small enough to count by hand."""

from pathlib import Path

import architecture
import pytest


def write(package: Path, files: dict[str, str]) -> Path:
    for name, text in {"__init__.py": "", **files}.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    return package


def test_modules_imports_and_chains(tmp_path: Path) -> None:
    files = {
        "a.py": "from package import b\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import package.e\n",
        "b.py": "from package.inner.c import value\n\n\ndef late():\n    import package.e\n",
        "inner/__init__.py": "from .c import value\n",
        "inner/c.py": "from package.inner import d\nvalue = 1\n",
        "inner/d.py": "import package.inner.c\n",  # c and d import each other, and count as one
        "e.py": "import package.a\n",
        "tests/test_a.py": "import package.e\n",
        "py.typed": "",
    }
    package = write(tmp_path / "package", files)
    found = architecture.modules(package)
    names = {"package", *(f"package.{name}" for name in ("a", "b", "e", "inner", "inner.c", "inner.d"))}
    assert found.keys() == names
    graph = architecture.import_graph(found)
    assert graph["package.a"] == {"package.b"}
    assert graph["package.b"] == {"package.inner.c"}
    assert architecture.size(package) == {
        "modules": 7,
        "lines": 4 + 5 + 1 + 2 + 1 + 1,
        "entries": 4,  # a, b, e, inner
        "longest_chain": 4,  # e, a, b, then c with d
    }


STEPS = """
from package.inner.deep import go

def step():
    go()
    local()

def local():
    pass
"""


def test_files_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = write(
        tmp_path / "package",
        {
            "start.py": STEPS,
            "inner/__init__.py": "",
            "inner/deep.py": "from package.other import side\n\ndef go():\n    for i in range(3):\n        side()\n",
            "other.py": "def side():\n    pass\n\ndef unused():\n    pass\n",
        },
    )
    monkeypatch.syspath_prepend(tmp_path)
    from package.start import step

    assert architecture.way(step, package) == (3, 2)  # start -> inner, inner -> other
