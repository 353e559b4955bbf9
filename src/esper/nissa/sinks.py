"""Sinks: the console, TensorBoard and Weights & Biases."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.leyline import MissingPackageError
from esper.nissa.catalogue import find_metric
from esper.nissa.events import AlarmRaised, Event, RoundMeasured
from esper.nissa.hub import Hub, Sink

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text
    from torch.utils.tensorboard import SummaryWriter
    from wandb import Run

LINE = {
    "objective": ("objective", "+.2f"),
    "gain": ("gain", "+.2f"),
    "accuracy": ("accuracy", ".1f"),
    "committed": ("committed", ".0%"),
    "added_parameters": ("parameters", "+,.0f"),
    "ppo/max_kl": ("KL", ".3f"),
    "ppo/entropy": ("entropy", ".2f"),
    "ppo/explained_variance": ("explained", ".2f"),
    "timing/collect_s": ("collect", ".1f"),
    "timing/update_s": ("update", ".1f"),
}
"""The console's line of a round: metric → label and format. Metrics that a round lacks are omitted."""
STYLES = {"warning": "yellow", "critical": "bold red"}
"""Severity → style; infos are only logged."""


class ConsoleSink:
    """Prints to stdout, above a progress bar if there is one. Figures out of their healthy range are yellow."""

    name = "console"
    _console: "Console"

    def open(self) -> None:
        """Find out what the terminal supports."""
        from rich.console import Console

        self._console = Console(highlight=False, soft_wrap=True)

    def write(self, event: Event) -> None:
        """Print a line for a round or an alarm."""
        from rich.text import Text

        if isinstance(event, RoundMeasured):
            self._print(_line(event))
        elif isinstance(event, AlarmRaised) and event.severity in STYLES:
            self._print(Text(str(event), STYLES[event.severity]))

    def close(self) -> None:
        """Do nothing: every line is flushed."""

    def _print(self, text: "Text") -> None:
        # A progress bar replaces stdout by one that prints above the bar; a console that writes on its own would not.
        # One write per line, because another thread may print too.
        with self._console.capture() as rendered:
            self._console.print(text)
        sys.stdout.write(rendered.get())
        sys.stdout.flush()


def _line(event: RoundMeasured) -> "Text":
    from rich.text import Text

    numbers, line, comma = event.numbers(), Text().append(f"round {event.round}:", "bold"), ""
    for name, (label, form) in LINE.items():
        metric = find_metric(name)
        if name in numbers and metric is not None:
            style = "" if metric.is_healthy(numbers[name]) else "yellow"
            line.append(f"{comma} {label} ", "dim")
            line.append(f"{numbers[name]:{form}}{' s' if metric.unit == 's' else ''}", style)
            comma = ","
    return line


class TensorBoardSink:
    """Writes `RUN/tensorboard`. A resumed run hides what was drawn of the rounds to come."""

    name = "tensorboard"
    _writer: "SummaryWriter"

    def __init__(self, run: Path, config: Mapping[str, Any], first_round: int) -> None:  # Any: JSON
        self._run, self._config, self._first_round = run, config, first_round

    def open(self) -> None:
        """Start a file, with the run's configuration as text."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._run / "tensorboard"), purge_step=self._first_round or None)
        text = json.dumps(self._config, indent=1)
        self._writer.add_text("config", "".join(f"    {line}\n" for line in text.splitlines()), self._first_round)

    def write(self, event: Event) -> None:
        """Draw numbers by round. An alarm is 1 where it begins and 0 where it ends, with its cause as text."""
        if isinstance(event, RoundMeasured):
            for name, value in event.numbers().items():
                self._writer.add_scalar(name, value, event.round)
            self._writer.flush()
        elif isinstance(event, AlarmRaised):
            self._writer.add_scalar(event.metric, float(not event.ended), event.round)
            self._writer.add_text(f"{event.metric}/cause", str(event), event.round)

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


class WandbSink:
    """Writes `RUN/wandb`, offline; `wandb sync` uploads it.

    W&B cannot resume offline runs: a resumed run appears as several, in one group.
    """

    name = "wandb"
    _wandb_run: "Run"

    def __init__(self, run: Path, config: Mapping[str, Any], first_round: int) -> None:  # Any: JSON
        self._run, self._config, self._first_round = run, config, first_round

    def open(self) -> None:
        """Begin an offline run that does not print."""
        import wandb

        self._wandb_run = wandb.init(
            project="esper",
            name=f"{self._run.name} from round {self._first_round}" if self._first_round else self._run.name,
            group=self._run.name,
            dir=str(self._run),
            mode="offline",
            config=dict(self._config),
            settings=wandb.Settings(console="off", silent=True),
        )

    def write(self, event: Event) -> None:
        """Log numbers by round. An alarm is 1 where it begins and 0 where it ends; the summary has its cause."""
        if isinstance(event, RoundMeasured):
            self._wandb_run.log(event.numbers(), step=event.round)
        elif isinstance(event, AlarmRaised):
            self._wandb_run.log({event.metric: float(not event.ended)}, step=event.round)
            self._wandb_run.summary[f"{event.metric}/cause"] = str(event)

    def close(self) -> None:
        """Flush and end the run."""
        self._wandb_run.finish()


PACKAGES = {
    "console": ("rich", "get_console", "rich"),
    "tensorboard": ("tensorboard", "__version__", "esper-morph[tensorboard]"),
    "wandb": ("wandb", "init", "esper-morph[wandb]"),
}
"""Option → module, a name in it, and what to install. W&B leaves a folder `wandb`, which imports as an empty module."""


@dataclass(frozen=True)
class SinkSettings:
    """Sinks in addition to the log. They do not affect a run, so they are no part of its configuration."""

    console: bool = False
    """Print a line per round, and alarms."""
    tensorboard: bool = False
    """Write RUN/tensorboard (needs esper-morph[tensorboard])."""
    wandb: bool = False
    """Write RUN/wandb, offline; `wandb sync` uploads it (needs esper-morph[wandb])."""

    def check(self) -> None:
        """Raise if a package is missing, with what to install."""
        for option, (module, name, install) in PACKAGES.items():
            if getattr(self, option):
                try:
                    getattr(import_module(module), name)
                except (ImportError, AttributeError) as error:
                    raise MissingPackageError(f"--{option}", module, install) from error

    def open(self, run: Path, config: Mapping[str, Any], first_round: int = 0) -> Hub:  # Any: JSON, and paths
        """The hub of a run in its folder, from a round on."""
        plain = json.loads(json.dumps(config, default=str))
        sinks: list[Sink] = [ConsoleSink()] if self.console else []
        sinks += [TensorBoardSink(run, plain, first_round)] if self.tensorboard else []
        sinks += [WandbSink(run, plain, first_round)] if self.wandb else []
        return Hub(sinks)
