"""What a user can get wrong at the front door: each mistake is a typed error that names the value and the remedy."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts import AT_ONCE, FEATURES, MLPHost, bring_to, make_batch, make_host, make_model
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina import (
    BlueprintRegistry,
    CNNHost,
    GateThresholds,
    GrowingOptimizer,
    Host,
    LifecycleConfig,
    MorphogeneticModel,
    Segment,
    attach,
    check_blueprint,
    check_host,
    lifecycle,
)
from esper.kasmina.layers import Linear, Scale, Statistics
from esper.leyline import (
    BadValueError,
    BlueprintContractError,
    CheckpointError,
    HostMismatchError,
    SeedStage,
    SlotSpec,
    StageChange,
    UnknownNameError,
)


class Stretch(Segment):
    """A segment around one layer."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Sequential(*layers)

    def forward(self, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        return self.layer(h), {}


def two_stretches(*first: nn.Module) -> Host:
    """Vectors of width 4 in the middle."""
    return Host([Stretch(*first), Stretch(Linear(4, 2))], [SlotSpec("middle", 4, "vector", 0.5)])


# -- hosts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm1d(4), nn.Dropout(0.5), nn.InstanceNorm1d(4, track_running_stats=True), nn.AlphaDropout(0.1)],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_with_a_state_of_their_own_are_refused(layer: nn.Module) -> None:
    """They would write, or draw, in rows that must leave no trace."""
    host = two_stretches(Linear(4, 4), layer)
    message = rf"segments.0.layer.1 of Host is a {type(layer).__name__} that .* or attach\(\) for foreign networks"
    with pytest.raises(HostMismatchError, match=message):
        MorphogeneticModel(host)
    with pytest.raises(HostMismatchError, match=message):
        check_host(host, torch.randn(3, 4))


def test_layers_without_a_state_are_welcome() -> None:
    """Dropout that drops nothing, a norm by batch statistics alone."""
    model = MorphogeneticModel(
        two_stretches(Linear(4, 4), nn.Dropout(0.0), nn.BatchNorm1d(4, track_running_stats=False))
    )
    assert model(torch.randn(3, 4)).shape == (3, 2)


class Counting(Segment):
    """Writes a buffer of its own."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        self.calls.add_(1)
        return self.linear(h), {}


class Moody(Segment):
    """Goes by its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Linear(4, 4)

    def forward(self, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        return self.linear(h) * (2 if self.training else 1), {}


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (Counting(), r"segment 0 \(Counting\) writes calls: return such values as statistics"),
        (Moody(), r"segment 0 \(Moody\) depends on its own mode: use the argument train"),
    ],
    ids=["writes", "goes by its mode"],
)
def test_check_host_finds_a_state_by_running(segment: Segment, message: str) -> None:
    """What no list of layers can know."""
    host = Host([segment, Stretch(Linear(4, 2))], [SlotSpec("middle", 4, "vector", 0.5)])
    with pytest.raises(HostMismatchError, match=message):
        check_host(host, torch.randn(3, 4))


def test_segments_are_segments() -> None:
    """At least one, and each of the class that says what it returns."""
    with pytest.raises(HostMismatchError, match="has no segments; a host needs at least one"):
        Host([], [])
    layers: list[Any] = [Stretch(Linear(4, 4)), nn.Linear(4, 2)]  # Any: wrong on purpose
    with pytest.raises(HostMismatchError, match=r"\['1: Linear'\] are no Segment: subclass .* or use attach\(\)"):
        Host(layers, [SlotSpec("middle", 4, "vector", 0.5)])


@pytest.mark.parametrize("call", [lambda m, x: m(x), lambda m, x: m.host(x)], ids=["model", "host"])
def test_an_input_that_does_not_fit_names_the_segment(call: Callable[[MorphogeneticModel, Tensor], Tensor]) -> None:
    """A width of 7 is taken, 5 is not."""
    model = MorphogeneticModel(make_host("mlp"))
    call(model, torch.randn(2, FEATURES))
    with pytest.raises(HostMismatchError, match=r"segment 0 \(HiddenSegment\) cannot run on .* shape \(2, 5\)"):
        call(model, torch.randn(2, 5))


