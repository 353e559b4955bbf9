"""Scripted hosts: lifecycles without networks, whose seeds are worth what the script says."""

import copy
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from esper.leyline import COOLDOWN_STAGES, LifecycleOp, SeedStage
from esper.simic.rewards import RewardConfig, Rewarded, RewardInputs, compute_reward
from esper.tamiyo.signals import Measured, SlotView

HOST_PARAMETERS, CHANCE, SLOTS = 1000, 10.0, 3
RAMP = 3
WAIT, GERMINATE, SET_ALPHA, PRUNE, FOSSILIZE, ADVANCE = LifecycleOp


@dataclass(frozen=True)
class Kind:
    """A seed: what it adds and what its absence would cost, at alpha 1, by age."""

    worth: Callable[[int], float]
    contribution: Callable[[int], float]
    parameters: int = 100
    measured: bool = True


def steady(worth: float, contribution: float | None = None, parameters: int = 100, measured: bool = True) -> Kind:
    """The same at every age."""
    needed = worth if contribution is None else contribution
    return Kind(lambda age: worth, lambda age: needed, parameters, measured)


class Move(NamedTuple):
    """One action; `crash` makes the training after it panic."""

    op: LifecycleOp = WAIT
    slot: int = 0
    kind: Kind | None = None
    target: float = 1.0
    speed: int = RAMP
    crash: bool = False


@dataclass
class Slot:
    """One slot."""

    stage: SeedStage = SeedStage.DORMANT
    kind: Kind | None = None
    alpha: float = 0.0
    target: float = 1.0
    speed: int = RAMP
    age: int = 0
    steps: int = 0

    @property
    def ramping(self) -> bool:
        """Alpha is on its way."""
        return self.stage is SeedStage.BLENDING and self.alpha != self.target

    def enter(self, stage: SeedStage) -> None:
        """A new stage."""
        self.stage, self.steps = stage, 0

    def points(self, of: Callable[[Kind], Callable[[int], float]]) -> float:
        """Worth or contribution at this alpha."""
        return self.alpha * of(self.kind)(self.age) if self.kind is not None else 0.0


