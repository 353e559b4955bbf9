"""The promises of a growing network, stage by stage, on every kind of host."""

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from hosts import AT_ONCE, HOST_KINDS, HostKind, bring_to, make_batch, make_model, shake
from promises import adamw, assert_optimiser_follows, gradients_of, refused, sgd, total
from torch import Tensor

from esper.kasmina import BlueprintRegistry, GrowingOptimizer, Host, LifecycleConfig, cross_entropy
from esper.kasmina.slot import ISOLATIONS, Isolation
from esper.leyline import BLEND_STYLES, SeedStage, SlotOccupiedError

# -- silence ----------------------------------------------------------------------------------------------------------


@pytest.mark.invariant(1)
@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("style", BLEND_STYLES)
@pytest.mark.parametrize("kind", HOST_KINDS)
def test_silent_stages(kind: HostKind, style: str, isolation: Isolation) -> None:
    """Even a seed with non-zero weights changes nothing before BLENDING, nor in BLENDING at alpha 0."""
    batch = make_batch(kind)
    for stage in (SeedStage.GERMINATED, SeedStage.TRAINING, SeedStage.BLENDING):
        model = make_model(kind, isolation=isolation)
        host = model.host
        assert isinstance(host, Host)
        for slot_id, slot in model.seed_slots.items():
            bring_to(model, slot_id, stage, batch, style=style)
            shake(slot, 1)
        for train in (True, False):
            bare = host.run(batch[0], train)[0]
            if stage is SeedStage.BLENDING:
                assert not torch.equal(model.body(batch[0], train)[0], bare)
                for slot in model.seed_slots.values():
                    slot.alpha.zero_()
            assert torch.equal(model.body(batch[0], train)[0], bare)
            if stage is SeedStage.BLENDING:
                for slot in model.seed_slots.values():
                    slot.alpha.fill_(slot.state.alpha)


# -- shadows ----------------------------------------------------------------------------------------------------------


@pytest.mark.invariant(2)
@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("kind", HOST_KINDS)
def test_an_epoch_beside_a_training_seed(
    kind: HostKind, isolation: Isolation, make: Callable[[object], torch.optim.Optimizer]
) -> None:
    """Weights and buffers of the host and of blending seeds are bit-equal to a run without it."""
    alone = make_model(kind, 3, isolation=isolation)
    before, between, behind = alone.seed_slots
    bring_to(alone, between, SeedStage.BLENDING, make_batch(kind), style="gate", alpha=0.5)
    shake(alone.seed_slots[between], 1)
    beside = copy.deepcopy(alone)
    for slot_id, style in ((before, "multiply"), (behind, "gate")):
        bring_to(beside, slot_id, SeedStage.TRAINING, make_batch(kind), style=style)
    seeds = {slot_id: copy.deepcopy(beside.seed_slots[slot_id].seed) for slot_id in (before, behind)}
    start = copy.deepcopy(alone.state_dict())

    for model in (alone, beside):
        optimiser = GrowingOptimizer(model, make, clip_norm=1.0)
        for index in range(6):
            optimiser.zero_grad()
            total(model.losses(*make_batch(kind, rng_seed=index))).backward()
            optimiser.step()

    shared, grown = alone.state_dict(), beside.state_dict()
    for name, tensor in shared.items():
        assert torch.equal(tensor, grown[name]), name
    moved = {name for name, tensor in shared.items() if not torch.equal(tensor, start[name])}
    assert {f"body.host.{name}" for name, _ in alone.host.named_parameters()} <= moved
    assert kind != "cnn" or "body.host.segments.0.norm.running_mean" in moved
    for slot_id, born in seeds.items():
        learnt = beside.seed_slots[slot_id].seed
        assert born is not None and learnt is not None
        for (name, old), new in zip(born.named_parameters(), learnt.parameters(), strict=True):
            assert not torch.equal(old, new), f"{name} of the seed in {slot_id} has learnt nothing"


