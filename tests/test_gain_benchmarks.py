"""The benchmarks of gains: whether they last, and what each task has to offer."""

import argparse
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from bench import BENCHMARKS, run_script
from simic.training.tiny import QUICK, quick_config
from torch import Tensor

from esper.leyline import BadValueError, SeedStage, head_preset
from esper.simic.evaluation.arena import Arena
from esper.simic.training.hosts import host_seed
from esper.simic.training.trainer import Trainer
from esper.tolaria import HostFleet, Task, gains, get_task
from esper.tolaria.gains import GAINS_FILE, published_gains

pytestmark = pytest.mark.slow

# -- whether they last ------------------------------------------------------------------------------------------------


def test_gain_lasts(tmp_path: Path, run_here: Callable[..., str]) -> None:
    """Two hosts under two rules: who waits has no gain, and so no share of it; the work of growth is counted."""
    printed = run_here(
        "gain_lasts",
        *("--policies", "random-commit", "wait", "--hosts", "2", "--steps", "2", "--out", str(tmp_path / "out")),
    )
    assert "over equal compute" in printed
    policies = json.loads((tmp_path / "out" / "gain_lasts_digits_blind.json").read_text())["policies"]
    waited, grown = policies["wait"], policies["random-commit"]
    assert (waited["figures"]["gain"], waited["figures"]["gain_later"], waited["figures"]["share"]) == (0, 0, None)
    assert grown["figures"]["work"] > waited["figures"]["work"] > 1
    assert waited["by_seed"][0]["work_later"] == [1.0, 1.0]
    later, control = waited["by_seed"][0]["compute_later"], waited["by_seed"][0]["control_later"]
    assert later != control, "it was given more training than the control"


