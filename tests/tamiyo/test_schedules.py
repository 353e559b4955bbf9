"""Plans: seeds germinate, advance and become fossils when they are due, on a stand-in for a fleet."""

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tamiyo.views import ADVANCE, CORE, FOSSILIZE, GERMINATE, LATER, NAMES, PRUNE, SLOTS, STEPS, WAIT, a_view, quiet
from torch import Tensor

from esper.leyline import BadValueError, LifecycleOp, SeedStage
from esper.leyline.records import decode, encode
from esper.tamiyo.policies import Plan, PlannedSeed, RandomCommitPolicy, SchedulePolicy
from esper.tamiyo.policy import Policy, PolicyView

# -- a stand-in for a fleet -------------------------------------------------------------------------------------------


class FakeSeed:
    """A slot of `FakeFleet`."""

    def __init__(self) -> None:
        self.stage, self.blueprint, self.age, self.held, self.tried = SeedStage.DORMANT, -1, 0, 0, 0

    def legal(self, op: LifecycleOp) -> bool:
        return {
            GERMINATE: self.stage is SeedStage.DORMANT,
            ADVANCE: self.stage is SeedStage.TRAINING and self.held >= 2,
            FOSSILIZE: self.stage is SeedStage.HOLDING and self.held >= 1,
            PRUNE: self.stage is SeedStage.HOLDING or (self.stage is SeedStage.TRAINING and self.held >= 2),
        }.get(op, False)

    def enter(self, stage: SeedStage) -> None:
        self.stage, self.held = stage, 0

    def tick(self) -> None:
        self.age, self.held = self.age + 1, self.held + 1
        if self.stage is SeedStage.GERMINATED:
            self.enter(SeedStage.TRAINING)
        elif self.stage is SeedStage.BLENDING and self.held == 3:
            self.enter(SeedStage.HOLDING)


class FakeFleet:
    """Slots with the lifecycle's timers, and nothing that trains."""

    def __init__(self, n: int) -> None:
        self.n, self.step = n, 0
        self.seeds = [[FakeSeed() for _ in SLOTS.slots] for _ in range(n)]
        self.log: list[list[tuple[int, str, str, str]]] = [[] for _ in range(n)]
        self.blocked = torch.zeros(n, len(LifecycleOp), len(SLOTS), dtype=torch.bool)

    def view(self) -> PolicyView:
        def column(name: str) -> Tensor:
            return torch.tensor([[int(getattr(seed, name)) for seed in seeds] for seeds in self.seeds])

        columns = {"stage": "stage", "blueprint": "blueprint", "age": "age", "steps_in_stage": "held", "tried": "tried"}
        seen: dict[str, Any] = {field: column(name) for field, name in columns.items()}
        signals = quiet(self.n, self.step)
        signals = signals._replace(slots=signals.slots._replace(**seen))
        masks = CORE.open_masks(self.n)
        legal = [[[seed.legal(op) for seed in seeds] for op in LifecycleOp] for seeds in self.seeds]
        masks["slot"] = torch.tensor(legal) & ~self.blocked
        masks["op"] = masks["slot"].any(-1)
        masks["op"][:, WAIT] = True
        masks["blueprint"][:, 2, 2] = False
        return a_view(signals, masks, self.step)

    def apply(self, actions: Tensor) -> None:
        for env, (op, slot, blueprint) in enumerate(actions.tolist()):
            seed = self.seeds[env][slot]
            if op != WAIT:
                assert seed.legal(LifecycleOp(op))
                self.log[env].append((self.step, LifecycleOp(op).name, SLOTS.slot_ids[slot], NAMES[blueprint]))
            if op == GERMINATE:
                seed.enter(SeedStage.GERMINATED)
                seed.blueprint, seed.age, seed.tried = blueprint, 0, seed.tried + 1
            elif op in (ADVANCE, FOSSILIZE):
                seed.enter(SeedStage.BLENDING if op == ADVANCE else SeedStage.FOSSILIZED)
            for each in self.seeds[env]:
                each.tick()
        self.step += 1

    def play(self, policy: Policy, before: Callable[["FakeFleet"], None] = lambda fleet: None) -> "FakeFleet":
        """A whole episode; `before` is called in each step."""
        state = policy.initial_state(list(range(self.n)))
        for _ in range(STEPS):
            before(self)
            actions, state = policy.act(self.view(), state, torch.rand(self.n, len(CORE)))
            self.apply(actions)
        return self


