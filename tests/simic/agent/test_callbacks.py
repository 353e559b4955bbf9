"""Callbacks of `learn`: what they write, when they stop a training, and how a killed one continues."""

import csv
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from light_envs import Walk

from esper.leyline import BadValueError, MissingPackageError
from esper.nissa import find_metric
from esper.simic.agent import (
    Checkpoints,
    CsvLog,
    Evaluation,
    Learned,
    LearnProgress,
    PPOConfig,
    TensorBoardLog,
    learn,
)
from esper.simic.agent.checkpoint import agent_tensors
from esper.simic.agent.learning import Callback
from esper.tamiyo import NetworkConfig

SMALL = PPOConfig(NetworkConfig(encoder=8, hidden=8, head=8), steps=8, epochs=1, minibatches=1)
ROUND = 16  # steps, with two environments


def train(rounds: int, callback: Any = (), start: Learned | None = None, stop: int = 0) -> Learned:
    """A few updates on episodes that end with the rounds; a last callback may stop it."""
    last: list[Callback] = [lambda state: state.learned.agent.updates != stop]
    callbacks = [callback, *last] if callable(callback) else [*callback, *last]
    steps = rounds * ROUND
    return learn(Steady, total_steps=steps, n_envs=2, config=SMALL, progress=False, callback=callbacks, start=start)


class Steady(Walk):
    """Episodes of eight steps without noise, so that environments have no state between rounds."""

    def _see(self) -> Any:
        seen, info = super()._see()
        return seen * np.array([1, 0], np.float32), info

    def reset(self, **options: Any) -> Any:
        result = super().reset(**options)
        self.length = 8
        return result


def table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def scripted(monkeypatch: pytest.MonkeyPatch, *results: float) -> list[int]:
    """Let evaluations give these means; returns the seeds that they are asked with."""
    given, seeds = iter(results), list[int]()

    def evaluate(self: Learned, episodes: int, seed: int, **options: Any) -> list[float]:
        seeds.append(seed)
        value = next(given)
        return [value - 1, value + 1]

    monkeypatch.setattr(Learned, "evaluate", evaluate)
    return seeds


# -- evaluation -------------------------------------------------------------------------------------------------------


def test_evaluation_stores_the_best_policy_and_every_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second update and after the last; the results reach callbacks behind it."""
    seeds = scripted(monkeypatch, 1.0, 3.0, 2.0)
    seen: list[LearnProgress] = []
    evaluation = Evaluation(2, 2, seed=9, folder=tmp_path)
    train(5, [evaluation, seen.append])
    assert evaluation.results == [(32, 1.0), (64, 3.0), (80, 2.0)] and seeds == [9, 9, 9]
    assert [state.numbers.get("evaluation/mean_return") for state in seen] == [None, 1.0, None, 3.0, 2.0]
    assert [float(row["evaluation/best_return"]) for row in table(tmp_path / "evaluations.csv")] == [1.0, 3.0, 3.0]
    assert Learned.load(tmp_path / "best").agent.updates == 4


@pytest.mark.parametrize(
    ("options", "results", "steps"),
    [
        ({"enough": 2.0}, [0.0, 1.9, 2.0], 3),
        ({"patience": 2}, [0.0, 1.0, 1.0, 0.5], 4),
        ({"patience": 1, "enough": 9.0}, [3.0, 2.0], 2),
        ({}, [3.0, 2.0, 1.0, 0.0, 0.0, 0.0], 6),
    ],
)
def test_evaluation_stops_a_training(
    options: dict[str, Any], results: list[float], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, *results)
    assert train(6, Evaluation(1, 2, **options)).agent.updates == steps


def test_evaluation_in_other_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes nothing of the training, and its own environments are fresh ones."""
    made: list[int] = []

    def make_env() -> Walk:
        made.append(1)
        return Steady()

    with_it = train(3, Evaluation(1, 3, make_env=make_env, greedy=False))
    assert len(made) == 9
    expected, found = (agent_tensors(learned.agent) for learned in (train(3), with_it))
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_evaluation_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows the best of what the killed training found, and forgets what came after its checkpoint."""
    scripted(monkeypatch, 1.0, 5.0, 9.0)
    train(6, [Checkpoints(tmp_path / "saved", 2), Evaluation(1, 2, folder=tmp_path)], stop=3)
    scripted(monkeypatch, 4.0, 4.5, 6.0, 4.0)
    evaluation = Evaluation(1, 2, folder=tmp_path)
    train(6, evaluation, Checkpoints.load(tmp_path / "saved"))
    assert [value for _, value in evaluation.results] == [1.0, 5.0, 4.0, 4.5, 6.0, 4.0]
    assert Learned.load(tmp_path / "best").agent.updates == 5


@pytest.mark.parametrize(
    "make",
    [
        lambda: Evaluation(0),
        lambda: Evaluation(episodes=0),
        lambda: Evaluation(patience=0),
        lambda: Checkpoints("x", 0),
    ],
)
def test_settings_are_checked(make: Callable[[], object]) -> None:
    with pytest.raises(BadValueError, match="0 is not an integer of 1 or more"):
        make()


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_the_last_checkpoints_remain(tmp_path: Path) -> None:
    train(7, Checkpoints(tmp_path, every=2, keep=2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["update-00006", "update-00007"]
    newest = Checkpoints.load(tmp_path)
    assert newest is not None and newest.agent.updates == 7
    assert Checkpoints.load(tmp_path / "none") is None
    with pytest.raises(BadValueError, match="update 1 is below update 7"):
        train(7, Checkpoints(tmp_path))


KILLED = """
import os, signal, sys
sys.path[:0] = {path!r}
from test_callbacks import Checkpoints, CsvLog, train
def kill(state):
    if state.learned.agent.updates == 5:
        os.kill(os.getpid(), signal.SIGKILL)
