"""A built-in host that is grown in an ordinary loop: killed and resumed, and finished as plain PyTorch."""

import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from simic.training.tiny import NAME, tiny_task

from esper.grower.task_growth import FINISHED, GrowthSettings, TaskGrowth
from esper.kasmina import GPTHost
from esper.leyline import BadValueError, CheckpointError
from esper.leyline.progress import ignore
from esper.storage.logs import read_lines
from esper.tolaria import TaskRegistry, get_task
from esper.tolaria.data.dataset import is_present

SETTINGS = GrowthSettings(NAME, 600, 7, "heuristic", 0, control=True, device="cpu")


def nothing() -> None:
    """No bar to advance."""
    ignore(1)


def run(growth: TaskGrowth, last: int | None = None) -> TaskGrowth:
    """Steps up to `last`; by default all, and the end."""
    while growth.step < (growth.settings.steps if last is None else last):
        growth.run_step(nothing)
    if last is None:
        growth.finish()
    return growth


def outcome(folder: Path) -> tuple[Any, ...]:
    """Everything that a run leaves, without what depends on the clock."""
    logs = [
        [{key: value for key, value in line.items() if key != "timing"} for line in read_lines(folder / name)]
        for name in ("events.jsonl", "metrics.jsonl")
    ]
    weights = {name: tensor.tolist() for name, tensor in load_file(folder / FINISHED / "weights.safetensors").items()}
    return json.loads((folder / "result.json").read_text()), logs, weights


@pytest.mark.parametrize("policy", ["heuristic", pytest.param("random", marks=pytest.mark.slow)])
def test_killed_and_resumed(policy: str, tmp_path: Path) -> None:
    """To the bit: before the first step, in mid-growth, and after the last step but before the end."""
    tiny_task()
    settings = replace(SETTINGS, policy=policy)
    run(TaskGrowth(settings, tmp_path / "whole"))
    cut = run(TaskGrowth(settings, tmp_path / "cut"), 0)
    for last in (3, 7):
        del cut
        gc.collect()  # a killed process holds no lock
        cut = run(TaskGrowth.resume(tmp_path / "cut"), last)
        assert cut.result is None
    del cut
    gc.collect()
    run(TaskGrowth.resume(tmp_path / "cut"))
    whole = outcome(tmp_path / "whole")
    assert outcome(tmp_path / "cut") == whole
    assert whole[0]["control"] != whole[0]["test"] and len(whole[1][1]) == 7
    assert policy == "random" or whole[0]["kept"]


def test_the_finished_model_needs_no_esper(tmp_path: Path) -> None:
    """`network.py` and `grown_blocks.py` give the model that was scored."""
    tiny_task()
    growth = run(TaskGrowth(replace(SETTINGS, control=False), tmp_path))
    result, modules = growth.result, []
    assert result is not None and result["control"] is None
    for path in (tmp_path / "host" / "network.py", tmp_path / FINISHED / "grown_blocks.py"):
        spec = importlib.util.spec_from_file_location(f"{path.stem}_of_a_test", path)
        assert spec is not None and spec.loader is not None
        modules.append(importlib.util.module_from_spec(spec))
        spec.loader.exec_module(modules[-1])
    model = modules[1].grow(modules[0].Network(), tmp_path / FINISHED)
    test = growth.batches.test()
    with torch.no_grad():
        accuracy = 100 * float((model(test.inputs).argmax(-1) == test.targets).double().mean())
    assert accuracy == result["test"]["accuracy"]
    assert sum(p.numel() for p in model.parameters()) == result["parameters"]
    grown = sum(seed["parameters"] for seed in result["kept"])
    assert result["parameters"] == result["host_parameters"] + grown > result["host_parameters"]


