"""`esper train`."""

from dataclasses import dataclass, field, fields
from pathlib import Path

import tyro
from rich.console import Console

from esper.leyline.series import KEEP
from esper.nissa import Watch
from esper.simic.training.config import TrainConfig
from esper.simic.training.runs import read_config
from esper.simic.training.trainer import Trainer


@dataclass(frozen=True)
class TrainCommand(TrainConfig):
    """Train a controller on fresh hosts, round after round; writes a run folder."""

    out: Path = Path("runs/train")
    """Folder of the run; it must not hold another."""
    resume: Path | None = None
    """Go on with this run instead, as it was configured, from its last complete round."""
    watch: tyro.conf.OmitArgPrefixes[Watch] = field(default_factory=Watch)
    profile: Path | None = None
    """Folder for a trace of every operator of one round, the second from here on (chrome://tracing, Perfetto)."""
    keep_checkpoints: int = KEEP
    """How many of the newest checkpoints to keep."""

    def run(self, console: Console) -> None:
        """Train, with a progress bar; Ctrl-C ends after the last complete round."""
        if self.resume is not None:
            trainer = Trainer(
                read_config(self.resume), self.resume, resume=True, watch=self.watch, profile=self.profile
            )
        else:
            config = TrainConfig(**{each.name: getattr(self, each.name) for each in fields(TrainConfig)})
            trainer = Trainer(
                config, self.out, watch=self.watch, profile=self.profile, keep_checkpoints=self.keep_checkpoints
            )
        trainer.run()
        console.print(
            f"{trainer.round} of {trainer.config.rounds} rounds are in {trainer.folder.path}", highlight=False
        )
