"""The upper bound: it chooses with hindsight, is scored on other images, and can be replayed."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from simic.training.tiny import tiny_task

from esper.kasmina.compare import RowScore
from esper.leyline import head_preset
from esper.simic.evaluation.arena import Arena, Lineups, Measure, PolicyPlayer
from esper.simic.evaluation.results import Result
from esper.simic.evaluation.yardsticks import CHOOSING, SCORED, extensions, run_oracle
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


def percent(runner: EpisodeRunner, env: int, images: slice) -> float:
    return 100 * float(runner.committed[env].hits[images].double().mean())


@pytest.mark.default_cases("test")
def test_its_figures_are_those_of_the_replayed_plan(small: Task, final: bool) -> None:
    """Each chosen plan on its host alone: the same accuracy, control and parameters on the scored images. On the
    choosing images it is better than waiting."""
    result, plans = run_oracle(Arena(small, CORE, final=final), SEEDS)
    assert any(plan.seeds for plan in plans), "waiting everywhere shows nothing"
    for number, (seed, plan) in enumerate(zip(SEEDS, plans, strict=True)):
        runner = EpisodeRunner(HostFleet(small, 2), Groups(1, 1), CORE)
        runner.final = final
        player = PolicyPlayer(runner, SchedulePolicy(runner.table, runner.slots, plan), [seed])
        end = play_episode(runner, player.act, player.on_step)
        assert result.accuracy[number] == pytest.approx(percent(runner, 0, SCORED))
        assert result.control_accuracy[number] == pytest.approx(percent(runner, 1, SCORED))
        assert result.added_params[number] == int(end.fossil_parameters[0])
        rent = 2 * float(torch.log2(1 + end.fossil_parameters[0] / small.host_parameters))
        gain = result.accuracy[number] - result.control_accuracy[number]
        assert result.objective[number] == pytest.approx(gain - rent, abs=1e-5)
        promised = percent(runner, 0, CHOOSING) - percent(runner, 1, CHOOSING) - rent
        assert promised > 0 or not plan.seeds
        assert len(result.commits[number]) == (result.added_params[number] > 0)


def row_of(correct: Sequence[bool]) -> RowScore:
    """A row that got these images right."""
    return RowScore(torch.tensor(correct), torch.zeros(len(correct)))


class Staged:
    """Stands in for the arena: says what each plan and the control got right, image by image."""

    def __init__(self, right: dict[int, Sequence[bool]], control: Sequence[bool], **parameters: int) -> None:
        self.task = get_task("digits_blind")
        self.right, self.control, self.parameters = right, control, {0: parameters.get("first", 0)}

    def run(self, make_policy: object, lineups: Lineups[Plan], seeds: Sequence[int], measure: Measure) -> torch.Tensor:
        plans = lineups[0]
        groups = Groups(len(seeds), len(plans))
        nothing = [False] * len(self.control)
        rows = [row_of(self.right.get(index, nothing)) for index in range(len(plans))]
        rows.append(row_of(self.control))
        fleet = SimpleNamespace(points=lambda rows: torch.tensor([row.accuracy for row in rows]))
        runner = SimpleNamespace(groups=groups, committed=rows * len(seeds), fleet=fleet)
        counts = [float(self.parameters.get(index, 0)) for index in range(len(plans))]
        result = SimpleNamespace(fossil_parameters=torch.tensor(counts * len(seeds)))
        values = measure(runner, result)  # type: ignore[arg-type]  # staged
        return values.view(len(seeds), len(plans), -1)


def staged(right: dict[int, Sequence[bool]], control: Sequence[bool], **parameters: int) -> tuple[Result, Plan]:
    result, (plan,) = run_oracle(Staged(right, control, **parameters), [1])  # type: ignore[arg-type]  # staged
    return result, plan


def test_half_of_the_images_choose_and_the_other_half_is_scored() -> None:
    """A plan that is right where it counts for the choice is taken, and pays for it on the rest."""
    lucky, honest = [True, False] * 4, [False, True] * 4
    result, plan = staged({3: lucky, 4: honest}, [True, True, *[False] * 6])
    plans = extensions(Plan(), get_task("digits_blind"))
    assert plan == plans[3], "it gains 100 − 25 on the even images"
    assert (result.objective, result.accuracy, result.control_accuracy) == ([-25.0], [0.0], [25.0])  # on the odd ones


def test_no_image_both_chooses_and_is_scored() -> None:
    for images in (397, 400):
        numbers = range(images)
        assert not set(numbers[CHOOSING]) & set(numbers[SCORED])
        assert set(numbers[CHOOSING]) | set(numbers[SCORED]) == set(numbers)


def test_it_waits_where_nothing_pays() -> None:
    """A gain that its rent eats up is none: 390 parameters double the host, which costs 2 points."""
    better = [True] * 100
    control = [False] * 2 + [True] * 98  # one image of fifty in each half: 2 points
    result, plan = staged({0: better}, control, first=391)
    assert plan == Plan()
    assert (result.objective, result.accuracy, result.control_accuracy) == ([0.0], [98.0], [98.0])
    assert (result.added_params, result.commits) == ([0], [[]])
    result, _ = staged({0: better}, control, first=389)
    assert (result.added_params, result.commits) == ([389], [["r1c0/norm"]])
    assert result.objective[0] == pytest.approx(2 - 2 * torch.log2(torch.tensor(1 + 389 / 390)).item(), abs=1e-6)
