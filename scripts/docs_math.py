"""Equations of docstrings as MathML, which browsers draw without scripts. An extension of griffe, for mkdocstrings."""

import re
from typing import Any

import griffe
from latex2mathml.converter import convert

BLOCK = re.compile(r"^\.\. math::[ ]*(?P<first>[^\n]*)\n(?P<rest>(?:(?:[ ]+[^\n]*)?\n)*)", re.MULTILINE)
INLINE = re.compile(r":math:`(?P<tex>[^`]+)`")


def with_mathml(text: str) -> str:
    """The text, with `.. math::` blocks and :math:`...` replaced."""

    def block(match: re.Match[str]) -> str:
        tex = " ".join(f"{match['first']}\n{match['rest']}".split())
        return f'<div class="equation">{convert(tex, display="block")}</div>\n\n'

    text = BLOCK.sub(block, text.rstrip() + "\n")
    # In a span, because a line that begins with <math> would be taken for a block.
    return INLINE.sub(lambda match: f"<span>{convert(' '.join(match['tex'].split()))}</span>", text)


class Equations(griffe.Extension):
    """Replace the equations of every docstring."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None and "math:" in obj.docstring.value:
            obj.docstring.value = with_mathml(obj.docstring.value)