def test_the_loop_is_that_of_the_task(tmp_path: Path) -> None:
    """The twin that does not grow ends with the weights of a built-in host that trains alone."""
    from esper.tolaria import HostTrainer

    task = tiny_task()
    settings = replace(SETTINGS, steps=task.steps, policy="wait", seed=5)
    growth = run(TaskGrowth(settings, tmp_path), 3)
    trainer = HostTrainer(task, task.load_batches(), 5)
    for _ in range(3):
        trainer.run_step()
    theirs = dict(trainer.model.body.host.named_parameters())
    for name, parameter in growth.learners["control"].model.named_parameters():
        number, _, rest = name.removeprefix("segment").partition(".")
        assert torch.allclose(parameter, theirs[f"segments.{number}.{rest}"], atol=1e-5), name
    assert all(
        torch.equal(mine, other)
        for mine, other in zip(
            growth.learners["grown"].model.state_dict().values(),
            growth.learners["control"].model.state_dict().values(),
            strict=False,
        )
        if mine.shape == other.shape and mine.is_floating_point()
    )


def test_slots_that_conduct_nothing_are_left_out(tmp_path: Path) -> None:
    """Of hosts whose first slot is cut."""
    task = replace(tiny_task(), name="digits_cut", defects=("blind_first_slot_cut",))
    task = replace(task, build_host=get_task("digits_varied").build_host)
    TaskRegistry.register(task)
    growth = TaskGrowth(replace(SETTINGS, task="digits_cut", control=False), tmp_path)
    assert growth.grown.slots == {"segment3": 8, "segment5": 16}


def test_text(tmp_path: Path) -> None:
    """A GPT on characters, scored by loss."""
    if not is_present("tinyshakespeare"):
        pytest.skip("no tinyshakespeare here")
    task = replace(
        get_task("shakespeare_char"),
        name="text_tiny",
        build_host=lambda: GPTHost(2, 16, 2, 32, 65),
        batches_per_step=2,
        batch=8,
        validation_size=1_000,
        slot_ids=("r0c0",),
    )
    TaskRegistry.register(task)
    growth = run(TaskGrowth(replace(SETTINGS, task="text_tiny", budget=3_000, steps=5, control=False), tmp_path))
    assert growth.result is not None and 3 < growth.result["test"]["loss"] < 5
    assert all(line["accuracy"] is None for line in read_lines(tmp_path / "metrics.jsonl"))


def test_bad_folders(tmp_path: Path) -> None:
    """One that holds a run, one that holds none, and a damaged checkpoint."""
    tiny_task()
    growth = TaskGrowth(replace(SETTINGS, control=False), tmp_path / "run")
    with pytest.raises(BadValueError, match=r"already holds a run; name another with --out, or use --resume"):
        TaskGrowth(SETTINGS, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"holds no growth to resume: begin one with esper grow --out"):
        TaskGrowth.resume(tmp_path / "none")
    with pytest.raises(BadValueError, match="budget 5 is too small: the smallest seed that fits has 12 parameters"):
        TaskGrowth(replace(SETTINGS, budget=5), tmp_path / "small")
    assert not (tmp_path / "small").exists()
    del growth
    gc.collect()
    (tmp_path / "run" / "checkpoints" / "step-00000" / "training.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError, match="was changed, is truncated"):
        TaskGrowth.resume(tmp_path / "run")


@pytest.mark.slow
def test_a_killed_process_is_resumed(tmp_path: Path) -> None:
    """SIGKILL somewhere in the run of the command, and the same result in the end."""
    command = [sys.executable, "-m", "esper", "grow", "--steps", "6", "--seed", "3"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--out", "whole"], cwd=tmp_path, env=environment, check=True, capture_output=True)
    process = subprocess.Popen([*command, "--out", "cut"], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    metrics = tmp_path / "cut" / "metrics.jsonl"
    end = time.monotonic() + 120
    while time.monotonic() < end and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 3):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "cut" / "result.json").exists()
    resumed = [sys.executable, "-m", "esper", "grow", "--resume", "cut"]
    subprocess.run(resumed, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")