train(8, [Checkpoints({folder!r}, every=2), CsvLog({folder!r} + "/log.csv"), kill])
"""


def test_a_killed_training_continues_from_its_last_checkpoint(tmp_path: Path) -> None:
    """To the bit, with the log of one that was not killed: the update after the checkpoint is written once."""
    path = [str(Path(__file__).parent)]
    script = KILLED.format(path=path, folder=str(tmp_path))
    killed = subprocess.run([sys.executable, "-c", script], env=dict(os.environ), capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(table(tmp_path / "log.csv")) == 5
    start = Checkpoints.load(tmp_path)
    assert start is not None and start.agent.updates == 4
    again = train(8, [Checkpoints(tmp_path, every=2), CsvLog(tmp_path / "log.csv")], start)
    whole = train(8, CsvLog(tmp_path / "whole.csv"))
    expected, found = (agent_tensors(learned.agent) for learned in (whole, again))
    assert {name for name, tensor in expected.items() if torch.equal(tensor, found[name])} == set(expected)
    rows = [table(tmp_path / name) for name in ("log.csv", "whole.csv")]
    assert [row["learn/steps"] for row in rows[0]] == [row["learn/steps"] for row in rows[1]]
    assert [row["ppo/policy_loss"] for row in rows[0]] == [row["ppo/policy_loss"] for row in rows[1]]
    assert len(rows[0]) == 8


# -- logs -------------------------------------------------------------------------------------------------------------


def test_csv_has_a_row_per_update_with_names_of_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column that appears later is empty in earlier rows."""
    scripted(monkeypatch, 1.5)
    learned = train(3, [Evaluation(3, 2), CsvLog(tmp_path / "new" / "log.csv")])
    rows = table(tmp_path / "new" / "log.csv")
    assert [row["evaluation/mean_return"] for row in rows] == ["", "", "1.5"]
    assert [float(row["learn/steps"]) for row in rows] == [16.0, 32.0, 48.0]
    assert [float(row["ppo/value_loss"]) for row in rows] == [metrics.value_loss for metrics in learned.history]
    assert float(rows[-1]["learn/mean_return"]) == pytest.approx(sum(total for _, total in learned.returns) / 6)
    unknown = {name for name in rows[0] if find_metric(name) is None}
    assert {name for name in unknown if not name.startswith(("learn/", "evaluation/", "ppo/action0/"))} == set()


def test_csv_refuses_another_file(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("a,b\n1,2\n")
    with pytest.raises(BadValueError, match="'learn/steps'; it is another file"):
        train(2, CsvLog(tmp_path / "log.csv"))


def test_tensorboard_draws_what_csv_writes(tmp_path: Path) -> None:
    """By environment steps. A continued training hides what the first drew beyond its start."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    first = train(6, [TensorBoardLog(tmp_path), Checkpoints(tmp_path / "saved", 2)], stop=3)
    again = train(6, TensorBoardLog(tmp_path), Checkpoints.load(tmp_path / "saved"))
    drawn = accumulator.EventAccumulator(str(tmp_path))
    drawn.Reload()
    events = drawn.Scalars("ppo/value_loss")
    assert [event.step for event in events] == [16, 32, 48, 64, 80, 96]
    expected = [metrics.value_loss for metrics in (*first.history[:2], *again.history)]
    assert [event.value for event in events] == pytest.approx(expected)
    assert {"learn/mean_return", "ppo/approx_kl", "ppo/action0/entropy"} <= set(drawn.Tags()["scalars"])


def test_tensorboard_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the training, which could be long."""
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    seen: list[LearnProgress] = []
    with pytest.raises(MissingPackageError, match=r"esper-morph\[tensorboard\]"):
        train(2, [seen.append, TensorBoardLog(tmp_path)])
    assert not seen


def test_all_callbacks_are_called_though_one_stops() -> None:
    calls: list[int] = []
    train(3, [lambda state: False, lambda state: calls.append(state.steps)])
    assert calls == [16]
