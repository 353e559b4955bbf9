"""Ours against sb3-contrib's RecurrentPPO: same environment, same settings, same number of weights, one thread each.

CartPole-v1 with velocities hidden; 8 envs × 32 steps, 20 epochs, batch 256, LSTM 64, one layer of 64 behind it for the
actor and one for the critic. Theirs has an LSTM each for actor and critic, ours one for both behind an encoder of 64.
Ours normalises observations and rewards by itself. Theirs leaves that to `VecNormalize`: it then learns better, and
runs faster because its sequences have fewer resets. So that is the first row; *bare* is without. The agents take turns,
so that changes in the machine's speed affect all of them. Seconds are those of the CPU.

    python benchmarks/ppo_vs_sb3.py            # 25 to 40 minutes

Finished seeds are stored in `--keep` and skipped next time. Needs sb3-contrib: pip install 'esper-morph[bench]'.
"""

import argparse
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from harness import RESULTS, Json, print_table, stored, write_result
from ppo_envs import HiddenVelocityCartPole
from ppo_learning import interval

from esper.simic.agent import PPOConfig, learn
from esper.tamiyo import NetworkConfig

EPISODES = 100
ENVS, STEPS, EPOCHS, BATCH, HIDDEN, LAYER = 8, 32, 20, 256, 64, 64
GAMMA, LAM, RATE, CLIP, END = 0.99, 0.95, 3e-4, 0.2, 0.01
"""For both: their default rate and clip, which fall linearly to the share END. Chosen on seeds 10 to 13."""
RIVALS = {"VecNormalize": True, "bare": False}
"""Whether theirs is wrapped"""


class Trained(NamedTuple):
    """One training."""

    steps_per_second: float
    mean_return: float
    weights: int


def ours(steps: int, seed: int) -> Trained:
    """Train and evaluate our agent."""
    config = PPOConfig(
        steps=STEPS, epochs=EPOCHS, minibatches=ENVS * STEPS // BATCH, gamma=GAMMA, lam=LAM, rate=RATE, rate_end=END,
        clip=CLIP, clip_end=END, target_kl=None, entropy=0.0, explore=0.0, logit_penalty=0.0, critic_decay=0.0,
        network=NetworkConfig(hidden=HIDDEN, head=LAYER), freeze_after=1.0,
    )  # fmt: skip
    start = time.process_time()
    learned = learn(HiddenVelocityCartPole, total_steps=steps, n_envs=ENVS, seed=seed, config=config, progress=False)
    speed = steps / (time.process_time() - start)
    returns = learned.evaluate(EPISODES, seed)
    weights = sum(weight.numel() for weight in learned.agent.network.parameters())
    return Trained(speed, statistics.fmean(returns), weights)


def theirs(steps: int, seed: int, *, wrapped: bool) -> Trained:
    """Train and evaluate theirs."""
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

    def batch(n: int) -> DummyVecEnv:
        envs = DummyVecEnv([HiddenVelocityCartPole] * n)
        envs.seed(seed)
        return envs

    envs: VecEnv = VecNormalize(batch(ENVS), gamma=GAMMA) if wrapped else batch(ENVS)
    model = RecurrentPPO(
        "MlpLstmPolicy",
        envs,
        n_steps=STEPS,
        batch_size=BATCH,
        n_epochs=EPOCHS,
        gamma=GAMMA,
        gae_lambda=LAM,
        ent_coef=0.0,
        learning_rate=lambda left: (END + (1 - END) * left) * RATE,
        clip_range=lambda left: (END + (1 - END) * left) * CLIP,
        policy_kwargs={"lstm_hidden_size": HIDDEN, "net_arch": {"pi": [LAYER], "vf": [LAYER]}},
        seed=seed,
        device="cpu",
    )
    start = time.process_time()
    model.learn(steps)
    speed = steps / (time.process_time() - start)
    shown: VecEnv = batch(16)
    if isinstance(envs, VecNormalize):
        shown = VecNormalize(shown, training=False, norm_reward=False, gamma=GAMMA)
        shown.obs_rms = envs.obs_rms
    returns, _ = evaluate_policy(model, shown, EPISODES, return_episode_rewards=True, warn=False)
    return Trained(speed, float(np.mean(returns)), sum(weight.numel() for weight in model.policy.parameters()))


def one_seed(steps: int, seed: int) -> dict[str, Trained]:
    """All agents on one seed, one after the other."""
    found = {"ours": ours(steps, seed)}
    for rival, wrapped in RIVALS.items():
        found[rival] = theirs(steps, seed, wrapped=wrapped)
    return found


def compare(seeds: list[dict[str, Trained]], rival: str) -> tuple[list[object], dict[str, Json]]:
    """A row of the table, and its content."""
    pairs = [(found["ours"], found[rival]) for found in seeds]
    ratios = [mine.steps_per_second / other.steps_per_second for mine, other in pairs]
    low, high = interval([mine.mean_return - other.mean_return for mine, other in pairs])
    speeds, returns = (
        [statistics.median(getattr(each[index], name) for each in pairs) for index in (0, 1)]
        for name in ("steps_per_second", "mean_return")
    )
    ratio = f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})"
    row: list[object] = [rival, *(f"{speed:,.0f}" for speed in speeds), ratio, *returns, f"{low:+.1f} to {high:+.1f}"]
    return row, {"ratio": statistics.median(ratios), "ratios": ratios, "return_gap": [float(low), float(high)]}


def main() -> None:
    """Train all on every seed, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--keep", type=Path, default=None, help="folder of finished seeds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seeds: list[dict[str, Trained]] = []
    for seed in range(arguments.seeds):
        name = f"{arguments.steps}_steps_seed_{seed}"
        content: Any = stored(arguments.keep, name, partial(one_seed, arguments.steps, seed))  # Any: JSON
        seeds.append({agent: Trained(*values) for agent, values in content.items()})
        speeds = ", ".join(f"{agent} {each.steps_per_second:,.0f}" for agent, each in seeds[-1].items())
        print(f"seed {seed}: {speeds} steps/s", flush=True)
    compared = {rival: compare(seeds, rival) for rival in RIVALS}
    print_table(
        f"PPO against sb3-contrib: {arguments.steps:,} steps, medians over {len(seeds)} seeds",
        ["theirs", "our steps/s", "their steps/s", "ratio", "our return", "their return", "difference, 95 %"],
        [row for row, _ in compared.values()],
    )
    weights = {agent: each.weights for agent, each in seeds[0].items()}
    print("weights: " + ", ".join(f"{agent} {count:,}" for agent, count in weights.items()))
    rows: list[Json] = [{agent: each._asdict() for agent, each in found.items()} for found in seeds]
    rivals: dict[str, Json] = {rival: content for rival, (_, content) in compared.items()}
    write_result("ppo_vs_sb3", {"steps": arguments.steps, "rivals": rivals, "seeds": rows}, arguments.out)


if __name__ == "__main__":
    main()
