"""Hardening: what comes out is plain torch, equals the model, loads without Esper and can be trained on."""

import copy
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina import BlueprintRegistry, CNNHost, GPTHost, Host, MorphogeneticModel, SeedState, Segment
from esper.kasmina.alpha import AlphaController
from esper.kasmina.attach import attach
from esper.kasmina.export import ExportError
from esper.kasmina.layers import BatchNorm2d, Conv2d, Linear, Scale, Statistics, named_statistics
from esper.kasmina.slot import Role
from esper.leyline import (
    ACTIVE_STAGES,
    BLEND_STYLES,
    BadValueError,
    CheckpointError,
    SeedStage,
    SlotSpec,
    StageError,
    UnknownNameError,
)

SIDE = 8
VOCAB, BLOCK = 11, 6


def close(hardened: Tensor, model: Tensor) -> None:
    torch.testing.assert_close(hardened, model, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def plant(
    model: MorphogeneticModel,
    slot_id: str,
    blueprint: str,
    style: str = "add",
    *,
    stage: SeedStage = SeedStage.FOSSILIZED,
    alpha: float = 0.7,
) -> None:
    """A seed at the given stage, as if it had been trained: all its weights are noise."""
    alpha = alpha if stage in ACTIVE_STAGES else 0.0
    controller = AlphaController(alpha=alpha, start=alpha, target=alpha)
    state = SeedState(slot_id, stage, blueprint, style=style, controller=controller)
    slot = model.body.slot(slot_id)
    slot.plant(state, rng_seed=3, like=next(model.host_parameters()))
    for parameter in slot.parameters():
        parameter.normal_(std=0.4)


def images(count: int = 8, rng_seed: int = 0) -> Tensor:
    return torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(rng_seed))


def tokens(count: int = 4) -> Tensor:
    return torch.randint(0, VOCAB, (count, BLOCK), generator=torch.Generator().manual_seed(0))


def cnn(*, masked: bool = False, slots: tuple[str, ...] | None = None) -> MorphogeneticModel:
    """A small host whose running statistics are no longer those of birth."""
    torch.manual_seed(0)
    model = MorphogeneticModel(CNNHost((8, 16), resolution=SIDE, classes=5, masked=masked), slots)
    for step in range(5):
        model.train()(3 * images(rng_seed=step) + 1)
    return model.eval()


def gpt(layers: int = 3) -> MorphogeneticModel:
    torch.manual_seed(0)
    return MorphogeneticModel(GPTHost(layers, 8, 2, BLOCK, VOCAB)).eval()


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


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
    host.blind()
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


# -- plain torch ------------------------------------------------------------------------------------------------------


