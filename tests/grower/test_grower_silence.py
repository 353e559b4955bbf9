"""What used to go wrong in silence is handled, or refused with the remedy."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import cast

import pytest
import torch
from loops import BlindCNN, digits, loader, make, plan, sgd, train_epoch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from esper.grower import Grower
from esper.grower.container import CHILD
from esper.leyline import BadValueError

DATA = digits(200)
VALIDATION = digits(300)[0][200:], digits(300)[1][200:]


@pytest.mark.default_cases("bare-accumulate")
@pytest.mark.parametrize(("order", "accumulation"), [("wrapped", "plain"), ("bare", "accumulate")])
def test_two_ranks_stay_equal(order: str, accumulation: str, tmp_path: Path) -> None:
    """DDP built before or after the grower, with and without accumulation."""
    folder = Path(__file__).parent
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(29500 + os.getpid() % 2000),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(folder), str(folder.parents[1] / "src")]),
    }
    command = [sys.executable, str(folder / "two_ranks.py"), order, accumulation, str(tmp_path / "run")]
    ranks = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    for rank, (out, err) in enumerate(outputs):
        assert f"rank {rank} equal" in out, err[-3000:]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 5  # rank 0 alone writes


def test_averages_follow() -> None:
    """An AveragedModel made before a birth gets the seed, averages it, and loses it again."""
    acts = {1: [("germinate", "stage1", "conv_light")], 3: [("prune", "stage1")]}
    model, optimizer, grower = make(policy=lambda report: acts.get(report.step, []))
    model(DATA[0][:2])  # chooses the slots
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    sizes = []
    for epoch in range(4):
        train_epoch(model, optimizer, DATA, epoch)
        average.update_parameters(model)
        grower.step(loader(VALIDATION))
        sizes.append(len(list(average.module.parameters())))
        assert sizes[-1] == len(list(model.parameters()))
        if epoch == 1:
            own, theirs = (list(getattr(each, CHILD).parameters()) for each in (model, average.module))
            assert not any(a is b for a, b in zip(own, theirs, strict=True))
            assert any(not torch.equal(a, b) for a, b in zip(own, theirs, strict=True))
    assert sizes == [14, 14, 10, 10]
    average.eval()
    assert average(VALIDATION[0]).shape == (100, 10)


def test_other_copies_are_named() -> None:
    """A copy that does not follow is told of once."""
    import copy

    model, optimizer, grower = make(policy=plan((1, "stage1", "conv_light"), (2, "stage2", "norm")))
    train_epoch(model, optimizer, DATA)
    best = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="a copy of the model was made before"):
        grower.step(loader(VALIDATION))
    train_epoch(model, optimizer, DATA, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grower.step(loader(VALIDATION))
    assert len(list(best.parameters())) == 10


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when the compiler is first imported
def test_compiled_before_growth() -> None:
    """It would bypass the slots."""
    model = BlindCNN()
    optimizer = sgd(model)
    with pytest.raises(BadValueError, match="compiled already"):
        Grower(cast(nn.Module, torch.compile(model, backend="eager")), optimizer, budget=1000)
    model.stage1.compile()
    with pytest.raises(BadValueError, match="'stage1' is compiled already"):
        Grower(model, optimizer, budget=1000)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_after_the_first_pass() -> None:
    """A compiled model grows like one that is not."""
    lines = {}
    for compiled in (False, True):
        torch._dynamo.reset()
        model, optimizer, grower = make(policy=plan((1, "stage1", "conv_light")))
        model(DATA[0][:2])
        runs = cast(nn.Module, torch.compile(model, backend="eager")) if compiled else model
        for epoch in range(3):
            train_epoch(runs, optimizer, DATA, epoch)
            lines[compiled] = str(grower.step(loader(VALIDATION)))
        grower.finish(keep=["stage1"])
        model.eval()
        lines[compiled] += f" {model(VALIDATION[0]).sum():.4f}"
    assert lines[False] == lines[True]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_models_are_calibrated(fullgraph: bool) -> None:
    """The last training batch is seen through the compiler too, so a seed can be dropped and norms be set anew."""
    torch._dynamo.reset()
    model, optimizer, grower = make(policy=plan((1, "stage1", "conv_light")))
    model.eval()
    model(DATA[0][:2])
    model.train()
    runs = cast(nn.Module, torch.compile(model, backend="eager", fullgraph=fullgraph))
    for epoch in range(2):
        train_epoch(runs, optimizer, DATA, epoch)
        grower.step(loader(VALIDATION))
    for parameter in getattr(model, CHILD).parameters():
        parameter.requires_grad_(False)
    torch._dynamo.reset()
    train_epoch(runs, optimizer, DATA, 2)
    with pytest.raises(BadValueError, match="got no gradient"):
        grower.step(loader(VALIDATION))
    norm = model.get_submodule("stage2.1")
    mean = norm.get_buffer("running_mean").clone()
    grower.finish(drop=["stage1"])
    assert not torch.equal(norm.get_buffer("running_mean"), mean)


def test_inference_mode() -> None:
    """The model may run first, and the grower step, where some trainers validate."""
    model, optimizer, grower = make(policy=plan((1, "stage1", "conv_light")))
    with torch.inference_mode():
        model(DATA[0][:2])
    for epoch in range(2):
        train_epoch(model, optimizer, DATA, epoch)
        with torch.inference_mode():
            record = grower.step(loader(VALIDATION))
    assert record.contributions
    train_epoch(model, optimizer, DATA, 2)
    with torch.inference_mode():
        grower.finish(loader(VALIDATION), keep=["stage1"])
    train_epoch(model, optimizer, DATA, 3)


@pytest.mark.parametrize("name", ["FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"])
def test_sharded_models(name: str) -> None:
    """Refused by name."""
    sharded = type(name, (nn.Sequential,), {})(nn.Linear(4, 4))
    with pytest.raises(BadValueError, match=name):
        Grower(sharded, sgd(sharded), budget=1000)


def test_data_parallel() -> None:
    """It would train copies of the seeds."""
    model = nn.DataParallel(BlindCNN())
    with pytest.raises(BadValueError, match=r"use DistributedDataParallel, or pass model\.module"):
        Grower(model, sgd(model), budget=1000)


def test_sharded_optimizers() -> None:
    """Refused by name."""
    model = BlindCNN()
    sharded = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})(model.parameters(), lr=0.1)
    with pytest.raises(BadValueError, match="ZeroRedundancyOptimizer"):
        Grower(model, sharded, budget=1000)
