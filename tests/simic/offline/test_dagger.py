"""DAgger: the learner acts, the teacher labels, and the learner comes to agree on its own states."""

import pytest
import torch
from simic.offline.toy import LAYOUT, TABLE, best, learned, mean_return, optimum, play
from simic.training.tiny import make_runner
from torch import Tensor

from esper.leyline import LifecycleOp
from esper.simic.agent import PPOAgent
from esper.simic.offline.dagger import DaggerConfig, HostRelabelling, dagger, relabel_episode
from esper.simic.offline.imitation import ImitationConfig, accuracy
from esper.simic.offline.transitions import Transitions
from esper.simic.training.collect import action_draws
from esper.simic.training.hosts import host_seed
from esper.tamiyo import ActionTable, NetworkConfig, PolicyView
from esper.tamiyo.policies import HeuristicConfig, HeuristicTamiyo, RandomCommitPolicy

SMALL = NetworkConfig(memory="window", encoder=32, hidden=32, head=32)


class Spy:
    """A policy whose actions are written down."""

    def __init__(self, policy: RandomCommitPolicy | HeuristicTamiyo) -> None:
        self.policy = policy
        self.views: list[PolicyView] = []
        self.actions: list[Tensor] = []

    @property
    def table(self) -> ActionTable:
        return self.policy.table

    def initial_state(self, seeds: list[int]) -> object:
        return self.policy.initial_state(seeds)

    def act(self, view: PolicyView, state: object, uniform: Tensor) -> tuple[Tensor, object]:
        actions, state = self.policy.act(view, state, uniform)  # type: ignore[arg-type]  # its own state
        self.views.append(view)
        self.actions.append(actions)
        return actions, state


def test_a_round_relabels_what_the_learner_did() -> None:
    """On live hosts: executed actions are the learner's, recorded ones the teacher's, in the states that the learner
    led to. The learner germinates and commits; this teacher would never germinate."""
    runner = make_runner(2, 1)
    steps = runner.fleet.task.steps
    learner = Spy(RandomCommitPolicy(runner.table, steps))
    teacher = Spy(
        HeuristicTamiyo(runner.table, runner.slots, HeuristicConfig(germinate_left=99, training_steps=9, trial=9))
    )
    seeds = [host_seed("recording", 0, group) for group in range(2)]
    draws = action_draws(0, "recording", [(0, env) for env in range(2)], steps, len(runner.table))
    episodes = relabel_episode(runner, learner, teacher, seeds, draws)
    executed, advised = (torch.stack(spy.actions, 1) for spy in (learner, teacher))
    assert torch.equal(episodes.actions, advised)
    assert not torch.equal(executed, advised)
    assert not (advised[..., 0] == LifecycleOp.GERMINATE).any()
    assert (executed[..., 0] == LifecycleOp.GERMINATE).any()
    _, slots, _, _ = runner.layout.split(episodes.observations)
    tried = slots[..., runner.layout.slot.index("tried")]
    assert (tried[:, -1] > 0).any(), "hosts grew as the learner decided"
    assert [view.step for view in teacher.views] == list(range(steps))
    assert all(
        torch.equal(*pair)
        for pair in zip((v.features for v in teacher.views), (v.features for v in learner.views), strict=True)
    )
    assert episodes.host_seed.tolist() == seeds
    assert not episodes.log_probs.any()


def relabelled(agent: PPOAgent | None, number: int) -> Transitions:
    """Few episodes of the toy, labelled by its best player; of that player itself, very few."""
    player, count = (best, 10) if agent is None else (learned(agent), 30)
    return play(player, count, number, label=lambda view, _: best(view))


def test_learners_agree_on_their_own_states() -> None:
    """The first learner knows ten episodes of its teacher, and errs where these never led. The last one agrees with
    the teacher in the states that it visits itself."""
    config = DaggerConfig(3, ImitationConfig(SMALL, epochs=40, batch=16, rate=1e-2))
    found = dagger(relabelled, TABLE, LAYOUT, config)
    assert len(found.agreement) == 3
    visited = play(learned(found.imitation.agent), 500, 99, label=lambda view, _: best(view))
    last = accuracy(found.imitation.agent, visited)["joint"]
    assert found.agreement[0]["joint"] < 0.92 < 0.99 < last
    assert mean_return(learned(found.imitation.agent, greedy=True)) > 0.95 * optimum()


@pytest.mark.slow
def test_on_hosts() -> None:
    """Two rounds with a heuristic as teacher, each on fresh hosts; the last learner agrees with what it was told."""
    runner = make_runner(6, 1)
    teacher = HeuristicTamiyo(runner.table, runner.slots, HeuristicConfig(patience=0, germinate_left=6))
    relabel = HostRelabelling(runner, teacher)
    rounds: list[Transitions] = []

    def watched(agent: PPOAgent | None, number: int) -> Transitions:
        rounds.append(relabel(agent, number))
        return rounds[-1]

    config = DaggerConfig(2, ImitationConfig(SMALL, epochs=60, batch=6, rate=1e-2))
    found = dagger(watched, runner.table, runner.layout, config)
    assert len(rounds) == 3
    assert len({int(seed) for data in rounds for seed in data.groups}) == 18
    assert found.imitation.accuracy["joint"] > 0.95
