"""Slots in foreign networks: a small ResNet and a small transformer of ordinary torch layers."""

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from esper.kasmina import (
    CNNHost,
    GateThresholds,
    GrowingOptimizer,
    LifecycleConfig,
    MorphogeneticModel,
    attach,
    cross_entropy,
)
from esper.kasmina.slot import ISOLATIONS, Isolation
from esper.leyline import (
    ACTIVE_STAGES,
    BLEND_STYLES,
    BadValueError,
    GateRefusedError,
    HostMismatchError,
    SeedStage,
    UnknownNameError,
)

AT_ONCE = LifecycleConfig(min_prune_age=0, thresholds=GateThresholds(min_training_steps=0, min_holding_steps=0))


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm and a skip connection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.skip(x))


class ResNet(nn.Module):
    """Images (B, 3, 8, 8) → 4 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(ResidualBlock(3, 8, 1))
        self.layer2 = nn.Sequential(ResidualBlock(8, 16, 2), ResidualBlock(16, 16, 1))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer2(self.layer1(x)).mean((-2, -1))
        logits: Tensor = self.head(self.dropout(h))
        return logits


class Transformer(nn.Module):
    """Tokens (B, T) → a score per entry of the vocabulary, (B, T, 11)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 11)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embedding(ids)))
        return logits


