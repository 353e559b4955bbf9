"""DAgger: the learner plays, a teacher says what it would have done in every state, and the learner imitates again.

Plain imitation knows only the states that the teacher visits. One mistake leads the learner to states that it has never
seen. Here it learns from its own states, round after round, and nothing that was labelled is forgotten.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline.numbers import require_whole
from esper.leyline.progress import Advance, ignore
from esper.simic.agent import PPOAgent
from esper.simic.agent.policy import LearnedPolicy, fit_policy
from esper.simic.evaluation.arena import PolicyPlayer
from esper.simic.offline.episodes import Episodes
from esper.simic.offline.imitation import Imitation, ImitationConfig, accuracy, imitate
from esper.simic.offline.transitions import Transitions, from_episodes, join
from esper.simic.training.collect import action_draws
from esper.simic.training.episode import EpisodeRunner, StepResult, play_episode
from esper.simic.training.hosts import host_seed
from esper.simic.training.tape import EpisodeTape, record_header
from esper.tamiyo import ActionTable, ObservationLayout, Policy, PolicyView

Relabel = Callable[[PPOAgent | None, int], Transitions]
"""Plays a round with the learner, or the teacher itself if it is None, and returns the states with the teacher's
actions."""


@dataclass(frozen=True)
class DaggerConfig:
    """Settings of DAgger."""

    rounds: int = 3
    """Rounds in which the learner plays. Before them, the teacher plays one."""
    imitation: ImitationConfig = field(default_factory=ImitationConfig)
    """How the learner imitates; each round starts from new weights."""

    def __post_init__(self) -> None:
        require_whole("rounds", self.rounds, 1)


class Dagger(NamedTuple):
    """The last learner, and how often each one agreed with the teacher."""

    imitation: Imitation
    agreement: list[
        dict[str, float]
    ]  # by round and head, in the states that the learner visited, before it learnt them


def dagger(
    relabel: Relabel,
    table: ActionTable,
    layout: ObservationLayout,
    config: DaggerConfig | None = None,
    *,
    rng_seed: int = 0,
    advance: Advance = ignore,
) -> Dagger:
    """Imitate a teacher on the states that the learner visits. `advance` counts rounds."""
    config = config if config is not None else DaggerConfig()
    data = relabel(None, 0)
    learned, agreement = imitate(data, table, layout, config.imitation, rng_seed=rng_seed), []
    advance(1)
    for number in range(1, config.rounds + 1):
        visited = relabel(learned.agent, number)
        agreement.append(accuracy(learned.agent, visited))
        data = join([data, visited])
        learned = imitate(data, table, layout, config.imitation, rng_seed=rng_seed)
        advance(1)
    return Dagger(learned, agreement)


class HostRelabelling:
    """Relabels episodes on fresh hosts of a runner's task; each round has its own."""

    def __init__(self, runner: EpisodeRunner, teacher: Policy, *, rng_seed: int = 0) -> None:
        self.runner, self.teacher, self.rng_seed = runner, teacher, rng_seed
        self.header = record_header(runner.fleet.task, runner.preset, ("teacher",), runner.layout)

    def __call__(self, learner: PPOAgent | None, number: int) -> Transitions:
        """One episode per env of the runner. Rewards are those of what was done, not of the labels."""
        executed = self.teacher if learner is None else fit_policy(learner, self.runner.slots)
        groups = self.runner.groups
        seeds = [host_seed("recording", self.rng_seed, number, group) for group in range(groups.count)]
        positions = [(number, env) for env in range(groups.grown)]
        draws = action_draws(
            self.rng_seed, "recording", positions, self.runner.fleet.task.steps, len(self.runner.table)
        )
        return from_episodes(relabel_episode(self.runner, executed, self.teacher, seeds, draws), self.header)


def relabel_episode(
    runner: EpisodeRunner, learner: Policy, teacher: Policy, seeds: list[int], draws: Tensor
) -> Episodes:
    """One episode of a learner, recorded with what the teacher would have done in each of its states.

    `draws` (steps, grown envs, heads) serve both. The teacher sees every view, so that it may keep a state.
    """
    tape, groups = EpisodeTape(runner), runner.groups
    player = PolicyPlayer(runner, learner, seeds, draws)
    hosts = [seed for seed in seeds for _ in range(groups.members)]
    state = teacher.initial_state(hosts)

    def on_step(step: int, view: PolicyView, actions: Tensor, result: StepResult) -> None:
        nonlocal state
        labels, state = teacher.act(view, state, draws[step].to(actions.device))
        tape.add(view, labels, result, torch.zeros_like(draws[step]))
        player.on_step(step, view, actions, result)
        if isinstance(teacher, LearnedPolicy):
            state = teacher.forget(state, result.panics)

    play_episode(runner, player.act, on_step)
    return tape.episodes(range(groups.grown), [0] * groups.grown, hosts)
