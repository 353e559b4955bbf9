"""An action on one env: one verb of the fleet per op."""

from collections.abc import Callable, Container
from typing import NamedTuple

import torch
from torch import Tensor

from esper.kasmina import lifecycle
from esper.kasmina.compare import RowScore
from esper.leyline import (
    ACTIVE_STAGES,
    HEADS,
    LIVE_STAGES,
    BadValueError,
    EsperError,
    HeadPreset,
    LifecycleOp,
    SeedStage,
    SlotConfig,
    StageChange,
)
from esper.simic.telemetry import Spans
from esper.simic.training.hosts import Groups
from esper.simic.training.observe import Observer, accuracy_of, first_actions, loss_of
from esper.tamiyo import ActionTable, ObservationLayout, growth_table
from esper.tamiyo.features import growth_layout, signals_to_features
from esper.tamiyo.policy import PolicyView, growth_masks
from esper.tamiyo.signals import SlotView
from esper.tolaria import HostFleet
from esper.tolaria.measurement import FleetComparison, Prober, Sensing

_CHOICES = {head.name: head.choices for head in HEADS}


class IllegalActionError(EsperError, RuntimeError):
    """A policy did what its masks do not allow."""


def apply_action(fleet: HostFleet, env: int, action: list[int], table: ActionTable, slots: SlotConfig) -> LifecycleOp:
    """Carry out one action (an index per head); raises where the fleet refuses what the masks allowed."""
    chosen = dict(zip(table.names, action, strict=True))
    op = LifecycleOp(chosen["op"])
    slot_id = slots.slot_ids[chosen["slot"]]
    try:
        if op is LifecycleOp.GERMINATE:
            fleet.germinate(
                env,
                slot_id,
                slots.blueprint_names[chosen["blueprint"]],
                style=str(_value(chosen, "blend")),
                tempo=int(_value(chosen, "tempo")),
                alpha_target=float(_value(chosen, "alpha_target")),
            )
        elif op is LifecycleOp.ADVANCE:
            fleet.advance(env, slot_id)
        elif op is LifecycleOp.FOSSILIZE:
            fleet.fossilize(env, slot_id)
        elif op is LifecycleOp.PRUNE:
            steps, curve = int(_value(chosen, "alpha_speed")), str(_value(chosen, "alpha_curve"))
            fleet.prune(env, slot_id, steps=steps, curve=curve)
        elif op is LifecycleOp.SET_ALPHA_TARGET:
            fleet.set_alpha_target(
                env,
                slot_id,
                float(_value(chosen, "alpha_target")),
                steps=int(_value(chosen, "alpha_speed")),
                curve=str(_value(chosen, "alpha_curve")),
            )
    except EsperError as error:
        raise IllegalActionError(f"env {env}: {op.name} in {slot_id} was offered but refused: {error}") from error
    return op


def _value(chosen: dict[str, int], name: str) -> int | float | str:
    """The value behind a head's choice; the head's placeholder where the table lacks it."""
    head = next(head for head in HEADS if head.name == name)
    choices = _CHOICES[name]
    assert not isinstance(choices, str), "slots and blueprints are looked up by the caller"
    value: int | float | str = choices[chosen.get(name, head.placeholder)]
    return value


class SeedChange(NamedTuple):
    """A seed of a grown env went from one stage to another."""

    env: int
    change: StageChange
    blueprint: str | None


class StepResult(NamedTuple):
    """What a step led to, for every grown env (n,)."""

    accuracy: Tensor
    """Calibrated validation accuracy of the main row, percent"""
    control_accuracy: Tensor
    loss: Tensor
    """Validation loss in units of the random-guess loss"""
    slots: SlotView
    """Before the tick"""
    seed_parameters: Tensor
    """(n, slots): of the seeds that were there before the actions"""
    acting_parameters: Tensor
    """Of all seeds with alpha > 0"""
    fossil_parameters: Tensor
    panics: Tensor
    """bool: the env went back to its snapshot"""
    symptoms: dict[int, list[str]]
    """Why, by env"""
    hardened_accuracy: Tensor | None
    """With fossils alone; at the end of the episode only"""
    hardened_control: Tensor | None
    hardened_loss: Tensor | None
    """In units of the random-guess loss"""
    changes: list[SeedChange]

    @property
    def gain(self) -> Tensor:
        """Points over the control."""
        return self.accuracy - self.control_accuracy


