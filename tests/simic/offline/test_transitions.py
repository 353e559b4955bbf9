"""Recorded episodes as transitions: in a policy's own columns, joined, packed and divided."""

import pytest
import torch
from simic.offline.made_up import episodes, header
from simic.training.tiny import make_runner
from torch import Tensor

from esper.leyline import BadValueError
from esper.simic.offline.episodes import Episodes, RecordHeader
from esper.simic.offline.imitation import divide_hosts
from esper.simic.offline.transitions import Transitions, fit_columns, from_episodes, join
from esper.simic.rewards import RewardConfig
from esper.simic.training.collect import action_draws
from esper.simic.training.episode import EpisodeRunner
from esper.simic.training.tape import EpisodeTape, record_header
from esper.tamiyo import ObservationLayout, Policy, growth_layout
from esper.tamiyo.features import signals_to_features
from esper.tamiyo.policies import RandomPolicy, WaitPolicy
from esper.tamiyo.policy import PolicyView
from esper.tamiyo.translation import Translation, adapt


def recorded(runner: EpisodeRunner, policy: Policy) -> tuple[list[PolicyView], Episodes, RecordHeader]:
    """An episode of a policy on live hosts: what it saw, and its record."""
    seeds, steps, grown = [3, 4], runner.fleet.task.steps, runner.groups.grown
    draws = action_draws(0, "recording", [(0, env) for env in range(grown)], steps, len(runner.table))
    runner.begin(seeds)
    state, tape, views = policy.initial_state(seeds), EpisodeTape(runner), []
    for step in range(steps):
        views.append(runner.view())
        actions, state = policy.act(views[-1], state, draws[step])
        tape.add(views[-1], actions, runner.step(actions), torch.zeros_like(draws[step]))
    header = record_header(runner.fleet.task, runner.preset, ("random",), runner.layout)
    return views, tape.episodes(range(grown), [0] * grown, seeds), header


def wider(runner: EpisodeRunner, vocabulary: tuple[str, ...], more: int) -> ObservationLayout:
    """The layout of a policy with other blueprints, and more slots."""
    layout = growth_layout(runner.slots, vocabulary=vocabulary)
    return adapt(runner.table, layout, len(runner.slots) + more)[1]


def test_columns_are_those_of_a_live_host() -> None:
    """Recorded columns in another layout are what `Translation` shows the policy of that layout, step by step."""
    runner = make_runner(2, 1)
    views, episodes, header = recorded(runner, RandomPolicy(runner.table))
    names = runner.slots.blueprint_names
    wanted = wider(runner, ("lora", *reversed(names)), 2)
    translation, actor = Translation(runner.slots, wanted), wanted.size - len(wanted.critic)
    data = from_episodes(episodes, header, layout=wanted)
    for step, view in enumerate(views):
        live = signals_to_features(translation._translate(view.signals), wanted)
        torch.testing.assert_close(data.observations[:, step, :actor], live[:, :actor], rtol=0, atol=0)
        assert torch.equal(fit_columns(view.features, runner.layout, wanted), live)
        for name, mask in translation.masks(view.masks).items():
            assert torch.equal(data.masks[name][:, step], mask), name
    assert (episodes.actions[..., 0] == 1).any(), "something was germinated, so that blueprints have other numbers"
    column = runner.table.index("blueprint")
    germinated = episodes.actions[..., 0] == 1
    own, theirs = episodes.actions[..., column][germinated], data.actions[..., column][germinated]
    assert [names[index] for index in own] == [wanted.vocabulary[index] for index in theirs]


def test_a_policy_that_knows_fewer_blueprints() -> None:
    """It may germinate where something fits that it knows; what it does not know, it cannot imitate."""
    runner = make_runner(2, 1)
    wanted = wider(runner, runner.slots.blueprint_names[-1:], 0)
    views, episodes, header = recorded(runner, WaitPolicy(runner.table))
    fits = torch.rand(episodes.masks["blueprint"].shape, generator=torch.Generator().manual_seed(0)) < 0.15
    episodes = episodes._replace(masks={**episodes.masks, "blueprint": fits & episodes.masks["blueprint"]})
    data, translation = from_episodes(episodes, header, layout=wanted), Translation(runner.slots, wanted)
    for step in range(len(views)):
        masks = translation.masks({name: mask[:, step] for name, mask in episodes.masks.items()})
        assert all(torch.equal(data.masks[name][:, step], mask) for name, mask in masks.items())
    assert not torch.equal(data.masks["op"], episodes.masks["op"])
    _, episodes, header = recorded(runner, RandomPolicy(runner.table))
    with pytest.raises(BadValueError, match=r"records use the blueprints \[.*\], which the policy does not know; add"):
        from_episodes(episodes, header, layout=wanted)


def test_columns_that_do_not_fit() -> None:
    """Fewer slots than were recorded, or columns that were not recorded."""
    runner = make_runner(1, 1)
    flat = torch.zeros(2, runner.layout.size)
    fewer = adapt(runner.table, runner.layout, 1)[1]
    with pytest.raises(BadValueError, match=r"records of \d slots for a policy of 1; make one for more slots"):
        fit_columns(flat, runner.layout, fewer)
    blind = growth_layout(runner.slots, sensing=False)
    lacking = r"lack columns that the policy sees: \['gradient', 'rank', 'rms', 'worth'\]; record them"
    with pytest.raises(BadValueError, match=lacking):
        fit_columns(torch.zeros(2, blind.size), blind, runner.layout)


