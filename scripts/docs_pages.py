"""What the documentation site takes from the program and from files outside of docs/: hooks of MkDocs (mkdocs.yml).

A comment `<!-- generated: NAME -->` on a page is replaced by the commands of `slimstart`, the settings of a recipe, or
the presets. CONTRIBUTING.md and CHANGELOG.md become pages. Links to files that are no pages lose their link, and a
`<picture>` becomes two images that follow the theme's switch between light and dark.
"""

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUTSIDE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}  # files of the root that are pages
MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
FENCE = re.compile(r"^```python [a-z-]+$", re.MULTILINE)  # `no-run` and `slow` are for the tests
PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="(?P<dark>[^"]+)"[^>]*>\s*<img (?P<rest>[^>]*)>\s*</picture>', re.DOTALL
)


# --- generated from the program ---------------------------------------------------------------------------------------


def commands() -> str:
    """Every command: what it does, an example, its arguments and options."""
    import typer

    from slimstart.lab.cli import app
    from slimstart.lab.cli.options import RECIPE_PANEL

    group: Any = typer.main.get_command(app)
    return "\n\n".join(_command(name, command, RECIPE_PANEL) for name, command in group.commands.items())


def _command(name: str, command: Any, settings_panel: str) -> str:
    arguments = [p for p in command.params if not p.opts[0].startswith("-")]
    usage = ["slimstart", name, *(f"{p.name.upper()}{'...' * (p.nargs == -1)}" for p in arguments), "[OPTIONS]"]
    own = [p for p in command.params if p.rich_help_panel != settings_panel and p.name != "help" and not p.hidden]
    example = (command.epilog or "").partition("Example:")[2].strip()
    lines = [f"## {name}", command.help or "", f"```text\n{' '.join(usage)}\n```"]
    lines += [f"Example:\n\n```sh\n{example}\n```"] if example else []
    lines += [_described(p) for p in own]
    if any(p.rich_help_panel == settings_panel for p in command.params):
        lines.append("Each [setting of a recipe](settings.md) is an option too: `structure_lr` is `--structure-lr`.")
    return "\n\n".join(lines)


def _described(parameter: Any) -> str:
    """An item of a definition list: the option as it is typed, its help and its default."""
    names = [*parameter.opts, *parameter.secondary_opts]
    typed = ", ".join(names) if names[0].startswith("-") else parameter.name.upper()
    default = parameter.default
    shown = default is not None and not isinstance(default, bool | list | tuple) and not parameter.required
    help_text = " ".join((parameter.help or "").split())
    end = f" Default: `{default}`." if shown else " Required." if parameter.required else ""
    return f"`{typed}`\n:   {help_text}{end}"


def settings() -> str:
    """Every setting of a recipe, with its default."""
    from slimstart.lab.recipes.recipe import Recipe

    items = []
    for field in dataclasses.fields(Recipe):
        default = "" if field.default is None else f" Default: `{json.dumps(field.default)}`."
        text = field.metadata["help"].rstrip(".")
        items.append(f"`{field.name}`\n:   {text[0].upper() + text[1:]}.{default}")
    return "\n\n".join(items)


def presets() -> str:
    """Every preset, with what the paper reports of its row."""
    from slimstart.lab.recipes.presets import PRESETS

    lines = ["| recipe | network | data | budget | what it is | the paper reports |", "|---|---|---|---|---|---|"]
    for name, entry in PRESETS.items():
        recipe, paper = entry.recipe, entry.paper
        saving = f", {paper.train_cost_saving:g}×" if paper and paper.train_cost_saving else ""
        numbers = f"{paper.accuracy:g} % at {paper.flops:g} % FLOPs{saving}" if paper else ""
        about = entry.about[0].upper() + entry.about[1:]
        lines.append(f"| `{name}` | {recipe.model} | {recipe.data} | `{recipe.budget}` | {about} | {numbers} |")
    return "\n".join(lines)


GENERATED: dict[str, Callable[[], str]] = {"commands": commands, "settings": settings, "presets": presets}


# --- links and pictures -----------------------------------------------------------------------------------------------


def page_of(path: str) -> str | None:
    """The page of the site that a file of the repository becomes, if it becomes one."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return "index.md" if path == "README.md" else OUTSIDE.get(path)


def with_site_links(markdown: str, source: str) -> str:
    """Links as the site needs them, where it has the page; a link to any other file of the repository loses its link.

    Args:
        source: path of the page's file, relative to the root of the repository.
    """

    folder = os.path.dirname(page_of(source) or "")

    def replaced(match: re.Match[str]) -> str:
        target = match["target"]
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = os.path.normpath(os.path.join(os.path.dirname(source), target))
        page = page_of(path)
        if page is None:
            return match["text"]
        return f"[{match['text']}]({os.path.relpath(page, folder)}{match['anchor'] or ''})"

    return LINK.sub(replaced, markdown)


def with_switching_pictures(markdown: str) -> str:
    """`<picture>` with a dark source as two images, of which the theme shows one."""

    def replaced(match: re.Match[str]) -> str:
        parts = dict(re.findall(r'(\w+)="([^"]*)"', match["rest"]))
        alt = parts.get("alt", "")
        return f"![{alt}]({parts['src']}#only-light)\n![{alt}]({match['dark']}#only-dark)"

    return PICTURE.sub(replaced, markdown)


# --- hooks ------------------------------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    outside = {made: name for name, made in OUTSIDE.items()}
    source = outside.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    markdown = MARKER.sub(lambda match: GENERATED[match[1]](), markdown)
    markdown = FENCE.sub("```python", markdown)
    return with_switching_pictures(with_site_links(markdown, source))
