"""The program `slimstart`, also as `python -m slimstart`; it needs the packages of `pip install slimstart[lab]`."""

import sys


def main() -> None:
    """Run the program, or say how to install it."""
    try:
        from slimstart.lab.cli import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "slimstart":
            raise
        sys.exit(f"the program needs {error.name}, which is not installed; run: pip install 'slimstart[lab]'")
    run()


if __name__ == "__main__":
    main()
