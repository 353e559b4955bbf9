"""Advantages over time, against plain Python and by hand."""

from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from rollouts import Calls
from torch import Tensor

from esper.simic.agent.losses import compute_gae


class Rows(NamedTuple):
    """What `compute_gae` takes, in its order."""

    rewards: Tensor
    values: Tensor
    ends: Tensor
    bootstraps: Tensor
    forced: Tensor
    lengths: Tensor


def random_rows(n_envs: int, steps: int, *, seed: int = 0, forced: float = 0.0, dtype: Any = torch.float32) -> Rows:
    """Ragged rows with ends among them; some of these were truncated, the others terminated."""
    generator = torch.Generator().manual_seed(seed)

    def draw(kind: Any = torch.randn) -> Tensor:
        numbers: Tensor = kind((n_envs, steps), generator=generator, dtype=dtype)
        return numbers

    ends = draw(torch.rand) < 0.2
    bootstraps = draw().where(ends & (draw(torch.rand) < 0.5), 0.0)
    lengths = torch.randint(0, steps + 1, (n_envs,), generator=generator)
    for row, length in enumerate(lengths.tolist()):
        if length:
            bootstraps[row, length - 1] = 0.7  # a cut
    return Rows(draw(), draw(), ends, bootstraps, draw(torch.rand) < forced, lengths)


def one_row(rewards: list[float], values: list[float], ends: list[bool], bootstraps: list[float]) -> Rows:
    """One env of three steps, none of them forced."""
    given = [torch.tensor([part]) for part in (rewards, values, ends, bootstraps)]
    return Rows._make([*given, torch.zeros((1, 3), dtype=torch.bool), torch.tensor([3])])


def in_plain_python(rows: Rows, env: int, gamma: float, lam: float) -> list[float]:
    """One env's advantages, by the definition."""
    rewards, values, ends, bootstraps, forced = (part[env].tolist() for part in rows[:5])
    length = int(rows.lengths[env])
    found = [0.0] * len(rewards)
    for t in reversed(range(length)):
        if ends[t] or t == length - 1:
            found[t] = rewards[t] + gamma * bootstraps[t] - values[t]
        else:
            trace = gamma * (1.0 if forced[t + 1] else lam)
            found[t] = rewards[t] + gamma * values[t + 1] - values[t] + trace * found[t + 1]
    return found


# -- by hand ----------------------------------------------------------------------------------------------------------
# γ = ½ and λ = ½, so γλ = ¼; rewards 1 2 3, values 4 6 8.
R, V = [1.0, 2.0, 3.0], [4.0, 6.0, 8.0]
NOWHERE, AT_THE_END, IN_THE_MIDDLE = [False] * 3, [False, False, True], [False, True, False]
ZEROS = [0.0] * 3


@pytest.mark.requirement(89)
@pytest.mark.parametrize(
    ("ends", "bootstraps", "advantages"),
    [
        # A₂ = 3 − 8 = −5;  A₁ = 2 + ½·8 − 6 + ¼·(−5) = −1.25;  A₀ = 1 + ½·6 − 4 + ¼·(−1.25) = −0.3125
        pytest.param(AT_THE_END, ZEROS, [-0.3125, -1.25, -5.0], id="done"),
        # A₂ = 3 + ½·10 − 8 = 0;  A₁ = 0 + ¼·0 = 0;  A₀ = 0
        pytest.param(AT_THE_END, [0.0, 0.0, 10.0], [0.0, 0.0, 0.0], id="truncated"),
        # the round is over, the segment is not: as truncated
        pytest.param(NOWHERE, [0.0, 0.0, 10.0], [0.0, 0.0, 0.0], id="cut"),
        # A₂ = 3 + ½·10 − 8 = 0;  A₁ = 2 − 6 = −4;  A₀ = 0 + ¼·(−4) = −1
        pytest.param(IN_THE_MIDDLE, [0.0, 0.0, 10.0], [-1.0, -4.0, 0.0], id="terminal inside"),
        # A₂ = 3 − 8 = −5;  A₁ = 2 + ½·20 − 6 = 6: neither V₂ nor A₂;  A₀ = 0 + ¼·6 = 1.5
        pytest.param(IN_THE_MIDDLE, [0.0, 20.0, 0.0], [1.5, 6.0, -5.0], id="truncated inside"),
    ],
)
def test_three_steps(ends: list[bool], bootstraps: list[float], advantages: list[float]) -> None:
    """Truncation and a cut bootstrap, termination does not. Returns are A + V."""
    found, returns = compute_gae(*one_row(R, V, ends, bootstraps), gamma=0.5, lam=0.5)
    assert found.tolist() == [advantages]
    assert returns.tolist() == [[advantage + value for advantage, value in zip(advantages, V, strict=True)]]


