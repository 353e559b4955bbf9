"""What can be switched off to see what it is worth: each switch does what it says, and is written into the run."""

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro
from simic.training.tiny import NAME, make_runner, play, tiny_task
from torch import Tensor

from esper.cli.train import TrainCommand
from esper.kasmina.slot import Isolation
from esper.leyline import BLEND_STYLES, UnknownNameError, head_preset
from esper.simic.agent import PPOAgent, losses
from esper.simic.agent.losses import compute_per_head_advantages
from esper.simic.rewards import RewardConfig
from esper.simic.training.collect import RoundCollector
from esper.simic.training.config import TrainConfig, growth_ppo
from esper.simic.training.episode import EpisodeRunner
from esper.simic.training.hosts import Groups
from esper.simic.training.rollouts import RoundRecord
from esper.simic.training.run_folder import RunFolder, read_config
from esper.simic.training.trainer import Trainer
from esper.tamiyo.features import SENSED, growth_layout
from esper.tamiyo.policies import RandomPolicy
from esper.tolaria import HostFleet, HostTrainer

SWITCHES: dict[str, tuple[list[str], str, dict[str, object]]] = {
    "no shaping": ([], "[reward]\nshaping = 0", {"reward.shaping": 0.0}),
    "no memory": ([], "[ppo.network]\nrecurrent = false", {"ppo.network.recurrent": False}),
    "feed-forward": ([], "[ppo.network]\nmemory = 'off'", {"ppo.network.memory": "off"}),
    "critic without the control": ([], "ppo.network.informed_critic = false", {"ppo.network.informed_critic": False}),
    "joint clipping": ([], "[ppo]\nclipping = 'joint'", {"ppo.clipping": "joint"}),
    "lambda 1": ([], "[ppo]\nlam = 1", {"ppo.lam": 1.0}),
    "epsilon 0": ([], "[ppo]\nexplore = 0", {"ppo.explore": 0.0}),
    "uncentred heads": ([], "[ppo]\ncentred = false", {"ppo.centred": False}),
    "straight-through": ([], 'isolation = "straight_through"', {"isolation": "straight_through"}),
    "no sensing": (["--no-sensing"], "", {"sensing": False}),
    "shaped reward": ([], "[reward]\nfamily = 'shaped'", {"reward.family": "shaped"}),
}
"""Flags of the command line, its file, and what changes in the settings."""


def flat(config: TrainConfig) -> set[tuple[str, object]]:
    """All settings by dotted path."""

    def walk(value: object, path: str) -> set[tuple[str, object]]:
        if hasattr(value, "__dataclass_fields__"):
            found = (walk(getattr(value, f.name), f"{path}.{f.name}") for f in fields(value))  # type: ignore[arg-type]
            return set().union(*found)
        return {(path.removeprefix("."), value)}

    return walk(config, "")


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_changes_one_setting_and_is_kept_with_the_run(name: str, tmp_path: Path) -> None:
    """From `esper train` into config.json and back; nothing else changes."""
    flags, text, changed = SWITCHES[name]
    (tmp_path / "run.toml").write_text(text)
    config = tyro.cli(TrainCommand, args=[*flags, "--config", str(tmp_path / "run.toml")]).settings()
    assert dict(flat(config) - flat(TrainConfig())) == changed
    with RunFolder.create(tmp_path / "run", config):
        pass
    assert read_config(tmp_path / "run") == config


def test_unknown_switches_are_refused() -> None:
    """By name, with what there is."""
    with pytest.raises(UnknownNameError, match="isolation 'none'"):
        TrainConfig(isolation="none")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(UnknownNameError, match="clipping 'op'"):
        replace(growth_ppo(), clipping="op")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(UnknownNameError, match="isolation 'none'"):
        HostFleet(tiny_task(), 2, isolation="none")  # type: ignore[arg-type]  # wrong on purpose


# -- the round --------------------------------------------------------------------------------------------------------


