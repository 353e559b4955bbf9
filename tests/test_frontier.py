"""The frontier: its parts by hand, its figure from made-up numbers, and the whole at its smallest."""

import argparse
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from bench import BENCHMARKS
from simic.training.tiny import quick_config

from esper.karn.canvas import new_figure
from esper.simic.training.config import TeachConfig
from esper.simic.training.run_folder import write_config
from esper.tolaria import get_task

PLAN = BENCHMARKS.parent / "src" / "esper" / "tamiyo" / "policies" / "shipped" / "schedule-digits_blind.json"


@pytest.fixture
def frontier(script_of: Callable[[str], ModuleType]) -> ModuleType:
    """The script as a module."""
    return script_of("frontier")


def arguments(**changes: object) -> argparse.Namespace:
    """Of a call on digits."""
    given = {"task": "digits_blind", "epochs": 3, "data_dir": None, "sizes": ["4-8-16:1400"], "policy": "wait"}
    return argparse.Namespace(**given | changes)


def test_a_size_fixes_widths_budget_and_length(frontier: ModuleType) -> None:
    """1,000 training images in minibatches of 64, 20 steps: three epochs are 2.3 minibatches a step."""
    task = frontier.task_of(arguments(), "6-12-24:2400")
    assert task.build_host().widths == [6, 12, 24]
    assert task.host_parameters + task.parameter_budget == 2_400
    assert (task.steps, task.batches_per_step) == (20, 2)
    assert frontier.task_of(arguments(), "6-12-24:2400") is task


def test_drawn_architectures(frontier: ModuleType) -> None:
    """Within the budget, not far below it, at most one seed per slot; the same ones for the same number."""
    task = frontier.task_of(arguments(), "4-8-16:1400")
    drawn = frontier.drawn_architectures(task, 30, 0)
    sizes = [frontier.parameters_of(task, own) - task.host_parameters for own in drawn]
    assert all(0.7 * task.parameter_budget <= size <= task.parameter_budget for size in sizes)
    assert all(len({fossil.slot_id for fossil in own}) == len(own) for own in drawn)
    assert len({tuple(own) for own in drawn}) > 10
    assert frontier.drawn_architectures(task, 3, 0) == drawn[:3]
    assert frontier.drawn_architectures(task, 3, 1) != drawn[:3]


def test_the_best_of_k_by_hand(frontier: ModuleType) -> None:
    """Validation ranks 2 > 0 > 1. Of pairs: {0,1} → 0, {0,2} → 2, {1,2} → 2. A k beyond the number takes all."""
    drawn = frontier.Trained([50.0, 40.0, 60.0], [10.0, 20.0, 40.0], [1.0, 1.0, 1.0])
    best = frontier.fmean_of_best
    assert best(drawn, range(3), 1) == pytest.approx((10 + 20 + 40) / 3)
    assert best(drawn, range(3), 2) == pytest.approx((10 + 40 + 40) / 3)
    assert best(drawn, range(3), 3) == best(drawn, range(3), 9) == 40.0
    assert best(drawn, range(0, 2), 2) == 10.0


def test_what_a_controller_learned_from(frontier: ModuleType, tmp_path: Path) -> None:
    """Two rounds of four hosts, and 40 episodes of a search with a control per lineup of plans; a plan's own search;
    nothing for a rule. In trainings of --epochs 3, an eighth of the task's 16 minibatches a step."""
    config = quick_config(2, teach=TeachConfig(episodes=40))
    write_config(tmp_path, config, 3)
    plans = 1 + len(get_task(config.task).slot_config.slots[0].blueprints)
    assert frontier.trainings_of(tmp_path) == pytest.approx(8 + 40 * (1 + 1 / plans))
    assert frontier.controller_work(arguments()) == 0
    assert frontier.controller_work(arguments(policy=f"schedule:{PLAN}")) == 6_528 * 8


def made_up() -> dict[str, Any]:  # Any: JSON
    """Two sizes, one controller, two hosts."""
    size = {
        "size": "small",
        "host": {"parameters": 1_000, "accuracy": [50.0, 52.0]},
        "grown": {"parameters": [[1_900, 2_000]], "accuracy": [[60.0, 61.0]]},
        "static": {"parameters": 2_000, "accuracy": [55.0, 57.0]},
        "search": {"parameters": [1_800, 1_900], "accuracy": [54.0, 62.0]},
        "retrained": {"accuracy": [[59.0, 60.0]]},
    }
    larger = {
        **size,
        "host": {"parameters": 3_000, "accuracy": [57.0, 59.0]},
        "static": {"parameters": 4_000, "accuracy": [60]},
    }
    return {"task": "cifar_made_up", "final": True, "sizes": [size, larger]}


def test_the_marks_of_the_figure(script_of: Callable[[str], ModuleType]) -> None:
    """Arrows, curve and hollow marks by hand; the panel names its axes, and others' results only for CIFAR-10."""
    script, content = script_of("frontier_figure"), made_up()
    small = content["sizes"][0]
    assert list(script.arrows(small)) == [((1_000, 50.0), (1_900, 60.0)), ((1_000, 52.0), (2_000, 61.0))]
    assert script.static_curve(content["sizes"]) == [(1_000, 51.0), (2_000, 56.0), (3_000, 58.0), (4_000, 60.0)]
    assert script.retrained([small]) == [(1_900, 59.0), (2_000, 60.0)]
    for task, named in (("cifar_made_up", True), ("digits", False)):
        with new_figure(6, 4) as figure:
            axis = figure.add_subplot()
            script.draw(axis, {**content, "task": task})
            legend = axis.get_legend()
            assert legend is not None
            assert any("SECNN" in text.get_text() for text in legend.get_texts()) == named
            assert axis.get_xscale() == "log"
            assert "test images" in axis.get_ylabel()


def test_the_picture(run_here: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "made_up.json").write_text(json.dumps(made_up()))
    run_here("frontier_figure", str(tmp_path / "made_up.json"), "--out", str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_at_its_smallest(run_here: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage by stage, each stored, so that a second call trains nothing; figures that belong together."""
    common = ["--task", "digits_blind", "--policy", f"schedule:{PLAN}", "--sizes", "4-8-16:1400", "--epochs", "3"]
    common += ["--hosts", "2", "--architectures", "4", "--keep", str(tmp_path / "keep"), "--out", str(tmp_path / "out")]
    for stage in ("grow", "scratch", "static"):
        assert f"stored {stage} of 1 sizes" in run_here("frontier", *common, "--stages", stage)
    script = importlib.import_module("frontier")
    for stage in ("train", "grow"):
        monkeypatch.setattr(script, stage, lambda *_: pytest.fail("it was stored"))
    assert "with controller" in run_here("frontier", *common)
    content = json.loads((tmp_path / "out" / "frontier_digits_blind.json").read_text())
    (size,) = content["sizes"]
    assert size["work"]["grown"] > size["work"]["search"] > size["work"]["host"] == 1
    assert abs(size["static"]["parameters"] - size["grown"]["parameters"][0][0]) < 60
    assert size["work"]["static"] == pytest.approx(size["work"]["grown"], rel=0.1)
    assert size["search"]["k"] == round(size["work"]["grown"] / size["work"]["search"])
