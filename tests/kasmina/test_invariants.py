"""The promises of a growing network, on random lifecycles over every kind of host.

A walk draws one of the verbs that are legal at that moment, again and again. Which those are is written down here once
more (`Walk.legal`), independent of the lifecycle itself. A step is what a user's loop does: two minibatches, a
measurement, a tick. A failing example is one number, which repeats the walk.
"""

import copy
import gc
import random
import weakref
from collections.abc import Callable
from functools import partial
from typing import Literal

import pytest
import torch
from hosts import AT_ONCE, HOST_KINDS, HostKind, bring_to, make_batch, make_model, shake
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from esper.kasmina import (
    BlueprintRegistry,
    CNNHost,
    GPTHost,
    GrowingOptimizer,
    Host,
    LifecycleConfig,
    MorphogeneticModel,
    cross_entropy,
)
from esper.kasmina.slot import ISOLATIONS, Isolation
from esper.leyline import (
    ACTIVE_STAGES,
    ALPHA_CURVES,
    BLEND_STYLES,
    COOLDOWN_STAGES,
    LIVE_STAGES,
    BadValueError,
    EsperError,
    GateRefusedError,
    SeedStage,
    SlotOccupiedError,
    StageError,
    UnknownNameError,
)

Verb = Literal["germinate", "advance", "fossilize", "set_alpha_target", "prune"]
VERBS: tuple[Verb, ...] = ("germinate", "advance", "fossilize", "set_alpha_target", "prune")
TEMPOS = (0, 1, 2)

MOVES = 30
FORWARD_WEIGHT = 6
STEP_WEIGHT = 2
SEEN: dict[tuple[HostKind, int], list[set[tuple[SeedStage, str | None]]]] = {}
"""Stages with styles that each walk has seen, by kind of host and number of slots."""
WALKING_TESTS = 4
# No shrinking: a smaller number is not a simpler walk.
EXAMPLES = 3
few = settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
some_host = pytest.mark.parametrize(("kind", "slots"), [(kind, slots) for kind in HOST_KINDS for slots in (1, 3)])
walks = st.integers(0, 2**32 - 1)
isolations = st.sampled_from(ISOLATIONS)


def total(losses: dict[str, Tensor]) -> Tensor:
    return torch.stack(list(losses.values())).sum()


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)  # type: ignore[arg-type]  # what GrowingOptimizer hands


def adamw(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)  # type: ignore[arg-type]  # likewise


