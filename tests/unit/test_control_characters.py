"""Control characters in files reach neither the terminal nor a page."""

import dataclasses
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slimstart.lab import records
from slimstart.lab.cli.display import SafeFormatter, console, errors, show_records, show_table
from slimstart.lab.control_characters import visible
from slimstart.lab.reports import markdown, page
from tests.records import make

ACTING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
EVIL = "\x1b[31m\x1b]0;title\x07\x9b2J\u202egnp.exe\x00\x7f\u2066"


def evil_records() -> list[records.Record]:
    record = make()
    fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    texts = {name for name, value in fields.items() if isinstance(value, str)} - {
        "method",
        "started",
        "finished",
        "schema",
    }
    changes = {name: f"{name}{EVIL}" for name in texts}
    layers = tuple(dataclasses.replace(layer, name=layer.name + EVIL) for layer in record.layers)
    first = dataclasses.replace(record, **changes, layers=layers, config={**record.config, EVIL: EVIL})
    return [first, dataclasses.replace(first, config={"other": EVIL}, config_hash=EVIL), *([make()] * 2)]


def test_characters_that_act_are_shown() -> None:
    assert visible("a\n\tb é 漢 \x1b[0m \u202e \udc80") == "a\n\tb é 漢 \\x1b[0m \\u202e \\udc80"
    assert not ACTING.search(visible(EVIL))


def test_tables_pages_and_lines(capsys: pytest.CaptureFixture[str]) -> None:
    found = evil_records()
    for one in (found, found[:1]):
        show_records(one)
        text, html = markdown(one), page.render(one)
        for output in (text, html):
            assert not ACTING.search(output)
            assert "gnp.exe" in output
    console.print(f"training in {EVIL}", markup=False)
    errors.print(f"error: {EVIL}", style="red", markup=False)
    captured = capsys.readouterr()
    for output in (captured.out, captured.err):
        assert not ACTING.search(output)
        assert "\\x1b" in output


def test_marks_of_rich_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    console.print("runs/[red]:warning:")
    show_table(["[bold]a"], [["[/]:b:"]])
    assert capsys.readouterr().out.split() == ["runs/[red]:warning:", "[bold]a", "[/]:b:"]


def test_messages_of_the_log() -> None:
    message = logging.LogRecord("x", logging.WARNING, "x.py", 1, "a checkpoint in %s", (EVIL,), None)
    assert not ACTING.search(SafeFormatter("%(message)s").format(message))


OTHERS = (["train", "--recipe"], ["--debug", "train", "--recipe"])


@pytest.mark.parametrize(
    "command", [["report"], *(pytest.param(command, marks=pytest.mark.slow) for command in OTHERS)]
)
def test_errors_of_the_program(command: list[str], tmp_path: Path) -> None:
    name, content = ("record.json", '{"schema": "%s"}') if command == ["report"] else ("recipe.toml", '"%s" = 3')
    (tmp_path / name).write_text(content % "\\u001b[31m\\u202e")
    arguments = [sys.executable, "-m", "slimstart", *command, tmp_path / name]
    found = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert found.returncode > 0
    assert ("Traceback" if "--debug" in command else "error: ") in found.stderr
    assert not ACTING.search(found.stdout + found.stderr)
