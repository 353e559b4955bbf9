"""Rules, chance and plans: what they do, and that it is always legal."""

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.leyline import BadValueError, BlueprintOffer, LifecycleOp, SeedStage, SlotConfig, SlotSpec, head_preset
from esper.leyline.records import decode, encode
from esper.tamiyo import ActionTable, growth_table
from esper.tamiyo.policies import (
    HeuristicConfig,
    HeuristicTamiyo,
    Plan,
    PlannedSeed,
    RandomCommitPolicy,
    RandomPolicy,
    SchedulePolicy,
    WaitPolicy,
)
from esper.tamiyo.policies.heuristic import steps_left
from esper.tamiyo.policy import Policy, View
from esper.tamiyo.signals import CriticView, HostView, Measured, OfferView, SlotView, TrainingSignals

WAIT, GERMINATE, SET_ALPHA, PRUNE, FOSSILIZE, ADVANCE = LifecycleOp
STEPS = 20
NAMES = ("norm", "conv", "attention")
OFFERS = tuple(BlueprintOffer(name, 1, 1, 10) for name in NAMES)
LAST_HAS_NO_ATTENTION = (OFFERS, OFFERS, OFFERS[:2])
SLOTS = SlotConfig(
    tuple(SlotSpec(f"r1c{c}", 8, "image", c / 2, blueprints=offers) for c, offers in enumerate(LAST_HAS_NO_ATTENTION))
)
TABLES = {preset: growth_table(head_preset(preset), SLOTS) for preset in ("core", "full")}
CORE, FULL = TABLES["core"], TABLES["full"]
LATER = Plan((PlannedSeed("r1c0", "conv", 6), PlannedSeed("r1c1", "norm", 0, 5), PlannedSeed("r1c2", "conv", 6)))
POLICIES: dict[str, Callable[[ActionTable], Policy]] = {
    "wait": WaitPolicy,
    "random": RandomPolicy,
    "random-commit": lambda table: RandomCommitPolicy(table, STEPS),
    "schedule": lambda table: SchedulePolicy(table, SLOTS, LATER),
    "heuristic": lambda table: HeuristicTamiyo(table, SLOTS),
}
EVERY_POLICY = pytest.mark.parametrize("name", POLICIES)


# -- what policies see ------------------------------------------------------------------------------------------------


LONGS = {"last_op", "stage", "blueprint"}
BOOLS = {"last_succeeded", "ramping", "can_advance", "can_fossilize", "can_prune", "can_retarget", "valid", "fits"}
MEASURED = {"audition", "contribution", "seed_gradient", "best"}


def blank(kind: Any, *shape: int) -> Any:
    """A view of zeros; Any: one of the NamedTuples of signals."""
    columns: dict[str, Any] = {}
    for name in kind._fields:
        dtype = torch.long if name in LONGS else torch.bool if name in BOOLS else torch.float
        columns[name] = blank(Measured, *shape) if name in MEASURED else torch.zeros(shape, dtype=dtype)
    return kind(**columns)


def quiet(n: int, step: int = 10) -> TrainingSignals:
    """Nothing is measured, nothing grows, all offers look the same."""
    hosts, slots = blank(HostView, n), blank(SlotView, n, len(SLOTS))
    return TrainingSignals(
        hosts._replace(time_left=torch.full((n,), 1 - step / STEPS)),
        slots._replace(blueprint=slots.blueprint - 1),
        blank(OfferView, n, len(SLOTS), len(NAMES)),
        blank(CriticView, n),
    )


def scrambled(part: Any) -> Any:
    """A view with random values of each tensor's type; Any: a tensor, or a tuple of them."""
    if isinstance(part, HostView):
        return HostView(*(scrambled(p) for p in part))._replace(time_left=part.time_left)
    if not isinstance(part, Tensor):
        return type(part)(*(scrambled(p) for p in part))
    if part.dtype == torch.bool:
        return torch.rand(part.shape) < 0.5
    return torch.randint(-1, 3, part.shape) if part.dtype == torch.long else torch.randn(part.shape) * 5