def test_a_foreign_network_is_sent_to_attach() -> None:
    """The commonest first mistake."""
    network: Any = nn.Sequential(nn.Linear(4, 4))  # Any: wrong on purpose
    with pytest.raises(HostMismatchError, match=r"Sequential is no Host .*: use attach\("):
        MorphogeneticModel(network)


@pytest.mark.parametrize(
    ("network", "slots", "message"),
    [
        (nn.Sequential(nn.Linear(4, 4)), ["0"], r"slots \['0'\] are not names with their widths"),
        (nn.Sequential(nn.Linear(4, 4)), "0", "slots '0' are not names"),
        (nn.Sequential(nn.Linear(4, 4)), {0: 4}, "slot 0 is not the name of a submodule"),
        (torch.relu, {"0": 4}, "takes an nn.Module, not builtin_function_or_method"),
        (MorphogeneticModel(CNNHost((4,), resolution=4)), {"0": 4}, "has slots already"),
    ],
    ids=["list", "str", "number", "function", "grown"],
)
def test_attach_says_what_it_takes(network: Any, slots: Any, message: str) -> None:  # Any: wrong on purpose
    """Typed errors instead of an AttributeError inside."""
    with pytest.raises(BadValueError, match=message):
        attach(network, slots)


def test_load_takes_a_model(tmp_path: Path) -> None:
    """A bare host has no slots to restore."""
    make_model("mlp").save(tmp_path / "model")
    host: Any = make_host("mlp")  # Any: wrong on purpose
    with pytest.raises(BadValueError, match="takes a MorphogeneticModel, not MLPHost: wrap the host"):
        MorphogeneticModel.load(tmp_path / "model", host)


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 1e4}, "budget 10000.0 is not an integer of 0 or more"),
        ({"budget": -1}, "budget -1"),
        ({"budget": True}, "budget True"),
        ({"rng_seed": 1.5}, "rng_seed 1.5 is not an integer"),
        ({"rng_seed": None}, "rng_seed None"),
        ({"config": {"cooldown": 3}}, "config is a dict; pass a LifecycleConfig"),
    ],
    ids=str,
)
def test_settings_are_checked_where_they_enter(settings: dict[str, Any], message: str) -> None:  # Any: wrong values
    """A model that could not be saved is not built either, attached or not."""
    with pytest.raises(BadValueError, match=re.escape(message)):
        MorphogeneticModel(make_host("mlp"), **settings)
    network = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(BadValueError, match=re.escape(message)):
        attach(network, {"0": 4}, **settings)
    assert not network[0]._forward_hooks


@pytest.mark.parametrize(
    "make",
    [
        lambda: LifecycleConfig(cooldown=3.0),  # type: ignore[arg-type]  # wrong on purpose, here and below
        lambda: LifecycleConfig(min_prune_age=True),
        lambda: LifecycleConfig(thresholds={"strict": True}),  # type: ignore[arg-type]
        lambda: GateThresholds(min_training_steps=1.5),  # type: ignore[arg-type]
        lambda: GateThresholds(strict="yes"),  # type: ignore[arg-type]
    ],
)
def test_configurations_are_checked_too(make: Callable[[], object]) -> None:
    """They go into the checkpoint as they are."""
    with pytest.raises(BadValueError):
        make()


def test_one_slot_may_be_named_by_a_string() -> None:
    """Not letter by letter."""
    assert list(MorphogeneticModel(make_host("mlp"), "r0c1").seed_slots) == ["r0c1"]
    with pytest.raises(UnknownNameError, match="unknown slot 'r9c9'"):
        MorphogeneticModel(make_host("mlp"), "r9c9")
    wrong: Any = [0, 1]  # Any: wrong on purpose
    with pytest.raises(BadValueError, match=r"slots \[0, 1\] must be ids"):
        MorphogeneticModel(make_host("mlp"), wrong)


