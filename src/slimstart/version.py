"""The version, from the metadata of the installed package."""

from importlib import metadata

try:
    __version__ = metadata.version("slimstart")
except metadata.PackageNotFoundError:  # run from a source tree
    __version__ = "0+unknown"
