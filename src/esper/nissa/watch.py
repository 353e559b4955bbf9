"""Who watches a run: settings, and the hub that follows from them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.nissa.hub import Hub, Sink
from esper.nissa.sinks import ConsoleSink, TensorBoardSink, WandbSink


@dataclass(frozen=True)
class Watch:
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