@pytest.mark.parametrize("value", [True, 2.0, "3", None, -1])
def test_steps_are_whole_numbers(value: Any) -> None:  # Any: wrong on purpose
    """Nor is a bool one; the model stays as it was."""
    model = make_model("mlp")
    bring_to(model, "r0c0", SeedStage.HOLDING, make_batch("mlp"))
    before = [slot.state for slot in model.seed_slots.values()]
    verbs: list[Callable[[], StageChange]] = [
        lambda: model.germinate_seed("r0c1", "norm", tempo=value),
        lambda: model.set_alpha_target("r0c0", 0.5, steps=value),
        lambda: model.prune_seed("r0c0", steps=value),
    ]
    for verb in verbs:
        with pytest.raises(BadValueError, match="is not an integer of 0 or more"):
            verb()
    assert before == [slot.state for slot in model.seed_slots.values()]


@pytest.mark.parametrize("value", [True, "1", None, torch.tensor(1.0)], ids=str)
def test_alphas_are_numbers(value: Any) -> None:  # Any: wrong on purpose
    """Of Python, as a checkpoint needs them."""
    model = make_model("mlp")
    bring_to(model, "r0c0", SeedStage.HOLDING, make_batch("mlp"))
    with pytest.raises(BadValueError, match=r"alpha_target .* is not in \(0, 1\]"):
        model.germinate_seed("r0c1", "norm", alpha_target=value)
    with pytest.raises(BadValueError, match=r"alpha target .* is not in \(0, 1\]"):
        model.set_alpha_target("r0c0", value)


def test_save_writes_nothing_that_load_would_refuse(tmp_path: Path) -> None:
    """What slipped past the front door stops there, and the old checkpoint stays."""
    model = make_model("mlp")
    model.save(tmp_path / "model")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    model.budget = 10.5  # type: ignore[assignment]  # wrong on purpose
    with pytest.raises(CheckpointError, match=r"could not be loaded again: model.budget is 10.5"):
        model.save(tmp_path / "model")
    mixed = make_model("cnn")
    mixed.host.get_submodule("segments.0").double()
    with pytest.raises(CheckpointError, match=r"is of torch.float32, other weights of torch.float64"):
        mixed.save(tmp_path / "model")
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}


# -- blueprints -------------------------------------------------------------------------------------------------------


def register(count: Any, build: Any) -> str:  # Any: wrong on purpose
    """As `front` for vector slots; the fixture forgets it."""
    BlueprintRegistry.register("vector", "front", count)(build)
    return "front"


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(BlueprintRegistry, "_specs", dict(BlueprintRegistry._specs))


@pytest.mark.parametrize(
    ("count", "build", "message"),
    [
        (lambda c: c, lambda width: torch.relu, "its factory returned builtin_function_or_method, not an nn.Module"),
        (lambda c: 0, lambda width: nn.Identity(), "has no parameters"),
        (lambda c: c + 1, Scale, r"clause 4 \(count\): it states 9 parameters but has 8"),
        (lambda c: float(c), Scale, r"clause 4 \(count\): it states 8.0 parameters"),
    ],
    ids=["no module", "no parameters", "wrong count", "no whole count"],
)
def test_a_seed_is_what_its_blueprint_states(count: object, build: object, message: str) -> None:
    """Budgets rely on the stated count, so planting compares; nothing has changed."""
    name, model = register(count, build), make_model("mlp")
    with pytest.raises(BlueprintContractError, match=message):
        model.germinate_seed("r0c0", name)
    assert model.seed_slots["r0c0"].state.stage is SeedStage.DORMANT
    assert model.grown_parameter_count == 0


def test_registering_takes_functions() -> None:
    """The count is one of the width."""
    with pytest.raises(BadValueError, match="count of blueprint 'front' is 24; pass a function of the width"):
        register(24, Scale)
    with pytest.raises(BadValueError, match="decorate a module class"):
        register(lambda c: c, 8)


@pytest.mark.parametrize("seeds", [0, -1, True, 2.0])
def test_a_contract_is_checked_on_some_seeds(seeds: Any) -> None:  # Any: wrong on purpose
    """None would prove nothing."""
    with pytest.raises(BadValueError, match=r"seeds .* is not an integer of 1 or more"):
        check_blueprint("vector", "norm", 8, seeds=seeds)


# -- slots ------------------------------------------------------------------------------------------------------------