def images(count: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Noise whose class is the brightest of four quadrants: something that a host can learn."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, 8, 8, generator=generator)
    quadrants = x.mean(1).reshape(count, 2, 4, 2, 4).mean((2, 4)).flatten(1)
    return x, quadrants.argmax(1)


def tokens(count: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids, each followed by the next larger one modulo the vocabulary: the wanted answer."""
    ids = torch.randint(11, (count, 5), generator=torch.Generator().manual_seed(seed))
    return ids, (ids + 1) % 11


class Case:
    """A foreign host with its slots and data."""

    def __init__(
        self, make: type[nn.Module], slots: dict[str, int], blueprint: str, data: Callable[..., tuple[Tensor, Tensor]]
    ) -> None:
        self.make, self.slots, self.blueprint, self.data = make, slots, blueprint, data
        self.first, self.second = slots

    def host(self) -> nn.Module:
        torch.manual_seed(3)
        return self.make()

    def model(self, isolation: Isolation = "shadow", *, config: LifecycleConfig | None = AT_ONCE) -> MorphogeneticModel:
        return attach(self.host(), self.slots, example=self.data()[0], isolation=isolation, config=config)


CASES = {
    "resnet": Case(ResNet, {"layer1": 8, "layer2": 16}, "conv_light", images),
    "transformer": Case(Transformer, {"encoder.layers.0": 16, "encoder.layers.1": 16}, "mlp_small", tokens),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def wake(model: MorphogeneticModel, slot_id: str) -> None:
    """Open the zero-initialised scale, so that the seed has an effect that can be seen."""
    for name, parameter in model.seed_slots[slot_id].named_parameters():
        if "scale" in name:
            nn.init.constant_(parameter, 0.3)


def stages(model: MorphogeneticModel, slot_id: str, blueprint: str, data: tuple[Tensor, Tensor]) -> Iterator[SeedStage]:
    """Walk one slot through every stage: up to a fossil in the first life, down to a prune in a second slot's."""
    yield SeedStage.DORMANT
    yield model.germinate_seed(slot_id, blueprint, tempo=3).target
    wake(model, slot_id)
    yield model.advance(slot_id).target
    model.observe_gradients({slot_id: 1.0})
    yield model.advance(slot_id).target
    for _ in range(2):
        model.tick()
        yield SeedStage.BLENDING
    model.tick()
    model.measure(*data, data[0])
    yield SeedStage.HOLDING
    yield model.fossilize(slot_id).target


def prune_life(model: MorphogeneticModel, slot_id: str, blueprint: str) -> Iterator[SeedStage]:
    """A seed that is cut, and its slot until it can be used again."""
    model.germinate_seed(slot_id, blueprint)
    wake(model, slot_id)
    model.advance(slot_id)
    model.observe_gradients({slot_id: 1.0})
    yield model.advance(slot_id).target
    while model.seed_slots[slot_id].state.ramping:
        model.tick()
    yield model.prune_seed(slot_id).target
    while model.seed_slots[slot_id].state.stage is not SeedStage.DORMANT:
        model.tick()
        yield model.seed_slots[slot_id].state.stage


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def hook_count(module: nn.Module) -> int:
    return sum(len(part._forward_hooks) for part in module.modules())


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# -- attaching --------------------------------------------------------------------------------------------------------


def test_a_probe_learns_what_passes_and_changes_nothing() -> None:
    host = CASES["resnet"].host().train()
    before, stream = copy.deepcopy(host.state_dict()), torch.get_rng_state()
    model = attach(host, {"layer2": 16, "head": 4, "layer1": 8}, example=images()[0])
    specs = [slot.spec for slot in model.seed_slots.values()]
    found = [(s.slot_id, s.topology, s.width, s.resolution) for s in specs]
    assert found == [("layer1", "image", 8, 8), ("layer2", "image", 16, 4), ("head", "vector", 4, None)]
    assert 0 < specs[0].position < specs[1].position < specs[2].position == 1
    assert same(before, host.state_dict()) and torch.equal(stream, torch.get_rng_state())
    assert all(part.training for part in host.modules()) and hook_count(host) == 3


def test_without_an_example_the_first_forward_is_the_probe(case: Case) -> None:
    model = attach(case.host(), case.slots)
    with pytest.raises(GateRefusedError, match=r"run one forward pass, or pass example="):
        model.germinate_seed(case.first, case.blueprint)
    assert "not probed" in repr(model)
    model(case.data()[0])
    assert [s.spec for s in model.seed_slots.values()] == [s.spec for s in case.model().seed_slots.values()]
    model.germinate_seed(case.first, case.blueprint)


class Awkward(nn.Module):
    """Submodules that cannot have a slot."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(4, 4, batch_first=True)
        self.twice = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)
        self.flat = nn.Flatten(0)
        self.deep = nn.Unflatten(0, (1, 1, -1))
        self.values = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.recurrent(x)
        h = self.values(self.twice(self.twice(h)))
        return self.flat(h).sum() + self.deep(h).sum()  # type: ignore[no-any-return]  # modules return Any


@pytest.mark.parametrize(
    ("slots", "error", "message"),
    [
        ({"recurent": 4}, UnknownNameError, r"'recurent'; allowed: recurrent"),
        ({"twice": 0}, BadValueError, r"'twice': width 0 is not a positive"),
        ({"twice": True}, BadValueError, r"width True"),
        ({}, BadValueError, r"at least one slot"),
        ({"values": 4}, BadValueError, r"'values' cannot have a slot under this name"),
        ({"recurrent": 4}, HostMismatchError, r"'recurrent' returns tuple; a slot needs one tensor"),
        ({"twice": 4}, HostMismatchError, r"'twice' ran 2 times"),
        ({"unused": 4}, HostMismatchError, r"'unused' ran 0 times"),
        ({"flat": 4}, HostMismatchError, r"'flat' returns a tensor of shape \(24,\)"),
        ({"deep": 4}, HostMismatchError, r"'deep' returns a tensor of shape \(1, 1, 2, 3, 4\)"),
    ],
)
def test_what_cannot_be_attached_is_refused_and_nothing_is_left_behind(
    slots: dict[str, int], error: type[Exception], message: str
) -> None:
    host = Awkward()
    with pytest.raises(error, match=message):
        attach(host, slots, example=torch.randn(2, 3, 4))
    assert hook_count(host) == 0


def test_a_width_that_differs_is_refused() -> None:
    host = CASES["resnet"].host()
    with pytest.raises(HostMismatchError, match=r"declared with width 9, but image of width 8 pass there"):
        attach(host, {"layer1": 9}, example=images()[0])
    assert hook_count(host) == 0
    model = attach(host, {"layer1": 9})
    with pytest.raises(HostMismatchError, match=r"width 9"):
        model(images()[0])


def test_attach_comes_once_and_before_compiling() -> None:
    host = CASES["resnet"].host()
    with pytest.raises(UnknownNameError, match="isolation 'none'; allowed: shadow, straight_through"):
        attach(host, {"layer1": 8}, isolation="none")  # type: ignore[arg-type]  # the mistake under test
    attach(host, {"layer1": 8})
    with pytest.raises(BadValueError, match="has a slot already"):
        attach(host, {"layer2": 16})
    with pytest.raises(BadValueError, match="attach first, then compile"):
        compiled = CASES["resnet"].host()
        compiled.compile(backend="eager")
        attach(compiled, {"layer1": 8})
    with pytest.raises(BadValueError, match="no parameters"):
        attach(nn.Sequential(nn.ReLU()), {"0": 8})


def test_any_arguments_reach_the_host() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, factor: float, *, train: float = 0.0) -> Tensor:
            result: Tensor = self.linear(x) * factor + train
            return result

    model = attach(Scaled(), {"linear": 4})
    x = torch.randn(2, 4)
    expected = model.host(x, 2.0, train=3.0)
    assert torch.equal(model(x, 2.0, train=3.0), expected)
    assert torch.equal(model(x=x, factor=2.0, train=3.0), expected)


# -- stages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_seed_acts_in_the_stages_that_say_so_and_in_no_other(case: Case, isolation: Isolation) -> None:
    model, plain = case.model(isolation).eval(), case.host().eval()
    x = case.data()[0]
    expected = plain(x)
    lives = [stages(model, case.first, case.blueprint, case.data())]
    for stage in lives[0]:
        assert model.seed_slots[case.first].state.stage is stage
        assert torch.equal(model(x), expected) == (stage not in ACTIVE_STAGES)
    fossil = model(x)
    for stage in prune_life(model, case.second, case.blueprint):
        assert torch.equal(model(x), fossil) == (stage not in ACTIVE_STAGES)


def train_host_alone(case: Case, steps: int, prepare: Callable[[MorphogeneticModel], None]) -> dict[str, Tensor]:
    """The state of a host after some steps of SGD, and where its random stream then stands."""
    model = case.model().train()
    prepare(model)
    optimiser = GrowingOptimizer(model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    torch.manual_seed(5)
    for step in range(steps):
        optimiser.zero_grad()
        sum(model.losses(*case.data(seed=step)).values(), torch.zeros(())).backward()
        optimiser.step()
    return {name: tensor.clone() for name, tensor in model.host.state_dict().items()} | {"rng": torch.get_rng_state()}


def test_a_training_seed_leaves_the_hosts_trajectory_bit_identical(case: Case) -> None:
    def nothing(model: MorphogeneticModel) -> None:
        pass

    def two_training_seeds(model: MorphogeneticModel) -> None:
        for slot_id in case.slots:
            model.germinate_seed(slot_id, case.blueprint)
            model.advance(slot_id)

    def one_with_a_gate(model: MorphogeneticModel) -> None:
        model.germinate_seed(case.second, case.blueprint, style="gate")
        model.advance(case.second)

    alone = train_host_alone(case, 4, nothing)
    assert same(alone, train_host_alone(case, 4, two_training_seeds))
    assert same(alone, train_host_alone(case, 4, one_with_a_gate))


def test_germination_draws_nothing_from_the_hosts_random_stream(case: Case) -> None:
    model = case.model()
    before = torch.get_rng_state()
    model.germinate_seed(case.first, case.blueprint, style="gate")
    assert torch.equal(before, torch.get_rng_state())


def test_a_shadow_sees_the_masks_and_statistics_of_the_main_row(case: Case) -> None:
    """A newborn seed is the identity, so its shadow's loss is the main loss to the last bit, dropout included."""
    model = case.model().train()
    model.germinate_seed(case.second, case.blueprint)
    model.advance(case.second)
    losses = model.losses(*case.data())
    assert torch.equal(losses["main"], losses[case.second])
    wake(model, case.second)
    losses = model.losses(*case.data())
    assert not torch.equal(losses["main"], losses[case.second])


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_gradients_in_every_stage(case: Case, isolation: Isolation) -> None:
    model, plain = case.model(isolation).train(), case.host().train()
    data = case.data()
    torch.manual_seed(1)
    cross_entropy(plain(data[0]), data[1]).backward()
    expected = gradients(plain)
    for stage in stages(model, case.first, case.blueprint, data):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        sum(model.losses(*data).values(), torch.zeros(())).backward()
        found = gradients(model.host)
        assert found.keys() == expected.keys()
        assert all(float(gradient.norm()) > 0 for gradient in found.values()), stage
        assert same(found, expected) == (stage not in ACTIVE_STAGES), stage
        seeds = gradients(model.seed_slots[case.first])
        if stage in (SeedStage.DORMANT, SeedStage.GERMINATED):
            assert not seeds
        else:
            assert len(seeds) == len(list(model.seed_parameters(case.first)))
            assert all(float(gradient.norm()) > 0 for gradient in seeds.values()), stage


@pytest.mark.parametrize("style", BLEND_STYLES)
def test_every_style_blends(case: Case, style: str) -> None:
    model = case.model().eval()
    x, targets = case.data()
    before = model(x)
    model.germinate_seed(case.first, case.blueprint, style=style, tempo=0)
    wake(model, case.first)
    model.advance(case.first)
    model.observe_gradients({case.first: 1.0})
    assert torch.equal(model(x), before)
    model.advance(case.first)
    assert not torch.equal(model(x), before)
    model.losses(x, targets)["main"].backward()
    assert all(p.grad is not None and float(p.grad.norm()) > 0 for p in model.seed_parameters(case.first))


def test_measuring_calibrates_each_row_and_writes_nothing(case: Case) -> None:
    model = case.model().train()
    x, targets = case.data(24)
    model.germinate_seed(case.first, case.blueprint)
    model.advance(case.first)
    wake(model, case.first)
    state, stream = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = model.measure(x, targets, x)
    assert same(state, model.state_dict()) and torch.equal(stream, torch.get_rng_state())
    assert all(part.training for part in model.modules())
    norms = [part for part in model.modules() if isinstance(part, nn.BatchNorm2d)]
    assert all(norm.momentum == 0.1 for norm in norms)
    assert model.reports()[0].audition == found.auditions[case.first].accuracy
    # Calibrated on the very inputs that it is scored on, a row without dropout is the train-mode forward.
    reference = copy.deepcopy(model.host).eval()
    for part in reference.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.train()
            part.momentum = 1.0
    reference(x)
    expected = reference.eval()(x).flatten(0, -2)
    losses = F.cross_entropy(expected, targets.flatten(), reduction="none")
    torch.testing.assert_close(found.main.losses, losses, rtol=1e-5, atol=1e-6)


def test_statistics_of_a_row_are_those_of_its_batch() -> None:
    model = CASES["resnet"].model().train()
    x = images(16)[0]
    statistics = model.body.calibrate(x, {})
    h = model.host.get_submodule("layer1.0.conv1")(x)
    name = "host.layer1.0.norm1.running_"
    torch.testing.assert_close(statistics[name + "mean"], h.mean((0, 2, 3)))
    torch.testing.assert_close(statistics[name + "var"], h.transpose(0, 1).flatten(1).var(1))
    model.body.write(statistics)
    assert torch.equal(model.body.get_buffer(name + "mean"), statistics[name + "mean"])


@pytest.mark.parametrize("trains", [True, False])
def test_a_norm_that_the_user_keeps_in_eval_mode_is_not_recalibrated(trains: bool) -> None:
    """Its statistics are fixed in training too: they belong to the host. So it is after a switch to eval mode."""
    model = attach(CASES["resnet"].host(), {"layer1": 8}, example=images()[0], config=AT_ONCE).train()
    frozen = model.host.get_submodule("layer2.0.norm1")
    frozen.eval()
    model(images()[0])
    if not trains:
        model.eval()
    found = model.body.calibrate(images()[0], {})
    assert {name.rsplit(".", 1)[0] for name in found} == {
        f"host.{name}"
        for name, layer in model.host.named_modules()
        if isinstance(layer, nn.BatchNorm2d) and layer is not frozen
    }


def test_a_model_is_born_in_the_mode_of_its_host() -> None:
    """A host in eval mode stays there until the model trains, and is recalibrated as a whole."""
    host = CASES["resnet"].host().eval()
    model = attach(host, {"layer1": 8}, example=images()[0])
    assert not model.training and not model.body.training
    before = {name: buffer.clone() for name, buffer in host.named_buffers()}
    model(images()[0])
    assert same(before, dict(host.named_buffers()))
    assert len(model.body.calibrate(images()[0], {})) == 2 * sum(isinstance(m, nn.BatchNorm2d) for m in host.modules())


def test_the_main_row_takes_its_mode_from_the_call() -> None:
    model = CASES["resnet"].model().train()
    x = images()[0]
    before = copy.deepcopy(model.state_dict())
    output, _ = model.body.main(x, train=False)
    assert same(before, model.state_dict()) and all(part.training for part in model.modules())
    assert torch.equal(output, model.eval()(x))


def test_a_network_grows_end_to_end(case: Case) -> None:
    torch.manual_seed(0)
    model = case.model(config=None).train()
    optimiser = GrowingOptimizer(model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), clip_norm=5.0)
    data = case.data(32)

    def step() -> float:
        for _ in range(4):
            optimiser.zero_grad()
            losses = model.losses(*data)
            sum(losses.values(), torch.zeros(())).backward()
            optimiser.step()
        model.tick()
        return losses["main"].item()

    first = step()
    model.germinate_seed(case.first, case.blueprint)
    for _ in range(3):
        step()
    model.measure(*data, data[0])
    model.advance(case.first)
    for _ in range(4):
        step()
    model.measure(*data, data[0])
    model.fossilize(case.first)
    assert step() < 0.7 * first
    assert model.grown_parameter_count > 0


# -- an ordinary module -----------------------------------------------------------------------------------------------


def grown(case: Case, isolation: Isolation = "shadow") -> MorphogeneticModel:
    """With a fossil in the first slot and a TRAINING seed in the second."""
    model = case.model(isolation)
    list(stages(model, case.first, case.blueprint, case.data()))
    model.germinate_seed(case.second, case.blueprint)
    model.advance(case.second)
    wake(model, case.second)
    return model


def test_a_copy_has_slots_and_hooks_of_its_own(case: Case) -> None:
    model = grown(case).eval()
    optimiser = GrowingOptimizer(model, lambda p: torch.optim.SGD(p, lr=0.1))
    x = case.data()[0]
    before = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), before)
        hooks = [hook for part in twin.modules() for hook in part._forward_hooks.values()]
        assert [getattr(hook, "__self__", None) for hook in hooks] == list(twin.seed_slots.values())
        nn.init.constant_(next(twin.seed_parameters(case.first)), 1.0)
        twin.prune_seed(case.second)
        assert not torch.equal(twin(x), before) and torch.equal(model(x), before)
    assert len(optimiser.wrapped.param_groups) == 3