class Walk:
    """A growing model on its way, and all that may be done to it."""

    def __init__(self, kind: HostKind, slots: int, isolation: Isolation, config: LifecycleConfig = AT_ONCE) -> None:
        self.kind = kind
        self.model = make_model(kind, slots, isolation=isolation, config=config)
        self.optimiser = GrowingOptimizer(self.model, sgd, clip_norm=1.0)
        self.minibatches = {place: 0 for place in self.model.seed_slots}
        self.trained = 0
        self.born = 0
        self.ticks = 0

    def legal(self, place: str, verb: Verb) -> bool:
        """Whether a verb must succeed on a slot now."""
        state, config = self.model.seed_slots[place].state, self.model.config
        if verb == "germinate":
            return state.stage is SeedStage.DORMANT
        if verb == "fossilize":
            held = state.steps_in_stage >= config.thresholds.min_holding_steps
            return state.stage is SeedStage.HOLDING and held and bool(state.contributions)
        if verb == "set_alpha_target":
            return state.stage is SeedStage.HOLDING
        if verb == "prune":
            young = state.stage is SeedStage.TRAINING and state.steps_in_stage < config.min_prune_age
            mortal = state.stage in LIVE_STAGES - {SeedStage.FOSSILIZED}
            return mortal and state.controller.holding and not young
        if state.stage is SeedStage.TRAINING:
            learnt = state.steps_in_stage >= config.thresholds.min_training_steps
            return learnt and state.gradient_norm is not None
        if state.stage is SeedStage.BLENDING:
            return state.controller.holding and not state.pruning
        return state.stage is SeedStage.GERMINATED or self.legal(place, "fossilize")

    def act(self, place: str, verb: Verb, number: int = 0) -> None:
        """Do it, with arguments that depend on the number."""
        model, spec = self.model, self.model.seed_slots[place].spec
        target, steps, curve = (0.5, 0.7, 1.0)[number % 3], number % 4, ALPHA_CURVES[number % len(ALPHA_CURVES)]
        if verb == "germinate":
            offers = BlueprintRegistry.offers(spec)
            blueprint = offers[number % len(offers)].name
            style, tempo = BLEND_STYLES[self.born % 3], TEMPOS[number // 21 % 3]
            model.germinate_seed(place, blueprint, style=style, tempo=tempo, alpha_target=target)
            self.minibatches[place] = 0
            self.born += 1
        elif verb == "advance":
            model.advance(place)
        elif verb == "fossilize":
            model.fossilize(place)
        elif verb == "set_alpha_target":
            model.set_alpha_target(place, target, steps=steps, curve=curve)
        else:
            model.prune_seed(place, steps=steps, curve=curve)

    def step(self) -> None:
        """Two minibatches, a measurement, a tick."""
        for _ in range(2):
            self.train()
        batch = make_batch(self.kind, rng_seed=99)
        self.model.measure(*batch, calibration=batch[0])
        self.model.tick()
        self.ticks += 1

    def train(self) -> None:
        self.optimiser.zero_grad()
        total(self.model.losses(*make_batch(self.kind, rng_seed=self.trained))).backward()
        self.optimiser.step()
        self.trained += 1
        for place, slot in self.model.seed_slots.items():
            self.minibatches[place] += slot.state.stage not in (SeedStage.DORMANT, SeedStage.GERMINATED)

    def follow(self, number: int, check: Callable[["Walk"], None]) -> None:
        """Steps and legal verbs in random order; `check` looks at what came of each."""
        chance = random.Random(number)
        seen = SEEN.setdefault((self.kind, len(self.model.seed_slots)), [])
        seen.append(set())
        self.born = len(seen)  # styles take turns, from walk to walk and within one
        for _ in range(MOVES):
            moves = [(place, verb) for place in self.model.seed_slots for verb in VERBS if self.legal(place, verb)]
            weights = [self.weight(place, verb) for place, verb in moves]
            # Steps as often as all slots need them, whatever their number.
            (move,) = chance.choices([*moves, None], [*weights, max(STEP_WEIGHT, sum(weights) / 3)])
            if move is None:
                self.step()
            else:
                self.act(*move, chance.randrange(10**6))
            seen[-1] |= {
                (slot.state.stage, slot.state.style if slot.state.blueprint is not None else None)
                for slot in self.model.seed_slots.values()
            }
            check(self)

    def weight(self, place: str, verb: Verb) -> int:
        """Forward rather than back: most promises are about seeds that act, and few walks would get there."""
        early = self.model.seed_slots[place].state.stage is not SeedStage.HOLDING
        return FORWARD_WEIGHT if verb in ("germinate", "advance") and early else 1


def by_hand(model: MorphogeneticModel, x: Tensor, train: bool) -> Tensor:
    """What the network is without its slots: segments, and the formula of each seed that acts."""
    host = model.host
    assert isinstance(host, Host)
    h = x
    for index, segment in enumerate(host.segments):
        h, _ = segment(h, train)
        slot = model.seed_slots.get(host.slots[index].slot_id) if index < len(host.slots) else None
        if slot is None or slot.state.stage not in ACTIVE_STAGES:
            continue
        assert slot.seed is not None
        delta = slot.seed(h)
        if slot.state.style == "multiply":
            h = h * (1 + slot.state.alpha * torch.tanh(delta))
        elif slot.gate is not None:
            h = h + slot.state.alpha * slot.gate(h) * delta
        else:
            h = h + slot.state.alpha * delta
    return h


def gradients_of(model: MorphogeneticModel, loss: Tensor) -> dict[str, Tensor | None]:
    model.zero_grad()
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def owner(model: MorphogeneticModel, name: str) -> str | None:
    """The slot that a parameter belongs to, or None for the host."""
    return name.split(".")[2] if name.startswith("body.slots.") else None


# -- random lives -----------------------------------------------------------------------------------------------------


@some_host
@few
@given(isolation=isolations, number=walks)
def test_only_acting_seeds_change_the_stream(kind: HostKind, slots: int, isolation: Isolation, number: int) -> None:
    """Invariant 1: empty, GERMINATED and TRAINING slots leave the output bit-identical, in training and in eval."""

    def check(walk: Walk) -> None:
        x, _ = make_batch(kind, rng_seed=1)
        acting = any(slot.state.stage in ACTIVE_STAGES for slot in walk.model.seed_slots.values())
        for train in (True, False):
            output = walk.model.body(x, train).output
            assert torch.equal(output, by_hand(walk.model, x, train))
            if not acting:
                assert isinstance(walk.model.host, Host)
                assert torch.equal(output, walk.model.host.run(x, train)[0])

    Walk(kind, slots, isolation).follow(number, check)


@some_host
@few
@given(isolation=isolations, number=walks)
def test_gradients_in_every_stage(kind: HostKind, slots: int, isolation: Isolation, number: int) -> None:
    """Invariants 2 and 3: seeds in TRAINING leave all other gradients as they are, and nothing that trains is dead."""

    def check(walk: Walk) -> None:
        model = walk.model
        x, targets = make_batch(kind, rng_seed=1)
        bare = gradients_of(model, cross_entropy(by_hand(model, x, True), targets))
        found = gradients_of(model, total(model.losses(x, targets)))
        for name, gradient in found.items():
            place = owner(model, name)
            stage = None if place is None else model.seed_slots[place].state.stage
            if stage is SeedStage.GERMINATED:
                assert gradient is None
                continue
            if stage is None or stage in ACTIVE_STAGES:
                reference = bare[name]
                assert gradient is not None and reference is not None
                assert torch.equal(gradient, reference), f"{name} is trained by a seed that should not act"
            # At birth only the scale has a gradient; two minibatches later all have one.
            if stage is None or (place is not None and walk.minibatches[place] >= 2):
                assert gradient is not None and gradient.count_nonzero() > 0, f"{name} gets no gradient in {stage}"

    Walk(kind, slots, isolation).follow(number, check)


@some_host
@few
@given(isolation=isolations, number=walks)
def test_illegal_verbs_change_nothing(kind: HostKind, slots: int, isolation: Isolation, number: int) -> None:
    """Invariant 5: what is not legal raises a typed error and changes neither states, weights, groups nor streams."""

    def check(walk: Walk) -> None:
        for place in walk.model.seed_slots:
            for verb in VERBS:
                if not walk.legal(place, verb):
                    with unchanged(walk.model, walk.optimiser), pytest.raises(EsperError) as caught:
                        walk.act(place, verb)
                    expected = SlotOccupiedError if verb == "germinate" else (StageError, GateRefusedError)
                    assert isinstance(caught.value, expected)

    Walk(kind, slots, isolation, LifecycleConfig()).follow(number, check)


@some_host
@few
@given(isolation=isolations, number=walks, cooldown=st.integers(3, 6))
def test_pruning_frees(kind: HostKind, slots: int, isolation: Isolation, number: int, cooldown: int) -> None:
    """Invariant 6: a pruned seed is gone from memory and optimiser; its slot rests for just so many ticks."""
    walk = Walk(kind, slots, isolation, LifecycleConfig(cooldown, min_prune_age=0, thresholds=AT_ONCE.thresholds))
    alive: dict[str, weakref.ref[nn.Module]] = {}
    dead: list[weakref.ref[nn.Module]] = []
    pruned_at: dict[str, int] = {}

    def check(walk: Walk) -> None:
        for place, slot in walk.model.seed_slots.items():
            if slot.seed is not None:
                alive[place] = weakref.ref(slot.seed)
                pruned_at.pop(place, None)
            elif place in alive:
                dead.append(alive.pop(place))
                pruned_at[place] = walk.ticks
            if place in pruned_at:
                rested = walk.ticks - pruned_at[place]
                assert slot.state.cooldown == max(0, cooldown - rested)
                assert (slot.state.stage is SeedStage.DORMANT) == (rested >= cooldown)
                assert (slot.state.stage in COOLDOWN_STAGES) == (rested < cooldown)
        assert_optimiser_follows(walk.model, walk.optimiser)

    walk.follow(number, check)
    gc.collect()
    assert [seed() for seed in dead] == [None] * len(dead), "something still holds a pruned seed"


@some_host
def test_the_walks_have_seen_everything(kind: HostKind, slots: int) -> None:
    """The walks above, taken together: every stage, with a seed in it in every style."""
    walks_taken = SEEN.get((kind, slots), [])
    if len(walks_taken) < WALKING_TESTS * EXAMPLES:
        pytest.skip("needs all walks of this file")
    seen = set().union(*walks_taken)
    everything = {(stage, style) for stage in LIVE_STAGES for style in BLEND_STYLES}
    assert everything | {(stage, None) for stage in SeedStage if stage not in LIVE_STAGES} <= seen


def assert_optimiser_follows(model: MorphogeneticModel, optimiser: GrowingOptimizer) -> None:
    """Its groups hold the parameters that exist, each once, and its state no others."""
    groups = [id(p) for group in optimiser.wrapped.param_groups for p in group["params"]]
    assert sorted(groups) == sorted(id(p) for p in model.parameters())
    assert {id(p) for p in optimiser.wrapped.state} <= set(groups)


class unchanged:  # noqa: N801  # reads as a statement: with unchanged(model)
    """Asserts that weights, buffers, states, optimiser groups and the random stream are the same afterwards."""

    def __init__(self, model: MorphogeneticModel, optimiser: GrowingOptimizer | None = None) -> None:
        self.model, self.optimiser = model, optimiser

    def look(self) -> tuple[list[object], dict[str, Tensor]]:
        slots = self.model.seed_slots.values()
        plain: list[object] = [(slot.state, id(slot.seed), id(slot.gate), slot.role) for slot in slots]
        if self.optimiser is not None:
            plain += [(g["name"], [id(p) for p in g["params"]]) for g in self.optimiser.wrapped.param_groups]
        tensors = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        return plain, tensors | {"random stream": torch.get_rng_state()}

    def __enter__(self) -> None:
        self.before = self.look()

    def __exit__(self, *_: object) -> None:
        (plain, tensors), (plain_now, tensors_now) = self.before, self.look()
        assert plain == plain_now
        assert tensors.keys() == tensors_now.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, tensors_now[name]), name