def train(network: nn.Module, x: Tensor, targets: Tensor, steps: int = 10) -> list[float]:
    network.train()
    optimiser = torch.optim.SGD(network.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = F.cross_entropy(network(x).flatten(0, -2), targets.flatten())
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


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


WITHOUT_ESPER = """
import sys
sys.modules["esper"] = None
sys.path.insert(0, sys.argv[1])
import torch
from pathlib import Path
from safetensors.torch import load_file
from {source} import *
folder = Path(sys.argv[1])
known = load_file(folder / "known.safetensors")
{build}
with torch.no_grad():
    torch.testing.assert_close(network(known["x"]), known["y"], rtol=1e-5, atol=1e-6)
network.train()
optimiser = torch.optim.SGD(network.parameters(), lr=0.05)
losses = []
for _ in range(10):
    optimiser.zero_grad()
    loss = torch.nn.functional.cross_entropy(network(known["x"]).flatten(0, -2), known["targets"].flatten())
    loss.backward()
    optimiser.step()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
assert not [name for name in sys.modules if name.startswith("esper.")]
print("parameters", sum(p.numel() for p in network.parameters()))
"""


def run_without_esper(folder: Path, source: str, build: str, x: Tensor, y: Tensor, targets: Tensor) -> int:
    """Equality and ten training steps in a process of its own; the number of parameters."""
    save_file({"x": x, "y": y.detach().contiguous(), "targets": targets}, folder / "known.safetensors")
    script = WITHOUT_ESPER.format(source=source, build=build)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(folder)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def test_an_image_network_loads_and_trains_without_esper(own_blueprints: None, tmp_path: Path) -> None:
    model = cnn()
    plant(model, "r0c0", "depthwise", "add")
    plant(model, "r1c0", "attention", "multiply")
    plant(model, "r0c1", "mixed", "gate")
    hardened = model.harden(tmp_path / "deep" / "inside")
    folder = tmp_path / "deep" / "inside"
    assert sorted(path.name for path in folder.iterdir()) == ["contents.json", "network.py", "weights.safetensors"]
    build = "network = load(folder)"
    targets = torch.arange(8) % 5
    assert run_without_esper(folder, "network", build, images(), model(images()), targets) == count(hardened)
    text = (folder / "network.py").read_text(encoding="utf-8")
    assert "import esper" not in text and "from esper" not in text
    assert "160 parameters" in text  # what grew, in the docstring: 64 + 12·8


def test_a_language_network_loads_and_trains_without_esper(tmp_path: Path) -> None:
    model = gpt()
    plant(model, "r0c0", "attention", "gate")
    plant(model, "r0c1", "mlp")
    hardened = model.harden(tmp_path)
    y = model(tokens())
    assert run_without_esper(tmp_path, "network", "network = load('.')", tokens(), y, tokens()) == count(hardened)
    contents = json.loads((tmp_path / "contents.json").read_text())
    assert [(g["slot"], g["blueprint"], g["style"]) for g in contents["grown"]] == [
        ("r0c0", "attention", "gate"),
        ("r0c1", "mlp", "add"),
    ]


def test_the_generated_file_is_tidy(tmp_path: Path) -> None:
    model = cnn(masked=True)
    plant(model, "r0c0", "conv_heavy", "gate")
    model.harden(tmp_path)
    text = (tmp_path / "network.py").read_text(encoding="utf-8")
    compile(text, "network.py", "exec")
    assert max(map(len, text.splitlines())) <= 120
    assert not any(line != line.rstrip() for line in text.splitlines())
    assert not any(a == b == c == "" for (a, b), (_, c) in pairwise(pairwise(text.splitlines())))
    assert "fold_rows" not in text and "statistics" not in text


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


# -- what users bring -------------------------------------------------------------------------------------------------

LEAK = 0.2


def leaky(h: Tensor) -> Tensor:
    return F.leaky_relu(h, LEAK)


class Mixed(nn.Module):
    """Layers of torch, layers of Esper, a parameter, a buffer, a constant, a function and a method."""

    table: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(1, width), nn.GELU())
        self.branches = nn.ModuleList([nn.Conv2d(width, width, 1), Conv2d(width, width, 3)])
        self.weight = nn.Parameter(torch.zeros(width, 1, 1))
        self.register_buffer("table", torch.linspace(0, 1, width)[:, None, None], persistent=False)
        self.power, self.activation = 2, F.silu
        self.never: nn.Module | None = None
        self.scale = Scale(width)

    def mix(self, h: Tensor) -> Tensor:
        return sum((branch(h) for branch in self.branches), start=h * self.table**self.power)

    def forward(self, h: Tensor) -> Tensor:
        h = self.mix(self.activation(leaky(self.stem(h))))
        if self.never is not None:
            h = self.never(h)
        return self.scale(h + self.weight)


class Extended(nn.Conv2d):
    """Not exportable: its constructor is not known."""


class Borrowing(nn.Module):
    """Not exportable: it refers to an object that a file cannot have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = Scale(width)

    def forward(self, h: Tensor) -> Tensor:
        return self.scale(h * len(BlueprintRegistry.names("image")))


class Recurrent(nn.Module):
    """Not exportable: a layer of torch whose constructor cannot be read."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTM(width, width)
        self.scale = Scale(width)

    def forward(self, h: Tensor) -> Tensor:
        return self.scale(h)