def test_bootstrap_of_a_step_that_goes_on_is_not_read() -> None:
    """A row that was cut and then continued keeps one there."""
    rows = one_row(R, V, AT_THE_END, [torch.nan, 50.0, 0.0])
    assert compute_gae(*rows, gamma=0.5, lam=0.5)[0].tolist() == [[-0.3125, -1.25, -5.0]]


# -- all at once ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement(54)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 1.0), (0.97, 0.0)])
def test_equals_one_env_at_a_time(seed: int, gamma: float, lam: float) -> None:
    """Equal to the per-env reference with ragged lengths, ends and forced steps anywhere."""
    rows = random_rows(9, 17, seed=seed, forced=0.4)
    found, returns = compute_gae(*rows, gamma=gamma, lam=lam)
    wanted = torch.tensor([in_plain_python(rows, env, gamma, lam) for env in range(9)])
    assert float((found - wanted).abs().max()) < 1e-5
    inside = torch.arange(17) < rows.lengths.unsqueeze(1)
    assert float((returns - (wanted + rows.values).where(inside, 0.0)).abs().max()) < 1e-5


def calls(n_envs: int, steps: int) -> int:
    """Torch calls for so many envs."""
    rows = random_rows(n_envs, steps, forced=0.3)
    with Calls() as counted:
        compute_gae(*rows, gamma=0.9, lam=0.9)
    return len(counted.seen)


@pytest.mark.requirement(54)
def test_calls_do_not_depend_on_envs() -> None:
    """GAE loops over time only."""
    assert calls(1, 12) == calls(64, 12) < calls(1, 24)


@pytest.mark.requirement(89)
def test_envs_are_isolated() -> None:
    """Changing env 2 leaves the advantages of env 1 bit-identical."""
    rows = random_rows(3, 11, forced=0.3)
    rows.lengths[:] = torch.tensor([11, 8, 10])
    before = [part.clone() for part in compute_gae(*rows, gamma=0.9, lam=0.9)]
    rows.rewards[2], rows.values[2], rows.bootstraps[2] = 1e6, -1e6, torch.nan
    rows.ends[2], rows.forced[2], rows.lengths[2] = ~rows.ends[2], ~rows.forced[2], 3
    after = compute_gae(*rows, gamma=0.9, lam=0.9)
    assert all(torch.equal(old[:2], new[:2]) for old, new in zip(before, after, strict=True))
    assert not torch.equal(before[0][2], after[0][2])


@pytest.mark.requirement(56)
def test_nothing_behind_a_length_has_influence() -> None:
    """Garbage in the padding changes no advantage and never appears in the result."""
    rows = random_rows(6, 9, forced=0.3)
    rows.lengths[:] = torch.tensor([0, 1, 4, 8, 9, 5])
    clean = compute_gae(*rows, gamma=0.9, lam=0.9)
    behind = torch.arange(9) >= rows.lengths.unsqueeze(1)
    for part in (rows.rewards, rows.values, rows.bootstraps):
        part[behind] = torch.nan
    for part in (rows.ends, rows.forced):
        part[behind] = ~part[behind]
    dirty = compute_gae(*rows, gamma=0.9, lam=0.9)
    for old, new in zip(clean, dirty, strict=True):
        assert torch.equal(old, new)
        assert new[behind].tolist() == [0.0] * int(behind.sum())


