"""The heuristic: what each of its rules does, which goes first, and their thresholds."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from tamiyo.views import ADVANCE, CORE, FOSSILIZE, FULL, GERMINATE, NAMES, PRUNE, SLOTS, WAIT, a_view, quiet

from esper.leyline import LifecycleOp, SeedStage
from esper.leyline.records import decode, encode
from esper.tamiyo.policies import HeuristicConfig, HeuristicTamiyo
from esper.tamiyo.policies.heuristic import steps_left
from esper.tamiyo.signals import Measured


class Situation:
    """One env that a test sets up; everything is legal in it unless said otherwise."""

    def __init__(self, step: int = 10, **host: float) -> None:
        self.step, self.signals, self.masks = step, quiet(1, step), CORE.open_masks(1)
        hosts = {name: torch.tensor([value]) for name, value in host.items()}
        self.signals = self.signals._replace(hosts=self.signals.hosts._replace(**hosts))

    def slot(
        self, place: int, stage: SeedStage, steps: int, value: float, error: float, cost: float = 0
    ) -> "Situation":
        """A conv seed with an audition (before it blends) or a contribution."""
        name = "audition" if stage is SeedStage.TRAINING else "contribution"
        measured = Measured(*(each.clone() for each in getattr(self.signals.slots, name)))
        measured.value[0, place], measured.error[0, place], measured.valid[0, place] = value, error, True
        changed: dict[str, Any] = {name: measured}
        slots = self.signals.slots._replace(
            **changed,
            stage=self.signals.slots.stage.clone(),
            blueprint=self.signals.slots.blueprint.clone(),
            steps_in_stage=self.signals.slots.steps_in_stage.clone(),
        )
        slots.stage[0, place], slots.blueprint[0, place], slots.steps_in_stage[0, place] = stage, 1, steps
        costs = self.signals.offers.cost.clone()
        costs[0, place, 1] = cost
        self.signals = self.signals._replace(slots=slots, offers=self.signals.offers._replace(cost=costs))
        for op in (WAIT, GERMINATE):
            self.masks["slot"][0, op, place] = False
        return self

    def unmeasured(self) -> "Situation":
        """No measurement is valid."""
        slots = self.signals.slots
        no = torch.zeros_like(slots.audition.valid)
        slots = slots._replace(
            audition=slots.audition._replace(valid=no), contribution=slots.contribution._replace(valid=no)
        )
        self.signals = self.signals._replace(slots=slots)
        return self

    def offers(self, worth: dict[tuple[int, int], float], cost: dict[tuple[int, int], float]) -> "Situation":
        """By slot and blueprint; all others 0."""
        tables = []
        for entries in (worth, cost):
            table = torch.zeros(1, len(SLOTS), len(NAMES))
            for (slot, blueprint), value in entries.items():
                table[0, slot, blueprint] = value
            tables.append(table)
        self.signals = self.signals._replace(offers=self.signals.offers._replace(worth=tables[0], cost=tables[1]))
        return self

    def forbid(self, op: LifecycleOp, place: int) -> "Situation":
        self.masks["slot"][0, op, place] = False
        self.masks["op"] = self.masks["slot"].any(-1)
        self.masks["op"][:, WAIT] = True
        return self

    def decide(self, config: HeuristicConfig | None = None, stale: int = 0) -> tuple[LifecycleOp, int, int]:
        """Op, slot and blueprint after so many steps at accuracy 0."""
        policy = HeuristicTamiyo(CORE, SLOTS, config)
        state = policy.initial_state([0])
        if stale:
            state = state._replace(level=torch.zeros(1), since=torch.full((1,), stale - 1))
        actions, _ = policy.act(a_view(self.signals, self.masks, self.step), state, torch.zeros(1, len(CORE)))
        op, slot, blueprint = actions[0].tolist()
        return LifecycleOp(op), slot, blueprint


WAITS = (WAIT, 0, 0)
TRAINING, HOLDING = SeedStage.TRAINING, SeedStage.HOLDING


@pytest.mark.parametrize(("step", "left"), [(1, 19), (7, 13), (13, 7), (19, 1)])
def test_steps_left(step: int, left: int) -> None:
    """From the share of time that is left; T itself is not told."""
    assert steps_left(quiet(1, step).hosts, step).tolist() == [left]


def test_germinates_after_patience_on_a_plateau() -> None:
    """Rises of 1 point or less do not count, and add up until they do."""
    policy = HeuristicTamiyo(CORE, SLOTS)
    state = policy.initial_state([0])
    ops = []
    for step, accuracy in enumerate([10.0, 20.0, 20.6, 21.2, 21.8, 22.0]):
        situation = Situation(step, accuracy=accuracy)
        actions, state = policy.act(a_view(situation.signals, situation.masks, step), state, torch.zeros(1, 3))
        ops.append(LifecycleOp(int(actions[0, 0])))
    # The level is 20 after the second; 20.6 is not above 21, 21.2 is and becomes the level; two steps later: patience.
    assert ops == [WAIT] * 5 + [GERMINATE]


def test_takes_the_offer_of_most_worth() -> None:
    situation = Situation().offers({(0, 1): 0.4, (2, 0): 1.0, (1, 2): 0.7}, {})
    assert situation.decide(stale=2) == (GERMINATE, 2, 0)
    assert situation.forbid(GERMINATE, 2).decide(stale=2) == (GERMINATE, 1, 2)


def test_minds_the_cost_of_an_offer() -> None:
    """Net: 1 − 0.1 · log2(16) = 0.6 against 0.71 − 0.1 · log2(2) = 0.61; per cost: 0.07, 0.71 and 5."""
    situation = Situation().offers({(0, 1): 1.0, (1, 1): 0.71, (2, 1): 0.1}, {(0, 1): 15, (1, 1): 1, (2, 1): 0.02})
    assert situation.decide(stale=2) == (GERMINATE, 1, 1)
    assert situation.decide(HeuristicConfig(choice="per_cost"), stale=2) == (GERMINATE, 2, 1)
    assert situation.decide(HeuristicConfig(choice="worth"), stale=2) == (GERMINATE, 0, 1)


@pytest.mark.parametrize("followed", [True, False])
def test_does_not_try_the_same_offer_twice(followed: bool) -> None:
    """Unless nothing was germinated, because a learner that it advises did something else. It need not see the seed,
    which a panic may have cut in the same step."""
    policy = HeuristicTamiyo(CORE, SLOTS, HeuristicConfig(patience=0))
    situation = Situation().offers({(1, 1): 1.0, (1, 0): 0.9}, {})
    state, found = policy.initial_state([0]), []
    for seeds in range(3):
        slots = situation.signals.slots
        slots = slots._replace(tried=torch.tensor([[0, seeds if followed else 0, 0]]))
        signals = situation.signals._replace(slots=slots)
        actions, state = policy.act(a_view(signals, situation.masks), state, torch.zeros(1, 3))
        found.append(actions[0, 1:].tolist())
    assert found[:2] == ([[1, 1], [1, 0]] if followed else [[1, 1]] * 2)
    assert (found[2] in found[:2]) is not followed


def test_does_not_try_an_offer_that_another_has_tried() -> None:
    """A learner that it advises germinated a conv on its own, and pruned it."""
    policy = HeuristicTamiyo(CORE, SLOTS, HeuristicConfig(patience=0))
    state = policy.initial_state([0])
    offers = {(1, 1): 1.0, (2, 0): 0.9}
    growing = Situation().offers(offers, {}).slot(1, TRAINING, 1, 0.0, 1.0)
    _, state = policy.act(a_view(growing.signals, growing.masks), state, torch.zeros(1, 3))
    empty = Situation().offers(offers, {})
    actions, _ = policy.act(a_view(empty.signals, empty.masks), state, torch.zeros(1, 3))
    assert actions[0].tolist() == [GERMINATE, 2, 0]


def test_does_not_germinate_too_late() -> None:
    """With nine steps left it still does."""
    assert Situation(step=11).decide(stale=5)[0] is GERMINATE
    assert Situation(step=12).decide(stale=5) == WAITS
    assert Situation(step=12).decide(HeuristicConfig(germinate_left=8), stale=5)[0] is GERMINATE


def test_does_not_germinate_too_many() -> None:
    """Two at once; fossils do not count."""
    situation = Situation().slot(0, TRAINING, 1, 0.0, 1.0)
    assert situation.decide(stale=5)[:2] == (GERMINATE, 1)
    assert situation.slot(1, SeedStage.BLENDING, 1, 0.0, 1.0).decide(stale=5) == WAITS
    assert situation.slot(1, SeedStage.FOSSILIZED, 1, 0.0, 1.0).decide(stale=5)[:2] == (GERMINATE, 2)


def test_advances_what_auditions_beyond_its_error() -> None:
    assert Situation().slot(1, TRAINING, 3, 2.0, 1.5).decide() == (ADVANCE, 1, 0)
    assert Situation().slot(1, TRAINING, 3, 2.0, 2.5).decide() == WAITS
    assert Situation().slot(1, TRAINING, 3, 2.0, 1.5).decide(HeuristicConfig(errors=2)) == WAITS
    assert Situation().slot(1, TRAINING, 3, 2.0, 1.5).decide(HeuristicConfig(least_audition=1)) == WAITS


def test_does_not_believe_an_early_audition() -> None:
    assert Situation().slot(1, TRAINING, 2, 9.0, 1.0).decide() == WAITS
    assert Situation().slot(1, TRAINING, 2, 9.0, 1.0).decide(HeuristicConfig(training_steps=2)) == (ADVANCE, 1, 0)


def test_advances_the_best_audition_first() -> None:
    situation = Situation().slot(0, TRAINING, 4, 2.0, 1.0).slot(2, TRAINING, 3, 5.0, 1.0)
    assert situation.decide() == (ADVANCE, 2, 0)
    assert situation.forbid(ADVANCE, 2).decide() == (ADVANCE, 0, 0)


def test_does_not_advance_what_could_not_be_fossilised() -> None:
    """Five steps: three of ramp, one held, one to act."""
    assert Situation(step=15).slot(1, TRAINING, 3, 2.0, 1.0).decide() == (ADVANCE, 1, 0)
    assert Situation(step=16).slot(1, TRAINING, 3, 2.0, 1.0).decide() == WAITS


def test_prunes_what_does_not_audition_well() -> None:
    """After six steps in training, the worst first; what was not measured is left alone."""
    assert Situation().slot(1, TRAINING, 5, 0.5, 1.0).decide() == WAITS
    assert Situation().slot(1, TRAINING, 6, 0.5, 1.0).decide() == (PRUNE, 1, 0)
    assert Situation().slot(1, TRAINING, 6, 0.5, 1.0).slot(0, TRAINING, 6, -2.0, 1.0).decide() == (PRUNE, 0, 0)
    assert Situation().slot(1, TRAINING, 9, -5.0, 1.0).unmeasured().decide() == WAITS


def test_fossilises_what_contributes_beyond_its_error() -> None:
    """Net of rent: a seed as large as the host pays 2 points."""
    assert Situation().slot(1, HOLDING, 1, 3.0, 0.9).decide() == (FOSSILIZE, 1, 0)
    assert Situation().slot(1, HOLDING, 1, 3.0, 0.9, cost=1).decide() == (FOSSILIZE, 1, 0)
    assert Situation().slot(1, HOLDING, 1, 3.0, 1.1, cost=1).decide() == WAITS
    assert Situation().slot(1, HOLDING, 1, 3.0, 0.9).decide(HeuristicConfig(least_contribution=2.5)) == WAITS


def test_prunes_what_is_not_worth_its_rent() -> None:
    """The worst first; what was not measured is left alone."""
    assert Situation().slot(1, HOLDING, 1, -0.1, 3.0).decide() == (PRUNE, 1, 0)
    assert Situation().slot(1, HOLDING, 1, 1.9, 3.0, cost=1).decide() == (PRUNE, 1, 0)
    assert Situation().slot(1, HOLDING, 1, -0.1, 3.0).decide(HeuristicConfig(prune_below=-1)) == WAITS
    assert Situation().slot(1, HOLDING, 1, -0.1, 3.0).slot(2, HOLDING, 1, -4.0, 3.0).decide() == (PRUNE, 2, 0)
    assert Situation().slot(1, HOLDING, 1, -4.0, 3.0).unmeasured().decide() == WAITS


def test_rescues_what_contributes_at_all_before_the_end() -> None:
    """With three steps left; the most useful first."""
    assert Situation(step=16).slot(1, HOLDING, 4, 0.2, 3.0).decide() == WAITS
    assert Situation(step=17).slot(1, HOLDING, 4, 0.2, 3.0).decide() == (FOSSILIZE, 1, 0)
    both = Situation(step=19).slot(1, HOLDING, 4, 0.2, 3.0).slot(2, HOLDING, 4, 0.3, 3.0)
    assert both.decide() == (FOSSILIZE, 2, 0)
    assert Situation(step=19).slot(1, HOLDING, 4, 1.9, 3.0, cost=1).decide() == (PRUNE, 1, 0)


def test_rules_in_order() -> None:
    """All apply; each gives way to the one before it, and what is forbidden is passed over."""
    situation = Situation().slot(0, HOLDING, 1, 3.0, 1.0).slot(1, TRAINING, 6, 2.0, 1.0)
    config = HeuristicConfig(at_once=3)
    assert situation.decide(config, stale=5) == (FOSSILIZE, 0, 0)
    assert situation.forbid(FOSSILIZE, 0).decide(config, stale=5) == (ADVANCE, 1, 0)
    assert situation.forbid(ADVANCE, 1).decide(config, stale=5)[:2] == (GERMINATE, 2)
    assert situation.forbid(GERMINATE, 2).decide(config, stale=5) == WAITS


def test_other_heads_do_what_core_does() -> None:
    """add, a ramp of 3, target 1.0, cut at once, linear: or the first legal choice where that is masked."""
    policy = HeuristicTamiyo(FULL, SLOTS, HeuristicConfig(patience=0))
    masks = FULL.open_masks(2)
    masks["blend"][1, 0] = False
    masks["alpha_target"][1, 2] = False
    actions, _ = policy.act(a_view(quiet(2), masks), policy.initial_state([0, 1]), torch.zeros(2, len(FULL)))
    assert actions.tolist() == [[GERMINATE, 0, 0, 0, 0, 2, 0, 0], [GERMINATE, 0, 0, 1, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patience": -1}, "patience -1 is not an integer of 0 or more"),
        ({"at_once": 0}, "at_once 0 is not an integer of 1 or more"),
        ({"trial": 2}, "trial 2 is not an integer of 3 or more: auditions do not count before"),
        ({"rent": float("nan")}, "rent nan is not a finite number"),
        ({"errors": -1.0}, "errors -1.0 is below 0"),
        ({"choice": "best"}, "unknown choice of blueprints 'best'; allowed: net, per_cost, worth"),
    ],
)
def test_bad_thresholds(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(HeuristicConfig(), **change)


def test_thresholds_as_json() -> None:
    """Tuned ones are shipped as files."""
    config = HeuristicConfig(patience=4, choice="per_cost", rent=1.5)
    assert decode(HeuristicConfig, json.loads(json.dumps(encode(config))), "heuristic") == config
