"""The documents: their code runs, shows the present interface, and they agree on the version."""

import re
import textwrap
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("**/*.md"))]
FENCE = re.compile(
    r"^(?P<indent> *)```python(?P<rest>[^\n]*)\n(?P<code>.*?)^(?P=indent)```[ ]*$", re.MULTILINE | re.DOTALL
)


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


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_code_runs(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a file in order, in one namespace, as a reader would type them."""
    found = blocks((ROOT / document).read_text(encoding="utf-8"))
    if document == "README.md":
        assert found, "a README without code that runs"
    monkeypatch.chdir(tmp_path)  # for files that a block writes
    namespace: dict[str, object] = {"__name__": "__document__"}
    for line, code in found:
        exec(compile("\n" * line + code, str(ROOT / document), "exec"), namespace)  # errors name the document's line


def test_the_readme_begins_with_the_plain_loop() -> None:
    (line, code), *_ = blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    assert line < 12  # on the first screen
    for own in ("model(images)", "loss.backward()", "optimizer.step()", "model = sparse.finish()"):
        assert own in code
    assert len(re.findall(r"\bsparse\b", code)) == 2  # made, and finished: nothing in the loop


@pytest.mark.parametrize("document", DOCUMENTS)
def test_removed_names_are_not_shown(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for name in ("sparse.net", "sparse.sync", "wrap=", "sparse.traffic", "fresh=", "spread_references", "passenger"):
        assert name not in text, name


def test_links_lead_somewhere() -> None:
    for document in [*DOCUMENTS, "CHANGELOG.md", "CONTRIBUTING.md"]:
        text = (ROOT / document).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            if not re.match(r"[a-z]+:", target):
                assert ((ROOT / document).parent / target).exists(), f"{document}: {target}"


@pytest.mark.parametrize("document", ["CITATION.cff", "CHANGELOG.md"])
def test_the_version_is_named(document: str) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    text = (ROOT / document).read_text(encoding="utf-8")
    assert re.search(rf"(?<![\d.]){re.escape(version)}(?![\d.]\d)", text)
    if document == "CITATION.cff":
        assert f"\nversion: {version}\n" in text
