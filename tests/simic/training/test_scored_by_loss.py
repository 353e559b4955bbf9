"""Tasks that are scored by loss: gains are percent of the control's loss, in training, tuning and evaluation alike."""

from dataclasses import replace

import pytest
import torch

from esper.leyline import head_preset, relative_gain, rent
from esper.simic.evaluation.comparison import run_comparisons
from esper.simic.evaluation.policies import EvaluationConfig
from esper.simic.rewards import RewardConfig
from esper.simic.training.collect import reward_step
from esper.simic.training.episode import EpisodeRunner, StepResult, play_episode
from esper.simic.training.hosts import Groups
from esper.simic.tuning import tune
from esper.tamiyo.policies import Plan, PlannedSeed, SchedulePolicy
from esper.tolaria import HostFleet, Task, TaskRegistry, get_task
from esper.tolaria.engine import HostTrainer

NAME = "digits_by_loss"
SMALL = {"steps": 8, "batches_per_step": 2, "batch": 16, "calibration_size": 64, "validation_size": 100}


@pytest.fixture(scope="module")
def task() -> Task:
    """Short episodes, scored by loss."""
    if NAME not in TaskRegistry.names():
        like = get_task("digits_blind")
        TaskRegistry.register(replace(like, name=NAME, score="loss", **SMALL))  # type: ignore[arg-type]  # by name
    return get_task(NAME)


def test_gains_are_percent_of_the_controls_loss(task: Task) -> None:
    """Of the growing host, of the hardened one, and in the reward, whose sum is the objective."""
    runner = EpisodeRunner(HostFleet(task, 2), Groups(1, 1), head_preset("core"))
    policy = SchedulePolicy(runner.table, runner.slots, Plan((PlannedSeed("r1c0", "depthwise", 0),)))
    rewards: list[float] = []

    def on_step(step: int, view: object, actions: torch.Tensor, result: StepResult) -> None:
        main, control = (comparison.main.loss for comparison in runner.comparisons)
        assert float(result.gain[0]) == pytest.approx(relative_gain(control, main), abs=1e-4)
        rewarded = reward_step(RewardConfig(), runner, view, actions, result)  # type: ignore[arg-type]  # of the episode
        runner.potential = rewarded.potential
        rewards.append(float(rewarded.total[0]))

    runner.begin([3])
    state = policy.initial_state([3])
    last = play_episode(runner, lambda view: policy.act(view, state, torch.zeros(1, 3))[0], on_step)
    hardened, control = (row.loss for row in runner.committed)
    assert last.fossil_parameters[0] > 0, "the seed was committed"
    assert float(last.hardened_gain[0]) == pytest.approx(relative_gain(control, hardened), abs=1e-4)
    price = rent(float(last.fossil_parameters[0]), task.host_parameters)
    assert sum(rewards) == pytest.approx(relative_gain(control, hardened) - price, abs=1e-3)


def test_seeds_are_judged_by_loss(task: Task) -> None:
    """Contributions are percent of the loss without the seed, and no accuracy is kept."""
    runner = EpisodeRunner(HostFleet(task, 2), Groups(1, 1), head_preset("core"))
    policy = SchedulePolicy(runner.table, runner.slots, Plan((PlannedSeed("r1c0", "depthwise", 0),)))
    runner.begin([3])
    state = policy.initial_state([3])
    play_episode(runner, lambda view: policy.act(view, state, torch.zeros(1, 3))[0])
    comparison = runner.comparisons[0]
    assert comparison.main.correct is None
    contribution = comparison.contributions["r1c0"]
    without = comparison.main.loss + contribution.loss.value
    assert contribution.points.value == pytest.approx(100 * contribution.loss.value / without, rel=1e-4)


def test_a_lone_host_is_judged_alike(task: Task) -> None:
    """The reference loop measures the audition that a fleet measures."""
    fleet = HostFleet(task, 2, seeds=[3, 3])
    lone = HostTrainer(task, task.load_batches(), 3)
    fleet.germinate(0, "r1c0", "depthwise")
    fleet.advance(0, "r1c0")
    lone.model.germinate_seed("r1c0", "depthwise")
    lone.model.advance("r1c0")
    fleet.train_step()
    lone.train_step()
    mine, reference = fleet.validate()[0].auditions["r1c0"], lone.validate().auditions["r1c0"]
    assert reference.points.value == pytest.approx(mine.points.value, abs=1e-3)
    assert mine.points.value != 0


def test_searches_and_evaluations_use_the_same_gain(task: Task) -> None:
    """A schedule is searched by it, and the objective of an evaluation is that gain minus rent."""
    tuned = tune(NAME, "schedule", episodes=24, progress=False)
    assert tuned.used <= 24
    report = run_comparisons([NAME], ["random-commit", "oracle"], EvaluationConfig(NAME, 2, 7), progress=False)
    (result,) = report.tasks[NAME].policies["random-commit"]
    for host in range(2):
        guess = task.random_guess_loss
        loss, control = (guess * (1 - score[host] / 100) for score in (result.accuracy, result.control_accuracy))
        gain = relative_gain(control, loss)
        assert result.gains(task)[host] == pytest.approx(gain, abs=1e-4)
        price = rent(float(result.added_params[host]), task.host_parameters)
        assert result.objective[host] == pytest.approx(gain - price, abs=1e-4)
