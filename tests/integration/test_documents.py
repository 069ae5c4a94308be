"""The documents: their code runs, their links and names exist, and they agree on the version."""

import importlib
import inspect
import re
import textwrap
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import slimstart
from scripts import docs_pages

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("**/*.md"))]
RECIPES = "docs/recipes.md"
TRAINERS = ("lightning", "transformers", "accelerate", "timm")  # libraries that the default tests do without
FENCE = re.compile(
    r"^(?P<indent> *)```python(?P<rest>[^\n]*)\n(?P<code>.*?)^(?P=indent)```[ ]*$", re.MULTILINE | re.DOTALL
)


def read(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(text: str) -> list[tuple[int, str]]:
    """The Python blocks that are to run: the line before the code, and the code."""
    found = []
    for match in FENCE.finditer(text):
        rest = match["rest"].strip()
        line = text.count("\n", 0, match.start("code"))
        assert rest in ("", "no-run"), f"line {line}: ```python{match['rest']} is neither run nor marked `no-run`"
        if not rest:
            found.append((line, textwrap.dedent(match["code"])))
    return found


def test_blocks_are_found() -> None:
    text = "a\n```python\nx = 1\n```\n```python no-run\nx = 2\n```\n- b\n  ```python\n  y = x\n  ```\n```sh\nls\n```\n"
    assert blocks(text) == [(2, "x = 1\n"), (9, "y = x\n")]
    with pytest.raises(AssertionError, match="line 1"):
        blocks("```python norun\n1/0\n```\n")


def run(document: str, chosen: Iterable[tuple[int, str]]) -> None:
    """Run blocks in one namespace, as a reader would type them; an error names the line of the document."""
    namespace: dict[str, object] = {"__name__": "__document__"}
    for line, code in chosen:
        exec(compile("\n" * line + code, str(ROOT / document), "exec"), namespace)


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name != RECIPES and blocks(read(name))])
def test_the_code_runs(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a file, from top to bottom."""
    monkeypatch.chdir(tmp_path)  # for files that a block writes
    run(document, blocks(read(document)))


def recipes() -> dict[str, tuple[int, str]]:
    """The one block of each recipe, by its heading."""
    text = read(RECIPES)
    starts = [(text.count("\n", 0, match.start()), match[1]) for match in re.finditer(r"^## (.*)$", text, re.MULTILINE)]
    ends = [*(line for line, _ in starts[1:]), text.count("\n")]
    found = {}
    for (start, heading), end in zip(starts, ends, strict=True):
        (found[heading],) = ((line, code) for line, code in blocks(text) if start < line < end)
    return found


def marked(heading: str) -> Any:
    """A recipe, as a slow test if it needs a library that `make trainers` installs."""
    _, code = recipes()[heading]
    needs = any(re.search(rf"^(import|from) {name}\b", code, re.MULTILINE) for name in TRAINERS)
    return pytest.param(heading, marks=pytest.mark.slow if needs else ())


@pytest.mark.parametrize("heading", list(map(marked, recipes())))
def test_every_recipe_runs_by_itself(heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each needs the first block of the page, and no other recipe."""
    monkeypatch.chdir(tmp_path)
    try:
        run(RECIPES, [blocks(read(RECIPES))[0], recipes()[heading]])
    except ModuleNotFoundError as error:
        if error.name not in TRAINERS:
            raise
        pytest.skip(f"{error.name} is not installed")


@pytest.mark.parametrize("document", ["README.md", "docs/index.md"])
def test_the_first_code_is_the_plain_loop(document: str) -> None:
    (line, code), *_ = blocks(read(document))
    assert line < 40
    for own in ("model(images)", "loss.backward()", "optimizer.step()", "model = sparse.finish()"):
        assert own in code
    assert len(re.findall(r"\bsparse\b", code)) == 2  # made, and finished: nothing in the loop


def test_the_readme_is_short() -> None:
    assert read("README.md").count("\n") <= 150


@pytest.mark.parametrize("document", DOCUMENTS)
def test_removed_names_are_not_shown(document: str) -> None:
    for name in ("sparse.net", "sparse.sync", "wrap=", "sparse.traffic", "fresh=", "spread_references", "passenger"):
        assert name not in read(document), name


def anchors(document: str) -> set[str]:
    """The anchors of a document's headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", read(document), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    for document in [*DOCUMENTS, "CHANGELOG.md", "CONTRIBUTING.md"]:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", read(document)):
            if not re.match(r"[a-z]+:", target):
                path = ((ROOT / document).parent / target).resolve() if target else ROOT / document
                assert path.exists(), f"{document}: {target}"
                found = not anchor or anchor in anchors(str(path.relative_to(ROOT)))
                assert found or path.name == "api.md", f"{document}: {target}#{anchor}"


def test_the_version_is_named() -> None:
    version = tomllib.loads(read("pyproject.toml"))["project"]["version"]
    assert f"\nversion: {version}\n" in read("CITATION.cff")
    assert re.search(rf"(?<![\d.]){re.escape(version)}(?![\d.]\d)", read("CHANGELOG.md"))


# --------------------------------------------------------------------------- the site


def test_every_page_is_in_the_navigation() -> None:
    pages = re.findall(r"([\w-]+\.md)$", read("mkdocs.yml"), re.MULTILINE)
    assert sorted(pages) == sorted([p.name for p in (ROOT / "docs").glob("*.md")] + [*docs_pages.OUTSIDE.values()])


def test_the_api_reference_is_complete() -> None:
    """Each `::: name` can be imported, and every public name of the package is shown."""
    named = re.findall(r"^::: (\S+)$", read("docs/api.md") + read("docs/policies.md"), re.MULTILINE)
    for name in named:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
    errors = {name for name in slimstart.__all__ if name.endswith("Error")}  # shown with their module
    assert "slimstart.errors" in named
    assert set(slimstart.__all__) - errors <= {name.rpartition(".")[2] for name in named}


def test_every_argument_in_the_api_reference_is_described_by_itself() -> None:
    """The site takes `a, b: ...` for one argument of that name, and its strict build stops there."""
    for name in re.findall(r"^::: (\S+)$", read("docs/api.md") + read("docs/policies.md"), re.MULTILINE):
        module, _, attribute = name.rpartition(".")
        found = getattr(importlib.import_module(module), attribute)
        owned = vars(found).items() if inspect.isclass(found) else ()
        shown = [found, *(value for key, value in owned if not key.startswith("_") and callable(value))]
        for one in shown:
            arguments = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.getdoc(one) or "", re.MULTILINE | re.DOTALL)
            described = re.findall(r"^ {4}(\S[^:]*):", arguments[1], re.MULTILINE) if arguments else []
            known = {key.lstrip("*") for key in inspect.signature(one).parameters} if described else set()
            assert {key.lstrip("*") for key in described} <= known, f"{name}: {described}"


def test_every_row_of_what_works_has_its_test() -> None:
    rows = [line.strip("| ").split(" | ") for line in read("docs/what-works.md").splitlines() if "::" in line]
    assert len(rows) >= 30
    for wish, answer, _, named in rows:
        assert answer in ("works", "works with one more line", "refused"), wish
        path, _, test = named.strip("` ").partition("::")
        assert f"\ndef {test}(" in read(f"tests/{path}"), named


def test_generated_parts_of_pages() -> None:
    marked = {name for document in DOCUMENTS for name in docs_pages.MARKER.findall(read(document))}
    assert marked == set(docs_pages.GENERATED)
    commands = docs_pages.commands()
    assert re.findall(r"^## (\w+)$", commands, re.MULTILINE)[:2] == ["train", "recipes"]
    assert "`--out`\n:   Folder of the run" in commands
    assert "slimstart report RUNS... [OPTIONS]" in commands
    assert "`--momentum`" not in commands  # a setting of a recipe
    assert "`momentum`\n:   " in docs_pages.settings()
    assert "| `vgg16-cifar10` | vgg16 | cifar10 | `channels=0.293` | Table 1 | 92.5 %" in docs_pages.presets()


@pytest.mark.parametrize(
    ("source", "shown", "expected"),
    [
        ("docs/a.md", "[x](guide.md#b)", "[x](guide.md#b)"),
        ("docs/a.md", "[x](../CONTRIBUTING.md)", "[x](contributing.md)"),
        ("docs/a.md", "[`x`](../examples/own_model.py), y", "`x`, y"),
        ("CONTRIBUTING.md", "[x](docs/guide.md)", "[x](guide.md)"),
        ("CONTRIBUTING.md", "[x](README.md), [y](#z)", "[x](index.md), [y](#z)"),
        ("docs/a.md", "[x](https://a.org)", "[x](https://a.org)"),
        ("docs/b/a.md", "[x](../guide.md#c), [y](z.md), [r](../../results/r)", "[x](../guide.md#c), [y](z.md), r"),
    ],
)
def test_links_of_the_site(source: str, shown: str, expected: str) -> None:
    assert docs_pages.with_site_links(shown, source) == expected


def test_pictures_follow_the_theme() -> None:
    picture = (
        '<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="b.svg">\n'
        '  <img src="a.svg" alt="Accuracy">\n</picture>'
    )
    expected = "![Accuracy](a.svg#only-light)\n![Accuracy](b.svg#only-dark)"
    assert docs_pages.with_switching_pictures(picture) == expected


# --------------------------------------------------------------------------- CONTRIBUTING.md


def section(name: str) -> str:
    """What is between two markers of CONTRIBUTING.md."""
    (found,) = re.findall(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", read("CONTRIBUTING.md"), re.DOTALL)
    return found


def test_tasks_name_files_and_sentences_that_exist() -> None:
    rows = [line.strip("| ").split(" | ") for line in section("tasks").strip().splitlines()[2:]]
    assert len(rows) >= 8
    for task, files, words in rows:
        paths = re.findall(r"`([^`]+)`", files)
        assert 1 <= len(paths) <= 3, task
        for path in paths:
            assert (ROOT / path).is_file(), f"{task}: {path}"
        (quoted,) = re.findall(r'"(.*)"', words)
        (page,) = re.findall(r"\]\(([^)#]+)", words)
        plain = " ".join(read(page).replace("**", "").split())
        assert quoted in plain, f"{task}: {page} does not say {quoted!r}"


def test_every_package_is_described() -> None:
    shown = {name for cell in re.findall(r"^\| (`.*?) \|", section("packages"), re.M) for name in cell.split("`")[1::2]}
    expected = set()
    for folder in (ROOT / "src" / "slimstart", ROOT / "src" / "slimstart" / "lab"):
        for path in folder.iterdir():
            if (path / "__init__.py").is_file() or (path.suffix == ".py" and not path.name.startswith("__")):
                name = path.relative_to(ROOT / "src" / "slimstart").as_posix()
                expected.add(name + "/" * path.is_dir())
    assert shown - {"slimstart", "slimstart.lab"} == expected
