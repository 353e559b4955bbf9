"""What `esper evaluate` wrote, read back: figures, intervals, and files that are something else."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from karn.run_folders import difference, evaluation, policy

from esper.karn import read_evaluations
from esper.karn.evaluations import MEAN, label_of, mean_interval
from esper.leyline import BadValueError


def read(tmp_path: Path, content: Any) -> Any:
    """A file of this content."""
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps(content))
    return read_evaluations(path)


def test_figures(tmp_path: Path) -> None:
    """Gains are differences to the controls, host by host; what the file has beyond is left alone."""
    (found,) = read(tmp_path, evaluation())
    assert (found.task, found.hosts, found.final) == ("digits_hand", 3, False)
    learned, wait = found.policies
    assert (learned.name, wait.name) == ("runs/a", "wait")
    assert learned.objective == [5.5, 6.5, 7.5]
    assert wait.gain == [10.0, 11.0, 12.0]
    assert learned.seeds == []
    (compared,) = found.differences
    assert (compared.policy, compared.against, compared.interval.mean) == ("runs/a", "wait", 4.5)
    assert (*compared.interval[1:], compared.adjusted_p, compared.seeds) == (3.25, 5.75, 0.0125, 1)
    assert (compared.superior, compared.not_worse) == (False, None)


def test_claims(tmp_path: Path) -> None:
    """As the file makes them."""
    entry = difference("runs/a", "wait", superior=True, not_worse=True, margin=1.0)
    (found,) = read(tmp_path, evaluation(differences=[entry]))
    assert (found.differences[0].superior, found.differences[0].not_worse) == (True, 1.0)


def test_training_seeds(tmp_path: Path) -> None:
    """Several have points of their own; a single one is the policy itself."""
    seeds = [policy(1.0), policy(3.0)]
    (found,) = read(tmp_path, evaluation(policies={"a+b": policy(2.0, by_seed=seeds), "c": policy(by_seed=seeds[:1])}))
    joined, single = found.policies
    # Mean accuracy 62 + shift, of the controls 51; parameters (0 + 64 + 160) / 3.
    assert joined.seeds == [(pytest.approx(224 / 3), 12.0), (pytest.approx(224 / 3), 14.0)]
    assert (joined.training_seeds, single.training_seeds, single.seeds) == (2, 1, [])


def test_several_tasks(tmp_path: Path) -> None:
    """Each by itself, then the mean, which has differences only."""
    tasks = {"one": evaluation(task="one"), "two": evaluation(task="two")}
    found = read(tmp_path, {"tasks": tasks, "mean": {"differences": [difference("runs/a", "wait")]}})
    assert [entry.task for entry in found] == ["one", "two", MEAN]
    assert found[2].policies == []
    assert found[2].differences[0].interval.mean == 4.5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], r"evaluation.json is no JSON object, but \[\]"),
        ({"loss": 3}, "is no evaluation: it has no 'policies'"),
        ({"tasks": {}}, "is no evaluation: its 'tasks' are empty"),
        (evaluation(policies={}), "is no evaluation: it has no 'policies'"),
        (evaluation(task=None), "'task' is None, not a string"),
        (evaluation(policies={"a": policy(objective=["x"])}), "policies, a: 'objective' is .* not a list of finite"),
        (evaluation(policies={"a": policy(objective=[1.0])}), "not lists over the same"),
        (evaluation(policies={"a": policy(control_accuracy=[1.0])}), "not lists over the same"),
        (
            evaluation(policies={"a": policy(), "b": {name: values[:2] for name, values in policy().items()}}),
            r"policies on \[2, 3\] hosts",
        ),
        (evaluation(policies={"a": {name: values[:1] for name, values in policy().items()}}), "two or more"),
        (evaluation(differences=[{"policy": "a", "against": "b"}]), r"differences\[0\], difference is no JSON object"),
    ],
)
def test_foreign_files(content: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match=message):
        read(tmp_path, content)


def test_no_json_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("objective 3")
    for name in ("x.json", "nowhere.json"):
        with pytest.raises(BadValueError, match=rf"{name} is no evaluation \(as `esper evaluate --json` writes it\)"):
            read_evaluations(tmp_path / name)


def test_interval_of_a_mean() -> None:
    """Of 1, 2, 3: deviation 1, error 1/√3, t of two degrees 4.3027: 2 ± 2.484."""
    interval = mean_interval([1.0, 2.0, 3.0])
    assert interval.mean == 2.0
    assert interval.low == pytest.approx(2 - 4.3027 / math.sqrt(3), abs=0.03)
    assert interval.high == pytest.approx(2 + 4.3027 / math.sqrt(3), abs=0.03)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("wait", "wait"),
        ("heuristic:tuned/digits.json", "heuristic:digits.json"),
        ("retrained:runs/a+runs/b", "retrained:a + 1 more"),
        ("runs/deep/first", "first"),
        ("runs/a+runs/b+runs/c", "a + 2 more"),
        ("x" * 50, "x" * 29 + "…"),
    ],
)
def test_labels(name: str, label: str) -> None:
    assert label_of(name) == label