@pytest.fixture
def own_blueprints() -> Iterator[None]:
    own = {
        "mixed": Mixed,
        "extended": lambda width: Extended(width, width, 1),
        "borrowing": Borrowing,
        "recurrent": Recurrent,
    }

    def counter(build: Callable[[int], nn.Module]) -> Callable[[int], int]:
        return lambda width: count(build(width))

    for name, build in own.items():
        BlueprintRegistry.register("image", name, counter(build))(build)
    yield
    for name in own:
        BlueprintRegistry.unregister("image", name)


def test_a_blueprint_of_the_user(own_blueprints: None) -> None:
    model = cnn()
    plant(model, "r0c0", "mixed", "gate")
    plant(model, "r0c1", "mixed")
    hardened = model.harden()
    close(hardened(images()), model(images()))
    assert count(hardened) == model.host_parameter_count + model.grown_parameter_count


@pytest.mark.parametrize(
    ("blueprint", "message"),
    [
        ("extended", "slot 'r0c0': Extended extends torch's Conv2d"),
        ("borrowing", "refers to 'BlueprintRegistry'"),
        ("recurrent", "nn.LSTM cannot be exported.*Compose"),
    ],
)
def test_what_cannot_be_exported_is_said(own_blueprints: None, blueprint: str, message: str) -> None:
    model = cnn()
    plant(model, "r0c0", blueprint)
    with pytest.raises(ExportError, match=message):
        model.harden()


class Noisy(nn.Module):
    """A layer that has to know whether it trains, but returns no statistics."""

    __call__: Callable[..., Tensor]

    def forward(self, h: Tensor, train: bool) -> Tensor:
        return F.dropout(h, 0.5, train)


