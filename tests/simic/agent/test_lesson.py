"""What a round teaches."""

import pytest
import torch
from rounds import collect, make_agent

from esper.leyline import BadValueError
from esper.simic.agent import TamiyoRolloutBuffer
from esper.simic.agent.lesson import Lesson, Reference, prepare_lesson

GROUPS = torch.tensor([0, 0, 1, 1, 2, 2, 2, 2])


def lesson_of(*, by_group: bool, floor: float = 1e-3) -> Lesson:
    """A round in which the second group has a hundredth of the others' rewards, and its reference made up."""
    agent = make_agent("core", by_group=by_group, advantage_floor=floor)
    buffer = collect(agent, ragged=False)
    buffer.groups, buffer.n_groups = GROUPS, 3
    buffer.rewards[2:4] *= 0.01
    buffer.values[2:4] *= 0.01
    buffer.bootstraps[2:4] *= 0.01
    cells = buffer.n_envs * buffer.capacity
    decided = torch.ones((cells, len(agent.table)), dtype=torch.bool)
    reference = Reference(buffer.log_probs.flatten(0, 1), decided, torch.zeros(cells), torch.zeros(()))
    return prepare_lesson(buffer, reference, agent.returns, agent.config, 1)


def spreads(lesson: Lesson) -> list[float]:
    """Deviation of the first head's advantages within each group."""
    by_env = lesson.advantages.by_head[0].view(8, -1)
    return [float(by_env[group == GROUPS].std(correction=0)) for group in range(3)]


def test_groups_have_one_scale_each() -> None:
    """Over the task, what little can be gained in a group is next to nothing; within it, it is as much as elsewhere."""
    over_the_task = spreads(lesson_of(by_group=False))
    assert over_the_task[1] < 0.02 < 0.5 < over_the_task[0]
    lesson = lesson_of(by_group=True)
    assert spreads(lesson) == pytest.approx([1.0, 1.0, 1.0], rel=1e-4)
    means = [float(lesson.advantages.by_head[0].view(8, -1)[group == GROUPS].mean()) for group in range(3)]
    assert means == pytest.approx([0.0, 0.0, 0.0], abs=1e-5)


def test_a_group_below_the_floor_stays_small() -> None:
    """What is reported is of the task: its own spread is above the floor."""
    wide, narrow = lesson_of(by_group=True), lesson_of(by_group=True, floor=0.1)
    assert spreads(narrow)[0] == pytest.approx(1.0, rel=1e-4)
    assert spreads(narrow)[1] < 0.5
    assert torch.equal(wide.standardised.std, narrow.standardised.std)
    assert not narrow.standardised.floored.any()


def test_groups_are_one_number_per_env() -> None:
    """Without any, envs of a task are alike."""
    agent = make_agent("core")
    size, hidden = agent.layout.size, agent.config.network.hidden
    with pytest.raises(BadValueError, match="groups"):
        TamiyoRolloutBuffer(4, 3, size, agent.table, hidden, groups=torch.zeros(3, dtype=torch.long))
    tasks = torch.tensor([0, 1, 1, 0])
    assert torch.equal(TamiyoRolloutBuffer(4, 3, size, agent.table, hidden, tasks=tasks).groups, tasks)
