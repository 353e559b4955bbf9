"""Settings of a training run."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from esper.kasmina.slot import ISOLATIONS, Isolation
from esper.leyline import BadValueError, UnknownNameError, head_preset
from esper.leyline.numbers import require_whole
from esper.simic.agent import PPOConfig
from esper.simic.rewards import RewardConfig, check_gamma
from esper.simic.telemetry import AlarmLimits
from esper.tamiyo import NetworkConfig
from esper.tolaria import Task, get_task

WAIT_BIAS = 1.0
"""On the logit of WAIT at birth: leaner plans from the start. With 2.5 an untrained policy commits a seed in 1 % of its
episodes, with 1.5 in 21 %, with 1 in 32 % (72 episodes each): without commits there is nothing to learn from."""


def growth_ppo() -> PPOConfig:
    """PPO's start values for growth."""
    return PPOConfig(gamma=1.0, normalise_rewards=False)


@dataclass(frozen=True)
class TrainConfig:
    """One run: a controller learns on fresh hosts, round after round."""

    task: str = "digits_blind"
    """Task to grow hosts of; several, separated by commas, share one policy."""
    rounds: int = 20
    """Rounds: in each, all hosts live one episode, then the policy is updated."""
    hosts: int = 32
    """Hosts per round, controls included; several tasks get equally many each."""
    members: int = 3
    """Hosts per group beside its control."""
    seed: int = 0
    """Everything random follows from it."""
    start: Path | None = None
    """A run whose controller this one begins with: its weights, and how it scales what it sees; all else is new."""
    preset: str = "core"
    """Heads and ops of the controller: core or full."""
    sensing: bool = True
    """Whether the controller sees what can be sensed at empty slots."""
    isolation: Isolation = "shadow"
    """How seeds in TRAINING learn: from a shadow row of their own, or straight_through the main row."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    ppo: PPOConfig = field(default_factory=growth_ppo)
    alarms: AlarmLimits = field(default_factory=AlarmLimits)
    device: str = "cpu"
    """Where hosts and policy live."""
    threads: int = 1
    """Of torch on the CPU; hosts this small gain nothing from more."""
    data_dir: Path | None = None
    """Where data sets are looked for (default: $ESPER_DATA, else the user's cache)."""

    def __post_init__(self) -> None:
        for name in ("rounds", "hosts", "members", "threads"):
            require_whole(name, getattr(self, name), 1)
        head_preset(self.preset)
        for name in self.tasks:
            get_task(name)
        if len(set(self.tasks)) != len(self.tasks) or self.hosts % len(self.tasks):
            raise BadValueError(f"{self.hosts} hosts for tasks {list(self.tasks)}: name each once, with equally many")
        if self.isolation not in ISOLATIONS:
            raise UnknownNameError("isolation", self.isolation, ISOLATIONS)
        check_gamma(self.reward.gamma, self.ppo.gamma)

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks by name."""
        return tuple(name.strip() for name in self.task.split(","))

    def agent_config(self, *tasks: Task) -> PPOConfig:
        """PPO's settings with what follows from the tasks: the WAIT bias and the floor of advantages."""
        ops = len(head_preset(self.preset).heads[0].choices)
        network: NetworkConfig = self.ppo.network
        if not network.first_bias:
            network = replace(network, first_bias=(WAIT_BIAS, *(0.0,) * (ops - 1)))
        floor = max(self.ppo.advantage_floor, *(gain_error(task) for task in tasks))
        return replace(self.ppo, network=network, steps=max(task.steps for task in tasks), advantage_floor=floor)


def gain_error(task: Task) -> float:
    """Standard error of a gain in points, where one image in ten tells the two hosts apart."""
    return 100 * float((0.1 / task.validation_size) ** 0.5)
