"""Hardening: what comes out is plain torch, equals the model and can be trained on."""

import copy
from pathlib import Path

import pytest
import torch
from hardening import attached, close, cnn, count, gpt, images, plant, tokens, train

from esper.kasmina import BlueprintRegistry, CNNHost
from esper.kasmina.layers import Conv2d
from esper.kasmina.slot import Role
from esper.leyline import BLEND_STYLES, BadValueError, SeedStage, StageError, UnknownNameError

# -- equality ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", BLEND_STYLES)
@pytest.mark.parametrize("blueprint", BlueprintRegistry.names("image"))
def test_every_image_blueprint_in_every_style(blueprint: str, style: str) -> None:
    model = cnn()
    plant(model, "r0c0", blueprint, style)
    hardened = model.harden()
    with torch.no_grad():
        close(hardened(images()), model(images()))
        assert not torch.allclose(model(images()), model.host(images()))  # the seed matters
    assert count(hardened) == model.host_parameter_count + model.grown_parameter_count


@pytest.mark.parametrize("style", BLEND_STYLES)
@pytest.mark.parametrize("blueprint", BlueprintRegistry.names("tokens"))
def test_every_token_blueprint_in_every_style(blueprint: str, style: str) -> None:
    model = gpt()
    plant(model, "r0c1", blueprint, style)
    hardened = model.harden()
    with torch.no_grad():
        close(hardened(tokens()), model(tokens()))
    assert count(hardened) == model.host_parameter_count + model.grown_parameter_count


def test_three_slots_at_once_and_none() -> None:
    model = cnn()
    close(model.harden()(images()), model(images()))
    plant(model, "r0c0", "norm", "add")
    plant(model, "r1c0", "conv_heavy", "multiply")
    plant(model, "r1c1", "norm", "gate")
    close(model.harden()(images()), model(images()))


def test_conductance_is_built_in() -> None:
    model = cnn()
    plant(model, "r0c0", "conv_light")
    plant(model, "r0c1", "conv_light")
    host = model.host
    assert isinstance(host, CNNHost)
    host.conductance[0] = 0.0
    host.conductance[2] = 0.25
    hardened = model.harden()
    close(hardened(images()), model(images()))
    assert count(hardened) == model.host_parameter_count + model.grown_parameter_count


def test_a_masked_host_keeps_its_mask_in_training() -> None:
    model = cnn(masked=True)
    close(model.harden()(images()), model(images()))  # all taps are on: ordinary convolutions
    assert not any("mask" in name for name in model.harden().state_dict())
    host = model.host
    assert isinstance(host, CNNHost)
    for module in host.modules():
        if isinstance(module, Conv2d) and module.mask is not None:
            module.mask[..., 0] = 0
    plant(model, "r0c0", "depthwise")
    hardened = model.harden()
    close(hardened(images()), model(images()))
    outer = hardened.get_parameter("segment0.conv.weight")[..., 0, 0].clone()
    train(hardened, images(), torch.arange(8) % 5, steps=3)
    assert torch.equal(hardened.get_parameter("segment0.conv.weight")[..., 0, 0], outer)


def test_dtype_is_kept_and_the_model_is_left_alone() -> None:
    model = cnn().double().train()
    plant(model, "r0c0", "attention", "gate")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stream = torch.get_rng_state()
    hardened = model.harden()
    assert torch.equal(torch.get_rng_state(), stream)
    assert model.training and not hardened.training
    assert {p.dtype for p in hardened.parameters()} == {torch.float64}
    torch.testing.assert_close(hardened(images().double()), model.eval()(images().double()))
    train(hardened, images().double(), torch.arange(8) % 5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.gpu
def test_the_device_is_kept(tmp_path: Path) -> None:
    for model, slot_id in ((cnn(), "r0c0"), (attached(), "stem")):
        model.to("cuda")
        plant(model, slot_id, "depthwise", "gate")
        hardened = model.harden(tmp_path, example=images(2).cuda())
        assert {tensor.device.type for tensor in hardened.state_dict().values()} == {"cuda"}
        close(hardened(images().cuda()), model(images().cuda()))


# -- plain torch ------------------------------------------------------------------------------------------------------


def test_training_lowers_the_loss_and_moves_the_statistics() -> None:
    model = cnn()
    plant(model, "r0c0", "bottleneck", "multiply")
    hardened = model.harden()
    mean = hardened.get_buffer("segment2.norm.running_mean").clone()
    losses = train(hardened, images(), torch.arange(8) % 5)
    assert losses[-1] < losses[0]
    assert not torch.equal(hardened.get_buffer("segment2.norm.running_mean"), mean)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in hardened.parameters())


