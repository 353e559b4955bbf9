"""Preset `commit`: what the rule does with each seed, slot by slot."""

from typing import Any

import pytest
import torch
from tamiyo.views import ADVANCE, FOSSILIZE, GERMINATE, PRUNE, WAIT, quiet

from esper.leyline import BadValueError, LifecycleOp, SeedStage, head_preset
from esper.tamiyo.commit_rule import CommitRule
from esper.tamiyo.signals import Measured, TrainingSignals

TRAINING, HOLDING = SeedStage.TRAINING, SeedStage.HOLDING


def scene(stage: SeedStage, steps: int, value: float, error: float = 0.5, cost: float = 0.0, **flags: bool) -> Any:
    """One host with a seed of blueprint 1 in its second slot. Everything is legal unless a flag says otherwise."""
    signals = quiet(1)
    name = "audition" if stage is TRAINING else "contribution"
    valid = flags.pop("valid", True)
    legal = {"can_advance": stage is TRAINING, "can_fossilize": stage is HOLDING, "can_prune": True} | flags
    changes: dict[str, Any] = {name: Measured(*(each.clone() for each in getattr(signals.slots, name)))}
    for part, given in zip(changes[name], (value, error, valid), strict=True):
        part[0, 1] = given
    for column, given in {"stage": stage, "steps_in_stage": steps, "blueprint": 1, **legal}.items():
        changes[column] = getattr(signals.slots, column).clone()
        changes[column][0, 1] = given
    costs = signals.offers.cost.clone()
    costs[0, 1, 1] = cost
    return signals._replace(slots=signals.slots._replace(**changes), offers=signals.offers._replace(cost=costs))


def op_of(signals: TrainingSignals, rule: CommitRule | None = None) -> LifecycleOp:
    """What the rule does with that seed; the empty slots beside it are left alone."""
    first, second, third = (rule or CommitRule()).ops(signals)[0].tolist()
    assert first == third == WAIT
    return LifecycleOp(second)


@pytest.mark.parametrize(
    ("signals", "op"),
    [
        (scene(TRAINING, 1, 9.0), WAIT),  # too early
        (scene(TRAINING, 2, 9.0), ADVANCE),
        (scene(TRAINING, 2, -0.4), ADVANCE),  # within its error
        (scene(TRAINING, 2, -0.6), WAIT),  # bad, but it may learn
        (scene(TRAINING, 6, -0.6), PRUNE),  # its trial is over
        (scene(TRAINING, 6, -0.6, can_prune=False), WAIT),
        (scene(TRAINING, 9, 9.0, valid=False), WAIT),  # not measured
        (scene(TRAINING, 2, 9.0, can_advance=False), WAIT),
        (scene(HOLDING, 0, 9.0), WAIT),
        (scene(HOLDING, 1, 0.1), FOSSILIZE),
        (scene(HOLDING, 1, 0.0), PRUNE),
        (scene(HOLDING, 1, 2.1, cost=1.0), FOSSILIZE),  # doubling the host costs 2 points
        (scene(HOLDING, 1, 1.9, cost=1.0), PRUNE),
        (scene(HOLDING, 1, 9.0, ramping=True), WAIT),
        (scene(HOLDING, 1, -9.0, valid=False), WAIT),
    ],
)
def test_what_it_does(signals: TrainingSignals, op: LifecycleOp) -> None:
    assert op_of(signals) is op


def test_thresholds_are_settings() -> None:
    """Longer trials, larger margins, and more errors."""
    assert op_of(scene(TRAINING, 2, -0.9), CommitRule(errors=2.0)) is ADVANCE
    assert op_of(scene(TRAINING, 2, 9.0), CommitRule(training_steps=3)) is WAIT
    assert op_of(scene(TRAINING, 6, -0.6), CommitRule(trial=7)) is WAIT
    assert op_of(scene(HOLDING, 1, 0.5), CommitRule(margin=1.0)) is PRUNE
    assert op_of(scene(HOLDING, 1, 0.5), CommitRule(holding_steps=2)) is WAIT
    with pytest.raises(BadValueError, match="errors -1 is below 0"):
        CommitRule(errors=-1)
    with pytest.raises(BadValueError, match="trial"):
        CommitRule(trial=-1)


def test_the_preset_leaves_the_policy_two_ops() -> None:
    """Whether to germinate; the other heads say what and where."""
    preset = head_preset("commit")
    assert preset.ops == (WAIT, GERMINATE)
    assert preset.head_names == ("op", "slot", "blueprint")
    assert preset.commits_by_rule and not head_preset("core").commits_by_rule


def test_all_hosts_and_slots_at_once() -> None:
    """Rows are independent."""
    one, other = scene(TRAINING, 2, 9.0), scene(HOLDING, 1, 9.0)

    def stacked(first: Any, second: Any) -> Any:
        if isinstance(first, torch.Tensor):
            return torch.cat([first, second])
        return type(first)(*(stacked(*pair) for pair in zip(first, second, strict=True)))

    assert CommitRule().ops(stacked(one, other)).tolist() == [[WAIT, ADVANCE, WAIT], [WAIT, FOSSILIZE, WAIT]]