class Residual(Segment):
    """A segment of the user's own, with statistics from two norms and a random layer."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.first, self.second = Conv2d(inputs, width, 3), Conv2d(width, width, 3)
        self.norms = nn.ModuleList([BatchNorm2d(width), BatchNorm2d(width)])
        self.noise = Noisy()

    def forward(self, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        statistics: Statistics = {}
        y, found = self.norms[0](self.first(h), train)
        statistics |= named_statistics("norms.0", found)
        z, found = self.norms[1](self.second(F.relu(y)), train)
        statistics |= named_statistics("norms.1", found)
        h = self.noise(y + z, train)
        return F.dropout(h, 0.1, train), statistics


class Top(Segment):
    """Class scores."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = Linear(width, 5)

    def forward(self, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        return self.linear(h.mean((-2, -1))), {}


def test_a_host_of_the_user() -> None:
    torch.manual_seed(0)
    host = Host([Residual(3, 8), Top(8)], [SlotSpec("middle", 8, "image", 0.5, SIDE)])
    model = MorphogeneticModel(host)
    for step in range(5):
        model.train()(images(rng_seed=step) + 1)
    plant(model.eval(), "middle", "depthwise")
    hardened = model.harden()
    close(hardened(images()), model(images()))
    assert not torch.equal(hardened.train()(images()), hardened(images()))  # dropout is on in training
    losses = train(hardened, images(), torch.arange(8) % 5)
    assert losses[-1] < losses[0]


def test_shared_weights_are_refused() -> None:
    first, top = Residual(3, 8), Top(8)
    first.second = Conv2d(8, 8, 3)
    twice = Residual(8, 8)
    twice.second.weight = first.second.weight
    slots = [SlotSpec(f"r0c{index}", 8, "image", 0.5, SIDE) for index in range(2)]
    with pytest.raises(ExportError, match="share weights"):
        MorphogeneticModel(Host([first, twice, top], slots)).harden()


def test_a_class_from_within_a_function() -> None:
    factor = 3.0

    class Local(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.scale = Scale(width)

        def forward(self, h: Tensor) -> Tensor:
            import math

            return self.scale(h * math.sqrt(factor))

    BlueprintRegistry.register("image", "local", lambda c: c)(Local)
    try:
        model = cnn()
        plant(model, "r0c0", "local")
        close(model.harden()(images()), model(images()))
    finally:
        BlueprintRegistry.unregister("image", "local")


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


# -- attached hosts ---------------------------------------------------------------------------------------------------


class Foreign(nn.Module):
    """A network that knows nothing of slots."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(self.stem(x))
        scores: Tensor = self.head(h.mean((-2, -1)).to(self.head.weight.dtype))
        return scores


FOREIGN_SOURCE = """
from torch import Tensor, nn
class Foreign(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(8, 5)
    def forward(self, x):
        h = self.block(self.stem(x))
        return self.head(h.mean((-2, -1)).to(self.head.weight.dtype))
network = grow(Foreign(), folder)
"""


def attached() -> MorphogeneticModel:
    torch.manual_seed(0)
    widths = {"stem": 8, "stem.0": 8, "block": 8, "head": 5}
    model = attach(Foreign(), widths, example=images(2))
    for step in range(3):
        model.train()(images(rng_seed=step) + 1)
    return model.eval()


def test_an_attached_host_stays_the_users_module(tmp_path: Path) -> None:
    model = attached()
    plant(model, "stem", "depthwise", "gate")
    plant(model, "stem.0", "conv_small", "multiply")
    plant(model, "head", "mlp_small")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    y = model(images())
    hardened = model.harden(tmp_path, example=images(1))
    assert isinstance(hardened, Foreign) and hardened is not model.host
    close(hardened(images()), y)
    assert torch.equal(model(images()), y)  # the live model still grows
    assert count(hardened) == model.host_parameter_count + model.grown_parameter_count
    assert not any("esper" in type(module).__module__ for module in hardened.modules() if module is not hardened)
    close(torch.compile(copy.deepcopy(hardened), backend="eager", fullgraph=True)(images()), y)
    losses = train(hardened, images(), torch.arange(8) % 5)
    assert losses[-1] < losses[0]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    targets = torch.arange(8) % 5
    assert run_without_esper(tmp_path, "grown_blocks", FOREIGN_SOURCE, images(), y, targets) == count(hardened)


def test_an_attached_host_as_a_program_for_inference(tmp_path: Path) -> None:
    model = attached()
    plant(model, "block", "conv_light")
    model.harden(tmp_path / "without")
    contents = json.loads((tmp_path / "without" / "contents.json").read_text())
    assert contents["program"].startswith("not written") and not (tmp_path / "without" / "model.pt2").exists()
    model.harden(tmp_path / "with", example=images(1))
    assert json.loads((tmp_path / "with" / "contents.json").read_text())["program"] == "model.pt2"
    program = torch.export.load(tmp_path / "with" / "model.pt2").module()
    for size in (2, 7):
        close(program(images(size)), model(images(size)))


def test_dropping_from_an_attached_host_recalibrates_the_export_alone() -> None:
    model = attached()
    plant(model, "stem.0", "conv_light", stage=SeedStage.HOLDING)
    with pytest.raises(BadValueError, match="calibration="):
        model.harden(drop=["stem.0"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    calibration = images(64, rng_seed=5)
    hardened = model.harden(drop=["stem.0"], calibration=calibration)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    roles = {"stem.0": Role.SILENT}
    close(hardened(images()), model.body.evaluate(images(), roles, model.body.calibrate(calibration, roles)))
    assert count(hardened) == model.host_parameter_count


def test_weights_on_disk_are_the_networks(tmp_path: Path) -> None:
    model = cnn()
    plant(model, "r0c0", "norm")
    hardened = model.harden(tmp_path)
    stored = load_file(tmp_path / "weights.safetensors")
    assert stored.keys() == hardened.state_dict().keys()
    assert all(torch.equal(value, hardened.state_dict()[name]) for name, value in stored.items())


class Tied(nn.Module):
    """Tied weights, and a submodule that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.mix = nn.Linear(8, 8)
        self.chain = nn.Sequential(self.mix, nn.Tanh())
        self.head = nn.Linear(8, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.chain(self.embed(ids)))
        return scores


def test_an_attached_host_with_shared_parts(tmp_path: Path) -> None:
    model = attach(Tied(), {"mix": 8}, example=tokens(2)).eval()
    plant(model, "mix", "mlp", "multiply")
    hardened = model.harden(tmp_path)
    close(hardened(tokens()), model(tokens()))
    assert count(hardened) == model.host_parameter_count + model.grown_parameter_count
    spec = importlib.util.spec_from_file_location("grown_blocks", tmp_path / "grown_blocks.py")
    assert spec is not None and spec.loader is not None
    blocks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(blocks)
    close(blocks.grow(Tied(), tmp_path)(tokens()), model(tokens()))


class Branching(nn.Module):
    """Control flow that torch.export cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y if bool(y.sum() > 0) else -y


def test_a_network_that_cannot_be_traced_is_written_without_a_program(tmp_path: Path) -> None:
    (tmp_path / "model.pt2").write_bytes(b"of an earlier network")
    example = torch.randn(4, 4)
    model = attach(Branching(), {"linear": 4}, example=example)
    plant(model, "linear", "norm")
    with pytest.warns(UserWarning, match="not written: torch.export cannot trace"):
        model.harden(tmp_path, example=example)
    assert not (tmp_path / "model.pt2").exists()
    assert (tmp_path / "weights.safetensors").exists()


def test_hooks_of_the_user_stay() -> None:
    model = attached()
    calls: list[str] = []
    model.host.get_submodule("block").register_forward_hook(lambda *_: calls.append("block"))
    plant(model, "block", "norm")
    model.harden()(images())
    assert calls == ["block"]


@pytest.mark.gpu
def test_the_device_is_kept(tmp_path: Path) -> None:
    for model, slot_id in ((cnn(), "r0c0"), (attached(), "stem")):
        model.to("cuda")
        plant(model, slot_id, "depthwise", "gate")
        hardened = model.harden(tmp_path, example=images(2).cuda())
        assert {tensor.device.type for tensor in hardened.state_dict().values()} == {"cuda"}
        close(hardened(images().cuda()), model(images().cuda()))


# -- folders and frozen parameters ------------------------------------------------------------------------------------


def test_a_folder_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was hardened before is replaced, also where Python has left its cache; a crash leaves it as it was."""
    model = cnn()
    folder = tmp_path / "grown"
    model.harden(folder)
    (folder / "__pycache__").mkdir()
    plant(model, "r0c0", "norm")
    model.harden(folder)
    assert {path.name for path in folder.iterdir()} == {"network.py", "weights.safetensors", "contents.json"}
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(*_: object, **__: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("esper.kasmina.harden.save_file", fail)
    with pytest.raises(OSError, match="disk is full"):
        model.harden(folder)
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["grown"]


def test_other_files_are_never_written_over(tmp_path: Path) -> None:
    """A checkpoint has weights of the same name: they would be lost."""
    model = cnn()
    model.save(tmp_path / "checkpoint")
    with pytest.raises(BadValueError, match=r"holds \['model.json'\].*give it one of its own"):
        model.harden(tmp_path / "checkpoint")
    MorphogeneticModel.load(tmp_path / "checkpoint")
    model.harden(tmp_path / "grown")
    with pytest.raises(CheckpointError, match=r"contents.json.*give it one of its own"):
        model.save(tmp_path / "grown")


@pytest.mark.parametrize("attach_it", [False, True])
def test_frozen_parameters_stay_frozen(attach_it: bool, tmp_path: Path) -> None:
    """Those of the host and those of seeds; the written list names them."""
    model = attached() if attach_it else cnn()
    place = "block" if attach_it else "r0c0"
    plant(model, place, "norm")
    frozen = [next(model.host_parameters()), next(model.seed_parameters(place))]
    for parameter in frozen:
        parameter.requires_grad_(False)
    network = model.harden(tmp_path / "grown")
    still = [name for name, parameter in network.named_parameters() if not parameter.requires_grad]
    assert len(still) == 2
    assert json.loads((tmp_path / "grown" / "contents.json").read_text())["frozen"] == still
    shapes = sorted(tuple(network.get_parameter(name).shape) for name in still)
    assert shapes == sorted(tuple(parameter.shape) for parameter in frozen)
