"""The catalogue of metrics, and the page that shows it."""

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from esper.leyline import HEAD_NAMES, LifecycleOp
from esper.nissa.catalogue import METRICS, Metric, find_metric

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


@pytest.fixture
def script(script_of: Callable[[str], ModuleType]) -> ModuleType:
    """The script that writes the page."""
    return script_of("metrics_page")


def test_the_page_is_up_to_date(script: ModuleType) -> None:
    """If not: `python benchmarks/metrics_page.py > docs/metrics.md`."""
    assert PAGE.read_text() == script.page()


def test_everything_is_on_the_page(script: ModuleType) -> None:
    """One line per metric, except those of a task, which are named once; nothing breaks its table."""
    lines = [line for line in script.page().splitlines() if line.startswith("| `")]
    shown = [metric for metric in METRICS if not metric.name.startswith("tasks/")]
    assert [line.split("`")[1] for line in lines] == [metric.name for metric in shown]
    assert all(line.count("|") == 5 for line in lines)
    assert all(metric.meaning for metric in METRICS)
    assert all(remark in script.page() for remark in script.REMARKS.values())


def test_names_are_unambiguous() -> None:
    """Nothing is there twice."""
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("objective", "objective"),
        ("ppo/max_kl", "ppo/max_kl"),
        (f"ppo/{HEAD_NAMES[-1]}/entropy", "ppo/<head>/entropy"),
        (f"ops/{LifecycleOp.ADVANCE.name}", "ops/<op>"),
        ("germinated/r1c0/conv_light", "germinated/<slot>/<blueprint>"),
        ("tasks/digits/reward/rent", "tasks/<task>/reward/rent"),
        ("alarms/kl_spike", "alarms/<alarm>"),
        ("alarms/entropy_collapse/slot", "alarms/<alarm>/<subject>"),
        ("objective_", None),
        ("ppo/nonsense/entropy", None),
        ("ops/DANCE", None),
        ("germinated/r1c0", None),
        ("tasks/digits/ppo/max_kl", None),
        ("reward/nonsense", None),
    ],
)
def test_names_are_found(name: str, found: str | None) -> None:
    """By their pattern; a head, op or part of the reward that does not exist is none."""
    metric = find_metric(name)
    assert (metric.name if metric is not None else None) == found


def test_ranges() -> None:
    """Ends are healthy; what is not finite never is."""
    both, above, below = Metric("a", "", "", 1, 2), Metric("a", "", "", low=1), Metric("a", "", "", high=2)
    assert [both.is_healthy(value) for value in (0.9, 1, 2, 2.1)] == [False, True, True, False]
    assert [above.is_healthy(value) for value in (0.9, 1, 1e9, math.inf)] == [False, True, True, False]
    assert [below.is_healthy(value) for value in (-1e9, 2, 2.1, math.nan)] == [True, True, False, False]
    assert Metric("a", "", "").is_healthy(-5)
    words = [both.healthy, above.healthy, below.healthy]
    assert words == ["1 to 2", "at least 1", "at most 2"]
    assert Metric("a", "", "", low=1, remark="rises").healthy == "at least 1; rises"
    assert Metric("a", "", "").healthy == ""