def collected(
    reward: RewardConfig | None = None, steps: int = 6, **changes: Any
) -> tuple[RoundCollector, RoundRecord]:  # Any: as its field
    """A round of so many steps by an agent with these settings."""
    task, groups = replace(tiny_task(), steps=steps), Groups(2, 3)
    runner = EpisodeRunner(HostFleet(task, groups.hosts), groups, head_preset("core"))
    config = replace(growth_ppo(), steps=steps, **changes)
    agent = PPOAgent(runner.table, runner.layout, config, total_updates=3)
    collector = RoundCollector([runner], agent, reward if reward is not None else RewardConfig(), rng_seed=4)
    [record] = collector.collect(0)
    return collector, record


def test_without_shaping_only_the_end_is_paid() -> None:
    """The same sum, all of it in the last step."""
    _, record = collected(RewardConfig(shaping=0.0), steps=12)
    assert len(record.symptoms) == 0
    assert float(record.rewards[:-1].abs().max()) == 0
    assert float(record.rewards[-1].abs().max()) > 0
    torch.testing.assert_close(record.rewards[-1], record.objective.float(), rtol=1e-4, atol=1e-3)


def test_the_shaped_reward_has_parts_of_its_own() -> None:
    """Costs that `paired` does not know."""
    _, record = collected(RewardConfig(family="shaped"))
    assert {"ratio", "blending", "shock", "op"} <= set(record.parts)
    assert float(record.parts["op"].abs().sum()) > 0


def test_exploration_can_be_off() -> None:
    """ε is 0 in the first round, where it is largest otherwise."""
    off, _ = collected(explore=0.0)
    on, _ = collected()
    assert (off.buffer.epsilon, on.buffer.epsilon) == (0.0, 0.05)


@pytest.mark.parametrize("recurrent", [True, False])
def test_without_memory_no_step_knows_the_one_before(recurrent: bool) -> None:
    """In acting: another memory changes nothing. In the update: the same log-probs as collected."""
    network = replace(growth_ppo().network, recurrent=recurrent, head_gain=1.0)
    collector, _ = collected(network=network)
    agent, seen = collector.agent, collector.buffer.observations[:, 3]
    masks = {name: mask[:, 3] for name, mask in collector.buffer.masks.items()}
    empty = agent.network.initial_state(len(seen))
    full = (empty[0] + 1, empty[1] - 2)
    draws = torch.full((len(seen), len(agent.table)), 0.4)
    one, value, _ = agent.act(seen, masks, empty, uniform=draws)
    two, other, _ = agent.act(seen, masks, full, uniform=draws)
    assert torch.equal(one.log_probs, two.log_probs) is not recurrent
    assert torch.equal(value, other) is not recurrent
    assert agent.update(collector.buffer).behaviour_gap <= 1e-5


@pytest.mark.parametrize("informed", [True, False])
def test_a_critic_without_the_control(informed: bool) -> None:
    """Whatever is known of the control, the value is the same; and so it is learnt from."""
    collector, _ = collected(network=replace(growth_ppo().network, informed_critic=informed))
    agent, seen = collector.agent, collector.buffer.observations[:, 3]
    masks = {name: mask[:, 3] for name, mask in collector.buffer.masks.items()}
    other = seen.clone()
    other[:, -len(agent.layout.critic) :] += 1.0
    hidden_state = agent.network.initial_state(len(seen))
    draws = torch.full((len(seen), len(agent.table)), 0.5)
    one, value, _ = agent.act(seen, masks, hidden_state, uniform=draws)
    two, changed, _ = agent.act(other, masks, hidden_state, uniform=draws)
    assert torch.equal(value, changed) is not informed
    assert torch.equal(one.log_probs, two.log_probs)
    assert agent.update(collector.buffer).minibatches_taken > 0


