"""The optimiser that follows the seeds."""

import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina import CNNHost, GrowingOptimizer, MorphogeneticModel
from esper.kasmina.layers import reset_parameters
from esper.leyline import BadValueError, CheckpointError, UnknownNameError

SLOTS = ("r0c0", "r1c0")


def grown() -> MorphogeneticModel:
    """A small CNN with two slots."""
    host = CNNHost((4,), classes=3, resolution=4)
    reset_parameters(host, 0)
    return MorphogeneticModel(host)


def momentum(model: MorphogeneticModel, clip_norm: float | None = None) -> GrowingOptimizer:
    """SGD with momentum."""
    return GrowingOptimizer(model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), clip_norm=clip_norm)


def names(optimiser: GrowingOptimizer) -> list[str]:
    """Groups in their order."""
    return [group["name"] for group in optimiser.wrapped.param_groups]


def batch(number: int = 0) -> tuple[Tensor, Tensor]:
    """Images and classes."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(6, 3, 4, 4, generator=generator), torch.arange(6) % 3


def train(model: MorphogeneticModel, optimiser: GrowingOptimizer, number: int = 0) -> dict[str, float]:
    """One step of training."""
    optimiser.zero_grad()
    torch.stack(list(model.losses(*batch(number)).values())).sum().backward()
    return optimiser.step()


def give_gradients(parameters: list[nn.Parameter], value: float) -> float:
    """Set every gradient entry to a value; their norm."""
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, value)
    return abs(value) * math.sqrt(sum(parameter.numel() for parameter in parameters))


# -- membership -------------------------------------------------------------------------------------------------------


@pytest.mark.invariant(6)
def test_follows_birth_and_death() -> None:
    """Each seed has its own group; pruning removes the group and all its state at once."""
    model = grown()
    optimiser = momentum(model)
    assert names(optimiser) == ["host"]
    model.germinate_seed("r0c0", "norm")
    assert names(optimiser) == ["host", "r0c0"]
    model.tick()
    train(model, optimiser)
    seeds = list(model.seed_parameters("r0c0"))
    assert all(parameter in optimiser.wrapped.state for parameter in seeds)
    hosts = len(list(model.host_parameters()))
    model.tick()
    model.tick()
    model.prune_seed("r0c0")
    assert names(optimiser) == ["host"]
    assert len(optimiser.wrapped.state) == hosts


@pytest.mark.invariant(6)
def test_parameters_are_freed() -> None:
    """Nothing keeps a reference to the parameters of a pruned seed."""
    model = grown()
    optimiser = momentum(model)
    model.germinate_seed("r0c0", "norm")
    ghosts = [weakref.ref(parameter) for parameter in model.seed_parameters("r0c0")]
    model.tick()
    train(model, optimiser)
    model.tick()
    model.tick()
    model.prune_seed("r0c0")
    gc.collect()
    assert ghosts and all(ghost() is None for ghost in ghosts)


def test_prune_by_ramp_keeps_the_group_until_the_cut() -> None:
    """The seed trains on while it fades; the tick that cuts it takes its group."""
    model = grown()
    optimiser = momentum(model)
    model.germinate_seed("r0c0", "norm", tempo=0)
    for number in range(3):
        train(model, optimiser, number)
        model.tick()
    model.advance("r0c0")
    model.tick()
    model.prune_seed("r0c0", steps=2)
    assert names(optimiser) == ["host", "r0c0"]
    model.tick()
    assert names(optimiser) == ["host"]


def test_successor_begins_without_momentum() -> None:
    """A new seed in the same slot has new parameters, in a group of its own, with no state."""
    model = grown()
    optimiser = momentum(model)
    model.germinate_seed("r0c0", "norm")
    model.tick()
    train(model, optimiser)
    model.tick()
    model.tick()
    model.prune_seed("r0c0")
    for _ in range(3):
        model.tick()
    model.germinate_seed("r0c0", "depthwise")
    assert names(optimiser) == ["host", "r0c0"]
    assert not any(parameter in optimiser.wrapped.state for parameter in model.seed_parameters("r0c0"))


def test_gate_is_in_the_group() -> None:
    """The parameters of the blending gate join with their seed and learn in its shadow."""
    model = grown()
    optimiser = momentum(model)
    model.germinate_seed("r0c0", "norm", style="gate")
    gate = model.seed_slots["r0c0"].gate
    assert gate is not None
    group = optimiser.wrapped.param_groups[1]["params"]
    assert all(any(parameter is member for member in group) for parameter in gate.parameters())
    model.tick()
    before = [parameter.detach().clone() for parameter in gate.parameters()]
    for number in range(3):
        train(model, optimiser, number)
    assert all(not torch.equal(old, new) for old, new in zip(before, gate.parameters(), strict=True))


def test_joins_a_model_that_has_grown() -> None:
    """Seeds that live already are in it from the start; one slot does not disturb the other's momentum."""
    model = grown()
    model.germinate_seed("r1c0", "norm")
    model.tick()
    optimiser = momentum(model)
    assert names(optimiser) == ["host", "r1c0"]
    train(model, optimiser)
    (state,) = [optimiser.wrapped.state[p]["momentum_buffer"] for p in [next(model.seed_parameters("r1c0"))]]
    model.germinate_seed("r0c0", "norm")
    assert optimiser.wrapped.state[next(model.seed_parameters("r1c0"))]["momentum_buffer"] is state


