"""check_host: sound hosts pass, and each kind of unsound one is told what is wrong with it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina import CNNHost, GPTHost, Host, Segment, check_host
from esper.kasmina.layers import Conv2d, Linear, Statistics, named_statistics
from esper.kasmina.norms import BatchNorm2d
from esper.leyline import BadValueError, HostMismatchError, SlotSpec


class Stretch(Segment):
    """A segment around one function or layer without statistics."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        return self.layer(h), {}


class NormStretch(Segment):
    """A convolution and a norm that misnames its statistics where it is told to."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.conv, self.norm, self.prefix = Conv2d(3, 4, 1), BatchNorm2d(4), prefix

    def forward(self, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        h, result = self.norm(self.conv(h), train)
        return h.mean((-2, -1)), named_statistics(self.prefix, result)


class Forgetful(nn.Module):
    """Row-aware layers around something that mixes the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Linear(4, 4)

    def forward(self, h: Tensor) -> Tensor:
        return self.linear(h - h.flatten().mean())


class Applied(nn.Module):
    """A foreign host: a layer and a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


def vectors(first: nn.Module, second: nn.Module, width: int = 4) -> Host:
    return Host([Stretch(first), Stretch(second)], [SlotSpec("middle", width, "vector", 0.5)])


@pytest.mark.parametrize(
    "host",
    [CNNHost((4, 8), resolution=8, masked=True), CNNHost((4,), pools=0, resolution=5), GPTHost(2, 16, 2, 6, 9)],
    ids=["masked", "no pools", "gpt"],
)
def test_built_in_hosts_are_native(host: Host) -> None:
    stream, before = torch.get_rng_state(), {name: tensor.clone() for name, tensor in host.state_dict().items()}
    report = check_host(host)
    assert (report.rows, report.detail, report.dead, report.sound) == ("native", "vectorised", (), True)
    assert report.slots == tuple(spec.slot_id for spec in host.slots)
    assert report.parameters == sum(parameter.numel() for parameter in host.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in host.state_dict().items())
    assert torch.equal(stream, torch.get_rng_state())


def test_an_example_and_targets_can_be_given() -> None:
    x, targets = torch.randn(5, 3, 8, 8), torch.randint(10, (5,))
    assert check_host(CNNHost((4, 8), resolution=8), x, targets).sound
    assert check_host(GPTHost(2, 16, 2, 6, 9), torch.randint(9, (3, 4))).sound
    with pytest.raises(BadValueError, match="Applied does not say what it takes: pass example="):
        check_host(Applied(F.relu))


def test_a_segment_that_does_not_fit_is_named() -> None:
    with pytest.raises(HostMismatchError, match=r"segment 1 \(Stretch\) cannot take its input of shape \(2, 4\)"):
        check_host(vectors(Linear(3, 4), Linear(5, 2)), torch.randn(2, 3))
    with pytest.raises(HostMismatchError, match=r"segment 0 \(Stretch\) must return"):
        check_host(vectors(nn.LSTM(3, 4), Linear(4, 2)), torch.randn(2, 3))
    host = Host([NormStretch("nrom"), Stretch(Linear(4, 2))], [SlotSpec("middle", 4, "vector", 0.5)])
    with pytest.raises(HostMismatchError, match=r"statistics \['nrom.running_mean'.*its buffers are \['norm.running"):
        check_host(host, torch.randn(4, 3, 2, 2))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            SlotSpec("here", 5, "image", 0.5, 6),
            r"'here' after segment 0 \(Stretch\): declared with width 5, but it is 4",
        ),
        (SlotSpec("here", 4, "tokens", 0.5), r"declared as tokens, but image of shape \(2, 4, 6, 6\)"),
        (SlotSpec("here", 4, "image", 0.5, 7), r"declared with resolution 7, but a tensor of shape \(2, 4, 6, 6\)"),
    ],
)
def test_a_slot_that_is_declared_wrongly_is_named(spec: SlotSpec, message: str) -> None:
    host = Host([Stretch(Conv2d(3, 4, 3)), Stretch(Conv2d(4, 2, 3))], [spec])
    with pytest.raises(HostMismatchError, match=message):
        check_host(host, torch.randn(2, 3, 6, 6))


def test_there_is_no_dropout_in_a_fleet() -> None:
    noisy = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    with pytest.raises(HostMismatchError, match=r"segments.0.layer.1 of Host is a Dropout that draws"):
        check_host(vectors(noisy, Linear(4, 2)), torch.randn(3, 4))
    with pytest.raises(HostMismatchError, match=r"no dropout in a fleet: Host draws"):
        check_host(vectors(Applied(lambda h: F.dropout(h, 0.5)), Linear(4, 2)), torch.randn(3, 4))
    report = check_host(Applied(lambda h: F.dropout(h, 0.5)), torch.randn(3, 4))
    assert report.rows == "error" and report.detail.startswith("no dropout in a fleet")
    assert check_host(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)), torch.randn(3, 4)).sound


class TrainOnly(Stretch):
    """A segment that fails outside training."""

    def forward(self, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        if not train:
            raise RuntimeError("no statistics yet")
        return super().forward(h, train)


def test_a_segment_that_fails_in_eval_mode_is_reported() -> None:
    host = Host([TrainOnly(Linear(4, 4)), Stretch(Linear(4, 2))], [SlotSpec("middle", 4, "vector", 0.5)])
    report = check_host(host, torch.randn(3, 4))
    assert report.rows == "error" and "no statistics yet" in report.detail


def test_parameters_that_cannot_learn_are_listed() -> None:
    biased = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(16, 3, 6, 6)
    biased(x)
    assert check_host(biased, x).dead == ("0.bias",)
    unused = Applied(F.relu)
    unused.register_parameter("extra", nn.Parameter(torch.zeros(3)))
    report = check_host(unused, torch.randn(8, 4))
    assert report.dead == ("extra",) and not report.sound
    infinite = check_host(Applied(lambda h: h * float("inf")), torch.randn(8, 4))
    assert infinite.dead == ("linear.weight", "linear.bias")
    frozen = Applied(F.relu)
    frozen.linear.bias.requires_grad_(False)
    assert check_host(frozen, torch.randn(8, 4)).dead == ()


@pytest.mark.parametrize(
    ("function", "rows", "detail"),
    [
        (F.gelu, "vmap", "vectorised"),
        (lambda h: torch.renorm(h, 2, 0, 1.0), "fallback", "fallback for aten::renorm"),
        (lambda h: h * h.detach().max().item(), "error", r"RuntimeError: vmap: It looks like you're calling .item()"),
    ],
    ids=["vmap", "fallback", "error"],
)
def test_foreign_hosts_go_through_vmap(function: Callable[[Tensor], Tensor], rows: str, detail: str) -> None:
    report = check_host(Applied(function), torch.randn(8, 4))
    assert report.rows == rows and report.detail.startswith(detail)


def test_foreign_batch_norm_and_foreign_segments_are_vectorised_by_vmap() -> None:
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)
    )
    assert check_host(network, torch.randn(8, 3, 6, 6)).rows == "vmap"
    assert check_host(vectors(nn.Linear(4, 4), Linear(4, 2)), torch.randn(3, 4)).rows == "vmap"


def test_rows_that_see_each_other_are_not_native() -> None:
    """Its layers are row-aware, but the mean is taken over all rows; vmap keeps them apart."""
    report = check_host(vectors(Forgetful(), Linear(4, 2)), torch.randn(3, 4))
    assert report.rows == "vmap"
