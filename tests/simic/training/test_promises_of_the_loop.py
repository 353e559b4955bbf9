"""What the loop promises between its parts: scales that stop moving, losses in the units of the task, memories that end
with a panic."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from simic.training.tiny import make_runner, quick_config, quick_trainer
from torch import Tensor

from esper.kasmina import CNNHost
from esper.leyline import SlotConfig, head_preset
from esper.simic.agent import PPOAgent, PPOUpdateMetrics
from esper.simic.agent.policy import LearnedPolicy
from esper.simic.evaluation.arena import PolicyPlayer, SideBySide
from esper.simic.rewards import RewardConfig
from esper.simic.training.collect import RoundCollector, action_draws
from esper.simic.training.config import growth_ppo
from esper.simic.training.episode import EpisodeRunner, play_episode
from esper.simic.training.hosts import Groups
from esper.tamiyo.heads import Masks
from esper.tamiyo.memory import HiddenState
from esper.tamiyo.policy import PolicyView
from esper.tolaria import HostFleet, get_task
from esper.tolaria.batches import ImageBatches
from esper.tolaria.data import ImageData, ImagePart

# -- scales that stop moving ------------------------------------------------------------------------------------------


@pytest.mark.requirement(5)
def test_the_statistics_of_observations_stand_still_after_their_share_of_rounds(tmp_path: Path) -> None:
    """Of four rounds the first two update them; from the third on they stay bit-equal."""
    ppo = replace(quick_config().ppo, freeze_after=0.5)
    trainer = quick_trainer(tmp_path / "run", rounds=4, ppo=ppo)
    statistics = trainer.agent.observations.statistics
    moved = []
    with trainer.folder:
        for done in range(4):
            assert trainer.agent.progress == pytest.approx(done / 4)
            before = {name: value.clone() for name, value in statistics.state_dict().items()}
            (record,) = trainer.run_round()
            assert float(record.features.std()) > 0
            after = statistics.state_dict()
            moved.append(any(not torch.equal(value, before[name]) for name, value in after.items()))
    assert moved == [True, True, False, False]


@pytest.mark.requirement(5)
def test_a_round_enters_the_statistics_of_observations_once_and_before_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number of the round counts once in its column."""
    trainer = quick_trainer(tmp_path / "run", rounds=4)
    agent, calls = trainer.agent, list[str]()
    take_in, update = agent.observations.update, agent.update

    def note_statistics(observations: Tensor, counted: Tensor | None) -> None:
        calls.append("statistics")
        take_in(observations, counted)

    def note_update(*given: Any) -> PPOUpdateMetrics:  # Any: passed on as they are
        calls.append("update")
        return update(*given)

    monkeypatch.setattr(agent.observations, "update", note_statistics)
    monkeypatch.setattr(agent, "update", note_update)
    with trainer.folder:
        (record,) = trainer.run_round()
    assert calls == ["statistics", "update"]
    columns = agent.layout.columns().repeat(record.features.shape[0] * record.features.shape[1])
    assert torch.equal(agent.observations.statistics.count, columns.bincount().double())


@pytest.mark.requirement(86)
def test_a_trained_policy_acts_on_normalised_features() -> None:
    """With statistics far from mean 0 and deviation 1 it acts as the agent does on what it sees, and otherwise than on
    raw features."""
    runner = make_runner(2, 2)
    network = replace(growth_ppo().network, head_gain=1.0)
    agent = PPOAgent(runner.table, runner.layout, replace(growth_ppo(), network=network))
    size = len(agent.observations.statistics.mean)
    state = {"mean": torch.linspace(-3, 3, size), "var": torch.full((size,), 0.01), "count": torch.ones(size)}
    agent.observations.statistics.load_state_dict(state)
    runner.begin([1, 2])
    view = runner.view()
    policy, draws = LearnedPolicy(agent, runner.slots), torch.rand((4, len(runner.table)))
    actions, hidden_state = policy.act(view, policy.initial_state([1, 1, 2, 2]), draws)
    empty = agent.network.initial_state(4)
    wanted, _, normalised = agent.act(agent.normalise(view.features), view.masks, empty, uniform=draws)
    _, _, raw = agent.act(view.features, view.masks, empty, uniform=draws)
    assert torch.equal(actions, wanted.actions)
    assert torch.equal(hidden_state[0], normalised[0])
    assert float((hidden_state[0] - raw[0]).abs().max()) > 0.1


# -- losses in the units of the task ----------------------------------------------------------------------------------


def guessing_runner(classes: int) -> EpisodeRunner:
    """Hosts that cannot learn, on noise of so many classes; their episode is one step."""
    generator = torch.Generator().manual_seed(classes)

    def part(size: int) -> ImagePart:
        images = torch.randint(256, (size, 1, 8, 8), generator=generator, dtype=torch.uint8)
        return ImagePart(images, torch.randint(classes, (size,), generator=generator))

    names = tuple(str(number) for number in range(classes))
    data = ImageData("noise", part(64), part(50), part(50), names, (0.5,), (0.29,))
    task = get_task("digits_blind")
    task = replace(
        task,
        name=f"guess_{classes}",
        build_host=lambda: CNNHost((4, 8, 16), 1, 3, classes, in_channels=1, resolution=8),
        classes=classes,
        steps=1,
        batches_per_step=1,
        batch=8,
        calibration_size=16,
        optimiser=replace(task.optimiser, rate=0.0),
    )
    groups = Groups(2, 1)
    fleet = HostFleet(task, groups.hosts, batches=ImageBatches(data, task.batch, device=torch.device("cpu")))
    return EpisodeRunner(fleet, groups, head_preset("core"))