def test_batch_norm_moves_as_the_model_does() -> None:
    model = cnn()
    hardened = model.harden().train()
    hardened(images(rng_seed=9))
    model.train()(images(rng_seed=9))
    for name in ("running_mean", "running_var"):
        theirs = model.get_buffer(f"body.host.segments.0.norm.{name}")
        close(hardened.get_buffer(f"segment0.norm.{name}"), theirs)


def test_nothing_in_it_is_ours() -> None:
    model = cnn()
    plant(model, "r0c0", "depthwise", "gate")
    for module in model.harden().modules():
        assert not any(kind.__module__.startswith("esper") for kind in type(module).__mro__)


def test_a_hardened_network_can_be_copied_compiled_exported_and_hardened_anew(tmp_path: Path) -> None:
    model = cnn()
    plant(model, "r0c0", "depthwise")
    hardened = model.harden(tmp_path)
    first = (tmp_path / "network.py").read_text()
    close(copy.deepcopy(hardened)(images()), hardened(images()))
    compiled = torch.compile(hardened, backend="eager", fullgraph=True)
    close(compiled(images()), hardened(images()))
    program = torch.export.export(hardened, (images(),)).module()
    close(program(images()), hardened(images()))
    model.harden(tmp_path)
    assert (tmp_path / "network.py").read_text() == first


# -- which seeds stay -------------------------------------------------------------------------------------------------


def test_seeds_that_are_no_fossils_are_refused_by_name() -> None:
    model = cnn()
    plant(model, "r0c0", "norm")
    plant(model, "r1c0", "norm", stage=SeedStage.TRAINING)
    plant(model, "r0c1", "norm", stage=SeedStage.HOLDING)
    with pytest.raises(StageError, match=r"r1c0 \(TRAINING\), r0c1 \(HOLDING\).*drop="):
        model.harden()
    with pytest.raises(StageError, match=r"r1c0 \(TRAINING\)"):
        model.harden(keep=["r0c1"])


@pytest.mark.parametrize(
    ("keep", "drop", "error", "message"),
    [
        (("r9c9",), (), UnknownNameError, "r9c9"),
        ((), ("r9c9",), UnknownNameError, "r9c9"),
        (("r0c1",), ("r0c1",), BadValueError, "both keep and drop"),
        ((), ("r0c0",), StageError, "a fossil is permanent"),
        (("r1c0",), (), StageError, r"TRAINING: its seed does not act yet \(alpha 0\)"),
        (("r1c1",), (), StageError, "DORMANT and holds no seed"),
    ],
)
def test_refusals(keep: tuple[str, ...], drop: tuple[str, ...], error: type[Exception], message: str) -> None:
    model = cnn()
    plant(model, "r0c0", "norm")
    plant(model, "r1c0", "norm", stage=SeedStage.TRAINING)
    plant(model, "r0c1", "norm", stage=SeedStage.HOLDING)
    with pytest.raises(error, match=message):
        model.harden(keep=keep, drop=drop)


def test_an_acting_seed_can_be_kept_at_its_present_alpha() -> None:
    model = cnn()
    plant(model, "r0c0", "conv_light", stage=SeedStage.BLENDING, alpha=1 / 3)
    hardened = model.harden(keep="r0c0")
    close(hardened(images()), model(images()))
    assert count(hardened) == model.host_parameter_count + model.grown_parameter_count


def test_dropping_a_silent_seed_needs_no_calibration() -> None:
    model = cnn()
    plant(model, "r0c0", "conv_light", stage=SeedStage.TRAINING)
    hardened = model.harden(drop=["r0c0", "r1c1"])  # an empty slot is dropped without ado
    close(hardened(images()), model(images()))
    assert count(hardened) == model.host_parameter_count


def test_dropping_an_acting_seed_recalibrates_the_export_alone() -> None:
    model = cnn()
    plant(model, "r0c0", "conv_light", stage=SeedStage.HOLDING)
    plant(model, "r0c1", "depthwise")
    with pytest.raises(BadValueError, match="calibration="):
        model.harden(drop=["r0c0"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    calibration = images(64, rng_seed=5)
    hardened = model.harden(drop=["r0c0"], calibration=calibration)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    roles = {"r0c0": Role.SILENT}
    statistics = model.body.calibrate(calibration, roles)
    close(hardened(images()), model.body.evaluate(images(), roles, statistics))
    close(hardened.get_buffer("segment2.norm.running_mean"), statistics["host.segments.2.norm.running_mean"])
    assert count(hardened) == model.host_parameter_count + sum(p.numel() for p in model.seed_parameters("r0c1"))


def test_a_host_without_statistics_needs_no_calibration() -> None:
    model = gpt()
    plant(model, "r0c0", "mlp", stage=SeedStage.HOLDING)
    close(model.harden(drop=["r0c0"])(tokens()), model.body.evaluate(tokens(), {"r0c0": Role.SILENT}, None))
