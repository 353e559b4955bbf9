"""Every number of every round as a curve for TensorBoard."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.leyline import MissingPackageError
from esper.nissa.events import AlarmRaised, Event, RoundMeasured

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