def test_without_sensing_there_are_no_such_columns() -> None:
    """Neither of slots nor of offers; the rest is as it was."""
    slots = tiny_task().slot_config
    with_them, without = growth_layout(slots), growth_layout(slots, sensing=False)
    lost = set(with_them.column_names) - set(without.column_names)
    assert {name.split(".")[1] for name in lost} == SENSED
    assert set(without.column_names) <= set(with_them.column_names)


# -- the update -------------------------------------------------------------------------------------------------------


def test_uncentred_heads_learn_from_the_advantage_itself() -> None:
    """Ten steps of advantage 1 … 10, all of which used the second head: its mean of 5.5 is taken off, or is not."""
    base, decided = torch.arange(1.0, 11.0), torch.ones((10, 2), dtype=torch.bool)
    centred = compute_per_head_advantages(base, decided)
    plain = compute_per_head_advantages(base, decided, centred=False)
    assert torch.equal(centred.by_head[1], base - 5.5)
    assert all(torch.equal(head, base) for head in plain.by_head)
    assert len(plain.by_head) == 2
    assert plain.uncentred.tolist() == [True, True]


def test_joint_clipping_by_hand() -> None:
    """Two heads with ratio 1.15 each, clip 0.2: apart both are inside the range, together, 1.3225, they are not.

    step  A    decided  joint r   loss                              ∂/∂log r of each head
    0     2    both     1.3225    −min(2.645, 2.4)     = −2.4       0 (apart: −2.3)
    1     −1   both     1.3225    −min(−1.3225, −1.2)  = 1.3225     1.3225 (apart: 1.15)
    2     2    first    1.15      −min(2.3, 2.3)       = −2.3       −2.3, and none for the head that was not used
    3     2    neither  1         not a decision                    0
    """
    log_ratio = torch.full((4, 2), math.log(1.15), dtype=torch.float64, requires_grad=True)
    decided = torch.tensor([[True, True], [True, True], [True, False], [False, False]])
    advantages = torch.tensor([2.0, -1.0, 2.0, 2.0], dtype=torch.float64)
    total = losses.joint_surrogate(log_ratio, decided, advantages, 0.2)
    assert total.item() == pytest.approx(-2.4 + 1.3225 - 2.3)
    total.backward()
    assert log_ratio.grad is not None
    expected = torch.tensor([[0, 0], [1.3225, 1.3225], [-2.3, 0], [0, 0]], dtype=torch.float64)
    torch.testing.assert_close(log_ratio.grad, expected)
    apart = log_ratio.detach().clone().requires_grad_()
    terms = losses.surrogate(apart.exp(), advantages.unsqueeze(1), 0.2)
    losses.masked_sum(terms, decided).sum().backward()
    assert apart.grad is not None
    torch.testing.assert_close(apart.grad[:2, 0], torch.tensor([-2.3, 1.15], dtype=torch.float64))


