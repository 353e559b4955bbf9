"""Observer, masks, rules and actions on a growable that is no fleet: one env, scored by loss."""

from collections.abc import Sequence

import pytest
import torch
from simic.training.tiny import make_runner
from torch import Tensor

from esper.kasmina import Comparison, LifecycleConfig, SeedState
from esper.kasmina.compare import PairedDifference, RowScore
from esper.leyline import LifecycleOp, Measurement, SeedStage, head_preset, relative_gain
from esper.simic.training.episode import apply_action
from esper.simic.training.hosts import Groups
from esper.simic.training.observe import Observer
from esper.tamiyo import PolicyView, TrainingSignals, growth_layout, growth_masks, growth_table, signals_to_features
from esper.tamiyo.policies import HeuristicConfig, HeuristicTamiyo
from esper.tolaria import get_task
from esper.tolaria.growable import Growable
from esper.tolaria.lifecycles import Lifecycles
from esper.tolaria.measurement import Sensing

SLOTS = get_task("digits_blind").slot_config
PRESET = head_preset("core")
TABLE = growth_table(PRESET, SLOTS)
ALONE = Groups(1, 1, controls=False)


class LoneModel:
    """Slots and lifecycles without weights. Losses are in units of 4, points relative to that loss."""

    n, device, budget, random_guess_loss = 1, torch.device("cpu"), 2000, 4.0

    def __init__(self) -> None:
        self.slot_config, self.slots = SLOTS, {slot.slot_id: slot for slot in SLOTS.slots}
        self.config, self.progress = LifecycleConfig(), 0.0
        self.losses = torch.full((1,), torch.nan)
        self.heard: list[tuple[str, str]] = []
        lives = Lifecycles(self)
        self.states, self.grown_parameters, self.tick = lives.states, lives.grown_parameters, lives.tick
        self.germinate, self.advance, self.fossilize = lives.germinate, lives.advance, lives.fossilize
        self.set_alpha_target, self.prune = lives.set_alpha_target, lives.prune

    def host_size(self, env: int) -> int:
        return 1000

    def plant(self, env: int, slot_id: str, state: SeedState) -> None:
        self.heard.append(("plant", slot_id))

    def uproot(self, env: int, slot_id: str) -> None:
        self.heard.append(("uproot", slot_id))

    def restructured(self, env: int, *, eased: bool) -> None:
        self.heard.append(("restructured", f"{env} {eased}"))

    def points(self, rows: Sequence[RowScore]) -> Tensor:
        return torch.stack([relative_gain(torch.tensor(4.0), row.losses.mean()) for row in rows])


def losing(*losses: float) -> list[Comparison]:
    """A comparison of one env without seeds."""
    return [Comparison(RowScore(None, torch.tensor(losses)), None, {}, {})]


def sensed() -> Sensing:
    """The third blueprint in the second slot is worth most."""
    offers = torch.zeros(1, len(SLOTS), len(SLOTS.blueprint_names))
    offers[0, 1, 2] = 1.0
    ones = torch.ones(1, len(SLOTS))
    return Sensing(ones, ones, ones, offers)


def look(observer: Observer, comparisons: list[Comparison]) -> TrainingSignals:
    wait, fine = torch.tensor([int(LifecycleOp.WAIT)]), torch.ones(1, dtype=torch.bool)
    return observer.look(comparisons, sensed(), torch.zeros(1), wait, fine)


def test_signals_of_a_lone_model() -> None:
    """Losses of 3 and 5 make 4, the unit, so 0 points; a loss of 5 makes −25 points, which are no new best."""
    model = LoneModel()
    growable: Growable = model
    observer = Observer(growable, ALONE)
    first = look(observer, losing(3.0, 5.0)).hosts
    assert (first.accuracy.item(), first.validation_loss.item(), first.train_loss.item()) == (0.0, 1.0, 1.0)
    assert (first.time_left.item(), first.accuracy_change.item(), first.stale.item()) == (1.0, 0.0, 0.0)
    model.progress, model.losses = 0.25, torch.tensor([2.0])
    second = look(observer, losing(5.0))
    assert (second.hosts.accuracy.item(), second.hosts.accuracy_change.item()) == (-25.0, -25.0)
    assert (second.hosts.best_accuracy.item(), second.hosts.stale.item()) == (0.0, 0.25)
    assert (second.hosts.time_left.item(), second.hosts.train_loss.item()) == (0.75, 0.5)
    assert torch.equal(second.critic.control_accuracy, second.hosts.accuracy), "it is its own control"


