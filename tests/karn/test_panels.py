"""Pictures over rounds show the numbers of the files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from karn.run_folders import default_events, metrics, write_run
from matplotlib.axes import Axes

from esper.karn import read_run
from esper.karn.panels import (
    HEALTH,
    LEARNING,
    MOST_ROWS,
    OTHERS,
    columns_of,
    draw_decisions,
    draw_ops,
    draw_panel,
    health_panels,
    ops_of,
    rows_of,
    short_name,
)
from esper.karn.state import RunState


@pytest.fixture
def run(tmp_path: Path) -> RunState:
    """Two rounds of four hosts with objectives 1, 2, 3, 4."""
    return read_run(write_run(tmp_path))


def heights(axis: Axes) -> dict[str, list[float]]:
    """Every line by its label."""
    return {str(line.get_label()): np.asarray(line.get_ydata()).tolist() for line in axis.lines}


def band(axis: Axes) -> tuple[float, float]:
    """Lower and upper end of what is filled, at round 0."""
    corners = np.asarray(axis.collections[0].get_paths()[0].vertices)
    there = corners[corners[:, 0] == 0, 1]
    return float(there.min()), float(there.max())


def cells(axis: Axes) -> list[list[float | None]]:
    """The values of a map; None is blank."""
    values: Any = axis.images[0].get_array()  # Any: an array with a mask
    shown: list[list[float | None]] = values.tolist()
    return shown


def test_learning_curves(run: RunState) -> None:
    """Means are those of the metrics, bands those of the hosts; of a share of 1/4, √(3/16/4) = 0.2165 either way."""
    curves = {panel.patterns[0]: panel for panel in LEARNING}
    (axis,) = draw_panel(run, curves["objective"]).axes
    assert [1.25, 2.25] in heights(axis).values()
    assert band(axis) == (1.75, 3.25)
    assert (axis.get_ylabel(), axis.get_xlabel()) == ("points", "round")
    (axis,) = draw_panel(run, curves["added_parameters"]).axes
    assert band(axis) == (7.5, 22.5)
    (axis,) = draw_panel(run, curves["committed"]).axes
    assert band(axis) == pytest.approx((0.25 - 0.2165, 0.25 + 0.2165), abs=1e-4)


def test_several_tasks_have_a_line_each(tmp_path: Path) -> None:
    """By name, from the metrics of each; a band over hosts of different tasks would mean nothing."""
    tasks = {name: {"objective": value, "reward": {"gain": 1.0}} for name, value in (("a", 3.0), ("b", 4.0))}
    run = read_run(write_run(tmp_path, [metrics(0, tasks=tasks)], default_events(1)))
    assert run.tasks == ["a", "b"]
    (axis,) = draw_panel(run, LEARNING[0]).axes
    assert {name: line for name, line in heights(axis).items() if name in "ab"} == {"a": [3.0], "b": [4.0]}
    assert not axis.collections
    assert axis.get_legend() is not None


def test_decisions(run: RunState) -> None:
    """Per host: one germination of each kind by four hosts, and two commits; blank where there was none."""
    assert rows_of(run) == ["r1c0/depthwise", "r1c1/norm"]
    germinated, committed = draw_decisions(run).axes[:2]
    assert cells(germinated) == [[0.25, 0.25], [0.25, 0.25]]
    assert cells(committed) == [[0.5, 0.5], [None, None]]


def test_rare_kinds_share_a_row(tmp_path: Path) -> None:
    """The 23 most frequent by name, the other 7 + 2 kinds of the run together."""
    many = {f"r1c0/kind{place:02d}": 40 - place for place in range(30)}
    run = read_run(write_run(tmp_path, [metrics(0, germinated=many), metrics(1, germinated={})]))
    rows = rows_of(run)
    assert len(rows) == MOST_ROWS
    assert rows[-1] == OTHERS
    assert rows[:2] == ["r1c0/kind00", "r1c0/kind01"]
    shown = cells(draw_decisions(run).axes[0])
    assert shown[0] == [40 / 4, None]
    assert shown[-1] == [sum(40 - place for place in range(23, 30)) / 4, None]


def test_ops(tmp_path: Path) -> None:
    """Shares of all decisions, in the order of the table of ops."""
    rows = [metrics(0, ops={"PRUNE": 1, "WAIT": 3}), metrics(1, ops={"WAIT": 1, "NAP": 1})]
    run = read_run(write_run(tmp_path, rows))
    assert ops_of(run) == ["WAIT", "PRUNE", "NAP"]
    (axis,) = draw_ops(run).axes
    assert heights(axis) == {"wait": [75.0, 50.0], "prune": [25.0, 0.0], "nap": [0.0, 50.0]}


def test_panels(tmp_path: Path) -> None:
    """Lines of every column, gaps where a round has none, the target of the KL, one colour per head."""
    rows = [metrics(number, **{"ppo/entropy": 0.5, "ppo/slot/kl": 0.1}) for number in range(3)]
    del rows[1]["ppo/op/entropy"]
    run = read_run(write_run(tmp_path, rows, default_events(3)))
    panels = {panel.title: panel for panel in HEALTH}
    entropy = panels["Entropy"]
    assert columns_of(run, entropy) == ["ppo/entropy", "ppo/op/entropy", "ppo/slot/entropy"]
    (axis,) = draw_panel(run, entropy).axes
    assert [value for value in heights(axis)["op"] if value == value] == pytest.approx([0.9, 0.7])
    assert len(heights(axis)["op"]) == 3
    colours = {line.get_label(): line.get_color() for line in axis.lines}
    (other,) = draw_panel(run, panels["KL per head"]).axes
    assert other.lines[0].get_color() == colours["slot"]
    assert len(set(colours.values())) == 3
    (axis,) = draw_panel(run, panels["KL of the joint action"]).axes
    assert [0.03, 0.03] in heights(axis).values()


def test_what_counts_as_unchanged(tmp_path: Path) -> None:
    """Rounding is no change; a column that some round lacks is drawn, so that its gap is seen."""
    rows = [metrics(number, **{"ppo/noise": 1e-7 * number, "ppo/drift": 1e-5 * number}) for number in range(3)]
    del rows[1]["ppo/rate"]
    run = read_run(write_run(tmp_path, rows, default_events(3)))
    drawn, constant = health_panels(run)
    shown = {name for panel in drawn for name in columns_of(run, panel)}
    assert {"ppo/rate", "ppo/drift"} <= shown
    assert "ppo/noise" in constant


@pytest.mark.parametrize(
    ("column", "name"),
    [
        ("ppo/slot/entropy", "slot"),
        ("ppo/approx_kl", "approx kl"),
        ("timing/collect_s", "collect s"),
        ("panics", "panics"),
    ],
)
def test_short_names(column: str, name: str) -> None:
    assert short_name(column) == name
