"""Something that happens at a line of slimstart, counted as the lines run."""

import os
import sys
from collections.abc import Callable
from typing import Any

import slimstart

PACKAGE = os.path.dirname(slimstart.__file__)


class AtLine:
    """A trace function, for `sys.settrace`, that counts lines of slimstart and calls a function at one of them."""

    def __init__(self, line: int = 0, happen: Callable[[], object] = lambda: None) -> None:
        self.line, self.happen, self.count = line, happen, 0

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.line:
                sys.settrace(None)
                self.happen()
        return self
