"""One round: N episodes in lockstep, recorded for the update."""

from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline import derive_seed
from esper.simic.agent import PPOAgent, Step, TamiyoRolloutBuffer
from esper.simic.rewards import RewardConfig
from esper.simic.training.episode import EpisodeRunner, SeedChange, StepResult
from esper.simic.training.rewarding import reward_step
from esper.simic.training.seeds import Purpose, host_seed


class RoundRecord(NamedTuple):
    """What happened in a round, for every grown env."""

    objective: Tensor
    """(n,): hardened gain minus rent of the fossils; points"""
    gain: Tensor
    """(n,): of the hardened hosts"""
    accuracy: Tensor
    """(n,): of the hardened hosts, percent"""
    added_parameters: Tensor
    """(n,): fossils"""
    panics: int
    actions: Tensor
    """(steps, n, heads)"""
    rewards: Tensor
    """(steps, n)"""
    parts: dict[str, Tensor]
    """Reward by part, (steps, n) each"""
    accuracies: Tensor
    """(steps, n): of the growing hosts"""
    control_accuracies: Tensor
    alphas: Tensor
    """(steps, n, slots): with which each step was trained"""
    changes: list[tuple[int, SeedChange]]
    """(step, change)"""
    symptoms: list[tuple[int, int, list[str]]]
    """(step, env, what the governor saw) of every panic"""


def action_draws(
    rng_seed: int, round_index: int, envs: int, steps: int, heads: int, purpose: Purpose = "training"
) -> Tensor:
    """(steps, envs, heads) in [0, 1): each env's own stream, a pure function of (seed, purpose, round, env)."""
    seeds = [derive_seed(rng_seed, "actions", purpose, round_index, env) for env in range(envs)]
    streams = [torch.rand((steps, heads), generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(streams, 1)


class Collector:
    """Fills a buffer with rounds of one task."""

    def __init__(self, runner: EpisodeRunner, agent: PPOAgent, reward: RewardConfig, rng_seed: int) -> None:
        self.runner, self.agent, self.reward, self.rng_seed = runner, agent, reward, rng_seed
        groups, steps = runner.groups, runner.fleet.task.steps
        self.buffer = TamiyoRolloutBuffer(
            groups.grown, steps, runner.layout.size, runner.table, agent.config.network.hidden, device=agent.device
        )
        self.raw = torch.zeros((steps, groups.grown, runner.layout.size), device=agent.device)

    def collect(self, round_index: int) -> RoundRecord:
        """One round with the agent's present policy; its observations enter the statistics when it is complete."""
        runner, agent, groups = self.runner, self.agent, self.runner.groups
        steps = runner.fleet.task.steps
        seeds = [host_seed("training", self.rng_seed, round_index, group) for group in range(groups.count)]
        draws = action_draws(self.rng_seed, round_index, groups.grown, steps, len(runner.table))
        runner.begin(seeds)
        memory, epsilon = agent.network.initial_memory(groups.grown), agent.epsilon
        self.buffer.begin(memory, epsilon)
        results: list[StepResult] = []
        parts: list[dict[str, Tensor]] = []
        changes: list[tuple[int, SeedChange]] = []
        for step in range(steps):
            view = runner.view()
            self.raw[step] = view.features
            seen = agent.see(view.features)
            decision, values, memory = agent.act(seen, view.masks, memory, epsilon=epsilon, uniform=draws[step])
            result = runner.step(decision.actions)
            rewarded = reward_step(self.reward, runner, view, decision.actions, result)
            runner.potential = rewarded.potential
            ends = result.panics | runner.done
            values = agent.values_of(values, self.buffer.tasks)
            self.buffer.add(
                Step(
                    seen,
                    view.masks,
                    decision.actions,
                    decision.log_probs,
                    values,
                    rewarded.total.float(),
                    ends,
                    torch.zeros_like(values),  # an episode terminates: nothing follows
                )
            )
            memory = (memory[0].where(~ends[:, None], 0.0), memory[1].where(~ends[:, None], 0.0))
            results.append(result)
            parts.append(dict(rewarded.breakdown.parts))
            changes += [(step, change) for change in result.changes]
        if agent.progress >= agent.config.freeze_after:
            agent.observations.freeze()
        agent.observations.update(self.raw.flatten(0, 1))
        return self._record(results, parts, changes)

    def _record(
        self, results: list[StepResult], parts: list[dict[str, Tensor]], changes: list[tuple[int, SeedChange]]
    ) -> RoundRecord:
        last = results[-1]
        assert last.hardened_accuracy is not None
        assert last.hardened_control is not None
        gain = last.hardened_accuracy - last.hardened_control
        host = self.runner.fleet.task.host_parameters
        rent = self.reward.rho * torch.log2(1 + last.fossil_parameters / host)
        return RoundRecord(
            objective=gain - rent,
            gain=gain,
            accuracy=last.hardened_accuracy,
            added_parameters=last.fossil_parameters,
            panics=int(sum(int(result.panics.sum()) for result in results)),
            actions=self.buffer.actions.transpose(0, 1).clone(),
            rewards=self.buffer.rewards.T.clone(),
            parts={name: torch.stack([part[name] for part in parts]) for name in parts[0]},
            accuracies=torch.stack([result.accuracy for result in results]),
            control_accuracies=torch.stack([result.control_accuracy for result in results]),
            alphas=torch.stack([result.slots.alpha for result in results]),
            changes=changes,
            symptoms=[(step, env, why) for step, r in enumerate(results) for env, why in r.symptoms.items()],
        )
