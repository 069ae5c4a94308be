"""Text from files, made safe for terminals and pages: characters that would act are shown as escapes."""

from __future__ import annotations

# C0 and C1 but for line ends and tabs, marks of writing direction, separators of lines, halves of surrogate pairs.
_ACTING = (
    *(set(range(0x20)) - {ord("\n"), ord("\t")}),
    *range(0x7F, 0xA0),
    *(0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)),
    *range(0xD800, 0xE000),
)
_SHOWN = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _ACTING}


def visible(text: str) -> str:
    r"""A text with control characters as escapes (`\x1b`), so that it cannot move the cursor or set a colour."""
    return text.translate(_SHOWN)
