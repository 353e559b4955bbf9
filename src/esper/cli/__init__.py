"""The command line."""

from esper.cli.entry import main

__all__ = ["main"]
