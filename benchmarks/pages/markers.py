"""Generated parts of Markdown files: what is between two markers comes from records.

A table, with the markers on lines of their own:

    <!-- results:accuracy -->
    | network | uniform | slimstart |
    <!-- /results -->

A number inside a sentence:

    is <!-- results:vgg19-cifar10-10/slimstart accuracy - uniform .1 -->0.7<!-- /results --> points ahead

The marker of a number must not begin a line, because an HTML comment there ends the paragraph in Markdown.

`make results` replaces what is between them. The name of a table is one of `blocks.BLOCKS`; `inline` describes the
names of numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable

OPEN, CLOSE = re.compile(r"<!-- results:(.*?) -->"), "<!-- /results -->"
_NOTHING = re.compile(r"\s*([-*+>]|\d+\.)?\s*")  # what may be before the text of a paragraph
_MARKER = re.compile(f"{OPEN.pattern}|{re.escape(CLOSE)}")


class MarkerError(ValueError):
    """A marker without a partner, in a place where it breaks the text, or with an unknown name."""


def fill(text: str, value: Callable[[str], str]) -> str:
    """The text with the generated parts replaced by `value(name)`.

    Raises:
        MarkerError: the markers do not come in pairs, or a number begins a line.
    """
    parts, end, name = [], 0, None
    for marker in _MARKER.finditer(text):
        line = text.count("\n", 0, marker.start()) + 1
        if (name is None) == (marker[0] == CLOSE):
            raise MarkerError(f"line {line}: {marker[0]!r} has no partner; write <!-- results:NAME --> ... {CLOSE}")
        if name is None:
            before = text[text.rfind("\n", 0, marker.start()) + 1 : marker.start()]
            if _NOTHING.fullmatch(before) and text[marker.end() : marker.end() + 1] != "\n":
                raise MarkerError(f"line {line}: {marker[0]!r} begins a line; put a word of the sentence before it")
            parts.append(text[end : marker.end()])
            name = marker[1]
        else:
            is_table = text[end:].startswith("\n")
            parts += [f"\n\n{value(name).strip()}\n\n" if is_table else value(name), CLOSE]
            name = None
        end = marker.end()
    if name is not None:
        raise MarkerError(f"the part {name!r} is not closed by {CLOSE}")
    return "".join([*parts, text[end:]])


def names(text: str) -> list[str]:
    """The names of all generated parts, in their order."""
    return OPEN.findall(text)
