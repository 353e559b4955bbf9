"""Signals as columns: bounded, nothing unmeasured in them, no env and no slot mixed with another."""

import math
from collections.abc import Callable
from typing import TypeVar, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tamiyo.policies import SMALL, decide, slots
from torch import Tensor

from esper.leyline import (
    BadValueError,
    BlueprintOffer,
    LifecycleOp,
    SeedStage,
    SlotConfig,
    SlotSpec,
    UnknownNameError,
    head_preset,
)
from esper.tamiyo import (
    FactoredRecurrentActorCritic,
    ObservationLayout,
    TrainingSignals,
    growth_layout,
    growth_masks,
    growth_table,
    signals_to_features,
)
from esper.tamiyo.features import LIMIT, SENSED, SLOT_COLUMNS, fill_in_control_end
from esper.tamiyo.signals import CriticView, HostView, Measured, OfferView, SlotView

COUNT = 3
"""Slots, and blueprints, unless a test says otherwise."""
EXTREMES = st.sampled_from([0.0, -0.0, 1e-45, -1e-30, 1.0, -1.0, 1e4, -1e4, 3.4e38, -3.4e38])
GARBAGE = [math.nan, math.inf, -math.inf, 1e30, 7.0]
OFFERS = tuple(BlueprintOffer(name, 1, 1, 10) for name in ("norm", "conv", "attention"))
"""In the order of `policies.slots`."""
FEW = settings(max_examples=40, deadline=None)

V = TypeVar("V")


def seen_stages(stages: Tensor) -> Tensor:
    """GERMINATED is never seen: the same step's tick makes it TRAINING."""
    return stages.where(stages != int(SeedStage.GERMINATED), int(SeedStage.TRAINING))


