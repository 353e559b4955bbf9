"""The blueprint contract: everything registered keeps it, and each way to break it is found and named."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hosts import AT_ONCE, make_batch, make_model
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina import BlueprintRegistry, GrowingOptimizer, check_blueprint
from esper.kasmina.check import ALIVE_RATIO
from esper.kasmina.layers import Conv2d, Linear, Scale
from esper.kasmina.norms import GroupNorm
from esper.leyline import TOPOLOGIES, BadValueError, BlueprintContractError, SeedStage, Topology, UnknownNameError

WIDTHS = (1, 3, 8, 48)
WIDE = 128
FEW_SEEDS = 5
RESOLUTION = {"image": 6, "tokens": 5, "vector": 5}

Everything = [(topology, name) for topology in TOPOLOGIES for name in BlueprintRegistry.names(topology)]
Register = Callable[[Topology, Callable[[int], nn.Module], Callable[[int], int]], str]


@pytest.fixture
def register() -> Iterator[Register]:
    """Registers blueprints for the time of one test; returns the name that each was given."""
    entered: list[tuple[Topology, str]] = []

    def enter(topology: Topology, build: Callable[[int], nn.Module], count: Callable[[int], int]) -> str:
        name = f"test_{len(entered)}"
        BlueprintRegistry.register(topology, name, count)(build)
        entered.append((topology, name))
        return name

    yield enter
    for topology, name in entered:
        BlueprintRegistry.unregister(topology, name)


# -- what is registered -----------------------------------------------------------------------------------------------


def check_where_it_fits(topology: Topology, name: str, width: int, **options: int) -> None:
    """Keeps the contract, or says why it cannot be built here and then is not built."""
    spec = BlueprintRegistry.spec(topology, name)
    if problem := spec.misfit(width, options.get("resolution", RESOLUTION[topology])):
        with pytest.raises(BadValueError, match=problem):
            check_blueprint(topology, name, width, **options)
        return
    report = check_blueprint(topology, name, width, **options)
    assert report.parameters == spec.count(width)
    assert report.weakest_ratio > ALIVE_RATIO


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("topology", "name"), Everything)
@pytest.mark.default_cases("*-3", "*-8")
def test_registered_blueprints_keep_the_contract(topology: Topology, name: str, width: int) -> None:
    check_where_it_fits(topology, name, width)


@pytest.mark.parametrize(("topology", "name"), Everything)
def test_wide_blueprints_keep_the_contract(topology: Topology, name: str) -> None:
    check_where_it_fits(topology, name, WIDE, seeds=FEW_SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "name"), Everything)
def test_wide_blueprints_keep_the_contract_on_all_seeds(topology: Topology, name: str) -> None:
    check_where_it_fits(topology, name, WIDE)


@pytest.mark.parametrize("width", [1, 3, 4, 8, 48])
@pytest.mark.parametrize("name", BlueprintRegistry.names("image"))
@pytest.mark.default_cases("*-3", "*-4")
def test_image_blueprints_on_a_single_pixel(name: str, width: int) -> None:
    """From width 4 on every image blueprint lives even where the image has shrunk to one pixel."""
    if width >= 4:
        assert BlueprintRegistry.spec("image", name).misfit(width, 1) is None
    check_where_it_fits("image", name, width, resolution=1)


def test_which_blueprints_fit_the_narrowest_slots() -> None:
    """Exclusions are few and stated; a blueprint that grew picky would show here."""

    def fitting(topology: Topology, width: int) -> set[str]:
        names = BlueprintRegistry.names(topology)
        return {n for n in names if BlueprintRegistry.spec(topology, n).misfit(width, RESOLUTION[topology]) is None}

    assert fitting("image", 1) == {"norm", "bottleneck", "conv_light"}
    assert fitting("image", 3) == set(BlueprintRegistry.names("image"))
    assert fitting("tokens", 3) == set(BlueprintRegistry.names("tokens")) - {"attention"}
    assert fitting("tokens", 8) == set(BlueprintRegistry.names("tokens"))
    assert fitting("vector", 1) == set(BlueprintRegistry.names("vector")) - {"norm"}
    assert fitting("vector", 3) == set(BlueprintRegistry.names("vector"))


@pytest.mark.parametrize(
    ("topology", "name", "width", "parameters"),
    [
        # 3×3 taps and 1×1 weights, then weight and bias of the norm and the scale: 9·4 + 4·4 + 3·4
        ("image", "depthwise", 4, 64),
        # 9·32 + 32·32 + 3·32
        ("image", "depthwise", 32, 1408),
        # two 3×3 convolutions, two norms, a scale: 2·9·32² + 2·2·32 + 32
        ("image", "conv_heavy", 32, 18592),
        # 32·8 down, 8·8·9 inside, 8·32 up, norm and scale 3·32
        ("image", "bottleneck", 32, 1184),
        # squeeze 32·8, excite 8·32, scale 32
        ("image", "attention", 32, 544),
        # query, key, value, out: 4·16²; three biases 3·16; scale 16
        ("tokens", "attention", 16, 1088),
        # down 16·8, up 8·16, scale 16
        ("vector", "lora", 16, 272),
    ],
)
def test_counts(topology: Topology, name: str, width: int, parameters: int) -> None:
    seed = BlueprintRegistry.build(topology, name, width)
    assert BlueprintRegistry.spec(topology, name).count(width) == parameters
    assert sum(parameter.numel() for parameter in seed.parameters()) == parameters


# -- broken on purpose ------------------------------------------------------------------------------------------------


class Convolution(nn.Module):
    """3×3 → GN → ReLU → scale, as a sound blueprint has it; the broken ones differ in one thing each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv: nn.Module = Conv2d(width, width, 3)
        self.norm = GroupNorm(1, width)
        self.scale: nn.Module = Scale(width)

    def forward(self, h: Tensor) -> Tensor:
        delta: Tensor = self.scale(F.relu(self.norm(self.conv(h))))
        return delta