def random_signals(n: int, step: int) -> TrainingSignals:
    """Any stage, any measurement; costs, errors and counts that can be."""
    signals: TrainingSignals = scrambled(quiet(n, step))
    slots = signals.slots
    measured = {name: getattr(slots, name) for name in ("audition", "contribution")}
    slots = slots._replace(
        stage=torch.randint(len(SeedStage), slots.stage.shape),
        steps_in_stage=torch.randint(9, slots.stage.shape),
        age=torch.randint(9, slots.stage.shape),
        tried=torch.randint(2, slots.stage.shape),
        **{name: each._replace(error=each.error.abs() / 5) for name, each in measured.items()},
    )
    return signals._replace(slots=slots, offers=signals.offers._replace(cost=signals.offers.cost.abs()))


def random_masks(table: ActionTable, n: int, share: float = 0.5) -> dict[str, Tensor]:
    """Allow about this share, WAIT always, and only what can be completed to a legal action."""
    masks = {head.name: torch.rand(n, *table.mask_shape(head)) < share for head in table.heads}
    for head in table.heads[3:]:
        masks[head.name][torch.arange(n), torch.randint(head.size, (n,))] = True
    masks["slot"][:, GERMINATE] &= masks["blueprint"].any(-1)
    masks["op"] &= masks["slot"].any(-1)
    masks["op"][:, WAIT] = True
    return masks


def a_view(signals: TrainingSignals, masks: dict[str, Tensor], step: int = 10) -> View:
    """Without features: no policy here looks at them."""
    return View(signals, torch.zeros(len(masks["op"]), 0), masks, step)


def assert_legal(table: ActionTable, actions: Tensor, masks: dict[str, Tensor]) -> None:
    """Along the conditional masks; heads that do not matter keep their placeholder."""
    causal = table.causal(actions)
    for env, action in enumerate(actions.tolist()):
        chosen = dict(zip(table.names, action, strict=True))
        for place, head in enumerate(table.heads):
            if not causal[env, place]:
                assert chosen[head.name] == head.placeholder, head.name
                continue
            mask = masks[head.name][env] if head.given is None else masks[head.name][env, chosen[head.given]]
            assert mask[chosen[head.name]], (head.name, chosen)


# -- all policies -----------------------------------------------------------------------------------------------------


@EVERY_POLICY
@pytest.mark.parametrize("preset", TABLES)
def test_each_is_a_policy(name: str, preset: str) -> None:
    policy = POLICIES[name](TABLES[preset])
    assert isinstance(policy, Policy)
    assert policy.table is TABLES[preset]


@EVERY_POLICY
@pytest.mark.parametrize("preset", TABLES)
@settings(max_examples=15, deadline=None)
@given(rng_seed=st.integers(0, 2**32), n=st.integers(1, 9), share=st.sampled_from([0.0, 0.3, 0.6, 1.0]))
def test_actions_are_legal(name: str, preset: str, rng_seed: int, n: int, share: float) -> None:
    """Whatever is seen, even what no fleet would show."""
    torch.manual_seed(rng_seed)
    table = TABLES[preset]
    policy = POLICIES[name](table)
    memory = policy.initial_memory(list(range(n)))
    for step in range(0, STEPS, 3):
        masks = random_masks(table, n, share)
        actions, memory = policy.act(a_view(random_signals(n, step), masks, step), memory, torch.rand(n, len(table)))
        assert actions.shape == (n, len(table)) and actions.dtype == torch.long
        assert_legal(table, actions, masks)


@EVERY_POLICY
def test_the_same_draws_give_the_same_actions(name: str) -> None:
    """Pairing: nothing but `uniform` is random, and an env does not see its neighbours."""
    n = 40
    policy = POLICIES[name](FULL)
    signals, masks, uniform = random_signals(n, 8), random_masks(FULL, n), torch.rand(n, len(FULL))
    view, memory = a_view(signals, masks, 8), policy.initial_memory(list(range(n)))
    together, _ = policy.act(view, memory, uniform)
    torch.manual_seed(1)
    again, _ = policy.act(view, policy.initial_memory(list(range(n))), uniform)
    assert torch.equal(together, again)

    def one(part: Any, env: int) -> Any:  # Any: a tensor, or a tuple of them
        return part[env : env + 1] if isinstance(part, Tensor) else type(part)(*(one(p, env) for p in part))

    for env in range(n):
        alone = a_view(one(signals, env), {name: mask[env : env + 1] for name, mask in masks.items()}, 8)
        actions, _ = policy.act(alone, policy.initial_memory([env]), uniform[env : env + 1])
        assert torch.equal(actions[0], together[env])


