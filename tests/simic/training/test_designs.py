"""Hosts of badly sized designs in the loop: what they cost, by the size of each."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from esper.kasmina import CNNHost
from esper.leyline import BadValueError, UnknownNameError, head_preset, objective
from esper.leyline.records import encode
from esper.simic.evaluation.policies import PolicySpec, make_policy
from esper.simic.evaluation.results import Result
from esper.simic.training.episode import EpisodeRunner, play_episode
from esper.simic.training.hosts import Groups
from esper.tamiyo.policies import Plan, PlannedSeed, SchedulePolicy
from esper.tolaria import HostFleet, Task, get_task

NARROW, WIDE = "3n-3w", "none"
# One input channel; (in·9 + 2)·out per block, then 10 classes.
SIZES = {NARROW: (9 + 2) * 1 + (1 * 9 + 2) * 8 + 90, WIDE: (9 + 2) * 4 + (4 * 9 + 2) * 8 + 90}
REVIVED = 3 * 9 * 8  # kernels of the second block that read the three masked channels of the first
SEED = 4 * 4 * 9 + 3 * 4  # conv_light behind the first block


def task_of(*kinds: str) -> Task:
    """Two blocks, a slot behind each."""
    return replace(
        get_task("digits_varied"),
        name="designs",
        build_host=lambda: CNNHost((4, 8), 3, 2, 10, in_channels=1, resolution=8, masked=True),
        slot_ids=("r1c0", "r1c1"),
        defects=kinds,
        steps=8,
        batches_per_step=1,
        batch=8,
        calibration_size=16,
        validation_size=50,
        budget=5_000,
    )


def seed_of(task: Task, kind: str) -> int:
    """The first host of a kind."""
    return next(seed for seed in range(100) if task.defect_of(seed) == kind)


@pytest.mark.parametrize("kind", SIZES)
def test_sizes_by_hand(kind: str) -> None:
    task = task_of(NARROW, WIDE)
    seed = seed_of(task, kind)
    assert task.size_of(seed) == SIZES[kind]
    assert task.size_of(seed, ["r1c0"]) == SIZES[kind] + (REVIVED if kind == NARROW else 0)
    assert task.size_of(seed, ["r1c1"]) == SIZES[kind]
    assert task.host_parameters == SIZES[WIDE], "the task's own figure is that of an intact host"


def test_rent_is_relative_to_each_host() -> None:
    """One seed in the first slot of both kinds: the narrow host also pays for the channels that the seed revives."""
    task = task_of(NARROW, WIDE)
    seeds = [seed_of(task, kind) for kind in (NARROW, WIDE)]
    groups = Groups(2, 1)
    runner = EpisodeRunner(HostFleet(task, groups.hosts), groups, head_preset("core"))
    policy = SchedulePolicy(runner.table, runner.slots, Plan((PlannedSeed("r1c0", "conv_light", 0),)))
    runner.begin(seeds)
    assert runner.host_sizes.tolist() == [SIZES[NARROW], SIZES[WIDE]]
    state = policy.initial_state(seeds)
    last = play_episode(runner, lambda view: policy.act(view, state, torch.zeros(2, len(runner.table)))[0])
    assert last.fossil_parameters.tolist() == [SEED + REVIVED, SEED]
    costs = runner.view().signals.offers.cost
    names = list(runner.slots.blueprint_names)
    found = costs[:, 0, names.index("conv_light")]
    torch.testing.assert_close(found, SEED / torch.tensor([SIZES[NARROW], SIZES[WIDE]], dtype=torch.float32))
    result = Result.scored(task, seeds, [50.0, 50.0], [40.0, 40.0], last.fossil_parameters, [[], []])
    wanted = [
        objective(10.0, float(added), float(size))
        for added, size in zip((SEED + REVIVED, SEED), SIZES.values(), strict=True)
    ]
    assert result.objective == pytest.approx(wanted)
    assert result.gains(task) == pytest.approx([10.0, 10.0])
    assert json.loads(json.dumps(result.host_params)) == list(SIZES.values())


def test_told_follows_the_plan_of_each_design(tmp_path: Path) -> None:
    """From a file of plans by design: the narrow host grows, the wide one waits."""
    task = task_of(NARROW, WIDE)
    seeds = [seed_of(task, kind) for kind in (NARROW, WIDE)]
    plans = {NARROW: Plan((PlannedSeed("r1c0", "conv_light", 0),)), WIDE: Plan()}
    (tmp_path / "told.json").write_text(json.dumps(encode(plans)))
    groups = Groups(2, 1)
    runner = EpisodeRunner(HostFleet(task, groups.hosts), groups, head_preset("core"))
    policy = make_policy(PolicySpec.parse(f"told:{tmp_path / 'told.json'}"), task, runner.table)
    runner.begin(seeds)
    state = policy.initial_state(seeds)
    last = play_episode(runner, lambda view: policy.act(view, state, torch.zeros(2, len(runner.table)))[0])
    assert last.fossil_parameters.tolist() == [SEED + REVIVED, 0]


def test_the_designs_of_cifar_varied() -> None:
    """Each block is sound or has a centre tap and a quarter of its channels; at most one is sound, or all three."""
    task = get_task("cifar_varied")
    sizes = {task.defect_of(seed): task.size_of(seed) for seed in range(100)}
    assert {kind.count("3w") for kind in sizes} == {0, 1, 3}
    assert len(sizes) == 5
    assert max(sizes, key=lambda kind: sizes[kind]) == "3w-3w-3w"
    # One input per tap: 3·1 → 2, 2·1 → 4, 4·1 → 8 channels with norms, and 8 · 10 + 10 for the classes.
    assert sizes["1n-1n-1n"] == (3 + 2) * 2 + (2 + 2) * 4 + (4 + 2) * 8 + 90
    assert sizes["3w-3w-3w"] == task.host_parameters == get_task("cifar_growth").host_parameters


@pytest.mark.parametrize(
    ("kind", "message"),
    [("3n", "design '3n' has 1 blocks, the host has 2"), ("3n-3w-3w", "has 3 blocks, the host has 2")],
)
def test_a_design_is_for_hosts_of_so_many_blocks(kind: str, message: str) -> None:
    with pytest.raises(BadValueError, match=message):
        task_of(kind).make_host(0)


@pytest.mark.parametrize("kind", ["5w-3w", "3x-3w", "3w-", "thin"])
def test_an_unknown_kind_is_refused_with_those_there_are(kind: str) -> None:
    with pytest.raises(UnknownNameError, match=r"blind.*designs such as 3w-1n-3w"):
        task_of(kind)
