"""The command line: `slimstart train | compare | evaluate | export | inspect | bench | report | recipes`.

Each command parses its options, calls the program, and shows the result; nothing is computed here. Open `options.py`
first (options that `train` and `compare` share), then the file of a command: `train_commands.py`, `compare_command.py`,
`network_commands.py`. `display.py` has tables and progress. PyTorch is imported by the commands
that need it, so that `--help` answers at once.
"""

from slimstart.lab.cli.main import app, main

__all__ = ["app", "main"]
