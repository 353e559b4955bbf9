"""The round's experience: what is kept, where, and what is refused."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from rollouts import FLOATS, HIDDEN, SIZE, TABLE, Calls, contents, fill, make_buffer, make_step, memory_of

from esper.leyline import BadValueError
from esper.simic.agent.rollout import Step, TamiyoRolloutBuffer


def unchanged(buffer: TamiyoRolloutBuffer, mistake: Callable[[], object], match: str) -> None:
    """The mistake is refused, and every tensor and the count of steps stay."""
    before, steps = {name: value.clone() for name, value in contents(buffer).items()}, buffer.steps
    with pytest.raises(BadValueError, match=match):
        mistake()
    assert all(torch.equal(value, before[name]) for name, value in contents(buffer).items())
    assert buffer.steps == steps


# -- keeping ----------------------------------------------------------------------------------------------------------


def test_steps_lie_where_they_belong() -> None:
    """All envs in lockstep, then some, then all again, each behind its own last one."""
    buffer = make_buffer()
    first, second, third = make_step(3), make_step(2), make_step(3)
    buffer.add(first)
    buffer.add(second, [2, 0])
    buffer.add(third)
    assert buffer.lengths.tolist() == [3, 2, 3]
    assert buffer.steps == 8
    for name in Step._fields[:1] + Step._fields[2:]:
        own = getattr(buffer, name)
        rows = [[getattr(first, name)[k], getattr(third, name)[k]] for k in range(3)]
        rows[2].insert(1, getattr(second, name)[0])
        rows[0].insert(1, getattr(second, name)[1])
        assert all(torch.equal(own[k, : len(row)], torch.stack(row)) for k, row in enumerate(rows))
    assert all(torch.equal(buffer.masks[name][2, 1], second.masks[name][0]) for name in TABLE.names)


@pytest.mark.requirement(88)
def test_capacity_is_a_limit() -> None:
    """One step too many raises and writes nothing, even if only one env is full."""
    buffer = make_buffer(3, 2)
    buffer.add(make_step(3))
    buffer.add(make_step(1), [1])
    unchanged(buffer, lambda: buffer.add(make_step(3)), "env 1 already has 2 steps")
    buffer.add(make_step(2), [0, 2])
    unchanged(buffer, lambda: buffer.add(make_step(3)), "env 0 already has 2 steps")


@pytest.mark.requirement(79)
def test_round_begins_in_the_same_memory() -> None:
    """Old data is unreachable after a reset, and nothing is allocated again."""
    buffer = make_buffer()
    fill(buffer, [6, 6, 6], ends=[(0, 0), (1, 2)])
    pointers = {name: value.data_ptr() for name, value in contents(buffer).items()}
    for name in FLOATS:
        getattr(buffer, name).fill_(torch.nan)
    buffer.begin(memory_of(3), epsilon=0.25)
    assert (buffer.steps, buffer.epsilon, int(buffer.valid.sum())) == (0, 0.25, 0)
    assert len(buffer.sequences().starts) == 0
    fill(buffer, [3, 0, 2])
    sequences = buffer.sequences()
    assert (sequences.rows.tolist(), sequences.lengths.tolist()) == ([0, 2], [3, 2])
    cells = buffer.batch(sequences, [0, 1, 2]).cells
    assert all(bool(getattr(buffer, name).flatten(0, 1)[cells].isfinite().all()) for name in FLOATS)
    assert {name: value.data_ptr() for name, value in contents(buffer).items()} == pointers


@pytest.mark.requirement(87)
def test_adding_costs_the_same_at_any_time() -> None:
    """The first and the last step make the same calls, on one step's numbers only."""
    buffer, seen = make_buffer(3, 40), []
    for place in range(40):
        step = make_step(3)
        with Calls() as calls:
            buffer.add(step)
        if place in (0, 39):
            seen.append([call for call in calls.seen if "select" not in call[0] and "slice" not in call[0]])
    assert seen[0] == seen[1]
    assert max(np.prod(shape) for _, shape in seen[0]) <= 3 * SIZE * len(TABLE) * 2


@pytest.mark.requirement(64)
def test_memory_is_kept_once_per_row() -> None:
    """An LSTM twice as wide adds the same number of bytes for 4 steps as for 400."""

    def cost(capacity: int) -> int:
        sizes = [sum(v.nbytes for v in contents(make_buffer(3, capacity, hidden)).values()) for hidden in (8, 16)]
        return sizes[1] - sizes[0]

    assert cost(4) == cost(400) == 2 * 3 * 8 * 4  # hidden and cell, 3 rows, 8 more numbers of 4 bytes


