"""A search shared between processes."""

import math
import pickle
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simic.training.tiny import NAME, tiny_task

from esper.leyline import BadValueError
from esper.leyline.progress import ignore
from esper.simic.evaluation.workers import call_in_worker, run_here
from esper.simic.evaluation.yardsticks import extensions
from esper.simic.tuning import Trials, shares, tune
from esper.tamiyo.policies import Plan

TRIALS = Trials(NAME, "schedule", "core", 1)


@given(st.integers(1, 80), st.integers(1, 80), st.integers(1, 20))
def test_shares(candidates: int, hosts: int, workers: int) -> None:
    """Every candidate meets every host once. Nobody has more to do than one process alone would have had."""
    parts = shares(candidates, hosts, workers)
    pairs = sorted((one, host) for some, these in parts for one in some for host in these)
    assert pairs == [(one, host) for one in range(candidates) for host in range(hosts)]
    work = [len(these) * (len(some) + 1) for some, these in parts]
    assert math.ceil(len(parts) / workers) * max(work) <= hosts * (candidates + 1)


def test_all_have_work() -> None:
    """By hand: 63 candidates on 4 hosts for 16 processes are 4 × 4 parts of 16 candidates, a control each."""
    parts = shares(63, 4, 16)
    assert len(parts) == 16
    assert {(len(some), len(these)) for some, these in parts} == {(16, 1), (15, 1)}
    assert shares(2, 70, 4) == [(range(2), range(at, min(at + 18, 70))) for at in (0, 18, 36, 54)]


@pytest.mark.slow
def test_shared_trials_are_the_same_trials() -> None:
    """Cut into four, each with its own controls: the same objectives, each in its place."""
    tiny_task()
    counted: list[int] = []

    def advance(amount: int, words: str = "") -> None:
        counted.append(amount)

    plans, hosts = extensions(Plan(), tiny_task())[:5], [2, 3, 7]
    shared, whole = (TRIALS(run_here, workers, advance, [plans] * 3, hosts) for workers in (4, 1))
    assert [value for row in shared for value in row] == pytest.approx(
        [value for row in whole for value in row], abs=1e-5
    )
    assert sum(counted) == 2 * len(plans) * len(hosts)


def test_errors_come_back() -> None:
    """With their message, whatever their type needs to be built."""
    run_share = partial(replace(TRIALS, task="nonsense").run_share, [["plan"]], [0], ignore)
    with pytest.raises(BadValueError, match="unknown task 'nonsense'") as raised:
        call_in_worker(run_share, (range(1), range(1)))
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_no_workers_are_no_search() -> None:
    """Before anything runs."""
    with pytest.raises(BadValueError, match="workers"):
        tune("digits_blind", "schedule", 16, workers=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["schedule", "heuristic"])
def test_processes_find_what_one_finds(kind: Any) -> None:
    """The same candidates on the same hosts; rounding apart."""
    alone, shared = (tune("digits_blind", kind, 24, workers=workers, progress=False) for workers in (1, 2))
    assert [(trial.stage, trial.candidate, trial.hosts) for trial in alone.log] == [
        (trial.stage, trial.candidate, trial.hosts) for trial in shared.log
    ]
    assert [trial.objective for trial in shared.log] == pytest.approx([t.objective for t in alone.log], abs=1.0)
    assert shared.used == alone.used
