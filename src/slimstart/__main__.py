"""`python -m slimstart` is `slimstart`."""

from slimstart.cli import main

if __name__ == "__main__":
    main()
