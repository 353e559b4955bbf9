"""Controls of a policy: its architectures from scratch, and static hosts of equal size."""

from dataclasses import replace
from itertools import islice

import pytest
import torch
from simic.training.tiny import tiny_task
from torch import nn

from esper.kasmina import CNNHost, GPTHost, GrowingOptimizer, Host
from esper.leyline import BadValueError, SeedStage, head_preset
from esper.simic.evaluation import yardsticks
from esper.simic.evaluation.arena import Arena
from esper.simic.evaluation.results import Fossil, Result
from esper.simic.evaluation.yardsticks import install, retrain, static_hosts, train_static
from esper.simic.training.hosts import Groups, host_seed
from esper.tolaria import HostFleet, Task, get_task
from esper.tolaria.engine import HostTrainer, make_optimizer


def varied() -> Task:
    """`digits_varied` as small as the tiny task."""
    return replace(get_task("digits_varied"), steps=4, batches_per_step=2, batch=16, calibration_size=64)


SEEDS = [host_seed("evaluation", 7, number) for number in range(3)]


def grown(arena: Arena, fossils: list[list[Fossil]]) -> Result:
    """The result of a policy that ended with these fossils, beside controls of the same hosts."""
    offers = {
        (slot.slot_id, offer.name): offer.parameters
        for slot in arena.task.slot_config.slots
        for offer in slot.blueprints
    }
    added = [sum(offers[fossil.slot_id, fossil.blueprint] for fossil in host) for host in fossils]
    n = len(fossils)
    runner = arena.runner(Groups(n, 1))
    fleet = runner.fleet
    fleet.reset(runner.groups.spread(SEEDS[:n]))
    for _ in range(arena.task.steps):
        fleet.train_step()
        fleet.tick()
    right = [float(100 * row.hits.float().mean()) for row in fleet.validate_committed(final=arena.final)]
    return Result([0.0] * n, [0.0] * n, right[1::2], added, fossils)


def test_retrained_hosts_have_their_fossils_from_the_first_minibatch() -> None:
    """Trained together in a fleet or each as a network of its own: the same."""
    task = tiny_task()
    fleet = HostFleet(task, 2, seeds=[11, 12])
    install(fleet, 0, [Fossil("r1c0", "depthwise"), Fossil("r1c2", "conv_small", "multiply", 0.5)])
    states = fleet.states[0]
    assert [states[slot_id].stage for slot_id in task.slot_ids] == [
        SeedStage.FOSSILIZED, SeedStage.DORMANT, SeedStage.FOSSILIZED,
    ]  # fmt: skip
    assert (states["r1c0"].alpha, states["r1c2"].alpha, states["r1c2"].style) == (1.0, 0.5, "multiply")
    alone = HostTrainer(task, fleet.batches, 11)
    alone.model = fleet.extract(0)
    alone.optimizer = GrowingOptimizer(alone.model, make_optimizer(task.optimiser), clip_norm=task.optimiser.clip_norm)
    before = {name: tensor.clone() for name, tensor in alone.model.named_parameters()}
    alone.train_step()
    fleet.train_step()
    after = dict(fleet.extract(0).named_parameters())
    moved = [name for name, tensor in alone.model.named_parameters() if not torch.equal(tensor, before[name])]
    assert any("r1c0" in name for name in moved), "seeds learn"
    for name, tensor in alone.model.named_parameters():
        torch.testing.assert_close(tensor, after[name], rtol=1e-4, atol=1e-5)