@pytest.mark.requirement(55)
def test_valid_mask_on_the_device() -> None:
    """The mask is one comparison with the tensor of lengths, without a host transfer."""
    seen = []
    for n_envs in (1, 64):
        buffer = make_buffer(n_envs)
        fill(buffer, [place % 7 for place in range(n_envs)] if n_envs > 1 else [4])
        with Calls() as calls:
            valid = buffer.valid
        seen.append([name for name, _ in calls.seen])
        assert valid.sum(1).tolist() == buffer.lengths.tolist()
        assert not bool((~valid[:, :-1] & valid[:, 1:]).any())
    assert seen[0] == seen[1]
    assert [name.split(".")[1] for name in seen[0]] == ["arange", "unsqueeze", "lt"]


def test_cut_fills_in_what_follows() -> None:
    """Where a sequence continues; a truncated one keeps its own value, a terminated one its 0, an empty row nothing."""
    buffer = make_buffer(4)
    fill(buffer, [3, 2, 2, 0], ends=[(1, 1)])
    buffer.bootstraps[1, 1] = 0.0
    before = buffer.bootstraps.clone()
    buffer.cut(torch.tensor([7.0, 8.0, 9.0, 10.0]))
    before[0, 2], before[2, 1] = 7.0, 9.0
    assert torch.equal(buffer.bootstraps[buffer.valid], before[buffer.valid])


def test_nothing_is_differentiated() -> None:
    """A buffer that held on to a graph would hold on to every round."""
    buffer = make_buffer()
    hidden, cell = memory_of(3)
    buffer.begin((hidden.requires_grad_(), cell))
    step = make_step(3)
    buffer.add(step._replace(values=step.values.requires_grad_()))
    buffer.cut(torch.zeros(3, requires_grad=True))
    assert not any(value.requires_grad for value in contents(buffer).values())


# -- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["observations", "actions", "log_probs", "values", "rewards", "ends", "bootstraps"])
def test_step_of_another_shape(name: str) -> None:
    """Also one that would spread over all envs; everything is proven before anything is written."""
    buffer, step = make_buffer(), make_step(3)
    given = getattr(step, name)
    for wrong in (given[:1], given.unsqueeze(-1), given.new_zeros(()), given.to("meta")):
        for envs in (None, [0, 1, 2]):
            unchanged(buffer, lambda w=wrong, e=envs: buffer.add(step._replace(**{name: w}), e), f"{name}: ")  # type: ignore[misc]


@pytest.mark.parametrize(("name", "dtype"), [("actions", torch.float32), ("ends", torch.float32), ("ends", torch.long)])
def test_step_of_another_kind(name: str, dtype: torch.dtype) -> None:
    """Half an action would be rounded."""
    buffer, step = make_buffer(), make_step(3)
    unchanged(buffer, lambda: buffer.add(step._replace(**{name: getattr(step, name).to(dtype)})), f"{name}: ")


def test_masks_that_do_not_fit() -> None:
    """A head is missing, one is too many, or a mask is of another shape or kind."""
    buffer, step = make_buffer(), make_step(3)
    op, slot = step.masks["op"], step.masks["slot"]
    wrong = (
        {"op": op},
        {"op": op, "slot": slot, "tempo": op},
        {"op": op, "slot": slot[:, 0]},
        {"op": op.float(), "slot": slot},
    )
    for masks in wrong:
        unchanged(buffer, lambda m=masks: buffer.add(step._replace(masks=m)), "mask")  # type: ignore[misc]


@pytest.mark.parametrize("reward", [torch.nan, torch.inf, -torch.inf])
def test_reward_that_is_not_finite(reward: float) -> None:
    """On the CPU it is refused by the env's number."""
    buffer, step = make_buffer(), make_step(2)
    step.rewards[1] = reward
    unchanged(buffer, lambda: buffer.add(step, [0, 2]), "env 2 got the reward")


@pytest.mark.parametrize("envs", [[0, 0], [3], [-1], [0, 1, 2, 2]])
def test_envs_that_there_are_not(envs: list[int]) -> None:
    """Twice the same one would count two steps and keep one."""
    buffer = make_buffer()
    unchanged(buffer, lambda: buffer.add(make_step(len(envs)), envs), "must be different ones of 0 … 2")


def test_no_env_at_all() -> None:
    """Nothing to add is nothing wrong."""
    buffer = make_buffer()
    buffer.add(make_step(0), [])
    assert buffer.steps == 0


def test_memory_of_another_shape() -> None:
    """Checked as a whole: a hidden state that fits is not taken without its cell."""
    buffer = make_buffer()
    fill(buffer, [2, 2, 2])
    fits = torch.zeros((3, HIDDEN))
    for wrong in ((fits, torch.zeros((3, 5))), (fits, torch.zeros((2, HIDDEN))), (torch.zeros(HIDDEN), fits)):
        unchanged(buffer, lambda w=wrong: buffer.begin(w), "hidden_state: ")  # type: ignore[misc]
    unchanged(buffer, lambda: buffer.cut(torch.zeros(())), "values: ")
