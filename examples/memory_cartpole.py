"""Balance a pole whose velocity is hidden: a recurrent policy learns what a memoryless one cannot.

    python examples/memory_cartpole.py                      # about a minute on one CPU core
    python examples/memory_cartpole.py --no-memory          # the same network, its memory emptied at every step

The environment shows where the cart and the pole are, not how fast they move; 500 is the best return.
"""

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from esper.simic.agent import Learned, PPOConfig, learn

Observation = NDArray[np.float32]


class HiddenVelocity(gym.ObservationWrapper[Observation, int, Observation]):
    """Position and angle only."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation: Observation) -> Observation:
        return observation[[0, 2]]


def main() -> None:
    """Train, evaluate, save, load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-memory", dest="memory", action="store_false")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/memory_cartpole"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the network is small: more threads only wait for each other

    config = PPOConfig(
        steps=128, epochs=10, minibatches=2, lam=0.9, rate=2e-3, rate_end=0.01, clip_end=0.01, target_kl=None,
        entropy=0.005, explore=0.0, logit_penalty=0.0,
    )  # fmt: skip
    config = replace(config, network=replace(config.network, recurrent=arguments.memory))
    learned = learn(HiddenVelocity, total_steps=arguments.steps, seed=arguments.seed, config=config)
    learned.save(arguments.out)

    again = Learned.load(arguments.out, HiddenVelocity)
    returns = again.evaluate(arguments.episodes, seed=1)
    print(
        f"{arguments.steps:,} steps, seed {arguments.seed}, memory {'on' if arguments.memory else 'off'}: "
        f"mean return {statistics.fmean(returns):.1f} over {len(returns)} episodes, least {min(returns):.0f}"
    )
    print(f"the policy is in {arguments.out}")


if __name__ == "__main__":
    main()