def test_inputs_are_left_alone() -> None:
    """They are the buffer's own."""
    rows = random_rows(4, 7, forced=0.3)
    copies = [part.clone() for part in rows]
    compute_gae(*rows, gamma=0.9, lam=0.9)
    assert all(torch.equal(part, copy) for part, copy in zip(rows, copies, strict=True))


# -- forced steps -----------------------------------------------------------------------------------------------------


def merged_gae(rows: Rows, gamma: float, lam: float) -> dict[int, float]:
    """GAE of the semi-MDP: per segment, each decision with the forced steps behind it is one transition.

    step → advantage of its decision.
    """
    rewards, values, ends, bootstraps, forced = (part[0].tolist() for part in rows[:5])
    stops = [step + 1 for step, end in enumerate(ends) if end or step == len(ends) - 1]
    found: dict[int, float] = {}
    for begin, stop in pairwise([0, *stops]):
        decisions = [step for step in range(begin, stop) if not forced[step]]
        following, advantage = bootstraps[stop - 1], 0.0
        for step, until in reversed(list(pairwise([*decisions, stop]))):
            reward = sum(gamma**passed * rewards[step + passed] for passed in range(until - step))
            discount = gamma ** (until - step)
            advantage = reward + discount * following - values[step] + discount * lam * advantage
            following, found[step] = values[step], advantage
    return found


STEPS = 12
FLAGS = st.lists(st.booleans(), min_size=STEPS, max_size=STEPS)


def marked(text: str) -> list[bool]:
    """x is True."""
    return [letter == "x" for letter in text]


@given(FLAGS, FLAGS, st.integers(0, 99), st.sampled_from([0.5, 0.9, 0.99]), st.sampled_from([0.0, 0.3, 0.95]))
@example(marked("xxx........."), marked("............"), 0, 0.9, 0.3)  # at the start
@example(marked("....xxxx...."), marked("............"), 0, 0.9, 0.3)  # in the middle
@example(marked(".........xxx"), marked("............"), 0, 0.9, 0.3)  # at the end, into a cut
@example(marked("....xxxxx..."), marked("......x....."), 0, 0.9, 0.3)  # across a truncation
@example(marked("xxxxxxxxxxxx"), marked("......x....."), 0, 0.9, 0.3)  # nothing but
def test_forced_steps_are_merged(forced: list[bool], ends: list[bool], seed: int, gamma: float, lam: float) -> None:
    """At every decision the estimate is that of the process in which forced steps do not exist."""
    rows = random_rows(1, STEPS, seed=seed, dtype=torch.float64)
    bootstraps = torch.randn((1, STEPS), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    rows = Rows(
        rows.rewards, rows.values, torch.tensor([ends]), bootstraps, torch.tensor([forced]), torch.tensor([STEPS])
    )
    found = compute_gae(*rows, gamma=gamma, lam=lam)[0][0].tolist()
    wanted = merged_gae(rows, gamma, lam)
    assert {step: found[step] for step in wanted} == pytest.approx(wanted, abs=1e-9)
    assert len(wanted) == forced.count(False)


def test_forced_step_by_hand() -> None:
    """γ = ½, λ = ½, a cut worth 10; the middle step is forced, and its value says something absurd."""
    rows = one_row(R, [4.0, 100.0, 8.0], NOWHERE, [0.0, 0.0, 10.0])
    rows.forced[0, 1] = True
    # A₂ = 3 + ½·10 − 8 = 0;  A₀ = (1 + ½·2) + ¼·8 − 4 + ¼·½·A₂ = 0
    assert compute_gae(*rows, gamma=0.5, lam=0.5)[0][0, 0] == 0.0
    rows.forced[0, 1] = False
    # A₁ = 2 + ½·8 − 100 = −94;  A₀ = 1 + ½·100 − 4 + ¼·A₁ = 23.5
    assert compute_gae(*rows, gamma=0.5, lam=0.5)[0][0, 0] == 23.5
