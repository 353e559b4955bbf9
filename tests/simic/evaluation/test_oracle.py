"""The upper bound: it chooses with hindsight, is scored on other images, and can be replayed."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from simic.training.tiny import tiny_task

from esper.leyline import head_preset
from esper.simic.evaluation.arena import Arena, Block, PolicyPlayer
from esper.simic.evaluation.results import Result
from esper.simic.evaluation.yardsticks import CHOOSING, SCORED, BestPlan, best_plans, one_seed_plans, run_oracle
from esper.simic.training.episode import EpisodeRunner, play_episode
from esper.simic.training.hosts import Groups, host_seed
from esper.tamiyo.policies import Plan, SchedulePolicy
from esper.tolaria import HostFleet, Task, get_task

CORE = head_preset("core")
SEEDS = [host_seed("evaluation", 0, number) for number in range(2)]


@pytest.fixture(scope="module")
def small() -> Task:
    """One slot, and a budget for four kinds of seeds: 12 plans."""
    return replace(tiny_task(), steps=10, slot_ids=("r1c0",), budget=64)


@pytest.fixture(scope="module", params=[False, True], ids=["validation", "test"])
def final(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def arena(small: Task, final: bool) -> Arena:
    return Arena(small, CORE, final=final)


@pytest.fixture(scope="module")
def hosts(arena: Arena) -> list[BestPlan]:
    return best_plans(arena, SEEDS)


def percent(runner: EpisodeRunner, env: int, images: slice) -> float:
    return 100 * float(runner.committed[env].correct[images].double().mean())


def test_its_figures_are_those_of_the_replayed_plan(
    small: Task, final: bool, arena: Arena, hosts: list[BestPlan]
) -> None:
    """Each chosen plan on its host alone: the same accuracy, control and parameters on the scored images."""
    assert any(host.plan.seeds for host in hosts), "waiting everywhere shows nothing"
    result = run_oracle(arena, SEEDS)
    for number, (seed, host) in enumerate(zip(SEEDS, hosts, strict=True)):
        runner = EpisodeRunner(HostFleet(small, 2), Groups(1, 1), CORE)
        runner.final = final
        player = PolicyPlayer(runner, SchedulePolicy(runner.table, runner.slots, host.plan), [seed])
        end = play_episode(runner, player.act, player.on_step)
        assert host.accuracy == pytest.approx(percent(runner, 0, SCORED))
        assert host.control_accuracy == pytest.approx(percent(runner, 1, SCORED))
        assert host.added_params == int(end.fossil_parameters[0])
        doublings = float(torch.log2(1 + end.fossil_parameters[0] / small.host_parameters))
        gain = host.accuracy - host.control_accuracy
        assert result.objective[number] == pytest.approx(gain - 2 * doublings, abs=1e-5)
        promised = percent(runner, 0, CHOOSING) - percent(runner, 1, CHOOSING) - 2 * doublings
        assert host.chosen_objective == pytest.approx(promised, abs=1e-5)
        assert len(result.commits[number]) == (host.added_params > 0)


def test_it_never_promises_less_than_waiting(hosts: list[BestPlan]) -> None:
    assert all(host.chosen_objective >= 0 for host in hosts)


class Row(NamedTuple):
    correct: torch.Tensor


class Staged:
    """Stands in for the arena: says what each plan and the control got right, image by image."""

    def __init__(self, right: dict[int, Sequence[bool]], control: Sequence[bool], **parameters: int) -> None:
        self.task = get_task("digits_blind")
        self.right, self.control, self.parameters = right, control, {0: parameters.get("first", 0)}

    def run(self, make_policy: object, plans: Sequence[Plan], seeds: Sequence[int]) -> Iterator[Block]:
        groups = Groups(len(seeds), len(plans))
        nothing = [False] * len(self.control)
        rows = [Row(torch.tensor(self.right.get(place, nothing))) for place in range(len(plans))]
        rows.append(Row(torch.tensor(self.control)))
        runner = SimpleNamespace(groups=groups, committed=rows * len(seeds))
        counts = [float(self.parameters.get(place, 0)) for place in range(len(plans))]
        result = SimpleNamespace(fossil_parameters=torch.tensor(counts * len(seeds)))
        yield Block(range(len(plans)), range(len(seeds)), runner, result)  # type: ignore[arg-type]  # staged


def staged(right: dict[int, Sequence[bool]], control: Sequence[bool], **parameters: int) -> tuple[BestPlan, Result]:
    arena = Staged(right, control, **parameters)
    (host,) = best_plans(arena, [1])  # type: ignore[arg-type]  # staged
    return host, run_oracle(arena, [1])  # type: ignore[arg-type]  # staged


def test_half_of_the_images_choose_and_the_other_half_is_scored() -> None:
    """A plan that is right where it counts for the choice is taken, and pays for it on the rest."""
    lucky, honest = [True, False] * 4, [False, True] * 4
    host, result = staged({3: lucky, 4: honest}, [True, True, *[False] * 6])
    plans = one_seed_plans(get_task("digits_blind"))
    assert host.plan == plans[3]
    assert (host.chosen_objective, *result.objective) == (75.0, -25.0)  # 100 − 25 on the even, 0 − 25 on the odd images
    assert (host.accuracy, host.control_accuracy) == (0.0, 25.0)


def test_no_image_both_chooses_and_is_scored() -> None:
    for images in (397, 400):
        numbers = range(images)
        assert not set(numbers[CHOOSING]) & set(numbers[SCORED])
        assert set(numbers[CHOOSING]) | set(numbers[SCORED]) == set(numbers)


def test_it_waits_where_nothing_pays() -> None:
    """A gain that its rent eats up is none: 390 parameters double the host, which costs 2 points."""
    better = [True] * 100
    control = [False] * 2 + [True] * 98  # one image of fifty in each half: 2 points
    host, result = staged({0: better}, control, first=391)
    assert host == BestPlan(Plan(), 98.0, 98.0, 0, 0.0)
    assert (result.objective, result.commits) == ([0.0], [[]])
    host, result = staged({0: better}, control, first=389)
    assert (result.added_params, result.commits) == ([389], [["r1c0/norm"]])
    assert result.objective[0] == pytest.approx(2 - 2 * torch.log2(torch.tensor(1 + 389 / 390)).item(), abs=1e-6)
