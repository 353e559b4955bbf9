"""`esper train`."""

import signal
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from esper.leyline import BadValueError
from esper.nissa import SinkSettings
from esper.simic.distributed import World, open_world
from esper.simic.teaching import check_episodes, teach, teach_shared
from esper.simic.training.config import TrainConfig, read_settings, taught_config
from esper.simic.training.follower import Follower
from esper.simic.training.run_folder import read_config
from esper.simic.training.together import is_together, read_together, train_together
from esper.simic.training.trainer import Trainer
from esper.simic.tuning.dealt import serve_trials
from esper.storage.series import KEEP

DEFAULT, OUT = TrainConfig(), Path("runs/train")


def flag(kind: Any, default: object = None) -> Any:  # Any: a type, and tyro's description of a flag
    """A flag that is None unless it was given; the help shows the default that holds then."""
    return tyro.conf.arg(constructor=kind, help_behavior_hint="" if default is None else f"(default: {default})")


@dataclass(frozen=True)
class PPOFlags:
    """Frequent settings of PPO; `--config` sets the others."""

    epochs: Annotated[int | None, flag(int, DEFAULT.ppo.epochs)] = None
    """Passes over a round in one update."""
    rate: Annotated[float | None, flag(float, DEFAULT.ppo.rate)] = None
    """Learning rate."""
    rate_end: Annotated[float | None, flag(float, DEFAULT.ppo.rate_end)] = None
    """Share of the learning rate at the end of the run."""
    target_kl: Annotated[float | None, flag(float, DEFAULT.ppo.target_kl)] = None
    """KL at 1.5 times which an update stops."""
    entropy: Annotated[float | None, flag(float, DEFAULT.ppo.entropy)] = None
    """Coefficient of the entropy bonus."""
    entropy_end: Annotated[float | None, flag(float, DEFAULT.ppo.entropy_end)] = None
    """Share of it at the end of the run."""


@dataclass(frozen=True)
class RewardFlags:
    """Frequent settings of the reward; `--config` sets the others."""

    rho: Annotated[float | None, flag(float, DEFAULT.reward.rho)] = None
    """Rent in points per doubling of the host."""
    commit_price: Annotated[float | None, flag(float, DEFAULT.reward.commit_price)] = None
    """Points that a host's first commit costs in addition; the second costs twice that, and so on."""


