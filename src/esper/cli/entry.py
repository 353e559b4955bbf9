"""The command line: each subcommand is a frozen dataclass, its fields are the flags, their strings the help."""

import signal
import sys
from collections.abc import Callable
from typing import Protocol

import tyro
from rich.console import Console

from esper.cli.demo import DemoCommand
from esper.cli.evaluate import EvaluateCommand
from esper.cli.query import QueryCommand
from esper.cli.report import ReportCommand
from esper.cli.tasks import TasksCommand
from esper.cli.train import TrainCommand
from esper.cli.tune import TuneCommand
from esper.leyline import EsperError


class Command(Protocol):
    """What a subcommand is, once its flags are read."""

    def run(self, console: Console) -> None:
        """Do it."""


COMMANDS: dict[str, Callable[..., Command]] = {
    "demo": DemoCommand,
    "tasks": TasksCommand,
    "train": TrainCommand,
    "tune": TuneCommand,
    "evaluate": EvaluateCommand,
    "report": ReportCommand,
    "query": QueryCommand,
}


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `esper`. A mistake of the user's ends in one line and exit code 2, not in a traceback."""
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="esper",
        description="Grow a neural network while it trains.",
        args=arguments,
    )
    try:
        command.run(Console())
    except EsperError as error:
        print(f"esper: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("esper: stopped", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
