"""The promises of a growing network, on random lifecycles over every kind of host.

A walk draws one of the verbs that are legal at that moment, again and again. Which those are is written down here once
more (`Walk.legal`), independent of the lifecycle itself. A step is what a user's loop does: two minibatches, a
measurement, a tick. A failing example is one number, which repeats the walk.
"""

import gc
import random
import weakref
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from hosts import AT_ONCE, HOST_KINDS, HostKind, make_batch, make_model
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from promises import assert_optimiser_follows, gradients_of, sgd, total, unchanged
from torch import Tensor, nn

from esper.kasmina import BlueprintRegistry, GrowingOptimizer, Host, LifecycleConfig, MorphogeneticModel, cross_entropy
from esper.kasmina.slot import ISOLATIONS, Isolation
from esper.leyline import (
    ACTIVE_STAGES,
    ALPHA_CURVES,
    BLEND_STYLES,
    COOLDOWN_STAGES,
    LIVE_STAGES,
    EsperError,
    GateRefusedError,
    SeedStage,
    SlotOccupiedError,
    StageError,
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
EXAMPLES = 4
few = settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
some_host = pytest.mark.parametrize(("kind", "slots"), [(kind, slots) for kind in HOST_KINDS for slots in (1, 3)])
# Whole combinations: the last test of this file needs all walks of one.
by_default = pytest.mark.default_cases("cnn-3", "mlp-1")
walks = st.integers(0, 2**32 - 1)
isolations = st.sampled_from(ISOLATIONS)


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


def owner(model: MorphogeneticModel, name: str) -> str | None:
    """The slot that a parameter belongs to, or None for the host."""
    return name.split(".")[2] if name.startswith("body.slots.") else None


# -- the promises -----------------------------------------------------------------------------------------------------


@pytest.mark.invariant(1)
@by_default
@some_host
@few
@given(isolation=isolations, number=walks)
def test_only_acting_seeds_change_the_stream(kind: HostKind, slots: int, isolation: Isolation, number: int) -> None:
    """Empty, GERMINATED and TRAINING slots leave the output bit-identical, in train and eval mode."""

    def check(walk: Walk) -> None:
        x, _ = make_batch(kind, rng_seed=1)
        acting = any(slot.state.stage in ACTIVE_STAGES for slot in walk.model.seed_slots.values())
        for train in (True, False):
            output = walk.model.body(x, train)[0]
            assert torch.equal(output, by_hand(walk.model, x, train))
            if not acting:
                assert isinstance(walk.model.host, Host)
                assert torch.equal(output, walk.model.host.run(x, train)[0])

    Walk(kind, slots, isolation).follow(number, check)


@pytest.mark.invariant(2, 3)
@by_default
@some_host
@few
@given(isolation=isolations, number=walks)
def test_gradients_in_every_stage(kind: HostKind, slots: int, isolation: Isolation, number: int) -> None:
    """Seeds in TRAINING leave all other gradients unchanged, and every trainable part gets a gradient."""

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


@pytest.mark.invariant(5)
@by_default
@some_host
@few
@given(isolation=isolations, number=walks)
def test_illegal_verbs_change_nothing(kind: HostKind, slots: int, isolation: Isolation, number: int) -> None:
    """An illegal verb raises a typed error and changes no state, weight, group or random stream."""

    def check(walk: Walk) -> None:
        for place in walk.model.seed_slots:
            for verb in VERBS:
                if not walk.legal(place, verb):
                    with unchanged(walk.model, walk.optimiser), pytest.raises(EsperError) as caught:
                        walk.act(place, verb)
                    expected = SlotOccupiedError if verb == "germinate" else (StageError, GateRefusedError)
                    assert isinstance(caught.value, expected)

    Walk(kind, slots, isolation, LifecycleConfig()).follow(number, check)


@pytest.mark.invariant(6)
@by_default
@some_host
@few
@given(isolation=isolations, number=walks, cooldown=st.integers(3, 6))
def test_pruning_frees(kind: HostKind, slots: int, isolation: Isolation, number: int, cooldown: int) -> None:
    """A pruned seed leaves memory and optimiser, and its slot rests for exactly the cooldown."""
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


@by_default
@some_host
def test_the_walks_have_seen_everything(kind: HostKind, slots: int) -> None:
    """The walks above, taken together: every stage, with a seed in it in every style."""
    walks_taken = SEEN.get((kind, slots), [])
    if len(walks_taken) < WALKING_TESTS * EXAMPLES:
        pytest.skip("needs all walks of this file")
    seen = set().union(*walks_taken)
    everything = {(stage, style) for stage in LIVE_STAGES for style in BLEND_STYLES}
    assert everything | {(stage, None) for stage in SeedStage if stage not in LIVE_STAGES} <= seen