def test_waiting() -> None:
    """WAIT, and placeholders everywhere else."""
    policy = WaitPolicy(FULL)
    actions, _ = policy.act(a_view(quiet(3), FULL.open_masks(3)), None, torch.rand(3, len(FULL)))
    assert actions.tolist() == [[WAIT, 0, 0, 0, 0, 2, 0, 0]] * 3


# -- chance -----------------------------------------------------------------------------------------------------------


def test_random_is_uniform_head_by_head() -> None:
    """WAIT or GERMINATE, 1/2 each; then slot 0 with one blueprint or slot 2 with two of them: 1/4, 1/8, 1/8."""
    n = 8000
    masks = {name: torch.zeros_like(mask) for name, mask in CORE.open_masks(n).items()}
    masks["op"][:, [WAIT, GERMINATE]] = True
    masks["slot"][:, GERMINATE, [0, 2]] = True
    masks["blueprint"][:, 0, 1] = True
    masks["blueprint"][:, 2, :2] = True
    actions, _ = RandomPolicy(CORE).act(a_view(quiet(n), masks), None, torch.rand(n, len(CORE)))
    kinds, counts = actions.unique(dim=0, return_counts=True)
    shares = {tuple(kind): count / n for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True)}
    expected = {(WAIT, 0, 0): 1 / 2, (GERMINATE, 0, 1): 1 / 4, (GERMINATE, 2, 0): 1 / 8, (GERMINATE, 2, 1): 1 / 8}
    assert shares == pytest.approx(expected, abs=0.03)  # five standard errors of 1/2


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

    def view(self) -> View:
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
        memory = policy.initial_memory(list(range(self.n)))
        for _ in range(STEPS):
            before(self)
            actions, memory = policy.act(self.view(), memory, torch.rand(self.n, len(CORE)))
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
        SchedulePolicy(CORE, SLOTS, plans).initial_memory([0, 1])


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


def test_a_table_for_other_slots_is_refused() -> None:
    fewer = SlotConfig(SLOTS.slots[:2])
    with pytest.raises(BadValueError, match="head 'slot' has 3 choices for 2 slots"):
        SchedulePolicy(CORE, fewer, Plan())
    with pytest.raises(BadValueError, match="head 'slot' has 3 choices for 2 slots"):
        HeuristicTamiyo(CORE, fewer)


# -- the rules --------------------------------------------------------------------------------------------------------


