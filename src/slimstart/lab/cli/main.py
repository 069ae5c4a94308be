"""The program `slimstart`: its commands, and its errors: one readable line that says what to do.

Exit status: 0 done, 1 failed, 2 wrong usage, 130 stopped by Ctrl-C, 143 by SIGTERM.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.logging import RichHandler

from slimstart import __version__
from slimstart.errors import BudgetError, ConfigError, SlimstartError
from slimstart.lab.cli import compare_command as compare
from slimstart.lab.cli import network_commands as networks
from slimstart.lab.cli import train_commands as train
from slimstart.lab.cli.display import SafeFormatter, errors
from slimstart.lab.control_characters import visible

app = typer.Typer(
    name="slimstart",
    help="Train neural networks that are narrow from step one, at a budget.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
train.add_to(app)
compare.add_to(app)
networks.add_to(app)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"slimstart {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; may also follow the command.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run a command, and turn errors into one line and an exit status."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    handler = RichHandler(console=errors, show_time=False, show_path=False)
    handler.setFormatter(SafeFormatter("%(message)s"))
    logging.basicConfig(handlers=[handler], level="WARNING")
    try:
        _refuse_empty(arguments)
        with _terminable():
            app(arguments, prog_name="slimstart")
    except _Terminated:
        from slimstart.distributed.launch import started_by_torchrun

        why = ", which torchrun sends when another process has failed" if started_by_torchrun() else ""
        errors.print(
            f"stopped by SIGTERM{why}; a run goes on from its last checkpoint, if it has one, with --resume",
            soft_wrap=True,
        )
        sys.exit(128 + signal.SIGTERM)
    except Exception as error:
        if debug:
            sys.excepthook = _show_traceback
            raise
        errors.print(f"error: {_one_line(error)}", style="red", soft_wrap=True)
        sys.exit(2 if isinstance(error, ConfigError | BudgetError) else 1)


def _refuse_empty(arguments: Sequence[str]) -> None:
    """Refuse empty values: `--out ""` would be the current folder."""
    for option, value in itertools.pairwise([*arguments, "-"]):
        if option.startswith("--") and (value == "" or option.endswith("=")):
            raise ConfigError(f"{option.removesuffix('=')} is empty; give it a value, or leave it out")


class _Terminated(BaseException):
    """SIGTERM, where no training handles it: before its first step, or the second time."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Raise `_Terminated` in this process on SIGTERM, so that it says so, and cleans up."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    process, received = os.getpid(), False

    def end(number: int, _: object) -> None:
        nonlocal received
        received = True
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != process:  # a worker, which inherits the handler
            os.kill(os.getpid(), number)
        raise _Terminated

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    except Exception as error:
        if received:  # compiled code, such as that of matplotlib, replaces an exception that it calls into
            raise _Terminated from error
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _show_traceback(*error: Any) -> None:
    """Python's own output, without control characters: messages may have text from files."""
    sys.stderr.write(visible("".join(traceback.format_exception(*error))))


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, SlimstartError | OSError | MemoryError):
        return text
    if type(error).__name__ == "OutOfMemoryError":
        return f"out of memory; try a smaller --batch-size ({text})"
    return f"{type(error).__name__}: {text} (--debug shows where)"