def test_gain_lasts_on_test_images_is_signed(
    tmp_path: Path, run_here: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into the learned runs, before anything is measured; a second look, and a run that is not finished, are warned of
    on the screen and in the JSON. One run is no two training seeds."""
    monkeypatch.chdir(tmp_path)
    Trainer(quick_config(1), Path("a")).run(progress=False)
    unfinished = Trainer(quick_config(2, seed=1, start=Path("a")), Path("b"))
    with unfinished.folder, unfinished.recorder.hub:
        unfinished.run_round()
    arguments = ["--task", QUICK, "--hosts", "2", "--steps", "2", "--out", "out"]
    run_here("gain_lasts", "--policies", "a", *arguments)
    assert not Path("a/final.jsonl").exists()
    run_here("gain_lasts", "--policies", "a", "wait", "--final", *arguments)
    (line,) = Path("a/final.jsonl").read_text().splitlines()
    assert json.loads(line)["policies"] == ["a", "wait"]
    assert json.loads(Path(f"out/gain_lasts_{QUICK}.json").read_text())["warnings"] == []
    printed = run_here("gain_lasts", "--policies", "b", "--final", *arguments)
    warned = json.loads(Path(f"out/gain_lasts_{QUICK}.json").read_text())["warnings"]
    assert warned[0].startswith("b has completed 1 of its 2 rounds")
    assert warned[1].startswith("b started from the controller of a, which has been in a final evaluation once")
    assert [line for line in printed.splitlines() if line.startswith("warning: ")] == [f"warning: {w}" for w in warned]
    with pytest.raises(BadValueError, match="one folder"):
        run_here("gain_lasts", "--policies", "a+a", "--final", *arguments)
    assert len(Path("a/final.jsonl").read_text().splitlines()) == 1


def test_waiting_with_the_work_of_a_control_is_the_control(script_of: Callable[[str], ModuleType]) -> None:
    """Given one training's work and as much again, a host ends where its control does, at T and later, whatever another
    host is given; given twice the work it ends where an episode of twice the length does."""
    script = script_of("gain_lasts")
    task = replace(get_task("digits_blind"), steps=3, batches_per_step=4)
    arena, seeds = Arena(task, head_preset("core")), [host_seed("evaluation", 7, number) for number in range(2)]

    def trained(episode: Task, steps: int, env: int) -> Tensor:
        alone = HostFleet(episode, 2, seeds=seeds, batches=arena.batches)
        for _ in range(steps):
            alone.train_step()
            alone.tick()
        return alone.points(alone.validate_committed())[env]

    at_end, later = script.wait_for(arena, seeds, np.array([1.0, 2.0]), np.array([1.0, 2.0]))
    double = replace(task, steps=6)
    assert at_end.tolist() == [trained(task, 3, 0), trained(double, 6, 1)]
    assert later.tolist() == [trained(task, 6, 0), trained(double, 12, 1)]


def test_only_fossils_are_trained_on(script_of: Callable[[str], ModuleType]) -> None:
    """Env 0 has committed one of its two seeds, env 1 none: afterwards there is one seed left in all, which learns."""
    script = script_of("gain_lasts")
    fleet = HostFleet(replace(get_task("digits_blind"), steps=9, batches_per_step=2), 2)
    for env, slot_id in ((0, "r1c0"), (0, "r1c1"), (1, "r1c0")):
        fleet.germinate(env, slot_id, "depthwise")
    for _ in range(9):
        for env, states in enumerate(fleet.states):
            for slot_id, state in list(states.items()):
                if state.stage is SeedStage.TRAINING and state.steps_in_stage >= 2:
                    fleet.advance(env, slot_id)
        fleet.train_step()
        fleet.validate(deployed=False)
        fleet.tick()
    fleet.fossilize(0, "r1c0")
    before = fleet.banks["r1c0", "depthwise"].weights.matrix[0].clone()
    _, work = script.train_on(fleet, [0, 1], final=False)
    assert [fleet.grown_parameters(env) for env in (0, 1)] == [64, 0]
    assert not torch.equal(fleet.banks["r1c0", "depthwise"].weights.matrix[0], before)
    assert not fleet.banks["r1c1", "depthwise"].weights.matrix.any(), "what is not there has no weights"
    assert work[0] > work[1] == 1.0


def test_shares_of_gains(script_of: Callable[[str], ModuleType]) -> None:
    """By hand: gains of 10 and 30 of which 10 and 20 are left, 30/40; not the mean of 1 and 2/3."""
    script = script_of("gain_lasts")
    assert script.share_of(np.array([[10.0, 30.0]]), np.array([[10.0, 20.0]])) == pytest.approx(0.75)
    assert script.share_of(np.zeros((1, 2)), np.ones((1, 2))) is None
    low, high = script.share_interval(np.array([[10.0, 30.0]]), np.array([[10.0, 20.0]]))
    assert (low, high) == (pytest.approx(2 / 3), pytest.approx(1.0))
    assert script.share_interval(np.array([[10.0, -30.0]]), np.ones((1, 2))) == (None, None)


# -- what each task offers --------------------------------------------------------------------------------------------


@pytest.fixture
def task_gains(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("task_gains")


@pytest.fixture
def own_gains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task_gains: ModuleType) -> Iterator[Path]:
    """A file of gains for this test alone."""
    path = tmp_path / "task_gains.json"
    monkeypatch.setattr(gains, "GAINS_FILE", path)
    monkeypatch.setattr(task_gains, "GAINS_FILE", path)
    gains.published_gains.cache_clear()
    yield path
    gains.published_gains.cache_clear()


def write_figures(folder: Path, name: str, figures: Mapping[str, object]) -> None:
    """A result as the script writes it."""
    content = {"machine": {"cpu": "?"}, name: figures}
    (folder / f"task_gains_{name}.json").write_text(json.dumps(content))


@pytest.mark.slow
def test_task_gains(tmp_path: Path) -> None:
    """Every cell of one task, once."""
    printed = run_script("task_gains.py", tmp_path, "--tasks", "digits", "--repeats", "1", "--out", str(tmp_path))
    task = get_task("digits")
    assert all(slot_id in printed for slot_id in task.slot_ids)
    figures = json.loads((tmp_path / "task_gains_digits.json").read_text())["digits"]["none"]
    assert figures["host_accuracy"] > 60
    assert figures["repeats"] == 1
    assert len(figures["cells"]) == sum(len(slot.blueprints) for slot in task.slot_config.slots)


def test_task_gains_are_paired(task_gains: ModuleType, own_gains: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each gain is against the control of the same repeat and kind of host; what is published can be read again.

    By hand: controls 40 and 50; the cell r1c0 depthwise 70 and 90 gains 30 and 40: mean 35, deviation 7.07.
    """
    task = get_task("digits_varied")
    arguments = argparse.Namespace(repeats=2, device="cpu", data_dir=None)
    jobs = task_gains.jobs_of(task, arguments)
    cells = sum(len(slot.blueprints) for slot in task.slot_config.slots)
    assert len(jobs) == len(set(jobs)) == 3 * 2 * (cells + 1)
    found = {}
    for job in jobs:
        control = 40.0 + 10.0 * job.rng_seed + (5.0 if job.defect == "none" else 0.0)
        best = (job.slot_id, job.blueprint) == ("r1c0", "depthwise")
        found[job] = control + (30.0 + 10.0 * job.rng_seed if best else 0.0)
    figures: dict[str, object] = {defect: task_gains.report(task, defect, found) for defect in task.defects}
    write_figures(own_gains.parent, task.name, figures)
    task_gains.publish(own_gains.parent)
    kinds = published_gains(task.name)
    assert [kind.defect for kind in kinds] == list(task.defects)
    assert [kind.host_accuracy for kind in kinds] == [45.0, 50.0, 45.0]
    for kind in kinds:
        best_cell = kind.best("r1c0")
        assert (best_cell.blueprint, best_cell.parameters, best_cell.points) == ("depthwise", 64, 35.0)
        assert best_cell.deviation == pytest.approx(50**0.5)
        assert kind.best("r1c1").points == 0.0
    assert "35.0 ± 7.1" in capsys.readouterr().out


def test_publishing_takes_what_there_is(task_gains: ModuleType, own_gains: Path) -> None:
    """All figures of a folder, in the order of the registry, each with its machine; and none that are gone from it."""
    for name in ("fashion_small", "digits"):
        write_figures(own_gains.parent, name, {})
    task_gains.publish(own_gains.parent)
    published = json.loads(own_gains.read_text())
    assert list(published) == ["digits", "fashion_small"]
    assert published["digits"] == {"machine": {"cpu": "?"}, "hosts": {}}
    (own_gains.parent / "task_gains_digits.json").unlink()
    task_gains.publish(own_gains.parent)
    assert list(json.loads(own_gains.read_text())) == ["fashion_small"]


def test_published_gains_are_the_results(task_gains: ModuleType, own_gains: Path) -> None:
    """What `esper tasks` shows is what the results folder holds."""
    task_gains.publish(BENCHMARKS / "results")
    assert json.loads(own_gains.read_text()) == json.loads(GAINS_FILE.read_text())