# -- invariant 1: silence ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("style", BLEND_STYLES)
@pytest.mark.parametrize("kind", HOST_KINDS)
def test_silent_stages(kind: HostKind, style: str, isolation: Isolation) -> None:
    """Invariant 1: not even a seed with weights of its own shows before BLENDING, nor in BLENDING at alpha 0."""
    batch = make_batch(kind)
    for stage in (SeedStage.GERMINATED, SeedStage.TRAINING, SeedStage.BLENDING):
        model = make_model(kind, isolation=isolation)
        host = model.host
        assert isinstance(host, Host)
        for place, slot in model.seed_slots.items():
            bring_to(model, place, stage, batch, style=style)
            shake(slot, 1)
        for train in (True, False):
            bare = host.run(batch[0], train)[0]
            if stage is SeedStage.BLENDING:
                assert not torch.equal(model.body(batch[0], train).output, bare)
                for slot in model.seed_slots.values():
                    slot.alpha.zero_()
            assert torch.equal(model.body(batch[0], train).output, bare)
            if stage is SeedStage.BLENDING:
                for slot in model.seed_slots.values():
                    slot.alpha.fill_(slot.state.alpha)


# -- invariant 2: shadows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("kind", HOST_KINDS)
def test_an_epoch_beside_a_training_seed(
    kind: HostKind, isolation: Isolation, make: Callable[[object], torch.optim.Optimizer]
) -> None:
    """Invariant 2: weights and buffers of the host, and of a seed that blends, are bit for bit those without it."""
    alone = make_model(kind, 3, isolation=isolation)
    before, between, behind = alone.seed_slots
    bring_to(alone, between, SeedStage.BLENDING, make_batch(kind), style="gate", alpha=0.5)
    shake(alone.seed_slots[between], 1)
    beside = copy.deepcopy(alone)
    for place, style in ((before, "multiply"), (behind, "gate")):
        bring_to(beside, place, SeedStage.TRAINING, make_batch(kind), style=style)
    seeds = {place: copy.deepcopy(beside.seed_slots[place].seed) for place in (before, behind)}
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
    for place, born in seeds.items():
        learnt = beside.seed_slots[place].seed
        assert born is not None and learnt is not None
        for (name, old), new in zip(born.named_parameters(), learnt.parameters(), strict=True):
            assert not torch.equal(old, new), f"{name} of the seed in {place} has learnt nothing"


