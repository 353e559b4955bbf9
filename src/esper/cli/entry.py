"""The command line: each subcommand is a frozen dataclass, its fields are the flags, their strings the help."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn, Protocol

from esper import __version__
from esper.leyline import EsperError
from esper.leyline.records import printable

if TYPE_CHECKING:
    from rich.console import Console


class Command(Protocol):
    """A subcommand with its flags set."""

    def run(self, console: "Console") -> None:
        """Carry it out."""


COMMANDS = {
    "demo": "Train a small controller and compare it with rules.",
    "tasks": "List the tasks, with the gain of the best seed per slot.",
    "train": "Train a controller on fresh hosts.",
    "grow": "Train and grow one host of a task.",
    "tune": "Search a fixed plan or the heuristic's thresholds.",
    "evaluate": "Compare policies on unseen hosts.",
    "offline": "Record policies, imitate records, learn from their rewards.",
    "watch": "Watch runs in the terminal, live or again.",
    "report": "Write a run as one HTML page.",
    "query": "Query a run with SQL.",
    "serve": "Show runs in the browser, live.",
}


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `esper`. User errors print one line and exit with code 2."""
    try:
        _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except EsperError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        print("esper: stopped", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except BrokenPipeError:
        # The reader (`| head`) has gone. Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None


def _run(arguments: list[str]) -> None:
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help", "--version"):
        print(f"esper {__version__}" if name == "--version" else _help())
        sys.stdout.flush()
        raise SystemExit(0)
    if name not in COMMANDS:
        close = get_close_matches(name, COMMANDS, 1)
        _fail(f"unknown command {name!r}; {f'did you mean {close[0]!r}?' if close else 'see esper --help'}")
    from rich.console import Console

    _parse(name, rest).run(Console(highlight=False))


def _parse(name: str, arguments: list[str]) -> Command:
    import tyro

    # Only the chosen one is imported: most need torch, which takes seconds.
    dataclass: type[Command] = getattr(import_module(f"{__package__}.{name}"), f"{name.capitalize()}Command")
    try:
        with _quiet_follower():
            return tyro.cli(dataclass, prog=f"esper {name}", args=arguments)
    finally:
        sys.stdout.flush()  # help for a reader that has gone fails here, where it is caught


@contextmanager
def _quiet_follower() -> Iterator[None]:
    """Print nothing on ranks other than 0 of `torchrun`: rank 0 says the same."""
    if os.environ.get("RANK", "0") == "0":
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def _help() -> str:
    commands = "\n".join(f"  {name:10}{text}" for name, text in COMMANDS.items())
    return (
        "usage: esper COMMAND [options]\n\nGrow a neural network while it trains.\n\n"
        f"commands:\n{commands}\n\nesper COMMAND --help lists the options; esper --version prints the version."
    )


def _fail(message: str) -> NoReturn:
    print(f"esper: {printable(message)}", file=sys.stderr)
    raise SystemExit(2)