def random_signals(n: int, slot_count: int = COUNT, blueprints: int = COUNT, seed: int = 0) -> TrainingSignals:
    """Signals as a fleet might give them, in any combination: what is not measured is 0."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator)

    def chance(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator) < 0.5

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def measured() -> Measured:
        valid = chance(n, slot_count)
        value, error = uniform(n, slot_count, low=-20.0, high=20.0), uniform(n, slot_count)
        return Measured(value.where(valid, 0.0), error.where(valid, 0.0), valid)

    ns, nsb = (n, slot_count), (n, slot_count, blueprints)
    audition, contribution, best, gradient = measured(), measured(), measured(), measured()
    hosts = HostView(
        time_left=uniform(n),
        train_loss=uniform(n, high=2.0),
        validation_loss=uniform(n, high=2.0),
        accuracy=uniform(n, high=100.0),
        accuracy_change=uniform(n, low=-5.0, high=5.0),
        best_accuracy=uniform(n, high=100.0),
        stale=uniform(n),
        grown=uniform(n),
        budget_left=uniform(n),
        last_op=whole(0, len(LifecycleOp), n),
        last_succeeded=chance(n),
    )
    each = SlotView(
        present=chance(*ns) | (torch.arange(slot_count) == 0),  # every host has a slot
        width=whole(4, 64, *ns).float(),
        depth=uniform(*ns),
        rms=uniform(*ns, high=3.0),
        rank=uniform(*ns),
        gradient=uniform(*ns),
        stage=seen_stages(whole(0, len(SeedStage), *ns)),
        blueprint=whole(-1, blueprints, *ns),
        alpha=uniform(*ns),
        alpha_target=uniform(*ns),
        ramping=chance(*ns),
        steps_in_stage=whole(0, 9, *ns).float(),
        age=whole(0, 20, *ns).float(),
        cooldown=whole(0, 5, *ns).float(),
        can_advance=chance(*ns),
        can_fossilize=chance(*ns),
        can_prune=chance(*ns),
        can_retarget=chance(*ns),
        audition=audition,
        audition_loss=uniform(*ns, low=-1.0).where(audition.valid, 0.0),
        contribution=contribution,
        contribution_loss=uniform(*ns, low=-1.0).where(contribution.valid, 0.0),
        seed_gradient=gradient._replace(value=gradient.value.abs()),
        tried=whole(0, 4, *ns).float(),
        best=best,
    )
    offers = OfferView(worth=uniform(*nsb), fits=chance(*nsb), cost=uniform(*nsb))
    critic = CriticView(
        uniform(n, low=-5.0, high=5.0),
        uniform(n, high=100.0),
        uniform(n, low=-5.0, high=5.0),
        uniform(n, high=100.0),
    )
    return TrainingSignals(hosts, each, offers, critic)


def over(view: V, change: Callable[[Tensor], Tensor]) -> V:
    """The same view with each tensor of it changed; a tensor likewise."""
    if isinstance(view, Tensor):
        return cast("V", change(view))
    return type(view)(*(over(part, change) for part in cast("tuple[Tensor, ...]", view)))


def named(flat: Tensor, layout: ObservationLayout) -> dict[str, Tensor]:
    """Column name → its values for all envs, and for their slots and offers where it has any."""
    parts = layout.split(flat)
    return dict(zip(layout.column_names, [c for part in parts for c in part.unbind(-1)], strict=True))


def changed(one: Tensor, other: Tensor, layout: ObservationLayout) -> set[str]:
    """Columns in which two sets of features differ, bit for bit."""
    first, second = named(one, layout), named(other, layout)
    return {name for name in first if not torch.equal(first[name], second[name])}


# -- the layout -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sensing", [True, False])
def test_every_column_is_named_once_and_the_sizes_match(sensing: bool) -> None:
    """By hand: 12 + 6 ops of the host; 29 + 8 stages + 3 blueprints of a slot, 3 of them sensed; 3 of an offer, one of
    them sensed; 4 of the critic."""
    layout = growth_layout(slots(2), sensing=sensing)
    slot, offer = (40, 3) if sensing else (37, 2)
    assert layout.sizes == (18, 2 * slot, 2 * 3 * offer, 4)
    assert len(set(layout.column_names)) == len(layout.column_names) == 18 + slot + offer + 4
    features = signals_to_features(random_signals(5, 2), layout)
    assert features.shape == (5, layout.size)
    assert features.dtype == torch.float32


def test_without_sensing_only_the_sensed_columns_are_missing() -> None:
    """The others are the same."""
    blind, sensing = growth_layout(slots(COUNT), sensing=False), growth_layout(slots(COUNT))
    signals = random_signals(6)
    missing = {"slot.rms", "slot.rank", "slot.gradient", "offer.worth"}
    assert set(sensing.column_names) - set(blind.column_names) == missing
    assert {name.split(".")[1] for name in missing} == SENSED
    seen = named(signals_to_features(signals, sensing), sensing)
    for name, column in named(signals_to_features(signals, blind), blind).items():
        assert torch.equal(column, seen[name])


def test_columns_do_not_depend_on_number_and_names_of_slots() -> None:
    """So that a policy may be used on another host."""
    one = growth_layout(slots(1))
    other = growth_layout(SlotConfig(tuple(SlotSpec(f"r1c{i}", 4 + i, "image", i / 7, 9, OFFERS) for i in range(7))))
    assert one.column_names == other.column_names


def test_the_critic_has_the_control_and_nobody_else() -> None:
    """By name; by value below."""
    layout = growth_layout(slots(COUNT))
    assert layout.critic == ("potential", "control_accuracy", "control_change", "control_end")
    assert not [name for name in (*layout.host, *layout.slot, *layout.offer) if "control" in name]


# -- values -----------------------------------------------------------------------------------------------------------


def test_by_hand() -> None:
    """One env, one slot, one number of each kind."""
    signals = random_signals(1, 1)
    one = torch.ones(1, 1)
    found = Measured(one * -4.0, one * 0.5, one.bool())
    signals = TrainingSignals(
        signals.hosts._replace(
            train_loss=torch.tensor([0.5]),
            validation_loss=torch.tensor([0.8]),
            accuracy=torch.tensor([60.0]),
            accuracy_change=torch.tensor([-3.0]),
            best_accuracy=torch.tensor([65.0]),
            last_op=torch.tensor([LifecycleOp.PRUNE]),
            last_succeeded=torch.tensor([True]),
        ),
        signals.slots._replace(
            width=one * 15,
            stage=one.long() * SeedStage.HOLDING,
            blueprint=one.long(),
            audition=found,
            audition_loss=one * 0.25,
            seed_gradient=Measured(one * (math.e - 1), one, one.bool()),
        ),
        OfferView(torch.tensor([[[0.5, 0.2, 0.1]]]), torch.tensor([[[True, True, False]]]), torch.zeros(1, 1, 3)),
        CriticView(torch.tensor([2.0]), torch.tensor([70.0]), torch.tensor([1.0]), torch.tensor([80.0])),
    )
    layout = growth_layout(slots(1))
    columns = named(signals_to_features(signals, layout), layout)
    wanted = {
        "train_loss": [math.log(1.5)],
        "loss_gap": [0.3],
        "accuracy": [0.6],
        "accuracy_change": [-0.3],
        "best_accuracy": [0.65],
        "below_best": [0.5],
        "last_op.prune": [1],
        "last_op.wait": [0],
        "last_succeeded": [1],
        "slot.width": [math.log(16)],
        "slot.stage.holding": [1],
        "slot.stage.dormant": [0],
        "slot.blueprint.norm": [0],
        "slot.blueprint.conv": [1],
        "slot.audition": [-0.4],
        "slot.audition_error": [0.05],
        "slot.audition_loss": [0.25],
        "slot.audition_valid": [1],
        "slot.seed_gradient": [1],
        "offer.worth": [0.5, 0.2, 0],
        "offer.fits": [1, 1, 0],
        "critic.potential": [0.2],
        "critic.control_accuracy": [0.7],
        "critic.control_change": [0.1],
        "critic.control_end": [0.8],
    }
    for name, value in wanted.items():
        assert columns[name].flatten().tolist() == pytest.approx(value, abs=1e-6), name


def test_one_hots_are_one_hot() -> None:
    """Each value has its column; a slot without a seed has none among the blueprints."""
    layout, signals = growth_layout(slots(COUNT)), random_signals(200)
    seen = named(signals_to_features(signals, layout), layout)
    germinated = int(SeedStage.GERMINATED)
    stages = signals.slots.stage
    for prefix, value in (
        ("last_op", signals.hosts.last_op),
        ("slot.stage", stages - (stages > germinated).long()),  # which has no column
        ("slot.blueprint", signals.slots.blueprint),
    ):
        columns = torch.stack([column for name, column in seen.items() if name.startswith(f"{prefix}.")], -1)
        assert torch.equal(columns.sum(-1), (value >= 0).float())
        assert torch.equal(columns.argmax(-1), value.clamp(min=0))


def test_every_signal_shows() -> None:
    """Whatever the fleet measures changes some column."""
    layout, signals, other = growth_layout(slots(COUNT)), random_signals(40), random_signals(40, seed=1)
    base = signals_to_features(signals, layout)
    unseen = []
    for part in TrainingSignals._fields:
        view, source = getattr(signals, part), getattr(other, part)
        for field in view._fields:
            moved = signals._replace(**{part: view._replace(**{field: getattr(source, field)})})
            if not changed(base, signals_to_features(moved, layout), layout):
                unseen.append(f"{part}.{field}")
    assert unseen == []


def test_every_column_varies() -> None:
    """None is constant by construction."""
    layout = growth_layout(slots(COUNT))
    seen = named(signals_to_features(random_signals(200), layout), layout)
    assert [name for name, column in seen.items() if column.std() == 0] == []


@pytest.mark.invariant(10)
@FEW
@given(extremes=st.lists(EXTREMES, min_size=1, max_size=5), seed=st.integers(0, 99), sensing=st.booleans())
def test_finite_and_bounded_for_extreme_signals(extremes: list[float], seed: int, sensing: bool) -> None:
    """Losses that exploded, zeros, the largest floats."""
    values = torch.tensor(extremes)

    def extreme(part: Tensor) -> Tensor:
        if not part.dtype.is_floating_point:
            return part
        return values[torch.randint(len(values), part.shape)]

    torch.manual_seed(seed)
    features = signals_to_features(
        over(random_signals(4, seed=seed), extreme), growth_layout(slots(COUNT), sensing=sensing)
    )
    assert features.isfinite().all()
    assert features.abs().max() <= LIMIT


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("field", ["audition", "contribution", "seed_gradient", "best"])
def test_what_was_not_measured_does_not_leak(field: str, garbage: float) -> None:
    """Exactly 0, whatever stands there; what was measured is as before."""
    signals, layout = random_signals(50), growth_layout(slots(COUNT))
    measured = getattr(signals.slots, field)
    assert measured.valid.any() and not measured.valid.all()

    def spoil(part: Tensor) -> Tensor:
        return part if part is measured.valid else part.where(measured.valid, garbage)

    names = [name for name in SlotView._fields if name in (field, f"{field}_loss")]
    spoilt = {name: over(getattr(signals.slots, name), spoil) for name in names}
    seen = signals_to_features(signals, layout)
    assert torch.equal(seen, signals_to_features(signals._replace(slots=signals.slots._replace(**spoilt)), layout))
    columns = {name: column for name, column in named(seen, layout).items() if name.startswith(f"slot.{field}")}
    assert len(columns) > 1
    assert all((column[~measured.valid] == 0).all() for column in columns.values())


def test_of_what_does_not_fit_nothing_is_said() -> None:
    """Neither worth nor cost."""
    signals, layout = random_signals(20), growth_layout(slots(COUNT))
    fits = signals.offers.fits
    spoilt = OfferView(signals.offers.worth.where(fits, math.nan), fits, signals.offers.cost.where(fits, math.nan))
    seen = named(signals_to_features(signals._replace(offers=spoilt), layout), layout)
    for name in ("offer.worth", "offer.cost"):
        assert (seen[name][~fits] == 0).all()
        assert (seen[name][fits] != 0).all()


# -- what depends on what ---------------------------------------------------------------------------------------------


@FEW
@given(n=st.integers(1, 40), slot_count=st.integers(1, 5), seed=st.integers(0, 999))
def test_a_row_is_the_same_alone(n: int, slot_count: int, seed: int) -> None:
    """No env sees another."""
    signals, layout = random_signals(n, slot_count, seed=seed), growth_layout(slots(slot_count))
    env = seed % n
    alone = over(signals, lambda part: part[env : env + 1])
    assert torch.equal(signals_to_features(signals, layout)[env : env + 1], signals_to_features(alone, layout))


@FEW
@given(order=st.permutations(range(4)), seed=st.integers(0, 999))
def test_permuting_slots_permutes_their_columns(order: list[int], seed: int) -> None:
    """Slots and offers, and nothing else: no column knows which slot it is."""
    signals, layout = random_signals(7, 4, seed=seed), growth_layout(slots(4))
    moved = signals._replace(
        slots=over(signals.slots, lambda part: part[:, order]),
        offers=over(signals.offers, lambda part: part[:, order]),
    )
    before, after = (layout.split(signals_to_features(given, layout)) for given in (signals, moved))
    host, by_slot, offers, critic = before
    for part, expected in zip(after, (host, by_slot[:, order], offers[:, order], critic), strict=True):
        assert torch.equal(part, expected)


def test_the_control_changes_only_the_critic() -> None:
    """And all of the critic's columns."""
    layout, signals = growth_layout(slots(COUNT)), random_signals(10)
    other = signals._replace(critic=random_signals(10, seed=1).critic)
    differing = changed(signals_to_features(signals, layout), signals_to_features(other, layout), layout)
    assert differing == {f"critic.{name}" for name in layout.critic}


