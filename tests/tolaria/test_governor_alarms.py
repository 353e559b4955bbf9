"""The governor's alarms: each symptom by hand, and no alarm in healthy hosts."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from fleets import AT_ONCE

from esper.leyline import BadValueError, EsperError, SeedStage
from esper.tolaria import Governor, GovernorConfig, HostFleet, Panic, Symptom, Task, get_task

# -- the signs by hand ------------------------------------------------------------------------------------------------


def watch(
    losses: list[float], *, guess: float = 2.0, variance: float = 1.0, config: GovernorConfig | None = None
) -> Governor:
    """One host with these losses, one per minibatch."""
    governor = Governor(1, guess, config)
    for loss in losses:
        observe(governor, loss, variance)
    return governor


def observe(
    governor: Governor, loss: float, variance: float = 1.0, *, finite: bool = True, ratio: float = 0.01
) -> None:
    """One minibatch."""
    governor.observe(torch.tensor([loss]), torch.tensor([finite]), torch.tensor([variance]), torch.tensor([ratio]))


WARM = [1.0, 0.9] * 10
"""Mean 0.95, deviation 0.05: high is above max(0.95 + 6·0.05, 3·0.95) = 2.85."""


def test_divergence_takes_three_minibatches_running() -> None:
    """Two are a bad draw; three are not, and a good one in between starts the count anew."""
    governor = watch([*WARM, 3.0, 3.0, 1.0, 3.0, 3.0])
    assert governor.verdicts() == []
    observe(governor, 3.0)
    assert governor.verdicts() == [Panic(0, (Symptom.DIVERGENCE,))]


def test_divergence_needs_both_limits() -> None:
    """2.7 is 35 deviations above the mean but below three times it."""
    assert watch([*WARM, 2.7, 2.7, 2.7, 2.7]).verdicts() == []
    # With a wide spread three times the mean (3·1) is within six deviations (1 + 6·0.9).
    assert watch([0.1, 1.9] * 10 + [3.3] * 4, guess=9.0).verdicts() == []


def test_what_is_high_does_not_become_normal() -> None:
    """High losses are not learnt from."""
    governor = watch([*WARM, *[5.0] * 50])
    assert governor.verdicts() == [Panic(0, (Symptom.DIVERGENCE,))]
    observe(governor, 5.0)
    assert governor.verdicts() == [Panic(0, (Symptom.DIVERGENCE,))]


def test_collapse_needs_a_host_that_had_left() -> None:
    """Guessing costs 2.0: a mean of 0.95 has left it (below 1.2), one of 1.5 has not."""
    governor = watch(WARM)
    observe(governor, 2.1)
    assert governor.verdicts() == [Panic(0, (Symptom.COLLAPSE,))]
    observe(governor, 2.2)  # worse than a guess by 10 %: no guess
    assert governor.verdicts() == []
    assert watch([*[1.5] * 20, 2.0]).verdicts() == []


def test_nothing_is_normal_before_the_warm_up() -> None:
    """Ten minibatches; only what is not finite, or runs away, counts before."""
    assert watch([0.1] * 9 + [9.0] * 1).verdicts() == []
    governor = watch([0.1])
    observe(governor, float("nan"))
    assert governor.verdicts() == [Panic(0, (Symptom.NOT_FINITE,))]
    observe(governor, 0.1, ratio=1.5)
    assert governor.verdicts() == [Panic(0, (Symptom.RUNAWAY_UPDATE,))]
    observe(governor, 0.1, ratio=float("nan"))
    assert governor.verdicts() == [Panic(0, (Symptom.RUNAWAY_UPDATE,))]
    observe(governor, 0.1, finite=False)
    assert governor.verdicts() == [Panic(0, (Symptom.NOT_FINITE,))]


def test_flat_logits() -> None:
    """A variance that was 1 and is 1e-4 of it."""
    governor = watch(WARM)
    observe(governor, 0.95, 2e-4)
    assert governor.verdicts() == []
    observe(governor, 0.95, 5e-5)
    assert governor.verdicts() == [Panic(0, (Symptom.FLAT_LOGITS,))]


def test_validation_counts_at_once() -> None:
    """A loss that is high, and worse than guessing; or weights that are not finite."""
    governor = watch(WARM)
    governor.examine(torch.tensor([2.9]), torch.tensor([True]))
    assert governor.verdicts() == [Panic(0, (Symptom.DIVERGENCE,))]
    governor.examine(torch.tensor([2.8]), torch.tensor([True]))
    assert governor.verdicts() == []
    governor.examine(torch.tensor([0.9]), torch.tensor([False]))
    assert governor.verdicts() == [Panic(0, (Symptom.NOT_FINITE,))]
    governor.examine(torch.tensor([float("nan")]), torch.tensor([True]))
    assert governor.verdicts() == [Panic(0, (Symptom.NOT_FINITE,))]


@pytest.mark.parametrize("settings", [{"decay": 0.0}, {"decay": 1.0}, {"patience": 0}, {"warmup": 0}])
def test_settings_that_make_no_sense(settings: dict[str, int]) -> None:
    """Named with what is allowed."""
    with pytest.raises(BadValueError):
        GovernorConfig(**settings)


# -- no false alarms --------------------------------------------------------------------------------------------------


def act_at_random(fleet: HostFleet, env: int, draw: random.Random) -> None:
    """One verb on one slot, as any controller might; one that is refused has changed nothing."""
    slot_id = draw.choice(fleet.task.slot_ids)
    blueprint = draw.choice([offer.name for offer in fleet.slots[slot_id].blueprints])
    style, tempo, target = (
        draw.choice(["add", "multiply", "gate"]),
        draw.choice([3, 5, 8]),
        draw.choice([0.5, 0.7, 1.0]),
    )
    verbs: list[Callable[[], object]] = [
        lambda: fleet.germinate(env, slot_id, blueprint, style=style, tempo=tempo, alpha_target=target),
        lambda: fleet.advance(env, slot_id),
        lambda: fleet.set_alpha_target(env, slot_id, target, steps=tempo),
        lambda: fleet.prune(env, slot_id, steps=draw.choice([0, 3])),
        lambda: fleet.fossilize(env, slot_id),
    ]
    # Mostly forward, so that seeds get to act.
    for verb in draw.choices(verbs, [4, 8, 1, 1, 1], k=2):
        try:
            verb()
        except EsperError:
            continue
        break


def assert_no_alarm(task: Task, n: int) -> None:
    """Healthy hosts from their first step on; the second half of them grows at random."""
    fleet = HostFleet(task, n)
    draws = [random.Random(seed) for seed in fleet.seeds]
    seen: set[SeedStage] = set()
    for step in range(task.steps):
        for env in range(n // 2, n):
            act_at_random(fleet, env, draws[env])
        fleet.train_step()
        panics = fleet.govern(fleet.validate())
        assert panics == [], f"step {step}"
        fleet.tick()
        seen |= {state.stage for states in fleet.states for state in states.values()}
    assert {SeedStage.TRAINING, SeedStage.BLENDING} <= seen
    assert float(fleet.losses.mean()) < task.random_guess_loss


@pytest.mark.slow
@pytest.mark.requirement(95)
@pytest.mark.parametrize("name", ["digits_blind", "digits"])
def test_no_false_alarm(name: str) -> None:
    """20 healthy hosts raise no alarm in 10 steps."""
    assert_no_alarm(replace(get_task(name), steps=10, batches_per_step=6), 20)


def test_cutting_a_seed_that_carries_its_host_is_no_fault() -> None:
    """A legal decision, if a poor one: the loss jumps back to where the host alone would be. It must stand."""
    fleet = HostFleet(get_task("digits_blind"), 2, config=AT_ONCE)
    for step in range(11):
        for env in range(2):
            if step == 0:
                fleet.germinate(env, "r1c0", "conv_light", tempo=0)
                fleet.advance(env, "r1c0")
            elif step == 2:
                fleet.advance(env, "r1c0")
            elif step == 10:
                fleet.prune(env, "r1c0")
        fleet.train_step()
        assert fleet.govern(fleet.validate()) == [], f"step {step}"
        fleet.tick()


@pytest.mark.requirement(95)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits_blind", "digits"])
def test_no_false_alarm_in_many_hosts(name: str) -> None:
    """200 healthy hosts raise no alarm in 30 steps."""
    assert_no_alarm(replace(get_task(name), steps=30), 200)
