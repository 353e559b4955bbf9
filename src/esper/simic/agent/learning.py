"""Training on Gymnasium environments with discrete actions."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from esper.leyline import BadValueError, derive_seed
from esper.leyline.numbers import require_whole
from esper.leyline.progress import progress_bar
from esper.simic.agent.checkpoint import load_agent, save_agent
from esper.simic.agent.collector import RolloutCollector, normalise, play
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.environments import RESET_SEEDS, MakeEnv
from esper.simic.agent.metrics import PPOUpdateMetrics
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.spaces import SpaceCodec
from esper.simic.agent.vectors import open_batch
from esper.simic.control import RunningMeanStd
from esper.tamiyo.memory import HiddenState

if TYPE_CHECKING:
    from numpy.typing import NDArray

RECENT = 100  # episodes in the mean return of a `LearnProgress`
EVALUATED_AT_ONCE = 16


@dataclass(frozen=True)
class RewardScale:
    """Statistics of the discounted returns whose deviation divides rewards."""

    mean: float
    var: float
    count: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and 0 <= self.var < math.inf and 0 <= self.count < math.inf):
            raise BadValueError(f"{self}: these are not finite, or below 0")


class Learned:
    """A trained policy, ready to act, evaluate, save and train further."""

    def __init__(self, agent: PPOAgent, codec: SpaceCodec, make_env: MakeEnv | None = None) -> None:
        self.agent, self.codec, self.make_env = agent, codec, make_env
        self.reward_statistics = RunningMeanStd(1)
        self.history: list[PPOUpdateMetrics] = []  # one entry per update; not saved, as `returns`
        self.returns: list[tuple[int, float]] = []  # (environment steps so far, return) of every training episode

    def act(
        self, observation: Any, hidden_state: HiddenState | None = None, mask: Any = None, *, greedy: bool = True
    ) -> tuple["int | NDArray[np.int64]", HiddenState]:  # Any: as the environment gives them
        """The action for one observation, and the hidden state for the next; pass None at the start of an episode."""
        agent = self.agent
        row = np.zeros(self.codec.observation_size, np.float32)
        self.codec.write_observation(observation, row)
        masks = agent.table.open_masks(1)
        self.codec.write_mask(mask, [part[0].numpy() for part in masks.values()])
        masks = {name: part.to(agent.device) for name, part in masks.items()}
        hidden_state = agent.network.initial_state(1) if hidden_state is None else hidden_state
        normalised = normalise(agent, torch.from_numpy(row)[None])
        decision, _, hidden_state = agent.act(normalised, masks, hidden_state, greedy=greedy)
        return self.codec.read_action(decision.actions[0].cpu().numpy()), hidden_state

    def evaluate(
        self, episodes: int, seed: int, *, greedy: bool = True, make_env: MakeEnv | None = None
    ) -> list[float]:
        """Undiscounted returns of new episodes in fresh environments, in order. Each depends only on the seed and its
        number. `make_env`: other environments than those of training."""
        require_whole("episodes", episodes, 1)
        make_env = self.make_env if make_env is None else make_env
        if make_env is None:
            raise BadValueError("no environment to evaluate in; pass one: Learned.load(folder, make_env)")
        with closing(open_batch(make_env, None, self.codec, default=min(episodes, EVALUATED_AT_ONCE))) as envs:
            return play(self.agent, envs, episodes, seed, greedy=greedy)

    def save(self, folder: Path | str) -> None:
        """Write a checkpoint: safetensors and JSON, nothing pickled."""
        scale = RewardScale(**{name: float(value) for name, value in self.reward_statistics.state_dict().items()})
        save_agent(self.agent, Path(folder), {"codec": self.codec, "rewards": scale})

    @classmethod
    def load(cls, folder: Path | str, make_env: MakeEnv | None = None, *, device: str = "cpu") -> "Learned":
        """Read a checkpoint. `make_env`, for evaluation, must have the spaces of training."""
        agent, extras = load_agent(Path(folder), {"codec": SpaceCodec, "rewards": RewardScale}, device=device)
        if make_env is not None:
            open_batch(make_env, None, extras["codec"], default=1).close()
        learned = cls(agent, extras["codec"], make_env)
        scale = {name: torch.tensor([value], dtype=torch.float64) for name, value in vars(extras["rewards"]).items()}
        learned.reward_statistics.load_state_dict(scale)
        return learned


class LearnProgress(NamedTuple):
    """The state of a training after an update, for callbacks."""

    learned: Learned  # the policy so far, to evaluate or save
    steps: int  # environment steps so far
    mean_return: float  # of the last 100 episodes; NaN before the first has ended
    metrics: PPOUpdateMetrics
    numbers: dict[str, float]  # everything to log, by name; callbacks may add to it


Callback = Callable[[LearnProgress], bool | None]


def learn(
    make_env: MakeEnv,
    *,
    total_steps: int,
    n_envs: int | None = None,
    seed: int = 0,
    config: PPOConfig | None = None,
    device: str = "cpu",
    progress: bool = True,
    callback: Callback | Sequence[Callback] = (),
    start: Learned | None = None,
    processes: bool = False,
) -> Learned:
    """Train a policy with PPO on the environments that `make_env()` returns.

    Observations may be Box or Discrete, actions Discrete or MultiDiscrete. Masks come from `info["action_mask"]` or a
    method `action_masks()`; for MultiDiscrete, as one array per component or one for all. There are `n_envs`
    environments (8), with `processes` each in a process of its own; or `make_env()` returns a vector of them.

    Training runs as many whole rounds of `n_envs × config.steps` steps as `total_steps` allows. After every update it
    calls the callbacks in order, and it ends early if one of them returns False. Those that are context managers are
    entered before and left at the end. `start`, trained or loaded, is trained further on its device with its
    configuration; `total_steps` then includes the steps that it has done.
    """
    if start is not None and config not in (None, start.agent.config):
        raise BadValueError("start is trained further with its own config, and another one was given; omit config")
    config, done = (config or PPOConfig(), 0) if start is None else (start.agent.config, start.agent.updates)
    callbacks = [callback] if callable(callback) else list(callback)
    envs = open_batch(make_env, n_envs, None if start is None else start.codec, processes=processes)
    with closing(envs), ExitStack() as stack:
        size, remark = envs.n * config.steps, f" ({done + 1} rounds of {envs.n} × {config.steps}; {done} are done)"
        require_whole("total_steps", total_steps, (done + 1) * size, remark=remark)
        table, layout, rounds = envs.codec.table, envs.codec.layout, total_steps // size
        rng_seed = derive_seed(seed, "agent") % 2**62
        learned = start or Learned(PPOAgent(table, layout, config, rng_seed=rng_seed, device=device), envs.codec)
        agent, learned.make_env = learned.agent, make_env
        agent.total_updates = rounds
        collector = RolloutCollector(envs, agent, learned.returns)
        collector.rewards.statistics, collector.steps = learned.reward_statistics, done * size
        first = derive_seed(seed, "round", done) if done else seed  # when continued, other episodes than before
        seeds = [derive_seed(first, "env", index) % RESET_SEEDS for index in range(envs.n)]
        for each in callbacks:
            if isinstance(each, AbstractContextManager):
                stack.enter_context(each)
        advance = stack.enter_context(progress_bar("learning", rounds - done, shown=progress))
        envs.begin(range(envs.n), seeds)
        for _ in range(done, rounds):
            learned.history.append(agent.update(collector.collect()))
            state = describe(learned, collector.steps)
            advance(1, f"return {state.mean_return:.4g}")
            answers = [each(state) for each in callbacks]
            if any(isinstance(answer, bool | np.bool_) and not answer for answer in answers):
                break
    return learned


def describe(learned: Learned, steps: int) -> LearnProgress:
    """The state of a training after its last update."""
    recent = [total for _, total in learned.returns[-RECENT:]]
    numbers = {"learn/steps": float(steps), "learn/episodes": float(len(learned.returns))}
    numbers |= {"learn/mean_return": float(np.mean(recent))} if recent else {}
    metrics = learned.history[-1]
    return LearnProgress(learned, steps, float(np.mean(recent or np.nan)), metrics, numbers | metrics.flat())
