"""Everything is measured on the device and read once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simic.telemetry.remote import remote, watched_device
from torch import Tensor

from esper.simic.telemetry import (
    RatioExplosionDiagnostic,
    collect_gradients,
    compute_lstm_health,
    measure_gradients,
    observation_statistics,
)
from esper.simic.telemetry.measurements import fetch

HEADS = ("op", "slot")
LEAKS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda tensor: tensor.sum().item(),
    "float": lambda tensor: float(tensor[0]),
    "bool": lambda tensor: bool((tensor > 0).any()),
    "cpu": lambda tensor: tensor.cpu(),
    "to": lambda tensor: tensor.to("cpu", torch.float64),
    "nonzero": lambda tensor: tensor.nonzero(),
    "mask": lambda tensor: tensor[tensor > 0],
    "equal": lambda tensor: torch.equal(tensor, tensor),
}
BYPASSES: dict[str, Callable[[Tensor], object]] = {
    "tolist": lambda tensor: tensor.tolist(),
    "numpy": lambda tensor: tensor.numpy(),
}


def damaged(*shape: int) -> Tensor:
    """Numbers with a NaN, infinities and zeros among them."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    flat = values.flatten()
    flat[0], flat[3], flat[5], flat[7] = torch.nan, torch.inf, -torch.inf, 0.0
    return flat.view(shape)


@pytest.mark.parametrize("name", LEAKS)
def test_the_watch_sees(name: str) -> None:
    """Every way to read a number is written down."""
    with watched_device() as watch:
        LEAKS[name](remote(torch.ones(3)))
    assert len(watch.reads) == 1


@pytest.mark.parametrize("name", BYPASSES)
def test_nothing_bypasses_the_watch(name: str) -> None:
    """What cannot be seen fails."""
    with watched_device(), pytest.raises(RuntimeError, match="not supported"):
        BYPASSES[name](remote(torch.ones(3)))


def test_work_on_the_device_is_no_read() -> None:
    """Sums, factories and copies within the device."""
    with watched_device() as watch:
        tensor = remote(torch.ones(3))
        made = torch.zeros(2, device=tensor.device)
        total = (tensor.double().sum() + made.sum()).to(tensor.device)
        assert watch.reads == []
        assert float(total) == 3.0
    assert len(watch.reads) == 1


def ratio_report(place: Callable[[Tensor], Tensor]) -> object:
    """A diagnostic with more offenders than room."""
    ratios = damaged(4, 3, 2).exp()
    actions = torch.arange(24).view(4, 3, 2)
    mask = torch.ones(4, 3, 2, dtype=torch.bool)
    diagnostic = RatioExplosionDiagnostic(high=1.5, low=0.7, cap=4)
    report = diagnostic(place(ratios), place(mask), place(actions), HEADS)
    return repr(report)  # NaN is not equal to itself


def gradient_report(place: Callable[[Tensor], Tensor]) -> object:
    """Gradients of a policy's modules."""
    named: dict[str, Tensor | None] = {f"heads.op.{index}": place(damaged(3, 4)) for index in range(3)}
    return collect_gradients({**named, "lstm.weight": place(damaged(20)), "critic.bias": None})


def lstm_report(place: Callable[[Tensor], Tensor]) -> object:
    """A memory with faults."""
    return compute_lstm_health((place(damaged(5, 6)), place(damaged(5, 6) * 3)))


def column_report(place: Callable[[Tensor], Tensor]) -> object:
    """Observations with faults."""
    return observation_statistics(place(damaged(6, 5, 3)), ["a", "b"], torch.tensor([0, 1, 1]), bound=1.0)


@pytest.mark.requirement(6, 33, 80)
@pytest.mark.parametrize(
    "report",
    [
        pytest.param(ratio_report, id="ratios"),
        pytest.param(gradient_report, id="gradients"),
        pytest.param(lstm_report, id="lstm"),
        pytest.param(column_report, id="observations"),
    ],
)
def test_one_transfer(report: Callable[[Callable[[Tensor], Tensor]], Any]) -> None:
    """Each report takes one read and equals the report on the CPU."""
    with watched_device() as watch:
        far = report(remote)
    assert watch.reads == ["_to_copy to cpu"]
    assert far == report(lambda tensor: tensor)


@pytest.mark.requirement(6)
def test_measuring_reads_nothing() -> None:
    """Gradients cost no transfer until the report is requested."""
    with watched_device() as watch:
        figures = measure_gradients({"lstm.weight": remote(damaged(8)), "critic.weight": remote(damaged(8))})
    assert watch.reads == []
    assert len(figures) == 2


class separate_devices(watched_device):  # noqa: N801  # used as a context, like torch.no_grad
    """The watched device, which refuses to join its tensors with those of the CPU, as real ones do."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ in ("cat", "stack"):
            devices = {tensor.device for tensor in args[0]}
            assert len(devices) == 1, f"tensors on {devices} in one {function.overloadpacket.__name__}"
        return super().__torch_dispatch__(function, types, args, kwargs)


@pytest.mark.requirement(44)
def test_a_module_on_two_devices_is_measured_where_it_lies() -> None:
    """Each device measures its own gradients, one read brings both, and the report is that of one module."""
    near, far = damaged(3, 4), damaged(20)
    with separate_devices() as watch:
        places = measure_gradients({"lstm.a": near, "lstm.b": remote(far)})
        devices = {place: figures.device.type for place, figures in places.items()}
        report = collect_gradients({"lstm.a": near, "lstm.b": remote(far)})
    assert devices == {("lstm", "cpu"): "cpu", ("lstm", "lazy"): "lazy"}
    assert watch.reads == ["_to_copy to cpu"]
    assert report == collect_gradients({"lstm.a": near, "lstm.b": far})


@pytest.mark.requirement(44)
def test_tensors_of_two_devices_are_read_once() -> None:
    """Tensors are gathered on the accelerator and read in one transfer."""
    near = torch.tensor([1.0, 2.0])
    with watched_device() as watch:
        numbers = fetch(near, remote(torch.tensor([[3]])), remote(torch.tensor(4)))
    assert watch.reads == ["_to_copy to cpu"]
    assert [tensor.tolist() for tensor in numbers] == [[1.0, 2.0], [[3.0]], 4.0]
    assert all(tensor.dtype is torch.float64 for tensor in numbers)