class Situation:
    """One env that a test sets up; everything is legal in it unless said otherwise."""

    def __init__(self, step: int = 10, **host: float) -> None:
        self.step, self.signals, self.masks = step, quiet(1, step), CORE.open_masks(1)
        hosts = {name: torch.tensor([value]) for name, value in host.items()}
        self.signals = self.signals._replace(hosts=self.signals.hosts._replace(**hosts))

    def slot(
        self, place: int, stage: SeedStage, steps: int, value: float, error: float, cost: float = 0
    ) -> "Situation":
        """A conv seed with an audition (before it blends) or a contribution."""
        name = "audition" if stage is SeedStage.TRAINING else "contribution"
        measured = Measured(*(each.clone() for each in getattr(self.signals.slots, name)))
        measured.value[0, place], measured.error[0, place], measured.valid[0, place] = value, error, True
        changed: dict[str, Any] = {name: measured}
        slots = self.signals.slots._replace(
            **changed,
            stage=self.signals.slots.stage.clone(),
            blueprint=self.signals.slots.blueprint.clone(),
            steps_in_stage=self.signals.slots.steps_in_stage.clone(),
        )
        slots.stage[0, place], slots.blueprint[0, place], slots.steps_in_stage[0, place] = stage, 1, steps
        costs = self.signals.offers.cost.clone()
        costs[0, place, 1] = cost
        self.signals = self.signals._replace(slots=slots, offers=self.signals.offers._replace(cost=costs))
        for op in (WAIT, GERMINATE):
            self.masks["slot"][0, op, place] = False
        return self

    def unmeasured(self) -> "Situation":
        """No measurement is valid."""
        slots = self.signals.slots
        no = torch.zeros_like(slots.audition.valid)
        slots = slots._replace(
            audition=slots.audition._replace(valid=no), contribution=slots.contribution._replace(valid=no)
        )
        self.signals = self.signals._replace(slots=slots)
        return self

    def offers(self, worth: dict[tuple[int, int], float], cost: dict[tuple[int, int], float]) -> "Situation":
        """By slot and blueprint; all others 0."""
        tables = []
        for entries in (worth, cost):
            table = torch.zeros(1, len(SLOTS), len(NAMES))
            for (slot, blueprint), value in entries.items():
                table[0, slot, blueprint] = value
            tables.append(table)
        self.signals = self.signals._replace(offers=self.signals.offers._replace(worth=tables[0], cost=tables[1]))
        return self

    def forbid(self, op: LifecycleOp, place: int) -> "Situation":
        self.masks["slot"][0, op, place] = False
        self.masks["op"] = self.masks["slot"].any(-1)
        self.masks["op"][:, WAIT] = True
        return self

    def decide(self, config: HeuristicConfig | None = None, stale: int = 0) -> tuple[LifecycleOp, int, int]:
        """Op, slot and blueprint after so many steps at accuracy 0."""
        policy = HeuristicTamiyo(CORE, SLOTS, config)
        memory = policy.initial_memory([0])
        if stale:
            memory = memory._replace(level=torch.zeros(1), since=torch.full((1,), stale - 1))
        actions, _ = policy.act(a_view(self.signals, self.masks, self.step), memory, torch.zeros(1, len(CORE)))
        op, slot, blueprint = actions[0].tolist()
        return LifecycleOp(op), slot, blueprint


WAITS = (WAIT, 0, 0)
TRAINING, HOLDING = SeedStage.TRAINING, SeedStage.HOLDING


@pytest.mark.parametrize(("step", "left"), [(1, 19), (7, 13), (13, 7), (19, 1)])
def test_steps_left(step: int, left: int) -> None:
    """From the share of time that is left; T itself is not told."""
    assert steps_left(quiet(1, step).hosts, step).tolist() == [left]


def test_germinates_after_patience_on_a_plateau() -> None:
    """Rises of 1 point or less do not count, and add up until they do."""
    policy = HeuristicTamiyo(CORE, SLOTS)
    memory = policy.initial_memory([0])
    ops = []
    for step, accuracy in enumerate([10.0, 20.0, 20.6, 21.2, 21.8, 22.0]):
        situation = Situation(step, accuracy=accuracy)
        actions, memory = policy.act(a_view(situation.signals, situation.masks, step), memory, torch.zeros(1, 3))
        ops.append(LifecycleOp(int(actions[0, 0])))
    # The level is 20 after the second; 20.6 is not above 21, 21.2 is and becomes the level; two steps later: patience.
    assert ops == [WAIT] * 5 + [GERMINATE]


def test_takes_the_offer_of_most_worth() -> None:
    situation = Situation().offers({(0, 1): 0.4, (2, 0): 1.0, (1, 2): 0.7}, {})
    assert situation.decide(stale=2) == (GERMINATE, 2, 0)
    assert situation.forbid(GERMINATE, 2).decide(stale=2) == (GERMINATE, 1, 2)


def test_minds_the_cost_of_an_offer() -> None:
    """Net: 1 − 0.1 · log2(16) = 0.6 against 0.71 − 0.1 · log2(2) = 0.61; per cost: 0.07, 0.71 and 5."""
    situation = Situation().offers({(0, 1): 1.0, (1, 1): 0.71, (2, 1): 0.1}, {(0, 1): 15, (1, 1): 1, (2, 1): 0.02})
    assert situation.decide(stale=2) == (GERMINATE, 1, 1)
    assert situation.decide(HeuristicConfig(choice="per_cost"), stale=2) == (GERMINATE, 2, 1)
    assert situation.decide(HeuristicConfig(choice="worth"), stale=2) == (GERMINATE, 0, 1)


