"""Does PPO learn? Four tasks with a known best return, five seeds each, final weights, 100 greedy episodes per seed.

    python benchmarks/ppo_learning.py                       # all tasks and what they are compared with
    python benchmarks/ppo_learning.py --tasks recall --seeds 2

Each task has one setting for all seeds, printed with its result. The settings were looked for on seeds 10 and 11.
Compared with: the first two tasks without memory, the last without masks (steps until 95 % of the last 200 training
episodes were right).
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from harness import RESULTS, Json, print_table, write_result
from ppo_envs import DelayedPay, FactoredChoice, HiddenVelocityCartPole, Recall
from scipy import stats

from esper.simic.agent import Learned, PPOConfig, learn
from esper.simic.agent.environments import MakeEnv
from esper.tamiyo import NetworkConfig

EVALUATION_SEED = 12345
WINDOW, RIGHT = 200, 0.95
"""Training episodes and the share of them that must be right, to count as learnt."""

SHORT = PPOConfig(epochs=8, minibatches=2, rate=2e-3, entropy=0.01)


@dataclass(frozen=True)
class Trial:
    """One task: what to train on, for how long, how, and what it takes to pass."""

    make_env: MakeEnv
    steps: int
    config: PPOConfig
    bar: float
    lower: float | None = None
    """Bar for the lower end of the interval."""


TRIALS: dict[str, Trial] = {
    "cartpole": Trial(
        HiddenVelocityCartPole,
        100_000,
        PPOConfig(
            steps=128, epochs=10, minibatches=2, lam=0.9, rate=2e-3, rate_end=0.01, clip_end=0.01, target_kl=None,
            entropy=0.005, explore=0.0, logit_penalty=0.0,
        ),
        475.0,
        450.0,
    ),
    "recall": Trial(Recall, 100_000, replace(SHORT, steps=66, rate_end=0.1, clip_end=0.5), 0.95),
    "delayed": Trial(DelayedPay, 40_000, replace(SHORT, steps=78), 0.95),
    "factored": Trial(FactoredChoice, 20_000, replace(SHORT, steps=32, rate=3e-3, entropy=0.02), 0.99),
}  # fmt: skip


def forgetful(trial: Trial) -> Trial:
    """The same without memory."""
    network: NetworkConfig = replace(trial.config.network, recurrent=False)
    return replace(trial, config=replace(trial.config, network=network))


COMPARED: dict[str, Callable[[], Trial]] = {
    "cartpole, no memory": lambda: forgetful(TRIALS["cartpole"]),
    "recall, no memory": lambda: forgetful(TRIALS["recall"]),
    "factored, no masks": lambda: replace(TRIALS["factored"], make_env=lambda: FactoredChoice(masked=False)),
}


def settings(config: PPOConfig) -> str:
    """What differs from the defaults."""
    usual = PPOConfig()
    changed = {
        f.name: getattr(config, f.name) for f in fields(config) if getattr(config, f.name) != getattr(usual, f.name)
    }
    return ", ".join(f"{name} {value}" for name, value in changed.items())


def learnt_after(learned: Learned) -> int | None:
    """Environment steps until enough of the last training episodes were right; None: never."""
    recent: list[float] = []
    for steps, value in learned.returns:
        recent.append(value)
        if len(recent) >= WINDOW and statistics.fmean(recent[-WINDOW:]) >= RIGHT:
            return steps
    return None


def interval(values: list[float]) -> tuple[float, float]:
    """95 % t-interval of the mean over seeds."""
    if len(values) < 2:
        return values[0], values[0]
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return statistics.fmean(values) - half, statistics.fmean(values) + half


@dataclass(frozen=True)
class Found:
    """A trial over its seeds."""

    steps: int
    episodes: int
    settings: dict[str, Json]
    means: list[float]
    mean: float
    interval: tuple[float, float]
    learnt_after: list[int | None]


def run(name: str, trial: Trial, arguments: argparse.Namespace) -> Found:
    """Train and evaluate on every seed."""
    means, learnt = list[float](), list[int | None]()
    for seed in range(arguments.seeds):
        steps = max(trial.steps // arguments.shorter, 8 * trial.config.steps)
        learned = learn(trial.make_env, total_steps=steps, seed=seed, config=trial.config)
        means.append(statistics.fmean(learned.evaluate(arguments.episodes, EVALUATION_SEED)))
        learnt.append(learnt_after(learned))
        print(f"{name}, seed {seed}: {means[-1]:.3f}", flush=True)
    steps = trial.steps // arguments.shorter
    return Found(
        steps, arguments.episodes, asdict(trial.config), means, statistics.fmean(means), interval(means), learnt
    )


def main() -> None:
    """Train everything, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=[*TRIALS, *COMPARED], choices=[*TRIALS, *COMPARED])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--shorter", type=int, default=1, help="divide the steps by this")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Json] = {}
    rows = []
    for name in arguments.tasks:
        trial = TRIALS[name] if name in TRIALS else COMPARED[name]()
        print(f"{name}: {trial.steps // arguments.shorter:,} steps; {settings(trial.config)}")
        found = run(name, trial, arguments)
        results[name] = asdict(found)
        low, high = found.interval
        bar = f"{trial.bar:g}" if name in TRIALS else "-"
        learnt = [f"{steps:,}" if steps is not None else "-" for steps in found.learnt_after]
        rows.append([name, f"{found.mean:.3f}", f"{low:.3f} to {high:.3f}", bar, " ".join(learnt)])
    print_table("PPO", ["task", "mean", "95 %", "bar", "steps until learnt"], rows)
    write_result("ppo_learning", {"tasks": results}, arguments.out)


if __name__ == "__main__":
    main()