def test_controls_where_nothing_was_grown_are_the_control() -> None:
    """To the bit; and where something was, retrained and static hosts are others."""
    arena = Arena(varied(), head_preset("core"))
    base = grown(arena, [[], [Fossil("r1c0", "depthwise")], [Fossil("r1c1", "depthwise")]])
    for control, added in ((retrain, [0, 64, 160]), (train_static, None)):
        found = control(arena, SEEDS, base)
        assert found.control_accuracy == base.control_accuracy
        assert (found.accuracy[0], found.objective[0], found.added_params[0]) == (base.control_accuracy[0], 0.0, 0)
        assert found.added_params == added or control is train_static
        assert found.work["training"][0] == pytest.approx(1.0)
        assert found.work["training"][2] > 1.0
        assert found.cost[0] < 3, "no step was measured, none probed"
    assert abs(found.added_params[2] - 160) <= 42, "half of what a channel of the last block adds: 8·9 + 2 + 10"
    assert found.fossils == [[], [], []]


def test_controls_are_scored_on_test_images_in_a_final_evaluation() -> None:
    """397 of them: an accuracy is a multiple of 1/397."""
    arena = Arena(varied(), head_preset("core"), final=True)
    base = grown(arena, [[Fossil("r1c0", "norm")], []])
    for control in (retrain, train_static):
        for accuracy in control(arena, SEEDS[:2], base).accuracy:
            assert accuracy * 3.97 == pytest.approx(round(accuracy * 3.97), abs=1e-3)


def test_static_hosts_come_as_near_as_they_can() -> None:
    """No other of the ladder is nearer; equal sizes are one architecture; what is not grown is not widened."""
    task = tiny_task()
    ladder = [_size(build()) for rung in islice(yardsticks._wider(task.build_host()), 60) for build in rung]
    added = [0, 64, 150, 652, 64, 1560]
    built = static_hosts(task, added)
    assert built[1] is built[4]
    for more, build in zip(added, built, strict=True):
        wanted = task.host_parameters + more
        assert abs(_size(build()) - wanted) == min(abs(size - wanted) for size in ladder) <= 15
    assert _size(built[0]()) == task.host_parameters


def test_widths_grow_by_one_factor() -> None:
    """By hand: the next block to be rounded up is that with the smallest (width + ½)/bare: 16.5/16, 8.5/8, 17.5/16,
    then 4.5/4 = 1.125."""
    found = list(islice(yardsticks._widths([4, 8, 16]), 5))
    assert found == [[4, 8, 16], [4, 8, 17], [4, 9, 17], [4, 9, 18], [5, 9, 18]]
    assert list(islice(yardsticks._widths([4, 4]), 3)) == [[4, 4], [5, 5], [6, 6]]


def test_static_hosts_keep_what_is_wrong_with_them() -> None:
    """A wider blind host is blind."""
    task = varied()
    (build,) = static_hosts(task, [160])
    wide = replace(task, build_host=build, defects=("blind",)).make_host(3)
    mask = wide.segments[0].conv.mask  # type: ignore[union-attr]  # a convolution
    assert isinstance(mask, torch.Tensor)
    assert mask.sum() == 1
    assert isinstance(wide, CNNHost)
    assert wide.slots[-1].width > 16


def test_language_hosts_widen_by_heads() -> None:
    small = replace(get_task("shakespeare_char"), build_host=lambda: GPTHost(2, 8, 2, 16, 65))
    (build,) = static_hosts(small, [2000])
    host = build()
    assert isinstance(host, GPTHost)
    assert (host.config() or {})["width"] == 12
    assert abs(_size(host) - small.host_parameters - 2000) < _size(GPTHost(2, 10, 2, 16, 65)) - small.host_parameters


def test_foreign_hosts_cannot_be_widened() -> None:
    class Foreign(Host):
        def __init__(self) -> None:
            inner = CNNHost((4,), 1, 1, 10, in_channels=1, resolution=8)
            super().__init__(list(inner.segments), inner.slots)  # type: ignore[arg-type]  # they are segments

    with pytest.raises(BadValueError, match="a Foreign cannot be widened"):
        static_hosts(replace(tiny_task(), build_host=Foreign, slot_ids=("r1c0",)), [0])


def _size(host: nn.Module) -> int:
    return sum(parameter.numel() for parameter in host.parameters())
