"""`esper train`."""

import signal
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path

import tyro
from rich.console import Console

from esper.leyline import BadValueError
from esper.nissa import SinkSettings
from esper.simic.training.config import TrainConfig
from esper.simic.training.run_folder import read_config
from esper.simic.training.trainer import Trainer
from esper.storage.series import KEEP


@dataclass(frozen=True)
class TrainCommand(TrainConfig):
    """Train a controller on fresh hosts, round after round; writes a run folder."""

    out: Path = Path("runs/train")
    """Folder of the run; it must not hold another."""
    resume: Path | None = None
    """Go on with this run instead, as it was configured (but for --data-dir), from its last complete round."""
    sinks: tyro.conf.OmitArgPrefixes[SinkSettings] = field(default_factory=SinkSettings)
    profile: Path | None = None
    """Folder for a trace of every operator of one round, the second from here on (chrome://tracing, Perfetto)."""
    keep_checkpoints: int = KEEP
    """How many of the newest checkpoints to keep."""

    def run(self, console: Console) -> None:
        """Train, with a progress bar; Ctrl-C ends after the last complete round."""
        if self.resume is not None:
            trainer = Trainer(
                self._resumed(self.resume), self.resume, resume=True, sinks=self.sinks, profile=self.profile
            )
        else:
            config = TrainConfig(**{each.name: getattr(self, each.name) for each in fields(TrainConfig)})
            trainer = Trainer(
                config, self.out, sinks=self.sinks, profile=self.profile, keep_checkpoints=self.keep_checkpoints
            )
        trainer.run()
        console.print(
            f"{trainer.round} of {trainer.config.rounds} rounds are in {trainer.folder.path}", highlight=False
        )
        if trainer.round < trainer.config.rounds:  # whoever runs this in a script should not take it for complete
            raise SystemExit(128 + signal.SIGINT)

    def _resumed(self, folder: Path) -> TrainConfig:
        """As the run was configured; only where its data lie may be another place."""
        new = {each.name: getattr(self, each.name) for each in fields(TrainCommand)}
        like = asdict(TrainConfig()) | {"out": TrainCommand.out, "keep_checkpoints": KEEP}
        given = [name for name, default in like.items() if name != "data_dir" and _plain(new[name]) != default]
        if given:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise BadValueError(f"--resume goes on with {folder} as it was configured; leave {flags} away")
        config = read_config(folder)
        return config if self.data_dir is None else replace(config, data_dir=self.data_dir)


def _plain(value: object) -> object:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
