"""Episodes and runs under preset `commit`."""

from pathlib import Path

import pytest
import torch
from simic.training.tiny import make_runner, play, tiny_task

from esper.leyline import LifecycleOp, SeedStage
from esper.simic.training.config import TrainConfig
from esper.simic.training.trainer import Trainer
from esper.tamiyo.commit_rule import CommitRule
from esper.tamiyo.policies import HeuristicConfig, HeuristicTamiyo, Plan, PlannedSeed, RandomPolicy, SchedulePolicy

BOTH = Plan((PlannedSeed("r1c0", "depthwise", 0), PlannedSeed("r1c1", "norm", 1)))


def test_a_plan_needs_its_births_alone() -> None:
    """The policy germinates twice and waits; the rule carries both seeds on, several in one step, to their ends."""
    runner = make_runner(2, 1, "commit")
    runner.rule = CommitRule(margin=-100.0)  # commit whatever is measured
    _, actions, results = play(runner, SchedulePolicy(runner.table, runner.slots, BOTH))
    ops = [LifecycleOp(int(op)) for step in actions for op in step[:1, 0]]
    assert ops[:2] == [LifecycleOp.GERMINATE] * 2 and set(ops[2:]) == {LifecycleOp.WAIT}
    causes = [change.change.cause for result in results for change in result.changes if change.env == 0]
    assert causes.count("fossilize") == 2 and causes.count("advance") == 2
    assert (results[-1].slots.stage[:, :2] == SeedStage.FOSSILIZED).all()


def test_what_does_not_pay_is_pruned() -> None:
    """With a margin that nothing reaches, no seed stays, and the objective is that of the bare host."""
    runner = make_runner(2, 1, "commit")
    runner.rule = CommitRule(margin=1000.0)
    _, _, results = play(runner, SchedulePolicy(runner.table, runner.slots, BOTH))
    assert results[-1].fossil_parameters.tolist() == [0.0, 0.0]
    causes = {change.change.cause for result in results for change in result.changes}
    assert "prune" in causes and "fossilize" not in causes


@pytest.mark.parametrize("kind", ["random", "heuristic"])
def test_other_rules_run_under_it(kind: str) -> None:
    """They only germinate; every action is legal."""
    runner = make_runner(2, 2, "commit")
    eager = HeuristicTamiyo(runner.table, runner.slots, HeuristicConfig(patience=0, germinate_left=1))
    policy = RandomPolicy(runner.table) if kind == "random" else eager
    _, actions, results = play(runner, policy)
    ops = {int(op) for step in actions for op in step[:, 0]}
    assert ops <= {LifecycleOp.WAIT, LifecycleOp.GERMINATE} and LifecycleOp.GERMINATE in ops
    assert any(change.change.cause == "advance" for result in results for change in result.changes)


def test_a_controller_learns_under_it(tmp_path: Path) -> None:
    """A run of two rounds; the price of a commit is paid by whoever germinated, whatever op it chose then."""
    tiny_task()
    config = TrainConfig(task="digits_tiny", rounds=2, hosts=4, members=3, preset="commit", seed=3)
    trainer = Trainer(config, tmp_path / "run")
    with trainer.folder:
        (record,) = trainer.run_round()
    assert set(record.actions[..., 0].unique().tolist()) <= {0, 1}
    torch.testing.assert_close(record.rewards.sum(0), record.objective, rtol=1e-4, atol=1e-3)