@pytest.mark.requirement(24)
@pytest.mark.parametrize("classes", [2, 10, 100])
def test_a_host_that_guesses_has_a_loss_of_one(classes: int) -> None:
    """Live and hardened losses are in units of the task's random-guess loss, for any number of classes."""
    runner = guessing_runner(classes)
    runner.begin([1, 2])
    for name, leaf in runner.fleet.host.weights.leaves.items():
        if ".linear." in name:
            leaf.data.zero_()  # all classes are alike to them
    result = runner.step(torch.zeros((2, len(runner.table)), dtype=torch.long))
    assert not bool(result.panics.any())
    assert result.hardened_loss is not None
    for losses in (result.loss, result.hardened_loss):
        assert losses.tolist() == pytest.approx([1.0, 1.0], abs=1e-5)


# -- memories that end with a panic -----------------------------------------------------------------------------------

BROKEN_ENV, BROKEN_STEP = 1, 2


class Remembering(LearnedPolicy):
    """Keeps how much each env remembered when it was to act."""

    def __init__(self, agent: PPOAgent, slots: SlotConfig) -> None:
        super().__init__(agent, slots)
        self.sizes: list[Tensor] = []

    def act(self, view: PolicyView, hidden_state: HiddenState, uniform: Tensor) -> tuple[Tensor, HiddenState]:
        self.sizes.append(sum((part.abs().sum(1) for part in hidden_state), torch.zeros(len(uniform))))
        return super().act(view, hidden_state, uniform)


def run_with_a_fault(policies: list[Remembering], runner: EpisodeRunner) -> None:
    """An evaluation in which one host breaks at one step."""
    fleet, steps = runner.fleet, iter(range(100))
    train = fleet.train_step

    def faulty() -> Tensor:
        if next(steps) == BROKEN_STEP:
            fleet.host.weights.matrix.data[runner.groups.envs[BROKEN_ENV]] = float("nan")
        return train()

    fleet.train_step = faulty  # type: ignore[method-assign]  # a fault
    policy = policies[0] if len(policies) == 1 else SideBySide(policies)
    positions = [(0, env) for env in range(runner.groups.grown)]
    draws = action_draws(0, "evaluation", positions, fleet.task.steps, len(runner.table))
    player = PolicyPlayer(runner, policy, list(range(runner.groups.count)), draws)
    play_episode(runner, player.act, player.on_step)


@pytest.mark.requirement(95)
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.default_cases("1")
def test_a_policy_begins_anew_after_a_panic(width: int) -> None:
    """In an evaluation too, later steps start with a fresh hidden state; the other hosts keep theirs."""
    runner = make_runner(2, 2)
    config = replace(growth_ppo(), steps=runner.fleet.task.steps)
    policies = [
        Remembering(PPOAgent(runner.table, runner.layout, config, rng_seed=seed), runner.slots) for seed in range(width)
    ]
    run_with_a_fault(policies, runner)
    # Side by side, each policy has every so many-th env.
    remembered = torch.stack([torch.stack(policy.sizes) for policy in policies], 2).flatten(1) > 0
    expected = torch.ones_like(remembered)
    expected[0] = False
    expected[BROKEN_STEP + 1, BROKEN_ENV] = False
    assert torch.equal(remembered, expected)


@pytest.mark.requirement(95)
def test_the_memory_of_training_begins_anew_after_a_panic(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step after the panic begins a new segment with an empty memory; the other hosts keep theirs."""
    runner = make_runner(2, 2)
    config = replace(growth_ppo(), steps=runner.fleet.task.steps)
    agent = PPOAgent(runner.table, runner.layout, config)
    sizes: list[Tensor] = []
    act, train, steps = agent.act, runner.fleet.train_step, iter(range(100))

    def note_memory(
        seen: Tensor, masks: Masks, hidden_state: HiddenState, **how: Any
    ) -> Any:  # Any: passed on as they are
        sizes.append(hidden_state[0].abs().sum(1) + hidden_state[1].abs().sum(1))
        return act(seen, masks, hidden_state, **how)

    def faulty() -> Tensor:
        if next(steps) == BROKEN_STEP:
            runner.fleet.host.weights.matrix.data[runner.groups.envs[BROKEN_ENV]] = float("nan")
        return train()

    monkeypatch.setattr(agent, "act", note_memory)
    monkeypatch.setattr(runner.fleet, "train_step", faulty)
    [record] = RoundCollector([runner], agent, RewardConfig(), rng_seed=4).collect(0)
    assert len(record.symptoms) == 1
    remembered = torch.stack(sizes) > 0
    expected = torch.ones_like(remembered)
    expected[0] = False
    expected[BROKEN_STEP + 1, BROKEN_ENV] = False
    assert torch.equal(remembered, expected)