@pytest.mark.parametrize("kind", HOST_KINDS)
def test_at_birth_only_the_scale_learns(kind: HostKind) -> None:
    """Invariant 2: a seed's first gradient opens its scale, and through that all others come alive."""
    model, batch = make_model(kind, 1), make_batch(kind)
    (place,) = model.seed_slots
    bring_to(model, place, SeedStage.TRAINING, batch)
    optimiser = GrowingOptimizer(model, sgd)
    alive: list[set[str]] = []
    for _ in range(2):
        optimiser.zero_grad()
        total(model.losses(*batch)).backward()
        slot = model.seed_slots[place]
        alive.append({name for name, p in slot.named_parameters() if p.grad is not None and p.grad.count_nonzero()})
        optimiser.step()
    assert alive[0] == {"seed.scale.weight"}
    assert alive[1] == {name for name, _ in model.seed_slots[place].named_parameters()}


@pytest.mark.parametrize("kind", HOST_KINDS)
def test_a_training_seed_learns(kind: HostKind) -> None:
    """Invariant 2: its gradient is that of a loss, not just any: following it lowers the shadow's loss.

    Straight-through has no feedback, hence no such promise.
    """
    model, (x, targets) = make_model(kind, 1), make_batch(kind, 32)
    (place,) = model.seed_slots
    bring_to(
        model,
        place,
        SeedStage.TRAINING,
        (x, targets),
        BlueprintRegistry.names(model.seed_slots[place].spec.topology)[-1],
    )
    optimiser = GrowingOptimizer(model, lambda p: torch.optim.Adam(p, lr=0.0), seed_options={"lr": 0.03})
    host_loss = float(model.losses(x, targets)["main"].detach())
    for _ in range(30):
        optimiser.zero_grad()
        total(model.losses(x, targets)).backward()
        optimiser.step()
    assert float(model.losses(x, targets)["main"].detach()) == host_loss
    tap = model.body.main(x, True, [place])[1][place]
    assert float(cross_entropy(model.body.shadow(place, tap, True), targets).detach()) < host_loss - 0.01