def test_does_not_try_the_same_offer_twice() -> None:
    policy = HeuristicTamiyo(CORE, SLOTS, HeuristicConfig(patience=0))
    situation = Situation().offers({(1, 1): 1.0, (1, 0): 0.9}, {})
    memory, found = policy.initial_memory([0]), []
    for _ in range(2):
        actions, memory = policy.act(a_view(situation.signals, situation.masks), memory, torch.zeros(1, 3))
        found.append(actions[0].tolist())
    assert found == [[GERMINATE, 1, 1], [GERMINATE, 1, 0]]


def test_does_not_germinate_too_late() -> None:
    """With nine steps left it still does."""
    assert Situation(step=11).decide(stale=5)[0] is GERMINATE
    assert Situation(step=12).decide(stale=5) == WAITS
    assert Situation(step=12).decide(HeuristicConfig(germinate_left=8), stale=5)[0] is GERMINATE


def test_does_not_germinate_too_many() -> None:
    """Two at once; fossils do not count."""
    situation = Situation().slot(0, TRAINING, 1, 0.0, 1.0)
    assert situation.decide(stale=5)[:2] == (GERMINATE, 1)
    assert situation.slot(1, SeedStage.BLENDING, 1, 0.0, 1.0).decide(stale=5) == WAITS
    assert situation.slot(1, SeedStage.FOSSILIZED, 1, 0.0, 1.0).decide(stale=5)[:2] == (GERMINATE, 2)


def test_advances_what_auditions_beyond_its_error() -> None:
    assert Situation().slot(1, TRAINING, 3, 2.0, 1.5).decide() == (ADVANCE, 1, 0)
    assert Situation().slot(1, TRAINING, 3, 2.0, 2.5).decide() == WAITS
    assert Situation().slot(1, TRAINING, 3, 2.0, 1.5).decide(HeuristicConfig(errors=2)) == WAITS
    assert Situation().slot(1, TRAINING, 3, 2.0, 1.5).decide(HeuristicConfig(least_audition=1)) == WAITS


def test_does_not_believe_an_early_audition() -> None:
    assert Situation().slot(1, TRAINING, 2, 9.0, 1.0).decide() == WAITS
    assert Situation().slot(1, TRAINING, 2, 9.0, 1.0).decide(HeuristicConfig(training_steps=2)) == (ADVANCE, 1, 0)


def test_advances_the_best_audition_first() -> None:
    situation = Situation().slot(0, TRAINING, 4, 2.0, 1.0).slot(2, TRAINING, 3, 5.0, 1.0)
    assert situation.decide() == (ADVANCE, 2, 0)
    assert situation.forbid(ADVANCE, 2).decide() == (ADVANCE, 0, 0)


def test_does_not_advance_what_could_not_be_fossilised() -> None:
    """Five steps: three of ramp, one held, one to act."""
    assert Situation(step=15).slot(1, TRAINING, 3, 2.0, 1.0).decide() == (ADVANCE, 1, 0)
    assert Situation(step=16).slot(1, TRAINING, 3, 2.0, 1.0).decide() == WAITS


def test_prunes_what_does_not_audition_well() -> None:
    """After six steps in training, the worst first; what was not measured is left alone."""
    assert Situation().slot(1, TRAINING, 5, 0.5, 1.0).decide() == WAITS
    assert Situation().slot(1, TRAINING, 6, 0.5, 1.0).decide() == (PRUNE, 1, 0)
    assert Situation().slot(1, TRAINING, 6, 0.5, 1.0).slot(0, TRAINING, 6, -2.0, 1.0).decide() == (PRUNE, 0, 0)
    assert Situation().slot(1, TRAINING, 9, -5.0, 1.0).unmeasured().decide() == WAITS


