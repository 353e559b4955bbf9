"""`learn` with its default settings against sb3-contrib's RecurrentPPO, on memory environments of public packages.

    python benchmarks/memory_envs.py --part development   # three environments, on which the defaults are chosen
    python benchmarks/memory_envs.py                      # all five; look at the two others once
    python benchmarks/memory_envs.py --part development --agents learn "4 epochs" --seeds 3

150,000 steps in 16 environments, one thread. RecurrentPPO has n_steps 128 and batch_size 512, and its own defaults
otherwise. The *return* is the mean over the episodes that end in the last tenth of training, exploration included. It
is normalised per environment: 0 is a uniformly random policy, 1 the largest return there is. The difference is averaged
over environments, per seed; the interval over seeds is a t-interval.

Their LSTM runs whole sequences in one call instead of step by step, with the same result to rounding, because most of
the time of this benchmark is theirs. So it says nothing about speed (`ppo_vs_sb3.py` does).

Both get the same observations. Those of MiniGrid are the 7×7 cells in view, flattened to 147 numbers. Finished cells
(agent, environment and seed) are stored in `--keep` and skipped next time.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import torch
from gymnasium.wrappers import FlattenObservation
from harness import RESULTS, Json, describe_machine, print_table, write_result
from ppo_learning import interval
from torch import Tensor, nn

from esper.leyline import BadValueError
from esper.simic.agent import PPOConfig, learn

Episodes = list[tuple[int, float]]  # environment steps so far, return
Env = gym.Env[Any, Any]  # Any: of any space

STEPS, ENVS, SEEDS = 150_000, 16, 5
THEIR_STEPS, THEIR_BATCH = 128, 512
RANDOM_EPISODES = 300
MARGIN = -0.05
"""Bar for the lower end of the interval"""


class Task(NamedTuple):
    """An environment and the largest return that it can give."""

    name: str
    best: float
    part: str


TASKS = {
    task.name: task
    for task in (
        Task("popgym-RepeatPreviousEasy-v0", 1.0, "development"),
        Task("MiniGrid-MemoryS7-v0", 1.0, "development"),
        Task("popgym-NoisyPositionOnlyCartPoleEasy-v0", 1.0, "development"),
        Task("popgym-RepeatFirstEasy-v0", 1.0, "final"),
        Task("popgym-VelocityOnlyCartpoleEasy-v0", 1.0, "final"),
    )
}
PARTS = ("development", "final")
THEIRS, OURS, RANDOM = "RecurrentPPO", "learn", "random"
VARIANTS: dict[str, dict[str, Any]] = {  # Any: values of PPOConfig
    OURS: {},
    "4 epochs": {"epochs": 4},
}
"""Changes of the defaults"""


def make(name: str) -> Env:
    """One environment, with an observation that both agents can read."""
    import minigrid
    import popgym  # noqa: F401  # registers its environments

    env: Env = gym.make(name, disable_env_checker=True)
    if name.startswith("MiniGrid"):
        seen: Any = minigrid.wrappers.ImgObsWrapper
        env = FlattenObservation(seen(env))
    return env


def play_randomly(name: str, seed: int) -> Episodes:
    """Episodes of a uniformly random policy."""
    env = make(name)
    env.action_space.seed(seed)
    episodes: Episodes = []
    steps = 0
    for episode in range(RANDOM_EPISODES):
        env.reset(seed=seed * RANDOM_EPISODES + episode)
        total, ended = 0.0, False
        while not ended:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            total, ended, steps = total + float(reward), terminated or truncated, steps + 1
        episodes.append((steps, total))
    return episodes


def train_ours(name: str, seed: int, steps: int, config: PPOConfig) -> Episodes:
    """The training episodes of `learn`."""
    return learn(lambda: make(name), total_steps=steps, n_envs=ENVS, seed=seed, config=config, progress=False).returns


def process_sequence(
    features: Tensor, state: tuple[Tensor, Tensor], starts: Tensor, lstm: nn.LSTM
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Their LSTM over whole sequences in one call, instead of one call per step: same numbers, a third of the time.

    Features (sequences × steps, size), `starts` (sequences × steps,) 1 where an episode starts: at first steps only.
    """
    n = state[0].shape[1]
    starts = starts.view(n, -1)
    if bool(starts[:, 1:].any()):
        raise BadValueError("an episode starts within a sequence; this call resets the state at first steps only")
    carried = (1 - starts[:, 0]).view(1, n, 1)
    steps = features.view(n, -1, lstm.input_size).transpose(0, 1)
    outputs, following = lstm(steps, (carried * state[0], carried * state[1]))
    return outputs.transpose(0, 1).flatten(0, 1), following


