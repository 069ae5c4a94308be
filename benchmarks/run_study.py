"""The two analyses of the paper: `python benchmarks/run_study.py variance | flip`."""

import typer
from study import command

if __name__ == "__main__":
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
    command.add_to(app)
    app()
