"""Sinks: the console, TensorBoard and Weights & Biases."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from esper.leyline import MissingPackageError
from esper.nissa.catalogue import find_metric
from esper.nissa.events import AlarmRaised, Event, RoundMeasured
from esper.nissa.hub import Hub, Sink

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


if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"


class TensorBoardSink:
    """Writes `RUN/tensorboard`. Of a run that goes on, what was drawn of the rounds to come is hidden."""

    name = "tensorboard"
    _writer: "SummaryWriter"

    def __init__(self, run: Path, config: Mapping[str, Any], first_round: int) -> None:  # Any: JSON
        self._run, self._config, self._first_round = run, config, first_round

    @staticmethod
    def require() -> None:
        """Raise where its package is missing."""
        try:
            import tensorboard  # noqa: F401
        except ImportError as error:
            raise MissingPackageError("--tensorboard", "tensorboard", "esper-morph[tensorboard]") from error

    def open(self) -> None:
        """Start a file, with the run's configuration as text."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._run / FOLDER), purge_step=self._first_round or None)
        text = json.dumps(self._config, indent=1)
        self._writer.add_text("config", "".join(f"    {line}\n" for line in text.splitlines()), self._first_round)

    def write(self, event: Event) -> None:
        """Scalars over rounds; an alarm is 1 where it begins and 0 where it ends, with its cause as text."""
        if isinstance(event, RoundMeasured):
            for name, value in event.numbers().items():
                self._writer.add_scalar(name, value, event.round)
            self._writer.flush()
        elif isinstance(event, AlarmRaised):
            self._writer.add_scalar(event.metric, float(not event.ended), event.round)
            self._writer.add_text(f"{event.metric}/cause", str(event), event.round)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


if TYPE_CHECKING:
    from wandb import Run

PROJECT = "esper"


class WandbSink:
    """Writes `RUN/wandb`; `wandb sync` uploads it if and when somebody wants that.

    Offline runs cannot be gone on with: a run that was resumed is several there, in one group.
    """

    name = "wandb"
    _wandb_run: "Run"

    def __init__(self, run: Path, config: Mapping[str, Any], first_round: int) -> None:  # Any: JSON
        self._run, self._config, self._first_round = run, config, first_round

    @staticmethod
    def require() -> None:
        """Raise where its package is missing. A folder of this name, which W&B itself leaves, is no package."""
        try:
            from wandb import init  # noqa: F401
        except ImportError as error:
            raise MissingPackageError("--wandb", "wandb", "esper-morph[wandb]") from error

    def open(self) -> None:
        """Begin an offline run. It leaves the terminal alone."""
        import wandb

        self._wandb_run = wandb.init(
            project=PROJECT,
            name=f"{self._run.name} from round {self._first_round}" if self._first_round else self._run.name,
            group=self._run.name,
            dir=str(self._run),
            mode="offline",
            config=dict(self._config),
            settings=wandb.Settings(console="off", silent=True),
        )

    def write(self, event: Event) -> None:
        """Numbers by round; an alarm is 1 where it begins and 0 where it ends, its cause is in the summary."""
        if isinstance(event, RoundMeasured):
            self._wandb_run.log(event.numbers(), step=event.round)
        elif isinstance(event, AlarmRaised):
            self._wandb_run.log({event.metric: float(not event.ended)}, step=event.round)
            self._wandb_run.summary[f"{event.metric}/cause"] = str(event)

    def close(self) -> None:
        """Write what is left."""
        self._wandb_run.finish()


@dataclass(frozen=True)
class SinkSettings:
    """Sinks beside the log. They change nothing of a run, so they are no part of its configuration."""

    console: bool = False
    """Print a line per round, in place of the words beside the progress bar, and alarms."""
    tensorboard: bool = False
    """Write RUN/tensorboard (needs esper-morph[tensorboard])."""
    wandb: bool = False
    """Write RUN/wandb, offline; `wandb sync` uploads it (needs esper-morph[wandb])."""

    def check(self) -> None:
        """Raise where a package is missing. Call it before anything else: it names what to install."""
        for wanted, kind in ((self.console, ConsoleSink), (self.tensorboard, TensorBoardSink), (self.wandb, WandbSink)):
            if wanted:
                kind.require()

    def open(self, run: Path, config: Mapping[str, Any], first_round: int = 0) -> Hub:  # Any: what JSON can tell
        """The hub of a run in its folder, which goes on from a round."""
        plain = json.loads(json.dumps(config, default=str))
        sinks: list[Sink] = []
        if self.console:
            sinks.append(ConsoleSink())
        if self.tensorboard:
            sinks.append(TensorBoardSink(run, plain, first_round))
        if self.wandb:
            sinks.append(WandbSink(run, plain, first_round))
        return Hub(sinks)