# -- invariant 3: gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", BLEND_STYLES)
@pytest.mark.parametrize("kind", HOST_KINDS)
def test_nothing_is_dead(kind: HostKind, style: str) -> None:
    """Invariant 3: every blueprint, in every stage: all that should train gets a gradient that is not zero."""
    batch = make_batch(kind)
    offers = BlueprintRegistry.offers(make_model(kind, 1).seed_slots["r0c0"].spec)
    for stage in (SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED):
        for offer in offers:
            model = make_model(kind)
            for place in model.seed_slots:
                blueprint = offer.name if place == "r0c0" else "norm"
                bring_to(model, place, stage, batch, blueprint, style=style, alpha=0.5)
                shake(model.seed_slots[place], 1)
            for name, gradient in gradients_of(model, total(model.losses(*batch))).items():
                assert gradient is not None and gradient.count_nonzero() > 0, (
                    f"{name} with {offer.name} in {stage.name}"
                )


@pytest.mark.parametrize("style", BLEND_STYLES)
@pytest.mark.parametrize("kind", HOST_KINDS)
def test_the_host_learns_through_an_acting_seed(kind: HostKind, style: str) -> None:
    """Invariant 3: weights before a slot get the gradient through its seed too, as a finite difference shows."""
    model = make_model(kind, 1, dtype=torch.float64)
    batch = make_batch(kind, dtype=torch.float64)
    bring_to(model, "r0c0", SeedStage.HOLDING, batch, style=style)
    shake(model.seed_slots["r0c0"], 1)
    host, seed = model.host, model.seed_slots["r0c0"].seed
    assert isinstance(host, Host) and seed is not None
    weight = list(host.segments[0].parameters())[-1]
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss() -> Tensor:
        return cross_entropy(model.body(batch[0], True).output, batch[1])

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


# -- invariant 5: refusals --------------------------------------------------------------------------------------------


def refused(model: MorphogeneticModel, error: type[EsperError], message: str, verb: Callable[[], object]) -> None:
    with unchanged(model), pytest.raises(error, match=message):
        verb()