@dataclass
class Host:
    """A host of three slots."""

    slots: list[Slot] = field(default_factory=lambda: [Slot() for _ in range(SLOTS)])
    step: int = 0

    def act(self, move: Move) -> None:
        """Do it; moves are legal by construction of the scripts."""
        slot = self.slots[move.slot]
        if move.op is GERMINATE:
            assert slot.stage is SeedStage.DORMANT and move.kind is not None
            self.slots[move.slot] = Slot(SeedStage.GERMINATED, move.kind, target=move.target, speed=move.speed)
        elif move.op is ADVANCE:
            assert slot.stage is SeedStage.TRAINING
            slot.enter(SeedStage.BLENDING)
        elif move.op is SET_ALPHA:
            assert slot.stage is SeedStage.HOLDING
            slot.target, slot.speed = move.target, move.speed
            slot.enter(SeedStage.BLENDING)
        elif move.op is FOSSILIZE:
            assert slot.stage is SeedStage.HOLDING
            slot.enter(SeedStage.FOSSILIZED)
        elif move.op is PRUNE:
            assert slot.kind is not None and slot.stage is not SeedStage.FOSSILIZED
            self.slots[move.slot] = Slot(SeedStage.PRUNED)

    def tick(self) -> None:
        """A step of training."""
        self.step += 1
        following = {
            SeedStage.PRUNED: SeedStage.EMBARGOED,
            SeedStage.EMBARGOED: SeedStage.RESETTING,
            SeedStage.RESETTING: SeedStage.DORMANT,
        }
        for slot in self.slots:
            slot.steps += 1
            slot.age += slot.kind is not None
            if slot.stage in COOLDOWN_STAGES:
                slot.enter(following[slot.stage])
            elif slot.stage is SeedStage.GERMINATED:
                slot.enter(SeedStage.TRAINING)
            elif slot.ramping:
                way = slot.target - slot.alpha
                step = way if slot.speed == 0 else math.copysign(min(abs(way), 1 / slot.speed), way)
                slot.alpha = slot.target if abs(way - step) < 1e-9 else slot.alpha + step
            elif slot.stage is SeedStage.BLENDING:
                slot.enter(SeedStage.HOLDING)

    @property
    def control(self) -> float:
        """Accuracy of a host that never grows: steep at first."""
        return CHANCE + 60 * (1 - math.exp(-self.step / 5))

    def gain(self, fossils_only: bool = False) -> float:
        """Points over the control."""
        counted = [s for s in self.slots if s.stage is SeedStage.FOSSILIZED or not fossils_only]
        return sum(slot.points(lambda kind: kind.worth) for slot in counted)

    def loss(self, fossils_only: bool = False) -> float:
        """In units of the random-guess loss: 1 at chance, 0 when all is right."""
        return 1 - (self.control + self.gain(fossils_only) - CHANCE) / (100 - CHANCE)

    def parameters(self, fossils_only: bool = False) -> int:
        """Grown ones that act, or of fossils."""
        counted = [s for s in self.slots if (s.stage is SeedStage.FOSSILIZED if fossils_only else s.alpha > 0)]
        return sum(slot.kind.parameters for slot in counted if slot.kind is not None)

    def view(self) -> SlotView:
        """As rewards see it."""
        slots = self.slots
        valid = [slot.alpha > 0 and slot.kind is not None and slot.kind.measured for slot in slots]
        needed = [slot.points(lambda kind: kind.contribution) for slot in slots]
        return slot_view(
            stage=[slot.stage for slot in slots],
            alpha=[slot.alpha for slot in slots],
            alpha_target=[slot.target for slot in slots],
            ramping=[slot.ramping for slot in slots],
            steps_in_stage=[slot.steps for slot in slots],
            age=[slot.age for slot in slots],
            contribution=[value if known else None for value, known in zip(needed, valid, strict=True)],
        )


def slot_view(
    stage: Sequence[int],
    alpha: Sequence[float],
    contribution: Sequence[float | None],
    *,
    alpha_target: Sequence[float] | None = None,
    ramping: Sequence[bool] | None = None,
    steps_in_stage: Sequence[int] | None = None,
    age: Sequence[int] | None = None,
    error: float = 0.0,
) -> SlotView:
    """One env; everything that rewards do not read is 0."""
    zeros = torch.zeros(1, len(stage), dtype=torch.float64)
    none = Measured(zeros, zeros, zeros.bool())
    fields: list[Any] = [none if name in _MEASURED else zeros for name in SlotView._fields]  # Any: of both kinds
    blank = SlotView(*fields)
    points = [0.0 if value is None else value for value in contribution]
    known = [value is not None for value in contribution]
    return blank._replace(
        stage=torch.tensor([[int(each) for each in stage]]),
        alpha=torch.tensor([alpha], dtype=torch.float64),
        alpha_target=torch.tensor([alpha_target or [1.0] * len(stage)], dtype=torch.float64),
        ramping=torch.tensor([ramping or [False] * len(stage)]),
        steps_in_stage=torch.tensor([steps_in_stage or [0] * len(stage)]),
        age=torch.tensor([age or [0] * len(stage)]),
        contribution=Measured(torch.tensor([points], dtype=torch.float64), zeros + error, torch.tensor([known])),
    )


_MEASURED = ("audition", "contribution", "seed_gradient", "best")

Script = Callable[[Host], Move]


def play(script: Script, steps: int = 24, host: Host | None = None) -> list[RewardInputs]:
    """An episode of one env, without the potentials, which `pay` fills in."""
    host = Host() if host is None else host
    transitions = []
    for step in range(steps):
        move, snapshot, before = script(host), copy.deepcopy(host), host.view()
        parameters = [slot.kind.parameters if slot.kind is not None else 0 for slot in host.slots]
        host.act(move)
        host.tick()
        if move.crash:
            host = replace(snapshot, step=snapshot.step + 1)
        transitions.append(_transition(move, before, parameters, host, step == steps - 1))
    return transitions