def test_held_weakly() -> None:
    """A model does not keep an optimiser alive that nobody uses."""
    model = grown()
    ghost = weakref.ref(momentum(model))
    gc.collect()
    assert ghost() is None
    model.germinate_seed("r0c0", "norm")


def test_seed_options() -> None:
    """Seeds get the host's settings, changed by their own."""
    model = grown()
    make = GrowingOptimizer(model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), seed_options={"lr": 0.5})
    model.germinate_seed("r0c0", "norm")
    host, seed = make.wrapped.param_groups
    assert (host["lr"], seed["lr"], seed["momentum"]) == (0.1, 0.5, 0.9)


def test_seed_options_are_settings_of_the_optimiser() -> None:
    """Before the first germination, not at it."""
    with pytest.raises(UnknownNameError, match=r"setting of SGD in seed_options 'learning_rate'; allowed: lr, mom"):
        GrowingOptimizer(grown(), lambda p: torch.optim.SGD(p, lr=0.1), seed_options={"learning_rate": 0.5})


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.nan, math.inf, True, "1"])
def test_clip_norm_is_positive(clip_norm: float) -> None:
    """A norm of 0 would stop all learning without a word."""
    with pytest.raises(BadValueError, match=r"clip_norm .* is not a finite number above 0; None disables clipping"):
        momentum(grown(), clip_norm)


def test_gradients_may_be_zeroed_instead() -> None:
    """As torch's optimisers have it."""
    model = grown()
    optimiser = momentum(model)
    train(model, optimiser)
    optimiser.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    optimiser.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_resumes_in_mid_ramp_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """Model and optimiser, saved and loaded beside each other, go on as if nothing had been."""

    def make(model: MorphogeneticModel) -> GrowingOptimizer:
        if kind == "sgd":
            return momentum(model, clip_norm=1.0)
        return GrowingOptimizer(model, lambda p: torch.optim.AdamW(p, lr=0.01), seed_options={"lr": 0.02})

    def go_on(model: MorphogeneticModel, optimiser: GrowingOptimizer) -> None:
        for number in range(4):
            train(model, optimiser, 10 + number)
            model.tick()

    model = grown()
    optimiser = make(model)
    model.germinate_seed("r1c0", "norm", style="gate")
    for number in range(3):
        train(model, optimiser, number)
        model.tick()
    model.advance("r1c0")
    model.germinate_seed("r0c0", "depthwise")
    train(model, optimiser, 3)
    model.tick()
    assert model.seed_slots["r1c0"].state.ramping
    model.save(tmp_path / "model")
    torch.save(optimiser.state_dict(), tmp_path / "optimiser.pt")

    again = MorphogeneticModel.load(tmp_path / "model")
    resumed = make(again)
    resumed.load_state_dict(torch.load(tmp_path / "optimiser.pt"))
    for pair in ((model, optimiser), (again, resumed)):
        go_on(*pair)
    left, right = model.state_dict(), again.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())
    # It still follows: groups are known by name after a reload too.
    again.prune_seed("r0c0")
    assert names(resumed) == ["host", "r1c0"]


def test_a_state_of_other_seeds_is_refused() -> None:
    """The model comes first."""
    model, other = grown(), grown()
    optimiser, strange = momentum(model), momentum(other)
    other.germinate_seed("r0c0", "norm")
    with pytest.raises(CheckpointError, match=r"\('r0c0', 3\)\], the model has \[\('host', 5\)\]: load the model"):
        optimiser.load_state_dict(strange.state_dict())
    model.germinate_seed("r0c0", "depthwise")
    with pytest.raises(CheckpointError, match="load the model that was saved with it first"):
        optimiser.load_state_dict(strange.state_dict())


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    ],
    ids=["step", "cosine", "linear", "one cycle"],
)
def test_schedulers_of_the_wrapped_optimiser(schedule: Callable[..., torch.optim.lr_scheduler.LRScheduler]) -> None:
    """Those that docs/by-hand.md names go on over births and deaths, with one rate for all."""
    model = grown()
    optimiser = momentum(model)
    scheduler = schedule(optimiser.wrapped)
    for number in range(6):
        train(model, optimiser, number)
        scheduler.step()
        model.tick()
        assert len({round(group["lr"], 9) for group in optimiser.wrapped.param_groups}) == 1
        if number == 1:
            model.germinate_seed("r0c0", "norm")
        if number == 4:
            model.prune_seed("r0c0")


