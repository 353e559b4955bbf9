"""Fleets with more numbers in one activation than 31 bits can count."""

from argparse import Namespace
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

N, FEW = 1024, 8


def test_hosts_train_as_in_a_small_fleet(
    script_of: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,024 hosts × 256 images × 32×32 pixels × 8 channels are 2³¹ numbers behind the first convolution. The last hosts
    lie behind all others there, and grow."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    make_fleet = script_of("fleet_throughput").make_fleet

    def outcome(n: int) -> list[Tensor]:
        fleet = make_fleet(Namespace(device="cuda", bf16=False), n, 256, graphs=False)
        fleet.reset([*range(FEW)] * (n // FEW))
        for env in range(n - FEW, n):
            fleet.germinate(env, "r1c0", "conv_light")
            fleet.advance(env, "r1c0")
        losses = [fleet.train_minibatch(fleet.draw(index), 0.05)[-FEW:].cpu() for index in range(3)]
        return [*losses, fleet.norms["r1c0", "conv_light"][-FEW:].cpu()]

    for many, few in zip(outcome(N), outcome(FEW), strict=True):
        assert bool((few > 0).all())
        torch.testing.assert_close(many, few, rtol=1e-3, atol=1e-5)
