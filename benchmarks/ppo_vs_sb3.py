"""Ours against sb3-contrib's RecurrentPPO: same environment, same settings, same number of weights, one thread each.

CartPole-v1 with velocities hidden; 8 envs × 32 steps, 20 epochs, batch 256, LSTM 64, one layer of 64 behind it for the
actor and one for the critic. Theirs has an LSTM each for actor and critic, ours one for both behind an encoder of 64.
Ours normalises observations and rewards by itself; theirs leaves that to a wrapper, which `--wrapped` puts around its
envs: it then learns better, and with fewer resets in its sequences runs faster. The two take turns, so that the
machine's moods hit both. Needs sb3-contrib (`pip install sb3-contrib`).

    python benchmarks/ppo_vs_sb3.py
"""

import argparse
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from harness import RESULTS, Json, print_table, write_result
from ppo_envs import HiddenVelocityCartPole
from ppo_learning import interval

from esper.simic.agent import PPOConfig, learn
from esper.tamiyo import NetworkConfig

EPISODES = 100
ENVS, STEPS, EPOCHS, BATCH, HIDDEN, LAYER = 8, 32, 20, 256, 64, 64
GAMMA, LAM, RATE, CLIP, END = 0.99, 0.95, 3e-4, 0.2, 0.01
"""For both: their default rate and clip, which fall linearly to the share END. Chosen on seeds 10 to 13."""


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
    start = time.perf_counter()
    learned = learn(HiddenVelocityCartPole, total_steps=steps, n_envs=ENVS, seed=seed, config=config, progress=False)
    speed = steps / (time.perf_counter() - start)
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
    start = time.perf_counter()
    model.learn(steps)
    speed = steps / (time.perf_counter() - start)
    shown: VecEnv = batch(16)
    if isinstance(envs, VecNormalize):
        shown = VecNormalize(shown, training=False, norm_reward=False, gamma=GAMMA)
        shown.obs_rms = envs.obs_rms
    returns, _ = evaluate_policy(model, shown, EPISODES, return_episode_rewards=True, warn=False)
    return Trained(speed, float(np.mean(returns)), sum(weight.numel() for weight in model.policy.parameters()))


def pair(steps: int, seed: int, wrapped: bool) -> tuple[Trained, Trained]:
    """Ours, then theirs, on one seed."""
    torch.set_num_threads(1)
    found = ours(steps, seed), theirs(steps, seed, wrapped=wrapped)
    print(f"seed {seed}: ours {found[0]}, sb3-contrib {found[1]}", flush=True)
    return found


def main() -> None:
    """Train both on every seed, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--wrapped", action="store_true", help="theirs normalised by VecNormalize")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the seeds, a core each")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        count = arguments.seeds
        pairs = list(pool.map(pair, [arguments.steps] * count, range(count), [arguments.wrapped] * count))
    rows: list[dict[str, Json]] = [
        {"seed": seed, "ours": list(mine), "sb3": list(other), "ratio": mine.steps_per_second / other.steps_per_second}
        for seed, (mine, other) in enumerate(pairs)
    ]
    ratios = [mine.steps_per_second / other.steps_per_second for mine, other in pairs]
    gaps = [mine.mean_return - other.mean_return for mine, other in pairs]
    print_table(
        "PPO against sb3-contrib",
        ["seed", "ours steps/s", "sb3 steps/s", "ratio", "ours return", "sb3 return"],
        [
            [seed, mine.steps_per_second, other.steps_per_second, ratio, mine.mean_return, other.mean_return]
            for seed, ((mine, other), ratio) in enumerate(zip(pairs, ratios, strict=True))
        ],
    )
    low, high = interval(gaps)
    print(f"\nratio of speeds: median {statistics.median(ratios):.1f}, {min(ratios):.1f} to {max(ratios):.1f}")
    print(f"difference in return: {statistics.fmean(gaps):+.1f}, 95 % {low:+.1f} to {high:+.1f}")
    print(f"weights: ours {pairs[0][0].weights:,}, sb3-contrib {pairs[0][1].weights:,}")
    write_result(
        "ppo_vs_sb3_wrapped" if arguments.wrapped else "ppo_vs_sb3",
        {"pairs": rows, "ratio": statistics.median(ratios), "return_gap": [low, high]},
        arguments.out,
    )


if __name__ == "__main__":
    main()