def test_fossilises_what_contributes_beyond_its_error() -> None:
    """Net of rent: a seed as large as the host pays 2 points."""
    assert Situation().slot(1, HOLDING, 1, 3.0, 0.9).decide() == (FOSSILIZE, 1, 0)
    assert Situation().slot(1, HOLDING, 1, 3.0, 0.9, cost=1).decide() == (FOSSILIZE, 1, 0)
    assert Situation().slot(1, HOLDING, 1, 3.0, 1.1, cost=1).decide() == WAITS
    assert Situation().slot(1, HOLDING, 1, 3.0, 0.9).decide(HeuristicConfig(least_contribution=2.5)) == WAITS


def test_prunes_what_is_not_worth_its_rent() -> None:
    """The worst first; what was not measured is left alone."""
    assert Situation().slot(1, HOLDING, 1, -0.1, 3.0).decide() == (PRUNE, 1, 0)
    assert Situation().slot(1, HOLDING, 1, 1.9, 3.0, cost=1).decide() == (PRUNE, 1, 0)
    assert Situation().slot(1, HOLDING, 1, -0.1, 3.0).decide(HeuristicConfig(prune_below=-1)) == WAITS
    assert Situation().slot(1, HOLDING, 1, -0.1, 3.0).slot(2, HOLDING, 1, -4.0, 3.0).decide() == (PRUNE, 2, 0)
    assert Situation().slot(1, HOLDING, 1, -4.0, 3.0).unmeasured().decide() == WAITS


def test_rescues_what_contributes_at_all_before_the_end() -> None:
    """With three steps left; the most useful first."""
    assert Situation(step=16).slot(1, HOLDING, 4, 0.2, 3.0).decide() == WAITS
    assert Situation(step=17).slot(1, HOLDING, 4, 0.2, 3.0).decide() == (FOSSILIZE, 1, 0)
    both = Situation(step=19).slot(1, HOLDING, 4, 0.2, 3.0).slot(2, HOLDING, 4, 0.3, 3.0)
    assert both.decide() == (FOSSILIZE, 2, 0)
    assert Situation(step=19).slot(1, HOLDING, 4, 1.9, 3.0, cost=1).decide() == (PRUNE, 1, 0)


def test_rules_in_order() -> None:
    """All apply; each gives way to the one before it, and what is forbidden is passed over."""
    situation = Situation().slot(0, HOLDING, 1, 3.0, 1.0).slot(1, TRAINING, 6, 2.0, 1.0)
    config = HeuristicConfig(at_once=3)
    assert situation.decide(config, stale=5) == (FOSSILIZE, 0, 0)
    assert situation.forbid(FOSSILIZE, 0).decide(config, stale=5) == (ADVANCE, 1, 0)
    assert situation.forbid(ADVANCE, 1).decide(config, stale=5)[:2] == (GERMINATE, 2)
    assert situation.forbid(GERMINATE, 2).decide(config, stale=5) == WAITS


def test_other_heads_do_what_core_does() -> None:
    """add, a ramp of 3, target 1.0, cut at once, linear: or the first legal choice where that is masked."""
    policy = HeuristicTamiyo(FULL, SLOTS, HeuristicConfig(patience=0))
    masks = FULL.open_masks(2)
    masks["blend"][1, 0] = False
    masks["alpha_target"][1, 2] = False
    actions, _ = policy.act(a_view(quiet(2), masks), policy.initial_memory([0, 1]), torch.zeros(2, len(FULL)))
    assert actions.tolist() == [[GERMINATE, 0, 0, 0, 0, 2, 0, 0], [GERMINATE, 0, 0, 1, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patience": -1}, "patience -1 is not an integer of 0 or more"),
        ({"at_once": 0}, "at_once 0 is not an integer of 1 or more"),
        ({"trial": 2}, "trial 2 is not an integer of 3 or more: auditions are not believed before"),
        ({"rent": float("nan")}, "rent nan is not a finite number"),
        ({"errors": -1.0}, "errors -1.0 is below 0"),
        ({"choice": "best"}, "unknown choice of blueprints 'best'; allowed: net, per_cost, worth"),
    ],
)
def test_bad_thresholds(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(HeuristicConfig(), **change)


def test_thresholds_as_json() -> None:
    """Tuned ones are shipped as files."""
    config = HeuristicConfig(patience=4, choice="per_cost", rent=1.5)
    assert decode(HeuristicConfig, json.loads(json.dumps(encode(config))), "heuristic") == config
