"""Which rows a fleet runs: who pays for what."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from fleets import SEEDLINGS, evaluation_rows, make_fleet, task_of
from torch import Tensor

from esper.kasmina import lifecycle
from esper.leyline import ACTIVE_STAGES, SeedStage
from esper.tolaria import HostFleet, get_task
from esper.tolaria.banks import Bank, bucket, with_spare
from esper.tolaria.graphs import plan_tensors
from esper.tolaria.rows import START, Act, Rows


@pytest.mark.parametrize(
    ("counts", "size"),
    [
        ((0,), 0),
        ((1, 4), 4),
        ((5, 8), 8),
        ((9, 12), 12),
        ((13, 16), 16),
        ((17, 24), 24),
        ((33, 48), 48),
        ((49, 64), 64),
    ],
)
def test_buckets_of_the_table(counts: tuple[int, ...], size: int) -> None:
    """The smallest that holds so many."""
    assert {bucket(count) for count in counts} == {size}


@pytest.mark.parametrize(("count", "size"), [(65, 96), (96, 96), (97, 128), (1000, 1024)])
def test_buckets_beyond_the_table(count: int, size: int) -> None:
    """Multiples of 32."""
    assert bucket(count) == size


def bare(n: int = 8) -> HostFleet:
    """Nothing grows in it."""
    return make_fleet(task_of("cnn"), n, grown=False)


def bring(fleet: HostFleet, env: int, slot_id: str, stage: SeedStage, blueprint: str = "conv_light") -> None:
    """A seed in GERMINATED, TRAINING or BLENDING."""
    fleet.germinate(env, slot_id, blueprint)
    for _ in range(int(stage) - int(SeedStage.GERMINATED)):
        fleet.states[env][slot_id] = lifecycle.record_gradient(fleet.states[env][slot_id], 1.0)
        fleet.advance(env, slot_id)


def acting(acts: dict[int, list[Act]]) -> list[tuple[int, str, str, int]]:
    """(place, slot, blueprint, row) of everything that really acts."""
    return [
        (place, act.bank.slot.slot_id, act.bank.blueprint, row)
        for place, found in sorted(acts.items())
        for act in found
        for row, valid in zip(act.rows.tolist(), act.valid.tolist(), strict=True)
        if valid
    ]


def test_a_bare_fleet_has_main_rows_alone() -> None:
    """One row per env, from the input on; nothing acts."""
    main, shadow, acts = bare().update_plan()
    assert shadow is None
    assert main.acts == acts == {}
    assert main.env.tolist() == list(range(8))
    assert [birth.place for birth in main.births] == [START]
    assert main.whole_fleet


def test_a_fleet_of_one_carries_a_second_row() -> None:
    """Kernels for a single row round differently."""
    fleet = bare(1)
    assert len(fleet.update_plan()[0]) == 2
    assert fleet.train_step().shape == (1,)
    assert len(fleet.validate()) == 1


def test_a_seed_that_waits_costs_nothing() -> None:
    """GERMINATED: no shadow row, no act."""
    fleet = bare()
    bring(fleet, 3, "r1c0", SeedStage.GERMINATED)
    main, shadow, acts = fleet.update_plan()
    assert shadow is None
    assert main.acts == acts == {}


def test_a_seed_that_trains_has_a_shadow_row() -> None:
    """Born at its slot from its own env, with spare rows behind it; the main rows do not know of it."""
    fleet = bare()
    bring(fleet, 3, "r1c1", SeedStage.TRAINING)
    main, shadow, acts = fleet.update_plan()
    assert main.acts == {}
    assert shadow is not None
    assert shadow.valid is not None
    assert shadow.valid.tolist() == [True, False, False]
    (birth,) = shadow.births
    assert birth.place == fleet.places["r1c1"]
    assert birth.parents[0] == shadow.env[0] == 3
    assert acting(acts) == [(birth.place, "r1c1", "conv_light", fleet.n)], "behind the main rows"
    (act,) = acts[birth.place]
    assert act.strength[0] == 1.0, "a shadow acts in full"
    assert act.learns.tolist() == [True, False, False]
    assert act.strength[1:].tolist() == [0.0, 0.0], "spares do nothing"


def test_a_seed_that_acts_is_in_the_main_row_alone() -> None:
    """BLENDING: at its alpha, no shadow row."""
    fleet = bare()
    bring(fleet, 3, "r1c1", SeedStage.BLENDING)
    main, shadow, acts = fleet.update_plan()
    assert shadow is None
    place = fleet.places["r1c1"]
    assert acting(main.acts) == acting(acts) == [(place, "r1c1", "conv_light", 3)]
    assert float(acts[place][0].strength[0]) == pytest.approx(1 / 3)
    assert acts[place][0].rows.tolist() == [3, 3, 3], "padding points at a row that is there"


def test_shadows_of_all_slots_are_one_pass() -> None:
    """In order of their places, each with spare rows; below, the env's acting seeds act on them too."""
    fleet = bare()
    for env in range(5):
        bring(fleet, env, "r1c2", SeedStage.TRAINING)
    bring(fleet, 6, "r1c0", SeedStage.TRAINING, "norm")
    bring(fleet, 6, "r1c1", SeedStage.BLENDING, "depthwise")
    _, shadow, acts = fleet.update_plan()
    assert shadow is not None
    assert shadow.valid is not None
    assert [(birth.place, len(birth.parents)) for birth in shadow.births] == [
        (fleet.places["r1c0"], 3),
        (fleet.places["r1c2"], 7),
    ]
    assert shadow.env[shadow.valid].tolist() == [6, 0, 1, 2, 3, 4]
    n = fleet.n
    assert acting(acts) == [
        (fleet.places["r1c0"], "r1c0", "norm", n),
        (fleet.places["r1c1"], "r1c1", "depthwise", 6),
        (fleet.places["r1c1"], "r1c1", "depthwise", n),
        *((fleet.places["r1c2"], "r1c2", "conv_light", n + row) for row in range(3, 8)),
    ]
    (both,) = acts[fleet.places["r1c1"]]
    assert both.learns.tolist() == [True, False, False, False], "a shadow trains its own seed alone"