def test_bad_input_is_named_and_changes_nothing() -> None:
    """Invariant 5: unknown names, values out of range."""
    model = make_model("cnn")
    bring_to(model, "r0c0", SeedStage.HOLDING, make_batch("cnn"))
    bring_to(model, "r1c0", SeedStage.FOSSILIZED, make_batch("cnn"))
    free, held, fossil = "r0c1", "r0c0", "r1c0"
    refused(model, UnknownNameError, "'conv_huge'.*conv_heavy", lambda: model.germinate_seed(free, "conv_huge"))
    refused(model, UnknownNameError, "'lora'", lambda: model.germinate_seed(free, "lora"))
    refused(model, UnknownNameError, "'r9c9'.*r0c0", lambda: model.germinate_seed("r9c9", "norm"))
    refused(model, UnknownNameError, "'r9c9'", lambda: model.advance("r9c9"))
    refused(model, UnknownNameError, "'r9c9'", lambda: model.prune_seed("r9c9"))
    refused(model, UnknownNameError, "'mix'.*multiply", lambda: model.germinate_seed(free, "norm", style="mix"))
    refused(model, BadValueError, "tempo -1", lambda: model.germinate_seed(free, "norm", tempo=-1))
    for target in (0.0, -0.5, 1.5, float("nan")):
        sow = partial(model.germinate_seed, free, "norm", alpha_target=target)
        refused(model, BadValueError, "alpha_target", sow)
        refused(model, BadValueError, "alpha target", partial(model.set_alpha_target, held, target))
    refused(model, BadValueError, "-1", lambda: model.set_alpha_target(held, 0.5, steps=-1))
    refused(model, UnknownNameError, "'zigzag'.*cosine", lambda: model.set_alpha_target(held, 0.5, curve="zigzag"))
    refused(model, BadValueError, "-1", lambda: model.prune_seed(held, steps=-1))
    refused(model, UnknownNameError, "'zigzag'", lambda: model.prune_seed(held, steps=2, curve="zigzag"))
    refused(model, SlotOccupiedError, "holds a 'norm' seed", lambda: model.germinate_seed(held, "norm"))
    refused(model, StageError, "fossil is permanent", lambda: model.prune_seed(fossil))
    refused(model, StageError, "fossil is permanent", lambda: model.advance(fossil))
    refused(model, StageError, "FOSSILIZED", lambda: model.set_alpha_target(fossil, 0.5))
    refused(model, StageError, "germinate a seed first", lambda: model.advance(free))
    refused(model, StageError, "cannot fossilise from DORMANT", lambda: model.fossilize(free))


def test_stages_cannot_be_jumped() -> None:
    """Invariant 5: gates hold until their conditions are met, and say which are not."""
    model = make_model("mlp", 1, config=LifecycleConfig())
    model.germinate_seed("r0c0", "norm", tempo=3)
    refused(model, StageError, "GERMINATED; only a HOLDING seed can", lambda: model.fossilize("r0c0"))
    refused(model, StageError, "no alpha to set in GERMINATED", lambda: model.set_alpha_target("r0c0", 0.5))
    model.advance("r0c0")
    refused(model, GateRefusedError, "0 steps in TRAINING, 2 are needed; its gra", lambda: model.advance("r0c0"))
    refused(model, GateRefusedError, "it may be pruned after 2", lambda: model.prune_seed("r0c0"))
    model.tick()
    model.tick()
    model.observe_gradients({"r0c0": float("inf")})
    refused(model, GateRefusedError, "gradient was not finite", lambda: model.advance("r0c0"))
    model.observe_gradients({"r0c0": 1.0})
    model.advance("r0c0")
    refused(model, GateRefusedError, r"alpha 0\.333 is on its way to 1\.000", lambda: model.advance("r0c0"))
    refused(model, StageError, "mid-ramp", lambda: model.prune_seed("r0c0"))
    for _ in range(3):
        model.tick()
    refused(model, GateRefusedError, "0 steps in HOLDING.*contribution was not", lambda: model.fossilize("r0c0"))
    model.prune_seed("r0c0", steps=2)
    refused(model, StageError, "is being pruned", lambda: model.advance("r0c0"))
    model.tick()
    refused(model, SlotOccupiedError, "rests for 3 more ticks", lambda: model.germinate_seed("r0c0", "norm"))
    refused(model, StageError, "3 ticks are left", lambda: model.advance("r0c0"))
    refused(model, StageError, "no seed in it", lambda: model.prune_seed("r0c0"))


