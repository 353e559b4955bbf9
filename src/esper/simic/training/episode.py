"""One episode of a fleet in groups: actions, training, measurement, and the loop over its steps."""

from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper.kasmina import SeedState, lifecycle
from esper.kasmina.compare import Comparison, RowScore
from esper.leyline import (
    ACTIVE_STAGES,
    HEADS,
    LIVE_STAGES,
    BadValueError,
    EsperError,
    Head,
    HeadPreset,
    LifecycleOp,
    SeedStage,
    SlotConfig,
    StageChange,
    gain_over,
)
from esper.simic.telemetry import Spans
from esper.simic.training.hosts import Groups
from esper.simic.training.observe import Observer, loss_of
from esper.tamiyo import ActionTable, growth_table
from esper.tamiyo.commit_rule import CommitRule
from esper.tamiyo.features import growth_layout, signals_to_features
from esper.tamiyo.policy import PolicyView, growth_masks
from esper.tamiyo.signals import SlotView
from esper.tolaria import HostFleet
from esper.tolaria.growable import Growable
from esper.tolaria.measurement import Sensing


class IllegalActionError(EsperError, RuntimeError):
    """A policy chose an action that the fleet, or another growable, refuses."""


def choices_of(head: Head, slots: SlotConfig) -> Sequence[Any]:  # Any: ops, names or numbers
    """What the indices of a head stand for."""
    if head.choices == "slots":
        return slots.slot_ids
    return slots.blueprint_names if head.choices == "blueprints" else head.choices


def apply_action(
    growable: Growable, env: int, action: list[int], table: ActionTable, slots: SlotConfig
) -> StageChange | None:
    """Carry out one action, an index per head of the table; other heads take their placeholder. WAIT returns None.

    `env` is a number in the growable, controls included.
    """
    indices = dict(zip(table.names, action, strict=True))
    chosen = {head.name: choices_of(head, slots)[indices.get(head.name, head.placeholder)] for head in HEADS}
    slot_id, target = chosen["slot"], chosen["alpha_target"]
    ramp = {"steps": chosen["alpha_speed"], "curve": chosen["alpha_curve"]}
    try:
        match op := LifecycleOp(chosen["op"]):
            case LifecycleOp.GERMINATE:
                style, tempo = chosen["blend"], chosen["tempo"]
                return growable.germinate(
                    env, slot_id, chosen["blueprint"], style=style, tempo=tempo, alpha_target=target
                )
            case LifecycleOp.ADVANCE:
                return growable.advance(env, slot_id)
            case LifecycleOp.FOSSILIZE:
                return growable.fossilize(env, slot_id)
            case LifecycleOp.PRUNE:
                return growable.prune(env, slot_id, **ramp)
            case LifecycleOp.SET_ALPHA_TARGET:
                return growable.set_alpha_target(env, slot_id, target, **ramp)
    except EsperError as error:
        raise IllegalActionError(f"env {env}: {op.name} in {slot_id} was offered but refused: {error}") from error
    return None


def apply_ops(growable: Growable, env: int, ops: Sequence[int]) -> list[StageChange]:
    """Carry out one op per slot, as the rule of preset `commit` gives them."""
    verbs = {
        LifecycleOp.ADVANCE: growable.advance,
        LifecycleOp.FOSSILIZE: growable.fossilize,
        LifecycleOp.PRUNE: growable.prune,
    }
    return [
        verbs[LifecycleOp(op)](env, slot_id)
        for slot_id, op in zip(growable.slots, ops, strict=False)
        if op != LifecycleOp.WAIT
    ]


class SeedChange(NamedTuple):
    """A change of stage in a slot of a grown env."""

    env: int  # number among the grown envs, as everywhere in results; the fleet's numbers include controls
    change: StageChange
    blueprint: str | None


class StepResult(NamedTuple):
    """What a step led to, for every grown env (n,). Losses are in units of the random-guess loss."""

    accuracy: Tensor  # of the main row, calibrated, on validation images, percent; the score where tasks count losses
    control_accuracy: Tensor
    loss: Tensor
    slots: SlotView  # before the tick
    seed_parameters: Tensor  # (n, slots): of the live seeds before the actions
    acting_parameters: Tensor  # added by all seeds with alpha > 0
    fossil_parameters: Tensor  # added by the committed ones
    panics: Tensor  # bool: the env was restored from its snapshot
    symptoms: dict[int, list[str]]  # what the governor saw, by env
    hardened_accuracy: Tensor | None  # with fossils alone; None before the end of the episode
    hardened_control: Tensor | None
    hardened_loss: Tensor | None
    changes: list[SeedChange]
    by_loss: bool = False  # whether scores are of losses

    @property
    def gain(self) -> Tensor:
        """Points over the control."""
        return gain_over(self.control_accuracy, self.accuracy, by_loss=self.by_loss)

    @property
    def hardened_gain(self) -> Tensor:
        """Points of the hardened host over its control, at the end of the episode."""
        assert self.hardened_accuracy is not None and self.hardened_control is not None
        return gain_over(self.hardened_control, self.hardened_accuracy, by_loss=self.by_loss)