def test_only_training_seeds_are_paid_for() -> None:
    """The grown fleet: a valid shadow row for each of its TRAINING seeds, a main act for each that acts, no more."""
    fleet = make_fleet(task_of("cnn"))
    main, shadow, acts = fleet.update_plan()
    slots = fleet.task.slot_ids
    training = [(s.env, s.slot) for s in SEEDLINGS["cnn"] if s.stage is SeedStage.TRAINING]
    active = sorted((s.env, slots[s.slot]) for s in SEEDLINGS["cnn"] if s.stage in ACTIVE_STAGES)
    assert shadow is not None
    assert shadow.valid is not None
    assert int(shadow.valid.sum()) == len(training)
    assert sorted(shadow.env[shadow.valid].tolist()) == sorted(env for env, _ in training)
    places = [sum(slot == index for _, slot in training) for index in range(3)]
    assert [len(birth.parents) for birth in shadow.births] == [with_spare(count, fleet.task.batch) for count in places]
    assert sorted((row, slot_id) for _, slot_id, _, row in acting(main.acts)) == active
    on_main = sorted((row, slot_id) for _, slot_id, _, row in acting(acts) if row < fleet.n)
    assert on_main == active


def test_evaluation_rows() -> None:
    """Without padding: the main rows, a shadow per TRAINING seed, an ablation per acting one, where they differ."""
    fleet = make_fleet(task_of("cnn"))
    rows, whose = evaluation_rows(fleet)
    seedlings = [s for s in SEEDLINGS["cnn"] if s.stage is SeedStage.TRAINING or s.stage in ACTIVE_STAGES]
    assert len(rows) == fleet.n + len(seedlings)
    assert list(whose) == list(range(fleet.n, len(rows)))
    assert sorted(whose.values()) == sorted((s.env, fleet.task.slot_ids[s.slot]) for s in seedlings)
    own = {(slot_id, row) for _, slot_id, _, row in acting(rows.acts)}
    for row, (env, slot_id) in whose.items():
        assert rows.env[row] == env
        assert ((slot_id, row) in own) == (fleet.states[env][slot_id].stage is SeedStage.TRAINING)
    place_of = {birth.place: len(birth.parents) for birth in rows.births[1:]}
    assert sum(place_of.values()) == len(whose)


