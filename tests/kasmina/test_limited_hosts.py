"""Hosts whose blocks compute less than they could: smaller kernels, fewer channels."""

from pathlib import Path

import pytest
import torch
from hardening import close, cnn, count, images, plant, run_without_esper, train

from esper.kasmina import CNNHost, MorphogeneticModel
from esper.leyline import BadValueError, SeedStage

SLOTS = ("r0c0", "r1c0", "r1c1")


def host_of(model: MorphogeneticModel) -> CNNHost:
    """Its host, as the type that it is."""
    assert isinstance(model.host, CNNHost)
    return model.host


def limited(*planted: str) -> MorphogeneticModel:
    """8 channels of which 2 live, 3×3; then 16 of which all live, 1×1. Seeds in these slots."""
    model = cnn(masked=True, slots=SLOTS)
    host = host_of(model)
    host.limit(0, channels=2)
    host.limit(1, centre_only=True)
    for slot_id in planted:
        plant(model, slot_id, "conv_light")
    return model


def test_masked_channels_are_silent() -> None:
    host = host_of(limited())
    h, _ = host.run_segment(0, images(), train=False)
    assert h[:, :2].abs().sum() > 0
    assert not h[:, 2:].any()


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_a_limited_host_computes_what_a_smaller_one_does(train: bool) -> None:
    """With the same weights; its gradients are those of the smaller one, and zero elsewhere."""
    host = host_of(limited())
    small = CNNHost((2, 16), resolution=8, classes=5)
    with torch.no_grad():
        for name, value in small.state_dict().items():
            whole = host.state_dict()[name]
            if name == "segments.2.conv.weight":
                whole = whole * host.state_dict()["segments.2.conv.mask"]
            value.copy_(whole[tuple(slice(0, size) for size in value.shape)])
    outputs = [network.run(images(), train)[0] for network in (host, small)]
    close(*outputs)
    for output in outputs:
        output.square().sum().backward()
    for name, parameter in small.named_parameters():
        own = host.get_parameter(name).grad
        assert own is not None
        assert parameter.grad is not None
        part = own[tuple(slice(0, size) for size in parameter.shape)]
        if name != "segments.2.conv.weight":  # whose outer taps the small one has
            torch.testing.assert_close(part, parameter.grad, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(own.abs().sum(), part.abs().sum())


# (in·taps + norm)·out per block, then the classifier; a seed behind the first block revives what reads its channels.
@pytest.mark.parametrize(
    ("planted", "parameters"),
    [
        ((), 2 * (27 + 2) + 16 * (2 * 1 + 2) + 5 * 17),
        (("r1c1",), 2 * (27 + 2) + 16 * (2 * 1 + 2) + 5 * 17),
        (("r1c0",), 2 * (27 + 2) + 16 * (8 * 1 + 2) + 5 * 17),
        (("r0c0", "r1c0"), 2 * (27 + 2) + 16 * (8 * 1 + 2) + 5 * 17),
    ],
)
def test_only_live_parameters_count_and_are_exported(planted: tuple[str, ...], parameters: int) -> None:
    model = limited(*planted)
    assert host_of(model).live_parameters(planted) == parameters
    hardened = model.harden()
    close(hardened(images()), model(images()))
    assert count(hardened) == parameters + model.grown_parameter_count
    assert not any("mask" in name for name in hardened.state_dict())


def test_the_folder_of_a_limited_network_needs_no_esper(tmp_path: Path) -> None:
    hardened = limited("r1c0").harden(tmp_path)
    known = images(), hardened(images()), torch.arange(8) % 5
    assert run_without_esper(tmp_path, "network", "network = load(folder)", *known) == count(hardened)


def test_statistics_without_a_dropped_seed_are_carved_too() -> None:
    model = limited()
    plant(model, "r1c0", "conv_light", stage=SeedStage.HOLDING)
    hardened = model.harden(drop="r1c0", calibration=images(64, rng_seed=9))
    bare = limited()
    statistics = bare.body.calibrate(images(64, rng_seed=9), {})
    for name, value in statistics.items():
        bare.body.get_buffer(name).copy_(value)
    close(hardened(images()), bare(images()))


def test_a_hardened_limited_network_trains() -> None:
    hardened = limited("r1c0").harden()
    losses = train(hardened, images(), torch.arange(8) % 5)
    assert losses[-1] < losses[0]


def test_all_of_an_unlimited_host_counts() -> None:
    host = CNNHost((4, 8), masked=True)
    assert host.live_parameters() == host.live_parameters(("r1c0",)) == count(host)


@pytest.mark.parametrize("channels", [0, 9])
def test_a_width_that_the_block_does_not_have_is_refused(channels: int) -> None:
    with pytest.raises(BadValueError, match=f"channels {channels} must be between 1 and the block's width, 8"):
        CNNHost((8, 16), masked=True).limit(0, channels=channels)


def test_only_masked_hosts_can_be_limited() -> None:
    with pytest.raises(BadValueError, match="masked=True"):
        CNNHost((8, 16)).limit(0, channels=2)
