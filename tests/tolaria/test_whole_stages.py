"""Fleets whose banks act through kernels of whole stages, against the same fleets with a kernel per operation."""

import pytest
import torch
from fleets import SGD, make_fleet, shake, task_of
from torch.profiler import ProfilerActivity, profile

from esper.tolaria import HostFleet
from esper.tolaria.banks import Bank

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def trained(minibatches: int = 3) -> HostFleet:
    """A fleet with seeds in every stage, after some minibatches."""
    fleet = make_fleet(task_of("cnn", SGD), device=CUDA)
    fleet.graphs = None
    shake(fleet)
    for index in range(minibatches):
        fleet.train_minibatch(fleet.draw(index), 0.01)
    return fleet


def test_equals_a_kernel_per_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of hosts and seeds, norms of gradients, and what a validation says, in float32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    whole = trained()
    assert any(bank.program is not None for bank in whole.banks.values())
    with monkeypatch.context() as patch:
        patch.setattr(Bank, "runs_whole", lambda bank, h: False)
        plain = trained()
        wanted = plain.validate()
    assert whole.norms.keys() == plain.norms.keys()
    for key, norms in plain.norms.items():
        torch.testing.assert_close(whole.norms[key], norms, rtol=1e-3, atol=1e-5)
        mine, its = (fleet.banks[key].weights.matrix for fleet in (whole, plain))
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole.host.weights.matrix, plain.host.weights.matrix, rtol=1e-4, atol=1e-5)
    for found, expected in zip(whole.validate(), wanted, strict=True):
        assert found.main.loss == pytest.approx(expected.main.loss, rel=1e-3)


def test_a_bank_is_few_kernels() -> None:
    """At most 12 forward, backward and step together."""
    fleet = trained()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as profiled:
        fleet.train_minibatch(fleet.draw(3), 0.01)
    own = ("stage_forward", "stage_backward", "kernel_gradient", "squeeze_", "sum_splits", "_sgd_kernel")
    kernels = [event.name for event in profiled.events() if event.device_type.name == "CUDA"]
    launched = [name for name in kernels if name.startswith(own)]
    assert launched
    assert len(launched) <= 12 * len(fleet.busy_banks()) + 1, "and one step of the hosts"