def test_the_end_is_told_in_one_column() -> None:
    layout = growth_layout(slots(COUNT))
    steps = torch.stack([signals_to_features(random_signals(4, seed=seed), layout) for seed in range(3)])
    before, end = steps.clone(), torch.tensor([10.0, 20.0, 30.0, 40.0])
    told = fill_in_control_end(steps, layout, end)
    assert torch.equal(steps, before), "what was seen stays as it was"
    assert changed(before.flatten(0, 1), told.flatten(0, 1), layout) == {"critic.control_end"}
    torch.testing.assert_close(named(told[1], layout)["critic.control_end"].flatten(), end / 100)


def test_nothing_is_read_back_from_the_device() -> None:
    """On a device that holds no numbers at all, reading one would raise."""
    layout = growth_layout(slots(COUNT))
    features = signals_to_features(over(random_signals(4), lambda part: part.to("meta")), layout)
    assert features.device.type == "meta"
    assert features.shape == (4, layout.size)


# -- through the network ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["core", "full"])
@pytest.mark.parametrize("count", range(1, 11))
def test_any_number_of_slots(preset: str, count: int) -> None:
    """Features, masks, heads and network from one slot configuration."""
    config = slots(count)
    heads = head_preset(preset)
    table, layout = growth_table(heads, config), growth_layout(config)
    network = FactoredRecurrentActorCritic(table, layout, SMALL)
    signals = random_signals(6, count)
    flat, masks = signals_to_features(signals, layout), growth_masks(signals, table, heads.ops)
    assert network.encode(flat).slots.shape == (6, count, SMALL.encoder)
    decision = decide(network, flat, masks, uniform=torch.rand(6, len(table)))
    assert (decision.choices > 0).all()
    assert decision.log_probs.isfinite().all()


