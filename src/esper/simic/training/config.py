"""Settings of a training run."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from esper.kasmina.slot import ISOLATIONS, Isolation
from esper.leyline import BadValueError, UnknownNameError, head_preset
from esper.leyline.numbers import require_positive, require_whole
from esper.leyline.records import Json, decode, encode
from esper.simic.agent import PPOConfig
from esper.simic.offline.networks import windowed
from esper.simic.rewards import RewardConfig, check_gamma
from esper.simic.telemetry import AlarmLimits
from esper.tolaria import Task, get_task

# Initial bias of WAIT's logit. With 1, an untrained policy commits a seed in 32 % of its episodes; with 1.5 in 21 %,
# with 2.5 in 1 % (72 episodes each). Without commits there is nothing to learn from.
WAIT_BIAS = 1.0
PATHS = ("data_dir", "start")  # settings that JSON and TOML hold as text


def growth_ppo() -> PPOConfig:
    """PPO's defaults for growth: episodes are dear, so rounds are small and steps large (docs/ppo.md)."""
    return PPOConfig(
        gamma=1.0, normalise_rewards=False, rate=3e-3, rate_end=0.1, epochs=8, target_kl=0.1, logit_penalty=3e-3
    )


@dataclass(frozen=True)
class TeachConfig:
    """Settings of teaching: a search of plans, and imitation of the best ones, before the first round."""

    episodes: int = 0  # of the search, divided equally among the tasks; 0: no teaching
    # In deviations of the objectives among the plans of a host: a plan that is β better counts e times as much there.
    betas: tuple[float, ...] = (0.1, 0.3)
    pooling: tuple[float, ...] = (0.0, 1.0)  # share by which an objective moves to the mean of its plan over all hosts
    sharpness: tuple[float, ...] = (1.0, 3.0, 10.0)  # factors of the logits after the imitation
    folds: int = 3  # parts of the hosts; each is held out once, to choose among the betas and sharpnesses
    epochs: int = 60  # passes of the imitation over the episodes

    def __post_init__(self) -> None:
        for name, least in (("episodes", 0), ("folds", 2), ("epochs", 1)):
            require_whole(f"teach.{name}", getattr(self, name), least)
        for name in ("betas", "pooling", "sharpness"):
            if not (values := getattr(self, name)):
                raise BadValueError(f"teach.{name} is empty; give at least one number")
            for value in values:
                if name != "pooling":
                    require_positive(f"teach.{name}", value)
                elif not 0 <= value <= 1:
                    raise BadValueError(f"teach.pooling {value!r} is not in [0, 1]")


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a run, in which a controller learns on fresh hosts, round after round."""

    task: str = "digits_blind"  # several tasks, separated by commas, share one policy
    rounds: int = 40  # an episode of all hosts each, then an update of the policy
    hosts: int = 16  # hosts per round, controls included, divided equally among the tasks
    members: int = 3  # hosts per group, without its control
    batch: int | None = None  # minibatch size of the hosts (default: the task's)
    seed: int = 0  # random seed of the run
    start: Path | None = None  # run whose trained controller and observation statistics this run starts with
    preset: str = "commit"  # heads and ops of the controller: core, commit or full
    sensing: bool = True  # whether the controller sees the probes of empty slots
    isolation: Isolation = "shadow"  # how seeds in TRAINING learn: in a shadow row, or straight_through the main row
    teach: TeachConfig = field(default_factory=TeachConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    ppo: PPOConfig = field(default_factory=growth_ppo)
    alarms: AlarmLimits = field(default_factory=AlarmLimits)
    device: str = "cpu"  # device of hosts and policy
    threads: int = 1  # threads of torch on the CPU; small hosts gain nothing from more
    data_dir: Path | None = None  # folder of the data sets (default: $ESPER_DATA, else the user's cache)

    def __post_init__(self) -> None:
        require_whole("rounds", self.rounds, 0 if self.teach.episodes else 1)
        for name in ("hosts", "members", "threads"):
            require_whole(name, getattr(self, name), 1)
        if self.batch is not None:
            require_whole("batch", self.batch, 1)
        head_preset(self.preset)
        for name in self.tasks:
            get_task(name)
        if len(set(self.tasks)) != len(self.tasks) or self.hosts % len(self.tasks):
            raise BadValueError(
                f"{self.hosts} hosts cannot be divided among tasks {list(self.tasks)}; name each task once and use a "
                f"multiple of {len(self.tasks)}"
            )
        if self.isolation not in ISOLATIONS:
            raise UnknownNameError("isolation", self.isolation, ISOLATIONS)
        if self.teach.episodes and (self.start, self.batch, self.isolation) != (None, None, "shadow"):
            raise BadValueError("teaching searches with the task's own hosts; omit --start, isolation and batch")
        self.ppo.floors(len(self.tasks))
        check_gamma(self.reward.gamma, self.ppo.gamma)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks by name."""
        return tuple(name.strip() for name in self.task.split(","))

    def agent_config(self, *tasks: Task) -> PPOConfig:
        """PPO's settings, completed with what follows from the tasks: WAIT bias, steps and the floors of advantages."""
        ops = len(head_preset(self.preset).heads[0].choices)
        network = replace(self.ppo.network, first_bias=self.ppo.network.first_bias or (WAIT_BIAS, *(0.0,) * (ops - 1)))
        # The standard error of a gain in points, if the two hosts disagree on one image in ten.
        errors = (100 * float((0.1 / task.validation_size) ** 0.5) for task in tasks)
        floors = tuple(map(max, self.ppo.floors(len(tasks)), errors))
        floor = floors if len(tasks) > 1 else floors[0]
        return replace(self.ppo, network=network, steps=max(task.steps for task in tasks), advantage_floor=floor)


def taught_config(episodes: int) -> TrainConfig:
    """The default settings of a run that begins with teaching.

    Under preset `commit` a plan is a single decision, which is easily imitated. The policy already knows what to do. So
    nothing rewards or forces exploration, steps are small, and a leash holds the policy. The critic learns first.
    """
    ppo = replace(
        growth_ppo(),
        network=windowed(),
        rate=3e-4,
        rate_end=1.0,
        epochs=4,
        target_kl=0.03,
        critic_first=4,
        leash=1.0,
        leash_until=1.0,
        leave_one_out=True,
        explore=0.0,
        entropy=0.0,
        logit_penalty=0.0,
    )
    return TrainConfig(rounds=20, hosts=32, members=7, teach=TeachConfig(episodes), ppo=ppo)


def decode_config(values: Mapping[str, Json], where: str) -> TrainConfig:
    """Settings from a parsed JSON or TOML object that has every field, strictly checked."""
    config: TrainConfig = decode(TrainConfig, {**values, **dict.fromkeys(PATHS)}, where)
    texts = (decode(str | None, values[name], f"{where}.{name}") for name in PATHS)
    data_dir, start = (None if text is None else Path(text) for text in texts)
    return replace(config, data_dir=data_dir, start=start)


def read_settings(path: Path, default: TrainConfig | None = None) -> TrainConfig:
    """The default settings, changed by a TOML file: any field, nested ones in tables, "none" for None."""
    try:
        changes = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadValueError(f"{path} cannot be read as TOML: {error}") from error
    return decode_config(_changed(encode(default or TrainConfig()), changes), f"{path}: settings")


def _changed(values: Json, changes: Json) -> Json:
    """Unknown keys are left to the decoder, which refuses them."""
    if isinstance(values, dict) and isinstance(changes, dict):
        return values | {name: _changed(values.get(name), change) for name, change in changes.items()}
    return None if changes == "none" else changes