def test_dtype_and_state_dict(case: Case) -> None:
    model, twin = grown(case).double().eval(), grown(case).double().eval()
    data = case.data()[0]
    x = data.double() if data.is_floating_point() else data
    for parameter in twin.parameters():
        nn.init.constant_(parameter, 0.1)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(x), model(x)) and model(x).dtype == torch.float64
    model.prune_seed(case.second)
    while model.reports()[1].cooldown:
        model.tick()
    model.germinate_seed(case.second, case.blueprint)
    assert all(p.dtype == torch.float64 for p in model.seed_parameters())


def test_a_checkpoint_restores_an_attached_host(case: Case, tmp_path: Path) -> None:
    model = grown(case).eval()
    model.save(tmp_path / "saved")
    torch.manual_seed(99)
    fresh = attach(case.make(), case.slots, example=case.data()[0])
    loaded = MorphogeneticModel.load(tmp_path / "saved", fresh).eval()
    assert torch.equal(loaded(case.data()[0]), model(case.data()[0]))
    assert loaded.reports() == model.reports()
    losses = [m.losses(*case.data())[case.second].item() for m in (model, loaded)]
    assert losses[0] == losses[1]


# -- compiled ---------------------------------------------------------------------------------------------------------


def check_compiled_equals_eager(case: Case, isolation: Isolation, backend: Any, rtol: float, atol: float) -> None:
    """Walk every stage with a compiled model; Any: a backend's name or the backend itself."""
    model = case.model(isolation)
    model.compile(backend=backend, fullgraph=True)
    data = case.data()

    def run() -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        found = {"eval": model.eval()(data[0]).detach()}
        # Compiled dropout draws other masks than eager dropout, so gradients are compared without it.
        losses = model.losses(*data)
        sum(losses.values(), torch.zeros(())).backward()
        found |= {f"loss {name}": loss.detach() for name, loss in losses.items()}
        return found | gradients(model)

    walks = [stages(model, case.first, case.blueprint, data), prune_life(model, case.second, case.blueprint)]
    for walk in walks:
        for stage in walk:
            compiled = run()
            with torch.compiler.set_stance("force_eager"):
                eager = run()
            assert compiled.keys() == eager.keys()
            for name, value in eager.items():
                close = torch.allclose(compiled[name], value, rtol=rtol, atol=atol)
                assert close, f"{stage.name}, {name}: off by {(compiled[name] - value).abs().max():.2g}"


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_compiled_model_equals_the_eager_one_in_every_stage(case: Case, isolation: Isolation) -> None:
    torch.compiler.reset()
    check_compiled_equals_eager(case, isolation, "eager", rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor imports parts of torch that torch deprecates
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_compiled_model_equals_the_eager_one_under_each_backend(
    case: Case, isolation: Isolation, backend: str
) -> None:
    torch.compiler.reset()
    check_compiled_equals_eager(case, isolation, backend, rtol=1e-3, atol=1e-5)


def test_alpha_alone_never_recompiles(case: Case) -> None:
    torch.compiler.reset()
    backend = CompileCounterWithBackend("eager")
    model = case.model().eval()
    model.compile(backend=backend, fullgraph=True)
    x, targets = case.data()
    counts: dict[str, int] = {}
    seen: set[float] = set()
    for stage in stages(model, case.first, case.blueprint, (x, targets)):
        model(x)
        counts[stage.name] = backend.frame_count
        seen.add(model.reports()[0].alpha)
    # One graph while the seed is silent, one while it acts at whatever alpha.
    assert counts == dict.fromkeys(["DORMANT", "GERMINATED", "TRAINING"], 1) | dict.fromkeys(
        ["BLENDING", "HOLDING", "FOSSILIZED"], 2
    )
    assert len(seen) == 4


def test_losses_of_a_compiled_model_train_it(case: Case) -> None:
    torch.compiler.reset()
    trained = []
    for compiled in (False, True):
        model = case.model(config=None).train()
        if compiled:
            model.compile(backend="aot_eager")
        optimiser = GrowingOptimizer(model, lambda p: torch.optim.SGD(p, lr=0.1))
        model.germinate_seed(case.first, case.blueprint)
        torch.manual_seed(2)
        for _ in range(4):
            optimiser.zero_grad()
            sum(model.losses(*case.data()).values(), torch.zeros(())).backward()
            optimiser.step()
            model.tick()
        model.advance(case.first)
        trained.append(model.state_dict())
    for name, value in trained[0].items():
        torch.testing.assert_close(trained[1][name], value, rtol=1e-4, atol=1e-5)


def test_torch_compile_serves_the_forward_pass(case: Case) -> None:
    torch.compiler.reset()
    model = attach(case.host(), case.slots).eval()
    compiled: Any = torch.compile(model, backend="eager")  # Any: torch types it as a function, it is a module
    x, targets = case.data()
    for _ in range(2):  # the first call probes
        torch.testing.assert_close(compiled(x), model(x), rtol=0.0, atol=0.0)
    model.germinate_seed(case.first, case.blueprint)
    model.advance(case.first)
    assert compiled.losses(x, targets).keys() == {"main", case.first}


def test_built_in_hosts_compile_the_same_way() -> None:
    torch.compiler.reset()
    model = MorphogeneticModel(CNNHost((4, 8), resolution=8, classes=4), config=AT_ONCE).eval()
    model.compile(backend="eager", fullgraph=True)
    data = images()
    for stage in stages(model, "r0c1", "conv_light", data):
        compiled = model.losses(*data)
        with torch.compiler.set_stance("force_eager"):
            eager = model.losses(*data)
        assert compiled.keys() == eager.keys() and (len(eager) == 2) == (stage is SeedStage.TRAINING)
        assert all(torch.equal(compiled[name], eager[name]) for name in eager), stage


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_shadow_sees_the_masks_of_the_compiled_main_row(case: Case) -> None:
    torch.compiler.reset()
    model = case.model().train()
    model.compile()
    model.germinate_seed(case.second, case.blueprint)
    model.advance(case.second)
    losses = model.losses(*case.data())
    torch.testing.assert_close(losses["main"], losses[case.second])
    stream = torch.get_rng_state()
    model.body.shadow(case.second, case.data()[0], train=True)
    assert torch.equal(stream, torch.get_rng_state())