def gradient(clipping: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Of the actor's loss alone over a whole round, at the weights that collected it."""
    alone: dict[str, Any] = {"epochs": 1, "minibatches": 1, "entropy": 0.0, "logit_penalty": 0.0, "clip_norm": 1e9}
    collector, _ = collected(clipping=clipping, value_coefficient=0.0, explore=0.0, **alone)
    agent = collector.agent
    monkeypatch.setattr(agent.optimizer, "step", lambda: None)
    agent.update(collector.buffer)
    named = agent.network.named_parameters()
    return {name: weight.grad.clone() for name, weight in named if weight.grad is not None}


def test_joint_clipping_reaches_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """At ratio 1 nothing is clipped, and the op's head, which is not centred, has the same gradient either way but for
    what its sum is divided by: the steps that decided it, or all that decided anything. Here both are the same number.
    The blueprint's head has another one: it learns from the step's own advantage."""
    apart, joint = gradient("per_head", monkeypatch), gradient("joint", monkeypatch)
    op, blueprint = "heads.op.weight", "heads.blueprint.score.weight"
    torch.testing.assert_close(apart[op], joint[op], rtol=1e-4, atol=1e-6)
    assert float(apart[op].abs().max()) > 0
    assert float((apart[blueprint] - joint[blueprint]).abs().max()) > 0.1 * float(apart[blueprint].abs().max())


# -- straight through -------------------------------------------------------------------------------------------------


def training_fleet(isolation: Isolation) -> HostFleet:
    """Hosts 0, 1, 2 with a TRAINING seed of every style in turn, and host 3 with none; one step of training."""
    fleet = HostFleet(tiny_task(), 4, isolation=isolation)
    for env, style in enumerate(BLEND_STYLES):
        fleet.germinate(env, "r1c0", "conv_light", style=style)
    for env in (0, 2):
        fleet.germinate(env, "r1c1", "depthwise")
    fleet.tick()
    fleet.step_index = 0
    fleet.train_step()
    return fleet


def test_straight_through_equals_single_hosts() -> None:
    """A fleet does to each host and seed what a lone model does; rounding apart."""
    fleet, task = training_fleet("straight_through"), tiny_task()
    assert fleet.update_plan()[1] is None
    batches = task.load_batches()
    for env, style in enumerate(BLEND_STYLES):
        lone = HostTrainer(task, batches, env, isolation="straight_through")
        lone.model.germinate_seed("r1c0", "conv_light", style=style)
        if env in (0, 2):
            lone.model.germinate_seed("r1c1", "depthwise")
        lone.model.tick()
        lone.train_step()
        mine, other = fleet.extract(env), lone.model
        assert mine.isolation == other.isolation
        for name, value in other.state_dict().items():
            torch.testing.assert_close(mine.state_dict()[name], value, rtol=1e-4, atol=1e-6, msg=f"{env} {name}")


def test_straight_through_leaves_the_host_alone() -> None:
    """Hosts are bit-equal to those that train with shadows; seeds learn something, and something else after a while."""
    fleets = [training_fleet(isolation) for isolation in ("shadow", "straight_through")]
    for fleet in fleets:
        fleet.tick()
        fleet.train_step()
    shadow, straight = fleets
    assert shadow.update_plan()[1] is not None
    assert torch.equal(shadow.host.weights.matrix, straight.host.weights.matrix)
    for key in straight.banks:
        mine, other = straight.banks[key].weights.matrix, shadow.banks[key].weights.matrix
        assert not torch.equal(mine, other), key
    newborn = HostFleet(tiny_task(), 4)
    newborn.germinate(0, "r1c0", "conv_light")
    key = "r1c0", "conv_light"
    moved = (straight.banks[key].weights.matrix[0] - newborn.banks[key].weights.matrix[0]).abs()
    assert float(moved.max()) > 1e-4


def test_straight_through_seeds_are_heard() -> None:
    """Auditions and the way to commitment are as ever: random growth commits, with both kinds of isolation."""
    runner = make_runner(1, 4)
    runner.fleet.isolation = "straight_through"
    views, _, results = play(runner, RandomPolicy(runner.table))
    assert any(bool(view.signals.slots.audition.valid.any()) for view in views)
    assert any(bool((result.acting_parameters > 0).any()) for result in results)


def test_a_run_with_everything_off(tmp_path: Path) -> None:
    """All switches at once: a round is collected and learnt from, by the fleet that was asked for."""
    tiny_task()
    network = replace(growth_ppo().network, recurrent=False, informed_critic=False)
    ppo = replace(growth_ppo(), network=network, clipping="joint", centred=False, lam=1.0, explore=0.0)
    reward = RewardConfig(family="shaped", shaping=0.0)
    config = TrainConfig(
        NAME, rounds=1, hosts=6, members=2, sensing=False, isolation="straight_through", reward=reward, ppo=ppo
    )
    trainer = Trainer(config, tmp_path / "run")
    trainer.run(progress=False)
    assert trainer.round == 1
    assert trainer.runners[0].fleet.isolation == "straight_through"