@pytest.mark.invariant(2)
@pytest.mark.parametrize("kind", HOST_KINDS)
def test_at_birth_only_the_scale_learns(kind: HostKind) -> None:
    """The first step trains only the seed's scale; after it every parameter gets a gradient."""
    model, batch = make_model(kind, 1), make_batch(kind)
    (slot_id,) = model.seed_slots
    bring_to(model, slot_id, SeedStage.TRAINING, batch)
    optimiser = GrowingOptimizer(model, sgd)
    alive: list[set[str]] = []
    for _ in range(2):
        optimiser.zero_grad()
        total(model.losses(*batch)).backward()
        slot = model.seed_slots[slot_id]
        alive.append({name for name, p in slot.named_parameters() if p.grad is not None and p.grad.count_nonzero()})
        optimiser.step()
    assert alive[0] == {"seed.scale.weight"}
    assert alive[1] == {name for name, _ in model.seed_slots[slot_id].named_parameters()}


@pytest.mark.invariant(2)
@pytest.mark.parametrize("kind", HOST_KINDS)
def test_a_training_seed_learns(kind: HostKind) -> None:
    """A seed in TRAINING learns: following its gradient lowers the shadow's loss.

    Straight-through has no feedback, so it makes no such promise.
    """
    model, (x, targets) = make_model(kind, 1), make_batch(kind, 32)
    (slot_id,) = model.seed_slots
    bring_to(
        model,
        slot_id,
        SeedStage.TRAINING,
        (x, targets),
        BlueprintRegistry.names(model.seed_slots[slot_id].spec.topology)[-1],
    )
    optimiser = GrowingOptimizer(model, lambda p: torch.optim.Adam(p, lr=0.0), seed_options={"lr": 0.03})
    host_loss = float(model.losses(x, targets)["main"].detach())
    for _ in range(30):
        optimiser.zero_grad()
        total(model.losses(x, targets)).backward()
        optimiser.step()
    assert float(model.losses(x, targets)["main"].detach()) == host_loss
    tap = model.body.main(x, True, [slot_id])[1][slot_id]
    assert float(cross_entropy(model.body.shadow(slot_id, tap, True), targets).detach()) < host_loss - 0.01


# -- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.invariant(3)
@pytest.mark.parametrize("style", BLEND_STYLES)
@pytest.mark.parametrize("kind", HOST_KINDS)
@pytest.mark.default_cases("cnn-gate", "gpt-multiply", "mlp-add")
def test_nothing_is_dead(kind: HostKind, style: str) -> None:
    """For every blueprint and stage, every trainable parameter gets a non-zero gradient."""
    batch = make_batch(kind)
    offers = BlueprintRegistry.offers(make_model(kind, 1).seed_slots["r0c0"].spec)
    for stage in (SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED):
        for offer in offers:
            model = make_model(kind)
            for slot_id in model.seed_slots:
                blueprint = offer.name if slot_id == "r0c0" else "norm"
                bring_to(model, slot_id, stage, batch, blueprint, style=style, alpha=0.5)
                shake(model.seed_slots[slot_id], 1)
            for name, gradient in gradients_of(model, total(model.losses(*batch))).items():
                assert gradient is not None and gradient.count_nonzero() > 0, (
                    f"{name} with {offer.name} in {stage.name}"
                )