def count(width: int) -> int:
    return 9 * width * width + 3 * width


def zero_convolution(width: int) -> nn.Module:
    """The classic: a zero-initialised convolution instead of a scale at the end."""
    seed = Convolution(width)
    foreign = nn.Conv2d(width, width, 3, padding=1, bias=False)
    nn.init.zeros_(foreign.weight)
    seed.conv = foreign
    return seed


class Unscaled(Convolution):
    """Acts from the first moment."""

    def forward(self, h: Tensor) -> Tensor:
        delta: Tensor = self.norm(self.conv(h)) + self.scale(h)
        return delta


class Unused(Convolution):
    """A parameter that forward leaves out."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.idle = Linear(width, 1, bias=False)


class Cropped(Convolution):
    """Loses a row of pixels."""

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h)[..., :-1, :]


class Biased(Convolution):
    """A bias that the norm takes away again."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = GroupNorm(width, width)


class Overflowing(Convolution):
    """Finite on the first two batches, no number on the third (of those that have passed a ReLU)."""

    batches = 0

    def forward(self, h: Tensor) -> Tensor:
        self.batches += torch.is_grad_enabled()
        delta = super().forward(h)
        return delta * float("nan") if self.batches == 3 and h.min() >= 0 else delta


class Counted(Convolution):
    """A norm that keeps running statistics."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.BatchNorm2d(width)  # type: ignore[assignment]  # the fault that is tested


class Dropping(Convolution):
    """Draws while it trains."""

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(h, 0.1, self.training))


BROKEN: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], int], str]] = {
    "zero-initialised convolution": (zero_convolution, count, r"clause 3 \(alive\)"),
    "not identity": (Unscaled, count, r"clause 2 \(identity at birth\).*Scale"),
    "parameter without gradient": (Unused, lambda c: count(c) + c, r"clause 3 \(alive\).*'idle\.weight'"),
    "wrong count": (Convolution, lambda c: count(c) + 1, r"clause 4 \(count\): it states 601 parameters but has 600"),
    "wrong shape": (Cropped, count, r"clause 1 \(residual\): Δ is \(8, 8, 5, 6\), h is \(8, 8, 6, 6\)"),
    "batch norm": (Counted, count, r"clause 5 \(stateless\): forward writes norm\.running_mean"),
    "dropout": (Dropping, count, r"clause 5 \(stateless\): forward draws random numbers"),
    "bias before a norm": (Biased, lambda c: count(c) + c, r"clause 3 \(alive\).*'conv\.bias'"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_blueprints_are_refused(fault: str, register: Register) -> None:
    build, stated, message = BROKEN[fault]
    name = register("image", build, stated)
    stream = torch.get_rng_state()
    with pytest.raises(BlueprintContractError, match=message):
        check_blueprint("image", name, 8)
    assert torch.equal(stream, torch.get_rng_state())


def test_a_gradient_that_is_no_number_is_dead(register: Register) -> None:
    name = register("image", Overflowing, count)
    with pytest.raises(BlueprintContractError, match=r"clause 3 \(alive\)"):
        check_blueprint("image", name, 8)


def test_a_tuple_is_no_residual(register: Register) -> None:
    class Pair(Convolution):
        def forward(self, h: Tensor) -> Tensor:
            return (super().forward(h), h)  # type: ignore[return-value]  # the fault that is tested

    name = register("image", Pair, count)
    with pytest.raises(BlueprintContractError, match=r"clause 1 \(residual\): Δ is tuple"):
        check_blueprint("image", name, 8)


def test_sound_twin_of_the_broken_ones_passes(register: Register) -> None:
    """What the broken ones were made from: so it is their one difference that was found."""
    name = register("image", Convolution, count)
    assert check_blueprint("image", name, 8).parameters == 600


# -- a user's own -----------------------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """A user's blueprint of plain torch layers: a bottleneck whose last layer is zero at birth."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, 4)
        self.up = nn.Linear(4, width)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, h: Tensor) -> Tensor:
        delta: Tensor = self.up(F.gelu(self.down(h)))
        return delta