def train_theirs(name: str, seed: int, steps: int) -> Episodes:
    """The training episodes of RecurrentPPO."""
    from sb3_contrib import RecurrentPPO
    from sb3_contrib.common.recurrent import policies
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv

    policy: Any = policies.RecurrentActorCriticPolicy
    policy._process_sequence = staticmethod(process_sequence)
    episodes: Episodes = []

    def collect(variables: dict[str, Any], _: object) -> bool:  # Any: of a method of theirs
        """Store the episodes that ended with a step."""
        ended = [info["episode"]["r"] for info in variables["infos"] if "episode" in info]
        episodes.extend((variables["self"].num_timesteps, float(total)) for total in ended)
        return True

    envs = DummyVecEnv([lambda: Monitor(make(name))] * ENVS)
    model = RecurrentPPO("MlpLstmPolicy", envs, n_steps=THEIR_STEPS, batch_size=THEIR_BATCH, seed=seed, device="cpu")
    model.learn(steps, callback=collect)
    return episodes


# -- cells ------------------------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """One training."""

    agent: str
    task: str
    seed: int
    steps: int

    @property
    def file(self) -> str:
        """Its file in the folder of finished cells."""
        return f"{self.agent}_{self.task}_{self.seed}.json".replace(" ", "-")

    @property
    def settings(self) -> Json:
        """What the result depends on."""
        config = asdict(replace(PPOConfig(), **VARIANTS[self.agent])) if self.agent in VARIANTS else {}
        plain: Json = json.loads(json.dumps({"steps": self.steps, "envs": ENVS, "config": config}))
        return plain