# -- schedules --------------------------------------------------------------------------------------------------------


def lived(slot: str, blueprint: str, germinate: int, advance: int, fossilize: int) -> list[tuple[int, str, str, str]]:
    """What the log says of a seed; only germination names a blueprint."""
    return [
        (germinate, "GERMINATE", slot, blueprint),
        (advance, "ADVANCE", slot, NAMES[0]),
        (fossilize, "FOSSILIZE", slot, NAMES[0]),
    ]


def test_a_schedule_to_the_letter() -> None:
    """Germinated at 4, advanced 5 steps later; ramp of 3 and one step held: fossilised at 4 + 5 + 4."""
    plan = Plan((PlannedSeed("r1c1", "attention", 4, 5),))
    fleet = FakeFleet(3).play(SchedulePolicy(CORE, SLOTS, plan))
    assert fleet.log == [lived("r1c1", "attention", 4, 9, 13)] * 3


def test_it_advances_as_soon_as_legal() -> None:
    """The gate asks for two steps in TRAINING, the third after germination: the default, and an earlier wish waits."""
    for seed in (PlannedSeed("r1c0", "conv", 0), PlannedSeed("r1c0", "conv", 0, advance_after=0)):
        fleet = FakeFleet(1).play(SchedulePolicy(CORE, SLOTS, Plan((seed,))))
        assert fleet.log[0] == lived("r1c0", "conv", 0, 3, 7)


def test_it_germinates_as_soon_as_legal() -> None:
    def block(fleet: FakeFleet) -> None:
        fleet.blocked[:, GERMINATE] = fleet.step < 5

    fleet = FakeFleet(1).play(SchedulePolicy(CORE, SLOTS, Plan((PlannedSeed("r1c0", "conv", 2),))), block)
    assert fleet.log[0] == lived("r1c0", "conv", 5, 8, 12)


def test_the_oldest_due_goes_first() -> None:
    """Three are due at 0 and follow one another in the order of the plan. At 3, 4 and 5 they are due to advance."""
    plan = Plan(tuple(PlannedSeed(slot, "norm", 0) for slot in ("r1c2", "r1c0", "r1c1")))
    fleet = FakeFleet(1).play(SchedulePolicy(CORE, SLOTS, plan))
    lives = [lived(slot, "norm", at, at + 3, at + 7) for at, slot in enumerate(("r1c2", "r1c0", "r1c1"))]
    assert fleet.log[0] == sorted(itertools.chain(*lives))


def test_what_has_been_due_for_longer_goes_first() -> None:
    """At 4 both the germination, due then, and the advance, due at 3, become legal; it is the advance's turn."""
    plan = Plan((PlannedSeed("r1c1", "conv", 4), PlannedSeed("r1c0", "norm", 0, 3)))

    def block(fleet: FakeFleet) -> None:
        fleet.blocked[:, ADVANCE] = fleet.step < 4

    lives = lived("r1c0", "norm", 0, 4, 8) + lived("r1c1", "conv", 5, 9, 13)
    assert FakeFleet(1).play(SchedulePolicy(CORE, SLOTS, plan), block).log[0] == sorted(lives)


def test_a_fossil_is_due_since_its_seed_is_held() -> None:
    """From 6 on, legal at 7, when the other's advance becomes legal too: that was due at 5, and goes first."""
    plan = Plan((PlannedSeed("r1c0", "norm", 0), PlannedSeed("r1c1", "conv", 1, 4)))

    def block(fleet: FakeFleet) -> None:
        fleet.blocked[:, ADVANCE, 1] = fleet.step < 7

    lives = lived("r1c0", "norm", 0, 3, 8) + lived("r1c1", "conv", 1, 7, 11)
    assert FakeFleet(1).play(SchedulePolicy(CORE, SLOTS, plan), block).log[0] == sorted(lives)