def test_a_tick_is_all_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the second slot leaves the first where it was."""
    model = make_model("mlp", 2)
    for slot_id in model.seed_slots:
        model.germinate_seed(slot_id, "norm")
    before = [slot.state for slot in model.seed_slots.values()]
    usual = lifecycle.tick

    def fails_at_the_second(
        state: lifecycle.SeedState, config: LifecycleConfig
    ) -> tuple[lifecycle.SeedState, tuple[StageChange, ...]]:
        if state.slot_id == "r0c1":
            raise RuntimeError("the second")
        return usual(state, config)

    monkeypatch.setattr(lifecycle, "tick", fails_at_the_second)
    with pytest.raises(RuntimeError, match="the second"):
        model.tick()
    assert before == [slot.state for slot in model.seed_slots.values()]


def test_alpha_is_exact_in_every_dtype() -> None:
    """⅓ of float32 is not ⅓ of float64: a model that is moved in mid-ramp goes on as if it had always been there."""
    model = make_model("mlp", 1)
    bring_to(model, "r0c0", SeedStage.TRAINING, make_batch("mlp"))
    model.prune_seed("r0c0")
    for _ in range(3):
        model.tick()
    model.germinate_seed("r0c0", "norm", tempo=3)
    model.advance("r0c0")
    model.observe_gradients({"r0c0": 1.0})
    model.advance("r0c0")
    slot = model.seed_slots["r0c0"]
    assert slot.state.alpha == 1 / 3
    for dtype in (torch.float16, torch.float64):
        model.to(dtype)
        assert slot.alpha.dtype is dtype and slot.alpha.item() == torch.tensor(1 / 3, dtype=dtype).item()


class Mixed(nn.Module):
    """A head in float64 behind a trunk in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4).double()
        self.head = nn.Linear(4, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.middle(self.trunk(x).double()))
        return scores


def test_a_seed_has_the_dtype_of_what_passes_its_slot() -> None:
    """And goes where the host is moved."""
    x = torch.randn(3, 4)
    model = attach(Mixed(), {"trunk": 4, "middle": 4}, example=x, config=AT_ONCE)
    for slot_id, dtype in (("trunk", torch.float32), ("middle", torch.float64)):
        bring_to(model, slot_id, SeedStage.BLENDING, (x, torch.tensor([0, 1, 0])))
        assert {p.dtype for p in model.seed_parameters(slot_id)} == {dtype}
    assert model(x).dtype is torch.float64


def test_autocast_is_no_dtype_for_weights() -> None:
    """The first forward, under autocast, is the probe: bfloat16 passes, the weights remain float32."""
    model = attach(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), {"0": 4}, config=AT_ONCE)
    x = torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
    model.germinate_seed("0", "norm")
    assert {p.dtype for p in model.seed_parameters("0")} == {torch.float32}


def test_numbers_do_not_pass_a_slot() -> None:
    """A stream of integers cannot be added to."""

    class Rounding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.long()

    network = nn.Sequential(nn.Linear(4, 4), Rounding())
    with pytest.raises(HostMismatchError, match=r"returns torch\.int64; a slot needs a floating-point stream"):
        attach(network, {"1": 4}, example=torch.randn(2, 4))


# -- optimiser --------------------------------------------------------------------------------------------------------


def test_an_optimiser_follows_a_growing_model() -> None:
    """A bare network has nothing to follow."""
    network: Any = nn.Linear(4, 4)  # Any: wrong on purpose
    with pytest.raises(BadValueError, match=r"follows a MorphogeneticModel, not Linear: wrap it first, with attach"):
        GrowingOptimizer(network, lambda p: torch.optim.SGD(p, lr=0.1))
    make: Any = lambda p: p  # noqa: E731  # Any: wrong on purpose
    with pytest.raises(BadValueError, match="returned list; it must build a torch optimiser"):
        GrowingOptimizer(make_model("mlp"), make)


def test_a_host_of_ones_own_still_works() -> None:
    """After so many refusals: segments of row-aware layers, trained for a step."""
    model = MorphogeneticModel(MLPHost(4, (8,), 3))
    loss = F.cross_entropy(model(torch.randn(6, 4)), torch.arange(6) % 3)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