def test_weights_serve_another_number_of_slots() -> None:
    """A checkpoint of a host with 2 slots loads for one with 5."""
    few, many = (
        FactoredRecurrentActorCritic(growth_table(head_preset("core"), slots(n)), growth_layout(slots(n)), SMALL)
        for n in (2, 5)
    )
    many.load_state_dict(few.state_dict())


def test_slot_columns_make_up_the_view() -> None:
    """A view taken apart into its columns and put together again is the same; errors without a column are 0."""
    view = random_signals(20).slots
    columns = {column.name: view.column(column.name) for column in SLOT_COLUMNS}
    again = SlotView.from_columns(columns)
    for name in SlotView._fields:
        one, other = getattr(view, name), getattr(again, name)
        if isinstance(one, Measured) and f"{name}_error" not in columns:
            one = one._replace(error=torch.zeros_like(one.error))
        parts = zip(one, other, strict=True) if isinstance(one, Measured) else [(one, other)]
        assert all(torch.equal(first, second) for first, second in parts), name
    for column in SLOT_COLUMNS:
        assert (columns[column.name].dtype is torch.bool) == (column.dtype is torch.bool), column.name
        assert (column.scale is None) == (column.dtype is not torch.float32), column.name


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 3), (4, 3), (3, 2)])
def test_signals_of_another_host_are_refused(shape: tuple[int, int]) -> None:
    """With both sizes in the message."""
    with pytest.raises(BadValueError, match=rf"\({shape[0]}, {shape[1]}\), the layout has \(3, 3\)"):
        signals_to_features(random_signals(2, *shape), growth_layout(slots(3)))


def test_an_unknown_column_is_refused() -> None:
    """A layout of something else."""
    with pytest.raises(UnknownNameError, match="unknown column 'speed'"):
        signals_to_features(random_signals(2), ObservationLayout(("speed",), ("width",), (), (), COUNT, COUNT))