def test_ties_go_by_the_order_of_the_plan() -> None:
    """Both are due at 3: the germination stands first, and the advance is made up at 4."""
    plan = Plan((PlannedSeed("r1c1", "conv", 3), PlannedSeed("r1c0", "norm", 0)))
    lives = lived("r1c1", "conv", 3, 6, 10) + lived("r1c0", "norm", 0, 4, 8)
    assert FakeFleet(1).play(SchedulePolicy(CORE, SLOTS, plan)).log[0] == sorted(lives)


def test_a_plan_for_each_env() -> None:
    """The oracle's replay; the empty plan waits."""
    plans = [
        Plan(),
        Plan((PlannedSeed("r1c2", "conv", 1),)),
        Plan((PlannedSeed("r1c0", "norm", 0), PlannedSeed("r1c1", "conv", 10))),
    ]
    fleet = FakeFleet(3).play(SchedulePolicy(CORE, SLOTS, plans))
    assert fleet.log[0] == []
    assert fleet.log[1] == lived("r1c2", "conv", 1, 4, 8)
    assert fleet.log[2] == lived("r1c0", "norm", 0, 3, 7) + lived("r1c1", "conv", 10, 13, 17)
    with pytest.raises(BadValueError, match="3 plans for 2 envs"):
        SchedulePolicy(CORE, SLOTS, plans).initial_state([0, 1])


def test_nothing_but_empty_plans() -> None:
    """Waits, without a seed to look at."""
    assert FakeFleet(2).play(SchedulePolicy(CORE, SLOTS, [Plan(), Plan()])).log == [[], []]


def test_a_seed_that_was_cut_does_not_come_back() -> None:
    """A plan germinates each seed once, whatever the governor does."""

    def cut(fleet: FakeFleet) -> None:
        if fleet.step == 5:
            fleet.seeds[0][0].enter(SeedStage.DORMANT)

    fleet = FakeFleet(1).play(SchedulePolicy(CORE, SLOTS, Plan((PlannedSeed("r1c0", "conv", 0),))), cut)
    assert fleet.log[0] == lived("r1c0", "conv", 0, 3, 7)[:2]


def test_random_commit() -> None:
    """One seed each, at 0 to T/2, advanced and fossilised as soon as legal; all slots, blueprints and steps occur."""
    fleet = FakeFleet(300).play(RandomCommitPolicy(CORE, STEPS))
    for log in fleet.log:
        step, _, slot, blueprint = log[0]
        assert log == lived(slot, blueprint, step, step + 3, step + 7)
    first = [log[0] for log in fleet.log]
    assert {step for step, *_ in first} == set(range(STEPS // 2 + 1))
    offered = {(slot.slot_id, offer.name) for slot in SLOTS.slots for offer in slot.blueprints}
    assert {(slot, blueprint) for _, _, slot, blueprint in first} == offered


# -- plans as values --------------------------------------------------------------------------------------------------


@pytest.mark.invariant(15)
def test_plans_as_json() -> None:
    """Through text and back; what is not a plan is refused."""
    for plan in (LATER, Plan()):
        assert decode(Plan, json.loads(json.dumps(encode(plan))), "plan") == plan
    with pytest.raises(BadValueError, match=r"plan.seeds\[0\] has unknown keys \['speed'\]"):
        decode(Plan, {"seeds": [{**encode(LATER)["seeds"][0], "speed": 1}]}, "plan")


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        ([("r9c9", "conv", 0)], "unknown slot 'r9c9'; allowed: r1c0, r1c1, r1c2"),
        ([("r1c2", "attention", 0)], "unknown blueprint for slot 'r1c2' 'attention'; allowed: norm, conv"),
        ([("r1c0", "conv", -1)], "germinate_at -1 is not an integer of 0 or more"),
        ([("r1c0", "conv", 0, 1.5)], "advance_after 1.5 is not an integer"),
        ([("r1c0", "conv", 0), ("r1c0", "norm", 5)], "slots ['r1c0', 'r1c0']"),
        ([(f"r1c{c}", "conv", 0) for c in range(4)], "a plan of 4 seeds; at most 3"),
    ],
)
def test_bad_plans(seeds: list[tuple[str, str, int]], message: str) -> None:
    """The error names the value and what is allowed."""
    with pytest.raises(ValueError, match=re.escape(message)):
        SchedulePolicy(CORE, SLOTS, Plan(tuple(PlannedSeed(*seed) for seed in seeds)))