def test_the_plan_stays_until_something_changes() -> None:
    """Rows are planned once per structure."""
    fleet = make_fleet(task_of("cnn"))
    before = fleet.update_plan()
    fleet.train_step()
    fleet.validate()
    assert fleet.update_plan() is before
    fleet.prune(4, "r1c0")
    assert fleet.update_plan() is not before


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[HostFleet], list[int]]:
    """Notes how many rows each pass has."""

    def watch(fleet: HostFleet) -> list[int]:
        passes: list[int] = []
        run = fleet.host.run

        def noting(rows: Rows, *args: Tensor | None, **kwargs: object) -> object:
            passes.append(len(rows))
            return run(rows, *args, **kwargs)  # type: ignore[arg-type]  # whatever it was called with

        monkeypatch.setattr(fleet.host, "run", noting)
        return passes

    return watch


def test_passes_of_a_minibatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One walk, with shadows beside the main rows, whatever the number of slots; each bank acts once."""
    fleet = bare()
    walks: list[tuple[int, int]] = []
    effects: list[str] = []
    walk, effect = fleet.host.run, Bank.effect

    def noting(rows: Rows, x: Tensor, *, train: bool, shadow: Rows | None) -> object:
        walks.append((len(rows), 0 if shadow is None else len(shadow)))
        return walk(rows, x, train=train, shadow=shadow)

    def acting_once(bank: Bank, *arguments: Tensor) -> Tensor:
        effects.append(f"{bank.slot.slot_id} {bank.blueprint}")
        return effect(bank, *arguments)

    monkeypatch.setattr(fleet.host, "run", noting)
    monkeypatch.setattr(Bank, "effect", acting_once)
    samples = fleet.draw(0)
    fleet.train_minibatch(samples, 0.1)
    bring(fleet, 2, "r1c0", SeedStage.BLENDING)
    fleet.train_minibatch(samples, 0.1)
    bring(fleet, 2, "r1c1", SeedStage.TRAINING)
    bring(fleet, 3, "r1c2", SeedStage.TRAINING)
    bring(fleet, 4, "r1c0", SeedStage.TRAINING)
    effects.clear()
    fleet.train_minibatch(samples, 0.1)
    assert walks == [(8, 0), (8, 0), (8, 9)]  # three shadows, each with two spares
    assert sorted(effects) == ["r1c0 conv_light", "r1c1 conv_light", "r1c2 conv_light"]


def test_passes_of_a_validation(counted: Callable[[HostFleet], list[int]]) -> None:
    """All rows calibrated and scored at once, then the main rows by their running statistics."""
    fleet = bare()
    bring(fleet, 2, "r1c0", SeedStage.BLENDING)
    bring(fleet, 3, "r1c2", SeedStage.TRAINING)
    fleet.validate()  # the first one measures what passes need
    passes = counted(fleet)
    fleet.validate()
    assert passes == [10, 10, 8]


def test_rows_move_no_statistics_but_the_main_ones() -> None:
    """A shadow row writes none: those of its host are what they are without it."""
    alone, beside = bare(), bare()
    bring(beside, 2, "r1c0", SeedStage.TRAINING)
    alone.train_step()
    beside.train_step()
    for name, buffer in alone.host.buffers.items():
        assert torch.equal(buffer, beside.host.buffers[name])


def test_the_end_of_an_episode_is_scored_on_more_images() -> None:
    """An ungrown host has the same hits on the validation images, which come first."""
    fleet = HostFleet(replace(get_task("digits_blind"), extra_size=200), 2)
    steps, ends = fleet.validate(deployed=False), fleet.validate_committed()
    for step, end in zip(steps, ends, strict=True):
        assert end.hits.shape == (600,)
        assert torch.equal(end.hits[:400], step.main.hits)


def test_kernels_find_what_they_read_side_by_side() -> None:
    """They take the numbers of entry e from place e of memory, so every tensor of a plan is contiguous."""
    fleet = make_fleet(task_of("cnn"), 8)
    plan = fleet.update_plan()
    assert plan.shadow is not None
    evaluation, _ = evaluation_rows(fleet)
    acts = [act for rows in (plan.main, evaluation) for group in rows.acts.values() for act in group]
    read = [tensor for act in acts for tensor in act if isinstance(tensor, Tensor)]
    assert read
    assert all(tensor.is_contiguous() for tensor in [*plan_tensors(plan), *read])