def test_a_first_score_far_below_zero_is_the_best_so_far() -> None:
    assert look(Observer(LoneModel(), ALONE), losing(8.0)).hosts.best_accuracy.item() == -100.0


def test_rules_grow_a_lone_model() -> None:
    """The rule germinates the best offer; its owner hears of it, and the masks follow."""
    model = LoneModel()
    observer, layout = Observer(model, ALONE), growth_layout(SLOTS)
    policy = HeuristicTamiyo(TABLE, SLOTS, HeuristicConfig(patience=0))
    signals = look(observer, losing(4.0))
    masks = growth_masks(signals, TABLE, PRESET.ops)
    assert masks["op"][0].nonzero().flatten().tolist() == [LifecycleOp.WAIT, LifecycleOp.GERMINATE]
    view = PolicyView(signals, signals_to_features(signals, layout), masks, 0)
    state = policy.initial_state([0])._replace(level=torch.zeros(1))
    actions, _ = policy.act(view, state, torch.zeros(1, len(TABLE)))
    change = apply_action(model, 0, actions[0].tolist(), TABLE, SLOTS)
    slot_id = SLOTS.slot_ids[1]
    assert change is not None and (change.slot_id, change.target) == (slot_id, SeedStage.GERMINATED)
    assert model.heard == [("plant", slot_id), ("restructured", "0 False")]
    after = look(observer, losing(4.0))
    assert after.hosts.grown.item() * 1000 == pytest.approx(model.grown_parameters(0)) != 0
    assert not growth_masks(after, TABLE, PRESET.ops)["slot"][0, LifecycleOp.GERMINATE, 1]


def held(model: LoneModel, contribution: float) -> list[Comparison]:
    """A seed in the first slot that has measured this contribution."""
    slot_id = SLOTS.slot_ids[0]
    measured = Measurement(contribution, 0.5)
    model.states[0][slot_id] = SeedState(
        slot_id, stage=SeedStage.HOLDING, blueprint=SLOTS.blueprint_names[0], contributions=(measured,)
    )
    [bare] = losing(2.0)
    return [bare._replace(contributions={slot_id: PairedDifference(measured, Measurement(0.125, 0.1))})]


def test_state_of_an_observer() -> None:
    """One that continues from it sees the same, and neither changes what was stored."""
    model = LoneModel()
    observer, fresh = Observer(model, ALONE), Observer(model, ALONE)
    assert set(observer.state()) == {"best_accuracy", "best_at", "best"}, "nothing was seen yet"
    fresh.restore(observer.state())
    look(observer, losing(3.0))
    model.progress = 0.5
    look(observer, held(model, 7.0))
    state = observer.state()
    stored = {name: tensor.clone() for name, tensor in state.items()}
    assert set(state) == {"accuracy", "control", "best_accuracy", "best_at", "best"}
    fresh.restore(state)
    model.progress = 0.75
    worse = held(model, 3.0)
    expected, found = look(observer, worse), look(fresh, worse)
    assert found.slots.best.value[0, 0] == 7.0 and found.slots.contribution_loss[0, 0] == 0.125
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    look(fresh, held(model, 9.0))
    assert all(torch.equal(state[name].nan_to_num(), tensor.nan_to_num()) for name, tensor in stored.items())
    fresh.restore(Observer(model, ALONE).state())
    assert look(fresh, losing(3.0)).hosts.accuracy_change.item() == 0.0, "forgotten, as at the start"


def test_a_fleet_is_growable() -> None:
    """Its values are those of its task."""
    runner = make_runner(1, 1)
    runner.begin([0])
    fleet: Growable = runner.fleet
    task = runner.fleet.task
    assert (fleet.slot_config, fleet.host_size(0), fleet.progress) == (task.slot_config, task.host_parameters, 0)
    assert fleet.random_guess_loss == task.random_guess_loss
    rows = [comparison.main for comparison in runner.comparisons]
    assert fleet.points(rows).tolist() == torch.tensor([row.accuracy for row in rows]).tolist()
    assert all(comparison.deployed is None for comparison in runner.comparisons)
    runner.step(torch.zeros(1, len(runner.table), dtype=torch.long))
    assert fleet.progress == 1 / task.steps