def run(cell: Cell) -> dict[str, Json]:
    """Train once. The curve has the mean return of every tenth."""
    torch.set_num_threads(1)
    start = time.process_time()
    if cell.agent == RANDOM:
        episodes = play_randomly(cell.task, cell.seed)
        last = [total for _, total in episodes]
    else:
        if cell.agent == THEIRS:
            episodes = train_theirs(cell.task, cell.seed, cell.steps)
        else:
            config = replace(PPOConfig(), **VARIANTS[cell.agent])
            episodes = train_ours(cell.task, cell.seed, cell.steps, config)
        last = [total for steps, total in episodes if 0.9 * cell.steps < steps <= cell.steps]
    if not last:
        raise BadValueError(f"no episode ended in the last tenth of {cell.steps} steps; raise --steps")
    seconds = time.process_time() - start
    tenths = [[total for steps, total in episodes if steps * 10 // cell.steps == tenth] for tenth in range(10)]
    curve = [statistics.fmean(tenth) if tenth else None for tenth in tenths]
    result: dict[str, Json] = {"return": statistics.fmean(last), "seconds": seconds, "curve": curve}
    return {**cell._asdict(), **result, "settings": cell.settings, "machine": describe_machine()}


def run_cells(wanted: Iterable[Cell], keep: Path, workers: int) -> dict[Cell, dict[str, Any]]:  # Any: JSON
    """Run the cells that are not stored yet. Each is stored at once."""
    keep.mkdir(parents=True, exist_ok=True)
    done: dict[Cell, dict[str, Any]] = {}
    for cell in wanted:
        if (path := keep / cell.file).exists():
            done[cell] = json.loads(path.read_text())
            if done[cell]["settings"] != cell.settings:
                raise BadValueError(f"{path} was made with other settings; delete it, or use another --keep")
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(run, cell): cell for cell in wanted if cell not in done}
        for future in as_completed(futures):
            cell, result = futures[future], future.result()
            draft = (keep / cell.file).with_suffix(".draft")  # a kill while writing leaves no broken cell
            draft.write_text(json.dumps(result, indent=1) + "\n")
            draft.rename(keep / cell.file)
            done[cell] = result
            print(f"{cell.agent}, {cell.task}, seed {cell.seed}: {result['return']:.3f}", flush=True)
    return done


def main() -> None:
    """Train what is missing, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*VARIANTS, THEIRS]
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--agents", nargs="+", choices=known, default=[OURS, THEIRS])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--workers", type=int, default=1, help="processes that share the cells, a core each")
    parser.add_argument("--keep", type=Path, default=Path("runs/memory_envs"), help="folder of finished cells")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    tasks = [task for task in TASKS.values() if arguments.part in (task.part, "all")]
    seeds, steps = range(arguments.seeds), arguments.steps
    chance = [Cell(RANDOM, task.name, 0, steps) for task in tasks]
    trained = [Cell(agent, task.name, seed, steps) for seed in seeds for task in tasks for agent in arguments.agents]
    cells = run_cells([*chance, *trained], arguments.keep, arguments.workers)
    report(tasks, arguments, cells)


def report(tasks: list[Task], arguments: argparse.Namespace, cells: dict[Cell, dict[str, Any]]) -> None:
    """One table, one JSON."""
    seeds, steps = range(arguments.seeds), arguments.steps

    def scores(agent: str, task: Task) -> list[float]:
        """Normalised returns by seed."""
        chance = cells[Cell(RANDOM, task.name, 0, steps)]["return"]
        found = [cells[Cell(agent, task.name, seed, steps)]["return"] for seed in seeds]
        return [(value - chance) / (task.best - chance) for value in found]

    by_agent = {agent: {task.name: scores(agent, task) for task in tasks} for agent in arguments.agents}
    rows = []
    results: dict[str, Json] = {}
    for agent, by_task in by_agent.items():
        means = [statistics.fmean(each) for each in zip(*by_task.values(), strict=True)]
        seconds = statistics.fmean(cells[cell]["seconds"] for cell in cells if cell.agent == agent)
        row: list[object] = [agent, *(f"{statistics.fmean(values):.3f}" for values in by_task.values())]
        row += [f"{statistics.fmean(means):.3f}", f"{seconds:.0f}"]
        result: dict[str, Json] = {"returns": by_task, "mean": statistics.fmean(means), "seconds": seconds}
        if THEIRS in by_agent and agent != THEIRS:
            theirs = [statistics.fmean(each) for each in zip(*by_agent[THEIRS].values(), strict=True)]
            low, high = interval([mine - other for mine, other in zip(means, theirs, strict=True)])
            row.append(f"{(low + high) / 2:+.3f} ({low:+.3f} to {high:+.3f})")
            result |= {"difference": [float(low), float(high)], "reached": bool(low > MARGIN)}
        results[agent] = result
        rows.append([*row, "-"][: len(tasks) + 4])
    header = ["agent", *(task.name for task in tasks), "mean", "CPU s", f"minus {THEIRS}, 95 %"]
    print_table("Normalised return in the last tenth of training", header, rows)
    settings: dict[str, Json] = {"steps": steps, "envs": ENVS, "seeds": arguments.seeds, "part": arguments.part}
    write_result("memory_envs", {"settings": settings, "agents": results}, arguments.out)


if __name__ == "__main__":
    main()
