"""A line per round in the terminal, and alarms."""

import sys
from typing import TYPE_CHECKING, NamedTuple

from esper.leyline import MissingPackageError
from esper.nissa.catalogue import find_metric
from esper.nissa.events import AlarmRaised, Event, RoundMeasured

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


class Shown(NamedTuple):
    """A metric in the line of a round."""

    name: str
    label: str
    form: str


LINE = (
    Shown("objective", "objective", "+.2f"),
    Shown("gain", "gain", "+.2f"),
    Shown("accuracy", "accuracy", ".1f"),
    Shown("committed", "committed", ".0%"),
    Shown("added_parameters", "parameters", "+,.0f"),
    Shown("ppo/max_kl", "KL", ".3f"),
    Shown("ppo/entropy", "entropy", ".2f"),
    Shown("ppo/explained_variance", "explained", ".2f"),
    Shown("timing/collect_s", "collect", ".1f"),
    Shown("timing/update_s", "update", ".1f"),
)
"""What is not measured in a round is left out."""
STYLES = {"warning": "yellow", "critical": "bold red"}
"""Severity → how it looks; an info is not shown, the log has it."""


class ConsoleSink:
    """Writes to stdout, above a progress bar where one is shown. Figures out of their healthy range are yellow."""

    name = "console"
    _console: "Console"

    @staticmethod
    def require() -> None:
        """Raise where its package is missing."""
        try:
            import rich  # noqa: F401
        except ImportError as error:
            raise MissingPackageError("--console", "rich", "rich") from error

    def open(self) -> None:
        """Look what the terminal can do."""
        from rich.console import Console

        self._console = Console(highlight=False, soft_wrap=True)

    def write(self, event: Event) -> None:
        """A line, or none."""
        from rich.text import Text

        if isinstance(event, RoundMeasured):
            self._print(_line(event))
        elif isinstance(event, AlarmRaised) and event.severity in STYLES:
            self._print(Text(str(event), STYLES[event.severity]))

    def close(self) -> None:
        """Nothing is held back."""

    def _print(self, text: "Text") -> None:
        # While a progress bar is shown rich puts another stdout in place, which prints above the bar; a console of its
        # own would write past it. One write per line: another thread may print too.
        with self._console.capture() as rendered:
            self._console.print(text)
        sys.stdout.write(rendered.get())
        sys.stdout.flush()


def _line(event: RoundMeasured) -> "Text":
    from rich.text import Text

    numbers = event.numbers()
    line = Text().append(f"round {event.round}:", "bold")
    for place, shown in enumerate(shown for shown in LINE if shown.name in numbers):
        metric, value = find_metric(shown.name), numbers[shown.name]
        unit = " s" if metric is not None and metric.unit == "s" else ""
        style = "" if metric is None or metric.is_healthy(value) else "yellow"
        line.append(f"{',' if place else ''} {shown.label} ", "dim")
        line.append(f"{value:{shown.form}}{unit}", style)
    return line