@pytest.mark.invariant(3)
@pytest.mark.parametrize("style", BLEND_STYLES)
@pytest.mark.parametrize("kind", HOST_KINDS)
def test_the_host_learns_through_an_acting_seed(kind: HostKind, style: str) -> None:
    """Weights before a slot also get the gradient through its seed, as finite differences show."""
    model = make_model(kind, 1, dtype=torch.float64)
    batch = make_batch(kind, dtype=torch.float64)
    bring_to(model, "r0c0", SeedStage.HOLDING, batch, style=style)
    shake(model.seed_slots["r0c0"], 1)
    host, seed = model.host, model.seed_slots["r0c0"].seed
    assert isinstance(host, Host) and seed is not None
    weight = list(host.segments[0].parameters())[-1]
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss() -> Tensor:
        return cross_entropy(model.body(batch[0], True)[0], batch[1])

    def slope() -> float:
        (gradient,) = torch.autograd.grad(loss(), [weight])
        return float((gradient * direction).sum())

    through = slope()
    handle = seed.register_forward_pre_hook(lambda module, inputs: (inputs[0].detach(),))
    around = slope()
    handle.remove()

    width = 1e-6
    with torch.no_grad():
        weight.add_(direction, alpha=width)
        above = float(loss())
        weight.sub_(direction, alpha=2 * width)
        below = float(loss())
    assert through == pytest.approx((above - below) / (2 * width), rel=1e-5, abs=1e-8)
    assert abs(through - around) > 1e-3 * abs(through)


# -- death ------------------------------------------------------------------------------------------------------------


@pytest.mark.invariant(6)
@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("stage", [SeedStage.GERMINATED, SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING])
def test_a_pruned_seed_leaves_nothing(stage: SeedStage, make: Callable[[object], torch.optim.Optimizer]) -> None:
    """Module, gate, parameters and optimiser state go at once; the slot is free after its cooldown."""
    batch = make_batch("cnn")
    config = LifecycleConfig(cooldown=4, min_prune_age=0, thresholds=AT_ONCE.thresholds)
    model = make_model("cnn", 2, config=config)
    optimiser = GrowingOptimizer(model, make)
    slot_id, other = model.seed_slots
    bring_to(model, slot_id, stage, batch, "conv_light", style="gate")
    bring_to(model, other, SeedStage.BLENDING, batch)
    for _ in range(2):
        optimiser.zero_grad()
        total(model.losses(*batch)).backward()
        optimiser.step()
    slot = model.seed_slots[slot_id]
    assert slot.seed is not None and slot.gate is not None
    dying = [weakref.ref(thing) for thing in (slot.seed, slot.gate, *slot.parameters())]
    kept = {id(p): copy.deepcopy(optimiser.wrapped.state[p]) for p in model.host.parameters()}
    before = model.grown_parameter_count

    model.prune_seed(slot_id)
    gc.collect()
    assert [thing() for thing in dying] == [None] * len(dying)
    assert model.grown_parameter_count == before - BlueprintRegistry.spec("image", "conv_light").count(6) - 7
    assert_optimiser_follows(model, optimiser)
    for parameter in model.host.parameters():
        for key, value in kept[id(parameter)].items():
            assert torch.equal(torch.as_tensor(optimiser.wrapped.state[parameter][key]), torch.as_tensor(value))

    for left in (4, 3, 2, 1):
        assert model.seed_slots[slot_id].state.cooldown == left
        refused(model, SlotOccupiedError, f"rests for {left} more", lambda: model.germinate_seed(slot_id, "norm"))
        model.tick()
    model.germinate_seed(slot_id, "norm")


@pytest.mark.invariant(6)
def test_a_ramp_ends_in_the_same_death() -> None:
    """Alpha falls to ⅔, ⅓ and 0 over three steps, and only then is the seed freed."""
    model, batch = make_model("mlp", 1), make_batch("mlp")
    optimiser = GrowingOptimizer(model, sgd)
    bring_to(model, "r0c0", SeedStage.HOLDING, batch)
    slot = model.seed_slots["r0c0"]
    assert slot.seed is not None
    seed = weakref.ref(slot.seed)
    model.prune_seed("r0c0", steps=3)
    assert slot.state.alpha == pytest.approx(2 / 3)
    model.tick()
    assert slot.state.alpha == pytest.approx(1 / 3)
    assert seed() is not None
    model.tick()
    gc.collect()
    assert seed() is None
    assert slot.state.stage is SeedStage.PRUNED
    assert slot.alpha.item() == 0.0
    assert_optimiser_follows(model, optimiser)