class _Scores(NamedTuple):
    accuracy: Tensor
    control: Tensor
    loss: Tensor


class EpisodeRunner:
    """A fleet in groups, with everything that a step consists of but the decision."""

    def __init__(self, fleet: HostFleet, groups: Groups, preset: HeadPreset, *, sensing: bool = True) -> None:
        self.fleet, self.groups, self.preset = fleet, groups, preset
        self.slots = fleet.task.slot_config
        self.table = growth_table(preset, self.slots)
        self.layout: ObservationLayout = growth_layout(self.slots, sensing=sensing)
        self.observer = Observer(fleet, groups, gated="blend" in self.table.names)
        self.prober = Prober(fleet)
        self.final = False
        """Whether the end of an episode is scored on test images."""
        self.committed: list[RowScore] = []
        """Image by image, every env of the fleet as it was hardened at the end of the last episode."""
        self.spans = Spans(enabled=False)
        """Whoever wants to know where the time goes puts his own here."""
        self._number = {env: row for row, env in enumerate(groups.envs)}

    @property
    def done(self) -> bool:
        """Whether the episode has ended."""
        return self.fleet.step_index >= self.fleet.task.steps

    def begin(self, seeds: list[int]) -> None:
        """Fresh hosts, one seed per group, measured before anything is trained."""
        fleet, n = self.fleet, self.groups.grown
        fleet.reset(self.groups.spread(seeds))
        self.observer.begin()
        self.found: FleetComparison = fleet.validate(deployed=False)
        self.sensing: Sensing = self.prober()
        self._last_op, self._last_succeeded = first_actions(n, fleet.device)
        self.potential = torch.zeros(n, device=fleet.device)
        """Φ of every env, as the reward last set it."""

    def view(self) -> PolicyView:
        """What policies see now."""
        signals = self.observer.look(self.found, self.sensing, self.potential, self._last_op, self._last_succeeded)
        features = signals_to_features(signals, self.layout)
        return PolicyView(signals, features, growth_masks(signals, self.table, self.preset.ops), self.fleet.step_index)

    def step(self, actions: Tensor) -> StepResult:
        """Apply the actions (n, heads), train, measure, let the governor look, tick."""
        fleet, groups = self.fleet, self.groups
        seed_parameters = self._parameters(LIVE_STAGES)
        with self.spans("apply"):
            changes = self._apply(actions)
        with self.spans("train"):
            fleet.train_step()
        with self.spans("validate"):
            earlier, self.found = self.found, fleet.validate(deployed=False)
        panics, stages = torch.zeros(groups.hosts, dtype=torch.bool), self._stages()
        symptoms: dict[int, list[str]] = {}
        with self.spans("govern"):
            verdicts = fleet.govern(self.found)
        for panic in verdicts:
            panics[panic.env] = True
            if panic.env in self._number:
                symptoms[self._number[panic.env]] = [symptom.name for symptom in panic.symptoms]
            self._take_back(panic.env, earlier)
        changes += self._undone(stages, symptoms)
        slots = self.observer.slots(self.found, self.sensing)
        acting, fossil = (self._parameters(stages).sum(1) for stages in (ACTIVE_STAGES, (SeedStage.FOSSILIZED,)))
        hardened = None
        if fleet.step_index + 1 >= fleet.task.steps:
            with self.spans("validate"):
                self.committed = fleet.validate_committed(final=self.final)
            hardened = self._scores(self.committed)
        names = self._blueprints()
        changes += [
            SeedChange(self._number[env], change, names[self._number[env]][change.slot_id])
            for env, change in fleet.tick()
            if env in self._number
        ]
        if not self.done:
            with self.spans("probe"):
                self.sensing = self.prober()
        live = self._scores(self.found.main)
        undone = groups.grown_of(panics).to(fleet.device)
        self._last_succeeded = ~undone
        return StepResult(
            accuracy=live.accuracy,
            control_accuracy=live.control,
            loss=live.loss,
            slots=slots,
            seed_parameters=seed_parameters,
            acting_parameters=acting,
            fossil_parameters=fossil,
            panics=undone,
            symptoms=symptoms,
            hardened_accuracy=None if hardened is None else hardened.accuracy,
            hardened_control=None if hardened is None else hardened.control,
            hardened_loss=None if hardened is None else hardened.loss,
            changes=changes,
        )

    def _scores(self, rows: list[RowScore]) -> _Scores:
        """Accuracy of every grown env and of its control in percent, and its relative loss."""
        percent, losses = accuracy_of(rows), loss_of(rows) / self.fleet.task.random_guess_loss
        return _Scores(self.groups.grown_of(percent), self.groups.control_of(percent), self.groups.grown_of(losses))

    def _take_back(self, env: int, earlier: FleetComparison) -> None:
        """A host that went back is again what was measured then, and nothing that was measured since."""
        self.found.main[env] = earlier.main[env]
        for now, then in (
            (self.found.auditions, earlier.auditions),
            (self.found.contributions, earlier.contributions),
        ):
            for key in [key for key in now if key[0] == env]:
                del now[key]
            now.update({key: value for key, value in then.items() if key[0] == env})

    def _stages(self) -> list[dict[str, SeedStage]]:
        return [{slot_id: state.stage for slot_id, state in self.fleet.states[env].items()} for env in self.groups.envs]

    def _undone(self, before: list[dict[str, SeedStage]], symptoms: dict[int, list[str]]) -> list[SeedChange]:
        """Stage changes that panics took back."""
        names, after = self._blueprints(), self._stages()
        return [
            SeedChange(row, StageChange(slot_id, stage, after[row][slot_id], "panic"), names[row][slot_id])
            for row in symptoms
            for slot_id, stage in before[row].items()
            if stage is not after[row][slot_id]
        ]

    def _apply(self, actions: Tensor) -> list[SeedChange]:
        """Structure edits. Host sync: one, for the actions."""
        changes = []
        for row, (env, action) in enumerate(zip(self.groups.envs, actions.tolist(), strict=True)):
            before = dict(self.fleet.states[env])
            op = apply_action(self.fleet, env, action, self.table, self.slots)
            for slot_id, state in self.fleet.states[env].items():
                old = before[slot_id]
                if state.stage is not old.stage:
                    change = StageChange(slot_id, old.stage, state.stage, op.name.lower())
                    changes.append(SeedChange(row, change, state.blueprint or old.blueprint))
        self._last_op = actions[:, 0].to(self.fleet.device)
        return changes

    def _blueprints(self) -> list[dict[str, str | None]]:
        """What grows in every slot of every grown env."""
        return [
            {slot_id: state.blueprint for slot_id, state in self.fleet.states[env].items()} for env in self.groups.envs
        ]

    def _parameters(self, stages: Container[SeedStage]) -> Tensor:
        """Parameters of the seeds in these stages (n, slots)."""
        counts = [
            [
                lifecycle.seed_parameters(self.fleet.slots[slot_id], state) if state.stage in stages else 0
                for slot_id, state in self.fleet.states[env].items()
            ]
            for env in self.groups.envs
        ]
        return torch.tensor(counts, dtype=torch.float32, device=self.fleet.device)


Act = Callable[[PolicyView], Tensor]
"""Actions (n, heads) of all grown envs from what a policy is given."""
OnStep = Callable[[int, PolicyView, Tensor, StepResult], None]
"""Called after every step with its number, what was seen, what was done, and what it led to."""


def play_episode(runner: EpisodeRunner, act: Act, on_step: OnStep | None = None) -> StepResult:
    """Play the episode that `runner.begin` started, to its end; returns the result of the last step."""
    step, result = 0, None
    while not runner.done:
        with runner.spans("observe"):
            view = runner.view()
        with runner.spans("act"):
            actions = act(view)
        with runner.spans("step"):
            result = runner.step(actions)
        if on_step is not None:
            on_step(step, view, actions, result)
        step += 1
    if result is None:
        raise BadValueError("the episode is over; call runner.begin(seeds) first")
    return result