def test_blueprints_below_their_minimum() -> None:
    """Invariant 5: too narrow, too small, not a multiple."""
    narrow = MorphogeneticModel(CNNHost((1, 3), 3, classes=4, resolution=4))
    refused(
        narrow,
        GateRefusedError,
        "width 1 is below its minimum of 2",
        lambda: narrow.germinate_seed("r0c0", "conv_heavy"),
    )
    refused(narrow, GateRefusedError, "gives its norm 3 values of 4", lambda: narrow.germinate_seed("r1c1", "norm"))
    odd = MorphogeneticModel(GPTHost(2, 6, 2, block=4, vocab=5))
    refused(odd, GateRefusedError, "width 6 is not a multiple of 4", lambda: odd.germinate_seed("r0c0", "attention"))
    short = MorphogeneticModel(GPTHost(2, 8, 2, block=1, vocab=5))
    refused(
        short,
        GateRefusedError,
        "resolution 1 is below its minimum of 2",
        lambda: short.germinate_seed("r0c0", "attention"),
    )


def test_budget() -> None:
    """Invariant 5: no seed beyond the budget; what is pruned is paid back."""
    # A norm seed has 3·width parameters: 24 of width 8, 18 of width 6.
    model = make_model("mlp", 2, budget=24 + 17)
    model.germinate_seed("r0c0", "norm")
    refused(
        model,
        GateRefusedError,
        "costs 18 parameters, 17 of the budget are left",
        lambda: model.germinate_seed("r0c1", "norm"),
    )
    model.prune_seed("r0c0")
    model.germinate_seed("r0c1", "norm")
    assert model.grown_parameter_count == 18


def test_budget_pays_for_the_gate_too() -> None:
    """Invariant 5: 24 parameters of the seed, and 8 + 1 of its gate."""
    model = make_model("mlp", 1, budget=24)
    refused(model, GateRefusedError, "33 parameters", lambda: model.germinate_seed("r0c0", "norm", style="gate"))


def test_germination_leaves_the_random_stream_alone() -> None:
    """Invariant 5 for the lucky case: a germination that succeeds draws nothing from the host's stream either."""
    model = make_model("cnn")
    stream = torch.get_rng_state()
    for place in model.seed_slots:
        model.germinate_seed(place, "conv_light", style="gate")
    assert torch.equal(stream, torch.get_rng_state())


# -- invariant 6: death -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("stage", [SeedStage.GERMINATED, SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING])
def test_a_pruned_seed_leaves_nothing(stage: SeedStage, make: Callable[[object], torch.optim.Optimizer]) -> None:
    """Invariant 6: module, gate, parameters and optimiser state die at once; the slot is free after its cooldown."""
    batch = make_batch("cnn")
    config = LifecycleConfig(cooldown=4, min_prune_age=0, thresholds=AT_ONCE.thresholds)
    model = make_model("cnn", 2, config=config)
    optimiser = GrowingOptimizer(model, make)
    place, other = model.seed_slots
    bring_to(model, place, stage, batch, "conv_light", style="gate")
    bring_to(model, other, SeedStage.BLENDING, batch)
    for _ in range(2):
        optimiser.zero_grad()
        total(model.losses(*batch)).backward()
        optimiser.step()
    slot = model.seed_slots[place]
    assert slot.seed is not None and slot.gate is not None
    dying = [weakref.ref(thing) for thing in (slot.seed, slot.gate, *slot.parameters())]
    kept = {id(p): copy.deepcopy(optimiser.wrapped.state[p]) for p in model.host.parameters()}
    before = model.grown_parameter_count

    model.prune_seed(place)
    gc.collect()
    assert [thing() for thing in dying] == [None] * len(dying)
    assert model.grown_parameter_count == before - BlueprintRegistry.spec("image", "conv_light").count(6) - 7
    assert_optimiser_follows(model, optimiser)
    for parameter in model.host.parameters():
        for key, value in kept[id(parameter)].items():
            assert torch.equal(torch.as_tensor(optimiser.wrapped.state[parameter][key]), torch.as_tensor(value))

    for left in (4, 3, 2, 1):
        assert model.seed_slots[place].state.cooldown == left
        refused(model, SlotOccupiedError, f"rests for {left} more", lambda: model.germinate_seed(place, "norm"))
        model.tick()
    model.germinate_seed(place, "norm")


def test_a_ramp_ends_in_the_same_death() -> None:
    """Invariant 6: over three steps, alpha ⅔, ⅓, 0; the seed is freed when it no longer acts, not before."""
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
