"""Every number of every round for Weights & Biases, without a network."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.leyline import MissingPackageError
from esper.nissa.events import AlarmRaised, Event, RoundMeasured

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
