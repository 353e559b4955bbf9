"""The simulation of verdicts at its smallest: its figures tell good intervals from bad ones."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy import stats

from esper.simic.evaluation import statistics


@pytest.fixture
def script(script_of: Callable[[str], ModuleType]) -> ModuleType:
    """The script as a module."""
    return script_of("crossed_statistics")


def test_one_table_and_one_json(run_here: Callable[..., str], tmp_path: Path) -> None:
    """Every cell is in both."""
    printed = run_here("crossed_statistics", "--simulations", "20", "--hosts", "6", "--out", str(tmp_path))
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text())
    assert (path.stem, found["simulations"], found["hosts"], found["seeds"]) == ("crossed_statistics", 20, 6, 5)
    assert "machine" in found
    assert len(found["cells"]) == found["worst"]["superior"]["cells"] == 2 * 5 * 4 * 2
    assert "----" in printed
    assert "least_coverage: worst" in printed


def test_true_variances(script: ModuleType) -> None:
    """By hand: 2²/5 + 5²/50 + 1²/250 = 1.304, and 2·(2²/5 + 1²/250) + 5²/50 = 2.108; against drawn means."""
    for learned, variance in ((1, 1.304), (2, 2.108)):
        design = script.Design(learned, 5.0, 2.0, 1.0, 5, 50)
        assert design.variance == pytest.approx(variance)
        left, right = script.draw(design, 4000, np.random.default_rng(0))
        means = left.mean((1, 2)) - right.mean((1, 2))
        assert means.var() == pytest.approx(variance, rel=4 * math.sqrt(2 / 4000))
        assert abs(means.mean()) < 4 * math.sqrt(variance / 4000)


def test_true_degrees_of_freedom(script: ModuleType) -> None:
    """By hand, one learned policy: seeds 2²/5 + 1/250 = 0.804 with 4, hosts 5²/50 + 1/250 = 0.504 with 49, rest 0.004
    with 196: 1.304² / (0.161604 + 0.005184 + 0.0000001) = 10.195."""
    assert script.Design(1, 5.0, 2.0, 1.0, 5, 50).freedom == pytest.approx(10.195, rel=1e-3)


def test_quantiles_between_those_that_were_computed(script: ModuleType) -> None:
    freedom = np.array([1.0, 1.7, 4.0, 7.3, 63.0, 900.0])
    np.testing.assert_allclose(script.quantiles(freedom), stats.t.ppf(0.975, freedom), rtol=2e-3)


def test_one_cell(script: ModuleType) -> None:
    """Hosts differ, seeds hardly do: verdicts are rarely wrong, those over seeds alone in a third of all cases; a
    test that knows the variances is hardly better."""
    cell = script.measure(script.Design(1, 9.0, 0.2, 1.0, 5, 64), 2000, 1.0, np.random.default_rng(1))
    assert max(cell.superior, cell.not_worse) < 4
    assert 94 < cell.coverage < 97
    assert min([*cell.power.values(), *cell.power_of_t.values()]) > 0.9
    assert cell.superior_over_seeds > 30


def test_intervals_too_narrow_are_noticed(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A break: errors two thirds of what they are."""
    honest = statistics.crossed

    def narrow(left: statistics.Array, right: statistics.Array) -> statistics.Estimate:
        mean, error, freedom = honest(left, right)
        return statistics.Estimate(mean, error * 2 / 3, freedom)

    monkeypatch.setattr(script, "crossed", narrow)
    design = script.Design(1, 9.0, 0.2, 1.0, 5, 64)
    verdicts = script.judge({design: script.measure(design, 2000, 1.0, np.random.default_rng(1))})
    missed = {name for name, verdict in verdicts.items() if verdict.missed}
    assert missed == {"superior", "not_worse", "least_coverage"}
