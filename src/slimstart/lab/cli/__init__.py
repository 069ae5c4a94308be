"""The command line: `slimstart train | evaluate | export | inspect | bench | report | recipes`.

Each command parses, calls the library, and shows what came out; nothing here computes. `train.py`, `networks.py` and
`bench.py` have the commands, `display.py` what they look like. PyTorch is imported by the commands that need it, so
that `--help` answers at once.
"""

from slimstart.lab.cli.main import app, main

__all__ = ["app", "main"]