def test_one_group_only() -> None:
    """The host's parameters are one group; others would not be followed."""
    with pytest.raises(ValueError, match=r"into 5 groups.*use one group, as in lambda p"):
        GrowingOptimizer(grown(), lambda p: torch.optim.SGD([{"params": [q]} for q in p], lr=0.1))


# -- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_equals_torch_without_seeds(kind: type[torch.optim.SGD] | type[torch.optim.AdamW]) -> None:
    """For a host alone it is the wrapped optimiser, bit for bit."""
    model, plain = grown(), grown()
    optimiser = GrowingOptimizer(model, lambda p: kind(p, lr=0.05))
    reference = kind(plain.parameters(), lr=0.05)
    for number in range(4):
        train(model, optimiser, number)
        reference.zero_grad()
        plain.losses(*batch(number))["main"].backward()
        reference.step()
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    assert pairs and all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_clipping_equals_torch() -> None:
    """One group alone is clipped as torch.nn.utils.clip_grad_norm_ does it."""
    model, plain = grown(), grown()
    optimiser = momentum(model, clip_norm=0.05)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for number in range(3):
        assert train(model, optimiser, number)["host"] > 0.05
        reference.zero_grad()
        plain.losses(*batch(number))["main"].backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        reference.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


def test_clip_per_group() -> None:
    """A group of norm 10 is scaled to 1, its neighbour of norm 0.5 is left as it is."""
    model = grown()
    optimiser = momentum(model, clip_norm=1.0)
    for slot_id in SLOTS:
        model.germinate_seed(slot_id, "norm")
    large, small = (list(model.seed_parameters(slot_id)) for slot_id in SLOTS)
    count = sum(parameter.numel() for parameter in large)  # 3·4 = 12 in each
    give_gradients(large, 10 / math.sqrt(count))
    give_gradients(small, 0.5 / math.sqrt(count))
    before = [parameter.detach().clone() for parameter in small]
    norms = optimiser.step()
    assert norms == pytest.approx({"r0c0": 10.0, "r1c0": 0.5})
    clipped = math.sqrt(sum(float(p.grad.square().sum()) for p in large if p.grad is not None))
    assert clipped == pytest.approx(1.0, rel=1e-5)
    for old, new in zip(before, small, strict=True):
        torch.testing.assert_close(old - new, torch.full_like(old, 0.1 * 0.5 / math.sqrt(count)))


@pytest.mark.requirement(38)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("group", ["host", "r0c0"])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_non_finite_group_is_left_out(group: str, poison: float, clip_norm: float | None) -> None:
    """Its weights and momentum stay untouched, bit for bit, while the other groups step."""
    model = grown()
    optimiser = momentum(model, clip_norm=clip_norm)
    for slot_id in SLOTS:
        model.germinate_seed(slot_id, "norm")
    model.tick()
    train(model, optimiser, 0)
    parameters = {"host": list(model.host_parameters())} | {s: list(model.seed_parameters(s)) for s in SLOTS}
    before = {name: _frame(optimiser, members) for name, members in parameters.items()}
    for members in parameters.values():
        give_gradients(members, 0.1)
    first = parameters[group][0].grad
    assert first is not None
    first.view(-1)[0] = poison
    norms = optimiser.step()
    after = {name: _frame(optimiser, members) for name, members in parameters.items()}
    assert not math.isfinite(norms[group])
    assert {name for name in parameters if before[name] != after[name]} == set(parameters) - {group}
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def _frame(optimiser: GrowingOptimizer, parameters: list[nn.Parameter]) -> list[list[float]]:
    """Weights and momentum as plain numbers."""
    states = [optimiser.wrapped.state[parameter]["momentum_buffer"] for parameter in parameters]
    return [tensor.detach().flatten().tolist() for tensor in (*parameters, *states)]


def test_seeds_learn_their_gradient_norms() -> None:
    """G2 reads what the optimiser saw; a gradient that is not finite is noted as infinite."""
    model = grown()
    optimiser = momentum(model)
    model.germinate_seed("r0c0", "norm")
    assert train(model, optimiser).keys() == {"host"}  # a germinated seed has no gradient yet
    noted = [model.seed_slots["r0c0"].state.gradient_norm]
    model.tick()
    norms = train(model, optimiser)
    noted.append(model.seed_slots["r0c0"].state.gradient_norm)
    give_gradients(list(model.seed_parameters("r0c0")), math.nan)
    optimiser.step()
    noted.append(model.seed_slots["r0c0"].state.gradient_norm)
    assert norms["r0c0"] > 0
    assert noted == [None, norms["r0c0"], math.inf]


def test_step_without_gradients() -> None:
    """Nothing to do is no error."""
    assert momentum(grown()).step() == {}
