"""What an episode costs: every pass is charged for what goes through it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from simic.training.tiny import make_runner, tiny_task
from torch.utils.flop_counter import FlopCounterMode

from esper.kasmina import row_layout
from esper.leyline import SeedStage
from esper.simic.evaluation.arena import PolicyPlayer
from esper.simic.evaluation.costs import PASSES, CostMeter, Structure
from esper.simic.training.episode import play_episode
from esper.tamiyo.policies import WaitPolicy
from esper.tolaria import HostFleet

# Multiply-adds per image of the tiny task's host: 1×1 convolutions 1→4 on 8×8, 4→8 on 4×4, 8→16 on 2×2, linear 16→10.
CONVOLUTIONS, LINEAR = (4 * 64, 32 * 16, 128 * 4), 160
HOST = sum(CONVOLUTIONS) + LINEAR
# A depthwise seed: 3×3 per channel, then 1×1; in the first slot 4 channels on 4×4, in the second 8 on 2×2.
FIRST, SECOND = 4 * 9 * 16 + 16 * 16, 8 * 9 * 4 + 64 * 4
STEPS, IMAGES, VALIDATION, CALIBRATION = 12, 2 * 16, 400, 64
UNIT = 3 * STEPS * IMAGES * HOST


def structure(**stages: SeedStage) -> Structure:
    """One env with depthwise seeds in these stages."""
    task = tiny_task()
    stage = [[float(stages.get(slot_id, SeedStage.DORMANT)) for slot_id in task.slot_ids]]
    name = task.slot_config.blueprint_names.index("depthwise")
    blueprint = [[float(name) if slot_id in stages else -1.0 for slot_id in task.slot_ids]]
    return Structure(np.array(stage), np.array(blueprint))


def meter() -> CostMeter:
    found = CostMeter(HostFleet(tiny_task(), 2))
    found.begin([0])
    return found


def test_waiting_costs_the_training_and_what_is_looked_at() -> None:
    """Once the plain training; thirteen validations and the last score, each with its calibration; twelve probes."""
    runner = make_runner(groups=1, members=2)
    account = CostMeter(runner.fleet)
    player = PolicyPlayer(runner, WaitPolicy(runner.table), [5], torch.zeros(STEPS, 2, 3), account)
    play_episode(runner, player.act, player.on_step)
    found = account.cost()
    assert set(found) == set(PASSES)
    assert found["training"] == pytest.approx([1.0, 1.0])
    assert found["shadow"] == found["ablation"] == [0.0, 0.0]
    assert found["validation"] == pytest.approx([14 * VALIDATION * HOST / UNIT] * 2)
    assert found["calibration"] == pytest.approx([14 * CALIBRATION * HOST / UNIT] * 2)
    assert found["probing"][0] > 12 * 16 * (2 * HOST - CONVOLUTIONS[0]) / UNIT


def test_every_row_is_charged_from_where_it_is_born() -> None:
    """A seed trains in the first slot beside one that acts in the second."""
    given = structure(r1c0=SeedStage.TRAINING, r1c1=SeedStage.HOLDING)
    account = meter()
    account.train(given)
    found = account.cost()
    behind_first = sum(CONVOLUTIONS[1:]) + LINEAR + SECOND
    behind_second = CONVOLUTIONS[2] + LINEAR
    assert found["training"] == pytest.approx([IMAGES * 3 * (HOST + SECOND) / UNIT])
    assert found["shadow"] == pytest.approx([IMAGES * (3 * FIRST + 2 * behind_first) / UNIT])
    account.measure(given)
    rows = FIRST + behind_first + behind_second
    found = account.cost()
    assert found["validation"] == pytest.approx([VALIDATION * (HOST + SECOND) / UNIT])
    assert found["ablation"] == pytest.approx([VALIDATION * rows / UNIT])
    assert found["calibration"] == pytest.approx([CALIBRATION * (HOST + SECOND + rows) / UNIT])


def test_hardened_hosts_have_their_fossils_alone() -> None:
    account = meter()
    account.harden(structure(r1c0=SeedStage.FOSSILIZED, r1c1=SeedStage.HOLDING))
    assert account.cost()["validation"] == pytest.approx([VALIDATION * (HOST + FIRST) / UNIT])


def test_straight_through_has_no_shadow_row() -> None:
    """Such a seed costs its own work on the main row."""
    account = CostMeter(HostFleet(tiny_task(), 2, isolation="straight_through"))
    account.begin([0])
    account.train(structure(r1c0=SeedStage.TRAINING))
    assert account.cost()["shadow"] == pytest.approx([IMAGES * 3 * FIRST / UNIT])


def test_what_is_charged_is_what_the_fleet_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight hosts, so that no spare rows are probed: the multiply-adds of a validation and of a probe as they run.

    By torch's convolutions: dense matrices for small images have zeros, which nobody is charged for."""
    monkeypatch.setattr(row_layout, "SMALL", 0)
    runner = make_runner(groups=4, members=1)
    fleet, account = runner.fleet, CostMeter(runner.fleet)
    runner.begin([3, 4, 5, 6])  # memory needs are measured in the first validation, by passes of their own
    bare = Structure.of_states(fleet.states, runner.slots.blueprint_names)
    for work, charge, passes in (
        (lambda: fleet.validate(deployed=False), account.measure, ("validation", "calibration")),
        (runner.prober, account.probe, ("probing",)),
    ):
        with FlopCounterMode(display=False) as counter:
            work()
        account.begin(range(8))
        charge(bare)
        charged = sum(sum(account.cost()[name]) for name in passes) * UNIT
        assert counter.get_total_flops() / 2 == pytest.approx(charged)


def test_a_slot_before_the_pool_lies_behind_its_convolution() -> None:
    """Its rows do not go through that one again."""
    task = replace(tiny_task(), slot_ids=("r0c0",))
    account = CostMeter(HostFleet(task, 2))
    account.begin([0])
    depthwise = task.slot_config.blueprint_names.index("depthwise")
    account.measure(Structure(np.array([[float(SeedStage.TRAINING)]]), np.array([[float(depthwise)]])))
    row = 4 * 9 * 64 + 16 * 64 + sum(CONVOLUTIONS[1:]) + LINEAR
    assert account.cost()["ablation"] == pytest.approx([VALIDATION * row / UNIT])