@dataclass(frozen=True)
class TrainCommand:
    """Train a controller on fresh hosts, round after round. Writes a run folder."""

    task: Annotated[str | None, flag(str, DEFAULT.task)] = None
    """Task of the hosts. Several tasks, separated by commas, share one policy."""
    rounds: Annotated[int | None, flag(int, DEFAULT.rounds)] = None
    """Rounds: an episode of all hosts each, then an update of the policy."""
    hosts: Annotated[int | None, flag(int, DEFAULT.hosts)] = None
    """Hosts per round, controls included, divided equally among the tasks."""
    members: Annotated[int | None, flag(int, DEFAULT.members)] = None
    """Hosts per group, without its control."""
    seed: Annotated[int | None, flag(int, DEFAULT.seed)] = None
    """Random seed of the run."""
    seeds: Annotated[str | None, flag(str)] = None
    """Several random seeds, e.g. 0..4 or 0,1,7: separate runs in OUT/seed0, OUT/seed1, … that share their fleets."""
    out: Annotated[Path | None, flag(Path, OUT)] = None
    """Output folder. Must not already contain a run."""
    resume: Annotated[Path | None, flag(Path)] = None
    """Resume this run from its last complete round. Only --data-dir may differ."""
    config: Annotated[Path | None, flag(Path)] = None
    """TOML file with any settings, e.g. `[ppo]` and `epochs = 8`. Flags win over the file."""
    teach: Annotated[int | None, flag(int)] = None
    """Search fixed plans with this number of episodes first, and imitate the best ones of each host."""
    workers: Annotated[int | None, flag(int, 1)] = None
    """Processes of that search."""
    start: Annotated[Path | None, flag(Path)] = None
    """Run whose trained controller this run starts with."""
    preset: Annotated[str | None, flag(str, DEFAULT.preset)] = None
    """Heads and ops of the controller: core, commit or full."""
    sensing: Annotated[bool | None, flag(bool, DEFAULT.sensing)] = None
    """Whether the controller sees the probes of empty slots."""
    device: Annotated[str | None, flag(str, DEFAULT.device)] = None
    """Device of hosts and policy."""
    data_dir: Annotated[Path | None, flag(Path)] = None
    """Folder of the data sets (default: $ESPER_DATA, else the user's cache)."""
    keep_checkpoints: Annotated[int | None, flag(int, KEEP)] = None
    """Number of newest checkpoints to keep."""
    hosts_by_rank: Annotated[str | None, flag(str)] = None
    """Under torchrun: hosts of every rank, controls included, separated by commas (default: divided evenly)."""
    profile: Annotated[Path | None, flag(Path)] = None
    """Folder for a trace of every operator of one round, the second from now (chrome://tracing, Perfetto)."""
    record: Annotated[Path | None, flag(Path)] = None
    """Folder for records of every transition, for offline learning. Name it again when you resume."""
    sinks: tyro.conf.OmitArgPrefixes[SinkSettings] = field(default_factory=SinkSettings)
    ppo: PPOFlags = field(default_factory=PPOFlags)
    reward: RewardFlags = field(default_factory=RewardFlags)

    def run(self, console: Console) -> None:
        """Train with a progress bar, on all ranks of torchrun. Ctrl-C ends after the last complete round."""
        together = self.seeds is not None or (self.resume is not None and is_together(self.resume))
        with open_world() as world:
            if together:
                self._run_together(world, console)
                return
            trained = self._lead(world, console) if world.rank == 0 else self._follow(world)
            if trained.round < trained.config.rounds:  # so that a script does not take it for complete
                raise SystemExit(128 + signal.SIGINT)

    def _lead(self, world: World, console: Console) -> Trainer:
        """Train, write and show."""
        config = self.settings() if self.resume is None else self._resumed(self.resume)
        folder, resume = self.resume or self.out or OUT, self.resume is not None
        begin = None
        if config.teach.episodes:
            check_episodes(config)  # before the folder is made
            begin = partial(teach, config, workers=self.workers or 1, world=world)
        trainer = Trainer(
            config,
            folder,
            resume=resume,
            keep_checkpoints=self._keep,
            sinks=self.sinks,
            begin=begin,
            profile=self.profile,
            record=self.record,
            world=world,
            hosts_by_rank=self._shares(),
        )
        trainer.run()
        console.print(f"{trainer.round} of {trainer.config.rounds} rounds are in {trainer.folder.path}")
        return trainer

    def _follow(self, world: World) -> Follower:
        """Collect for rank 0."""
        config = self.settings() if self.resume is None else None
        follower = Follower(world, config, hosts_by_rank=self._shares(), data_dir=self.data_dir)
        own = follower.config
        follower.run(partial(serve_trials, device=own.device, data_dir=own.data_dir))
        return follower

    @property
    def _keep(self) -> int:
        return KEEP if self.keep_checkpoints is None else self.keep_checkpoints

    def _shares(self) -> tuple[int, ...] | None:
        if self.hosts_by_rank is None:
            return None
        try:
            return tuple(int(count) for count in self.hosts_by_rank.split(","))
        except ValueError:
            raise BadValueError(
                f"--hosts-by-rank {self.hosts_by_rank!r}: give whole numbers separated by commas, such as 24,8"
            ) from None

    def _run_together(self, world: World, console: Console) -> None:
        """Train several seeds in shared fleets, or resume all of them."""
        if world.size > 1:
            raise BadValueError(f"several seeds share one process, not {world.size}; start it without torchrun")
        given = {name: getattr(self, name) for name in ("seed", "workers", "profile", "hosts_by_rank")}
        if excluded := [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]:
            raise BadValueError(f"several seeds share one process and its fleets; omit {', '.join(excluded)}")
        if self.resume is None:
            config, seeds = self.settings(), tuple(parse_seeds(self.seeds or ""))
        else:
            config, seeds = read_together(self.resume)
            config = self._resumed(self.resume / f"seed{config.seed}")
        make_begin = None
        if config.teach.episodes:
            check_episodes(config)
            make_begin = partial(teach_shared, learners=len(seeds))
        folder = self.resume or self.out or OUT
        train_together(
            config,
            folder,
            seeds,
            make_begin=make_begin,
            keep_checkpoints=self._keep,
            sinks=self.sinks,
            record=self.record,
        )
        console.print(f"{config.rounds} rounds of {len(seeds)} seeds are in {folder}")

    def settings(self) -> TrainConfig:
        """The defaults, changed by the file, then by the flags."""
        config = DEFAULT if self.teach is None else taught_config(self.teach)
        config = config if self.config is None else read_settings(self.config, config)
        given = {name: value for name, value in _given(self).items() if hasattr(config, name)}
        given |= {name: replace(getattr(config, name), **_given(getattr(self, name))) for name in ("ppo", "reward")}
        if self.teach is not None:
            given["teach"] = replace(config.teach, episodes=self.teach)
        return replace(config, **given)

    def _resumed(self, folder: Path) -> TrainConfig:
        """The settings of a run to resume; only its data folder may differ."""
        free = {"resume", "data_dir", "hosts_by_rank", "profile", "record", "workers", "sinks", "ppo", "reward"}
        names = _given(self).keys() - free
        names |= {f"{group}.{name}" for group in ("ppo", "reward") for name in _given(getattr(self, group))}
        if names:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(names))
            raise BadValueError(f"--resume continues {folder} with its own settings; omit {flags}")
        config = read_config(folder)
        return config if self.data_dir is None else replace(config, data_dir=self.data_dir)


def parse_seeds(text: str) -> list[int]:
    """The numbers of `0..4` or `0,1,7`."""
    try:
        first, separator, last = text.partition("..")
        seeds = list(range(int(first), int(last) + 1)) if separator else [int(part) for part in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds:
        raise BadValueError(f"--seeds {text!r} names no seeds; write for example 0..4 or 0,1,7")
    return seeds


def _given(flags: Any) -> dict[str, Any]:  # Any: a dataclass of flags, and their values
    return {name: value for name, value in vars(flags).items() if value is not None}