def _transition(move: Move, before: SlotView, parameters: list[int], host: Host, last: bool) -> RewardInputs:
    after = host.view()
    if move.crash:  # nobody may look at these
        after = after._replace(alpha=after.alpha * math.nan, stage=torch.full_like(after.stage, 5))
    nothing = math.nan if move.crash else 0.0
    missing = math.nan if move.crash or not last else 0.0
    return RewardInputs(
        potential=_row(math.nan),
        op=torch.tensor([int(move.op)]),
        slot=torch.tensor([move.slot]),
        before=before,
        after=after,
        seed_parameters=torch.tensor([parameters]),
        gain=_row(host.gain() + nothing),
        control_accuracy=_row(host.control),
        chance_accuracy=_row(CHANCE),
        loss=_row(host.loss() + nothing),
        acting_parameters=torch.tensor([host.parameters()]),
        fossil_parameters=torch.tensor([host.parameters(fossils_only=True)]),
        host_parameters=torch.tensor([HOST_PARAMETERS]),
        terminal=torch.tensor([last]),
        objective_gain=_row(host.gain(fossils_only=True) + missing),
        objective_loss=_row(host.loss(fossils_only=True) + missing),
        panic=torch.tensor([move.crash]),
    )


def _row(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def stack(transitions: Sequence[RewardInputs]) -> RewardInputs:
    """The same step of several envs as one."""
    return cast(RewardInputs, _stack(transitions))


def _stack(parts: Sequence[Any]) -> Any:  # Any: tensors, or named tuples of them
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))
    return type(parts[0])(*(_stack(columns) for columns in zip(*parts, strict=True)))


def pay(config: RewardConfig, steps: Sequence[RewardInputs]) -> list[Rewarded]:
    """Rewards along an episode, each Φ handed on to the next step."""
    stored, paid = torch.zeros(steps[0].gain.shape, dtype=torch.float64), []
    for inputs in steps:
        paid.append(compute_reward(config, inputs._replace(potential=stored)))
        stored = paid[-1].potential
    return paid


def first_return(config: RewardConfig, script: Script, steps: int = 24) -> float:
    """Discounted return from the start up to the end of the first segment: what the first decision is judged by."""
    total = 0.0
    transitions = play(script, steps)
    for step, (inputs, rewarded) in enumerate(zip(transitions, pay(config, transitions), strict=True)):
        total += config.gamma**step * float(rewarded.total)
        if bool(inputs.panic):
            break
    return total


def random_script(rng: random.Random, crashes: float = 0.06) -> Script:
    """Legal moves of every kind in all slots, with seeds good and bad."""

    def script(host: Host) -> Move:
        slot = rng.randrange(SLOTS)
        move = Move(rng.choice(_legal(host.slots[slot])), slot, target=rng.choice((0.5, 0.7, 1.0)))
        if move.op is GERMINATE:
            kind = steady(rng.gauss(0, 5), rng.gauss(0, 5), rng.randrange(1, 3000), rng.random() < 0.7)
            move = move._replace(kind=kind)
        return move._replace(speed=rng.choice((0, 3, 5)), crash=rng.random() < crashes)

    return script


def _legal(slot: Slot) -> list[LifecycleOp]:
    ops = {
        SeedStage.DORMANT: [GERMINATE],
        SeedStage.TRAINING: [WAIT, ADVANCE, ADVANCE, PRUNE],
        SeedStage.HOLDING: [WAIT, SET_ALPHA, FOSSILIZE, PRUNE],
        SeedStage.BLENDING: [WAIT] if slot.ramping else [WAIT, PRUNE],
    }
    return ops.get(slot.stage, [WAIT])