class EpisodeRunner:
    """A fleet in groups, and everything that a step consists of except the decision."""

    def __init__(
        self,
        fleet: HostFleet,
        groups: Groups,
        preset: HeadPreset,
        *,
        sensing: bool = True,
        rule: CommitRule | None = None,
    ) -> None:
        """`rule` decides on live seeds if the preset leaves that to a rule."""
        self.fleet, self.groups, self.preset = fleet, groups, preset
        self.rule = (rule or CommitRule()) if preset.commits_by_rule else None
        self.slots = fleet.slot_config
        self.table = growth_table(preset, self.slots)
        self.layout = growth_layout(self.slots, sensing=sensing)
        self.observer = Observer(fleet, groups, gated="blend" in self.table.names)
        self.prober = fleet.prober()
        self.final = False  # whether the end of an episode is scored on test images
        self.committed: list[RowScore] = []  # of every env of the fleet, hardened at the end of the last episode
        self.spans = Spans(enabled=False)  # times the parts of a step; replace it to switch that on
        self._envs = groups.envs  # grown envs, by their numbers in the fleet
        self._rows = {env: row for row, env in enumerate(self._envs)}  # number in the fleet → among the grown envs

    @property
    def done(self) -> bool:
        """Whether the episode has ended."""
        return self.fleet.step_index >= self.fleet.task.steps

    def begin(self, seeds: list[int]) -> None:
        """Start an episode with fresh hosts, one seed per group, and measure them untrained."""
        fleet, n = self.fleet, self.groups.grown
        fleet.reset(self.groups.spread(seeds))
        self.observer.begin()
        self._ruled: Tensor | None = None  # ops of the rule (n, slots), set by `view`
        # No scores with running statistics (`deployed`): controllers use calibrated ones.
        self.comparisons: list[Comparison] = fleet.validate(deployed=False)
        self.sensing: Sensing = self.prober()
        self._last_op = torch.full((n,), int(LifecycleOp.WAIT), device=fleet.device)
        self._last_succeeded = torch.ones(n, dtype=torch.bool, device=fleet.device)
        self.potential = torch.zeros(n, device=fleet.device)  # Φ of every env, as the reward last set it
        sizes = [float(fleet.host_size(env)) for env in self._envs]
        self.host_sizes = torch.tensor(sizes, device=fleet.device)  # parameters of every grown env's host

    def view(self) -> PolicyView:
        """What policies see now."""
        signals = self.observer.look(
            self.comparisons, self.sensing, self.potential, self._last_op, self._last_succeeded
        )
        if self.rule is not None:
            self._ruled = self.rule.ops(signals)
        features = signals_to_features(signals, self.layout)
        return PolicyView(signals, features, growth_masks(signals, self.table, self.preset.ops), self.fleet.step_index)

    def step(self, actions: Tensor) -> StepResult:
        """Apply the actions (n, heads), train, measure, let the governor check, tick.

        A host that the governor restores gets its scores from `earlier` back.
        """
        fleet, seed_parameters = self.fleet, self._parameters(LIVE_STAGES)
        with self.spans("apply"):
            changes = self._apply(actions)
        with self.spans("train"):
            fleet.train_step()
        with self.spans("validate"):
            earlier, self.comparisons = self.comparisons, fleet.validate(deployed=False)
        symptoms = self._govern(earlier, changes)
        slots = self.observer.slots(self.comparisons, self.sensing)
        acting, fossil = (self._added(stages) for stages in (ACTIVE_STAGES, (SeedStage.FOSSILIZED,)))
        hardened: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
        if fleet.step_index + 1 >= fleet.task.steps:
            with self.spans("validate"):
                self.committed = fleet.validate_committed(final=self.final)
            hardened = self._scores(self.committed)
        states = self._states()
        for env, change in fleet.tick():
            if (row := self._rows.get(env)) is not None:
                changes.append(SeedChange(row, change, states[row][change.slot_id].blueprint))
        if not self.done:
            with self.spans("probe"):
                self.sensing = self.prober()
        panics = torch.tensor([row in symptoms for row in range(self.groups.grown)], device=fleet.device)
        self._last_succeeded = ~panics
        live = self._scores([comparison.main for comparison in self.comparisons])
        parameters = seed_parameters, acting, fossil
        return StepResult(*live, slots, *parameters, panics, symptoms, *hardened, changes, fleet.task.by_loss)

    def _scores(self, scores: list[RowScore]) -> tuple[Tensor, Tensor, Tensor]:
        """Accuracy of every grown env and of its control in percent, and its relative loss; `scores` are by env."""
        percent, losses = self.fleet.points(scores), loss_of(scores) / self.fleet.random_guess_loss
        return self.groups.grown_of(percent), self.groups.control_of(percent), self.groups.grown_of(losses)

    def _states(self) -> list[dict[str, SeedState]]:
        return [dict(self.fleet.states[env]) for env in self._envs]

    def _apply(self, actions: Tensor) -> list[SeedChange]:
        """Carry out the ops of the rule, if there is one, and the actions; returns the changes of stage.

        Device syncs: one for the actions, and one for the rule's ops."""
        changes, states = [], self._states()
        ruled = [[] for _ in self._envs] if self._ruled is None else self._ruled.tolist()
        for row, (env, action) in enumerate(zip(self._envs, actions.tolist(), strict=True)):
            own = apply_action(self.fleet, env, action, self.table, self.slots)
            for change in (*apply_ops(self.fleet, env, ruled[row]), own):
                if change is not None and change.source is not change.target:
                    after = self.fleet.states[env][change.slot_id].blueprint
                    changes.append(SeedChange(row, change, after or states[row][change.slot_id].blueprint))
        self._last_op = actions[:, 0].to(self.fleet.device)
        return changes

    def _govern(self, earlier: list[Comparison], changes: list[SeedChange]) -> dict[int, list[str]]:
        """Let the governor restore hosts that diverged; returns its symptoms and adds the stages that it undid."""
        states = self._states()
        with self.spans("govern"):
            panics = self.fleet.govern(self.comparisons)
        for panic in panics:
            self.comparisons[panic.env] = earlier[panic.env]
        symptoms = {
            self._rows[panic.env]: [symptom.name for symptom in panic.symptoms]
            for panic in panics
            if panic.env in self._rows
        }
        for row in symptoms:
            for slot_id, state in self.fleet.states[self._envs[row]].items():
                if state.stage is not (stage := states[row][slot_id].stage):
                    change = StageChange(slot_id, stage, state.stage, "panic")
                    changes.append(SeedChange(row, change, state.blueprint))
        return symptoms

    def _added(self, stages: Container[SeedStage]) -> Tensor:
        """Parameters (n,) of the seeds in these stages, and of their host what takes part only because of them."""
        fleet, revived = self.fleet, []
        for env in self._envs:
            grown = [slot_id for slot_id, state in fleet.states[env].items() if state.stage in stages]
            revived.append(float(fleet.task.size_of(fleet.seeds[env], grown) - fleet.host_size(env)))
        return self._parameters(stages).sum(1) + torch.tensor(revived, device=fleet.device)

    def _parameters(self, stages: Container[SeedStage]) -> Tensor:
        """Of the seeds in these stages (n, slots)."""
        counts = [
            [
                lifecycle.seed_parameters(self.fleet.slots[slot_id], state) if state.stage in stages else 0
                for slot_id, state in self.fleet.states[env].items()
            ]
            for env in self._envs
        ]
        return torch.tensor(counts, dtype=torch.float32, device=self.fleet.device)


Act = Callable[[PolicyView], Tensor]  # from what policies see to actions (n, heads) of all grown envs
OnStep = Callable[[int, PolicyView, Tensor, StepResult], None]  # gets the number, view, actions and result of a step


def play_episode(runner: EpisodeRunner, act: Act, on_step: OnStep | None = None) -> StepResult:
    """Play the episode that `runner.begin` started, to its end; returns the result of the last step."""
    result = None
    while not runner.done:
        with runner.spans("observe"):
            view = runner.view()
        with runner.spans("act"):
            actions = act(view)
        with runner.spans("step"):
            result = runner.step(actions)
        if on_step is not None:
            on_step(view.step, view, actions, result)
    if result is None:
        raise BadValueError("the episode is over; call runner.begin(seeds) first")
    return result
