"""Hosts and blueprints of plain torch layers in a fleet: through vmap, and equal to training them one by one."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from fleets import image_batches
from torch import Tensor, nn

from esper.kasmina import BlueprintRegistry, Host, Segment
from esper.kasmina.layers import RowCall, Statistics
from esper.leyline import SlotSpec
from esper.tolaria import HostFleet, HostTrainer, get_task


class Plain(Segment):
    """Layers of torch.nn that keep no state."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        return self.body(h), {}


def foreign_host() -> Host:
    """A small CNN without a layer of ours."""
    first = Plain(nn.Conv2d(1, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), nn.AvgPool2d(2))
    last = Plain(nn.Conv2d(6, 8, 3, padding=1), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    return Host([first, last], [SlotSpec("r0c0", 6, "image", position=0.5, resolution=4)])


class Wave(nn.Module):
    """A seed of plain torch layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.scale = nn.Parameter(torch.zeros(width, 1, 1))

    def forward(self, h: Tensor) -> Tensor:
        return self.scale * torch.sin(self.conv(h))


@pytest.fixture
def wave() -> Iterator[str]:
    """A user's blueprint, for this test alone."""
    BlueprintRegistry.register("image", "wave", lambda c: 9 * c * c + 2 * c)(Wave)
    yield "wave"
    BlueprintRegistry.unregister("image", "wave")


def test_who_takes_rows_as_they_are() -> None:
    """Layers of ours do, others do not."""
    assert RowCall(get_task("digits").build_host()).native
    assert not RowCall(foreign_host()).native


def test_foreign_hosts_and_seeds_equal_the_loop(wave: str) -> None:
    """Three hosts with seeds of both kinds, shadow and acting, in float64 to 1e-9 after eight minibatches."""
    task = replace(
        get_task("digits"), build_host=foreign_host, slot_ids=("r0c0",), budget=10_000, batches_per_step=2, batch=16
    )
    batches = image_batches(task)
    fleet = HostFleet(task, 3, batches=batches, dtype=torch.float64)
    lone = [HostTrainer(task, batches, seed, host=task.make_host(seed).double()) for seed in fleet.seeds]
    for env, trainer in enumerate(lone):
        if env < 2:
            fleet.germinate(env, "r0c0", ("wave", "conv_light")[env])
            trainer.model.germinate_seed("r0c0", ("wave", "conv_light")[env])
    for step in range(4):
        if step == 3:
            for env in range(2):
                fleet.advance(env, "r0c0")
                lone[env].model.advance("r0c0")
        for place in range(2):
            samples = fleet.draw(2 * step + place)
            fleet.train_minibatch(samples, 0.05)
            for env, trainer in enumerate(lone):
                for group in trainer.optimizer.wrapped.param_groups:
                    group["lr"] = 0.05
                trainer.optimizer.zero_grad()
                losses = trainer.model.losses(samples.inputs[env], samples.targets[env])
                torch.stack(list(losses.values())).sum().backward()
                trainer.optimizer.step()
        fleet._record_gradients()
        fleet.tick()
        for trainer in lone:
            trainer.tick()
    for env, trainer in enumerate(lone):
        ours, theirs = fleet.extract(env).state_dict(), trainer.model.state_dict()
        for name, tensor in theirs.items():
            assert (ours[name] - tensor).abs().max() <= 1e-9 * tensor.abs().max().clamp_min(1e-6), name