def adapter_count(width: int) -> int:
    return 9 * width + 4


@pytest.mark.parametrize("topology", ["tokens", "vector"])
def test_plain_torch_blueprint_passes(topology: Topology, register: Register) -> None:
    name = register(topology, Adapter, adapter_count)
    assert check_blueprint(topology, name, 8).parameters == 76


def test_plain_torch_blueprint_grows(register: Register) -> None:
    """From seed to fossil, in a host of Esper's layers."""
    name = register("vector", Adapter, adapter_count)
    model = make_model("mlp", 1)
    batch = make_batch("mlp")
    optimiser = GrowingOptimizer(model, lambda p: torch.optim.SGD(p, lr=0.1))
    model.germinate_seed("r0c0", name, tempo=1)
    model.advance("r0c0")
    for _ in range(2):
        optimiser.zero_grad()
        torch.stack(list(model.losses(*batch).values())).sum().backward()
        optimiser.step()
    model.advance("r0c0")
    model.advance("r0c0")
    model.measure(*batch, calibration=batch[0])
    model.fossilize("r0c0")
    assert model.seed_slots["r0c0"].state.stage is SeedStage.FOSSILIZED
    assert not torch.equal(model(batch[0]), model.host(batch[0]))
    assert model.config is AT_ONCE


def test_plain_torch_seeds_are_a_function_of_their_number_too(register: Register) -> None:
    """The same model, whatever was drawn before; and two slots do not get the same seed."""
    name = register("tokens", Adapter, adapter_count)

    def weights(stream: int) -> list[Tensor]:
        model = make_model("gpt", 2)
        torch.manual_seed(stream)
        for slot_id in model.seed_slots:
            model.germinate_seed(slot_id, name)
        return [next(model.seed_parameters(slot_id)).detach() for slot_id in model.seed_slots]

    (first, second), (again, _) = weights(1), weights(2)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


# -- registry ---------------------------------------------------------------------------------------------------------


def test_names_are_unique_and_known() -> None:
    with pytest.raises(BadValueError, match="'norm' for image slots is registered already"):
        BlueprintRegistry.register("image", "norm", count)
    with pytest.raises(UnknownNameError, match=r"'conv_lihgt'.*conv_light"):
        BlueprintRegistry.spec("image", "conv_lihgt")
    with pytest.raises(UnknownNameError, match="'conv_light'"):
        check_blueprint("vector", "conv_light", 8)
    with pytest.raises(BadValueError, match="width 6 is not a multiple of 4"):
        BlueprintRegistry.build("tokens", "attention", 6)
    with pytest.raises(BadValueError, match="resolution 1 is below its minimum of 2"):
        BlueprintRegistry.build("tokens", "attention", 8, resolution=1)


def test_a_seed_is_a_function_of_its_number() -> None:
    """Whatever the global stream stands at; and another number gives another seed."""

    def weights(rng_seed: int) -> Tensor:
        torch.rand(3)
        seed = BlueprintRegistry.build("image", "conv_light", 8, rng_seed=rng_seed)
        return torch.cat([parameter.detach().flatten() for parameter in seed.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