def test_a_policy_that_sees_less_than_was_recorded() -> None:
    """Columns of the probe are dropped; the others stay in their order."""
    runner = make_runner(2, 1)
    runner.begin([1, 2])
    signals, blind = runner.view().signals, growth_layout(runner.slots, sensing=False)
    recorded = signals_to_features(signals, runner.layout)
    assert torch.equal(fit_columns(recorded, runner.layout, blind), signals_to_features(signals, blind))


def test_the_critic_sees_the_potential() -> None:
    """By hand, at ρ 2 on a host of 100 parameters. Gains 5, 7 and 9; seeds of 100 parameters act in the second step:
    rent 2·log2(2) = 2. Φ before the steps: 0, 5, 7 − 2 = 5. In tens of points. A panic in the second leaves 5."""
    like = header(steps=3)
    one = episodes(2, like)._replace(
        gain=torch.tensor([[5.0, 7.0, 9.0]] * 2),
        acting_parameters=torch.tensor([[0.0, 100.0, 100.0]] * 2),
        panics=torch.tensor([[False, False, False], [False, True, False]]),
        host_parameters=torch.tensor([100.0, 100.0]),
    )
    column = like.layout.size - 2
    assert from_episodes(one, like).observations[..., column].tolist() == [[0, 0.5, 0.5], [0, 0.5, 0.5]]
    free = from_episodes(one, like, reward=RewardConfig(rho=0.0)).observations[..., column]
    torch.testing.assert_close(free, torch.tensor([[0, 0.5, 0.7], [0, 0.5, 0.5]]))


def some(count: int, steps: int, first_group: int = 0) -> Transitions:
    """Made-up transitions whose rewards number the steps."""
    data = from_episodes(episodes(count, like := header(steps=steps)), like)
    ends = torch.zeros_like(data.terminated)
    ends[:, -1] = True
    rewards = torch.arange(float(count * steps)).view(count, steps)
    nothing = torch.zeros_like(ends)
    return data._replace(rewards=rewards, terminated=ends, truncated=nothing, groups=first_group + torch.arange(count))


def test_shorter_episodes_are_filled_up() -> None:
    """With steps of weight 0 that are forced and belong to no other sequence; the others stay as they are."""
    long, short = some(2, 5), some(3, 3, 10)
    both = join([long, short])
    assert both.n_episodes == 5
    assert torch.equal(both.rewards[:2], long.rewards)
    assert torch.equal(both.observations[2:, :3], short.observations)
    assert both.groups.tolist() == [0, 1, 10, 11, 12]
    assert both.weights[2:].tolist() == [[1, 1, 1, 0, 0]] * 3
    assert both.terminated[2:].tolist() == [[False, False, True, True, True]] * 3
    assert both.masks["op"][2:, 3:].sum(-1).eq(1).all()
    assert not both.masks["slot"][2:, 3:].any()
    assert torch.equal(join([long]).rewards, long.rewards)


def test_parts() -> None:
    """By number, in that order."""
    data = some(4, 3)
    part = data.part(torch.tensor([2, 0]))
    assert part.rewards.tolist() == [[6, 7, 8], [0, 1, 2]]
    assert part.groups.tolist() == [2, 0]
    assert torch.equal(part.masks["slot"][1], data.masks["slot"][0])


def test_packed_order() -> None:
    """Episode 1 of two ends a sequence after its second step: lengths 4, 2 and 2. Step by step, longest first."""
    data = some(2, 4)
    data.terminated[1, 1] = True
    steps = data.packed(data.sequences(), [0, 1])
    assert steps.n_sequences == 3
    assert steps.cells.tolist() == [0, 4, 6, 1, 5, 7, 2, 3]
    assert steps.rewards.tolist() == steps.cells.tolist(), "rewards number the steps"
    assert torch.equal(steps.observations[2], data.observations[1, 2])
    assert torch.equal(steps.masks["op"][4], data.masks["op"][1, 1])
    assert data.packed(data.sequences(), [1]).cells.tolist() == [4, 6, 5, 7]


def test_an_epoch() -> None:
    """Every step once, in another order each time."""
    data, generator = some(7, 3), torch.Generator().manual_seed(0)

    def epoch() -> list[Tensor]:
        return [steps.cells for steps in data.minibatches(3, generator)]

    first, second = epoch(), epoch()
    assert [len(cells) for cells in first] == [9, 9, 3]
    assert sorted(torch.cat(first).tolist()) == sorted(torch.cat(second).tolist()) == list(range(21))
    assert torch.cat(first).tolist() != torch.cat(second).tolist()


def test_held_out_hosts() -> None:
    """All episodes of a host stay together; none may be left without, and none may be all there is."""
    data = some(12, 2)._replace(groups=torch.arange(12) // 3)
    generator = torch.Generator().manual_seed(0)
    seen, unseen = divide_hosts(data, 0.5, generator)
    assert unseen is not None
    groups = [set(part.groups.tolist()) for part in (seen, unseen)]
    assert [len(group) for group in groups] == [2, 2]
    assert not groups[0] & groups[1]
    assert [part.n_episodes for part in (seen, unseen)] == [6, 6]
    whole, none = divide_hosts(data, 0.1, generator)
    assert none is None
    assert whole.n_episodes == 12
    with pytest.raises(BadValueError, match=r"held_out 0.9 leaves none of 4 hosts to learn from"):
        divide_hosts(data, 0.9, generator)
