"""Generated parts of Markdown files: what is between two markers comes from records.

A table, with the markers on lines of their own:

    <!-- results:accuracy -->
    | network | uniform | slimstart |
    <!-- /results -->

A number inside a sentence:

    is <!-- results:vgg19-cifar10-10/slimstart accuracy - uniform .1 -->0.7<!-- /results --> points ahead

`make results` replaces what is between them. The name of a table is one of `blocks.BLOCKS`; `inline` describes the
names of numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable

OPEN, CLOSE = re.compile(r"<!-- results:(.*?) -->"), "<!-- /results -->"
_MARKER = re.compile(f"{OPEN.pattern}|{re.escape(CLOSE)}")


class MarkerError(ValueError):
    """A marker that is not closed, is closed twice, or has an unknown name."""


def fill(text: str, value: Callable[[str], str]) -> str:
    """The text with the generated parts replaced by `value(name)`.

    Raises:
        MarkerError: the markers do not come in pairs.
    """
    parts, end, name = [], 0, None
    for marker in _MARKER.finditer(text):
        if (name is None) == (marker[0] == CLOSE):
            line = text.count("\n", 0, marker.start()) + 1
            raise MarkerError(f"line {line}: {marker[0]!r} has no partner; write <!-- results:NAME --> ... {CLOSE}")
        if name is None:
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
