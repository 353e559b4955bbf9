"""From validation data to actions: measure a growing model, let a policy look at it, and carry out what it decides."""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch

from esper.grower.adapting import Adaptation, head_steps
from esper.grower.growing_model import GrowingModel
from esper.grower.guard import Guard
from esper.grower.notes import leaves_of, pack, rebuilt, unpack
from esper.grower.policies import RULES, OwnPolicy, make_policy, read_actions
from esper.grower.records import OPS, Action, GrowthReport, Offer
from esper.grower.rules import trial_of
from esper.grower.scoring import (
    TEMPERATURES,
    Batch,
    InputTap,
    RowRunner,
    RowScores,
    Scorer,
    Statistics,
    score_rows,
    to_device,
)
from esper.grower.sensing import ModelProber
from esper.grower.statistics import StatisticsChoice
from esper.kasmina import lifecycle
from esper.kasmina.compare import IGNORED, Comparison, RowScore, paired_difference
from esper.kasmina.slot import Role
from esper.leyline import ACTIVE_STAGES, BadValueError, LifecycleOp, SeedStage, StageChange, derive_seed, head_preset
from esper.leyline.records import Json
from esper.nissa.events import Choices
from esper.simic.agent.policy import LearnedPolicy
from esper.simic.training.episode import apply_action, apply_ops
from esper.simic.training.hosts import Groups
from esper.simic.training.live import choice_names, considered
from esper.simic.training.observe import Observer
from esper.tamiyo import Policy, PolicyView, growth_layout, growth_masks, growth_table, signals_to_features
from esper.tamiyo.commit_rule import CommitRule
from esper.tolaria.measurement import Sensing

JUDGED = ACTIVE_STAGES - {SeedStage.FOSSILIZED}


class Scored(NamedTuple):
    """The scores behind a measurement."""

    main: RowScore
    rows: dict[str | None, RowScore] | None
    """The model (None) and the model without each judged seed; None where the user passed a number"""
    first: Batch
    """The first validation batch"""
    scores: RowScores | None = None
    trials: dict[str, Statistics] | None = None
    """Norm statistics that were tried"""

    @property
    def calibrated(self) -> RowScore:
        """The model as it trains: with the statistics of the last inputs, if a row with them was scored."""
        return self.main if self.rows is None else self.rows[None]


class Look(NamedTuple):
    """One measurement of the model."""

    comparison: Comparison
    sensing: Sensing


class Decider:
    """The policy of one growing model, and everything that it sees."""

    def __init__(
        self,
        growing: GrowingModel,
        scorer: Scorer,
        tap: InputTap,
        policy: str | Path | OwnPolicy,
        steps: int,
        adaptation: Adaptation | None = None,
    ) -> None:
        self.growing, self.scorer, self.steps = growing, scorer, steps
        self.step = 0
        self.runner = RowRunner(growing.host, growing.modules, tap)
        slots = growing.slot_config
        self.observer = Observer(growing, Groups(1, 1, controls=False))
        self.prober = ModelProber(growing, self.runner, scorer)
        self.sensing = callable(policy)
        """Whether the empty slots are probed, which costs a backward pass: the rules here do not look at that"""
        self.own: OwnPolicy | None = None
        self.policy: Policy | None = None
        self.preset = head_preset("core")
        if callable(policy) or policy in RULES:
            self.own = policy if callable(policy) else RULES[str(policy)]
            if adaptation is not None and policy == "heuristic":
                self.own = adaptation.rule
        else:
            self.policy, self.preset = make_policy(policy, slots)
        self.table, self.layout = growth_table(self.preset, slots), growth_layout(slots)
        # Seeds act from birth here, so their trial is the time in HOLDING.
        self.rule = CommitRule(holding_steps=trial_of(steps)) if self.preset.commits_by_rule else None
        self.names: dict[str, list[str]] = {}
        """Of the choices of a learned policy, by head"""
        self.choices: Choices = {}
        """What it considered last"""
        if isinstance(self.policy, LearnedPolicy):
            self.sensing, self.policy.followed = True, 1
            self.names = choice_names(self.policy.table, slots, self.policy.agent.layout)
        self.state = None if self.policy is None else self.policy.initial_state([growing.rng_seed])
        self.last_op = int(LifecycleOp.WAIT)
        self.guard = Guard(growing)
        self.look: Look | None = None
        self.adaptation = adaptation
        self.choice: StatisticsChoice | None = None
        if adaptation is not None:
            self.choice = StatisticsChoice(self.runner)
            self.choice.open()

    # -- measuring ----------------------------------------------------------------------------------------------------

    def score(self, validation: Iterable[Batch] | float) -> Scored:
        """Score the model, and the model without each seed that is not committed."""
        if isinstance(validation, float):
            return Scored(self.scorer.of_number(validation), None, None)
        first, batches = _peek(validation)
        rows = {name: dict.fromkeys(members, Role.SILENT) for name, members in self._judged_groups().items()}
        adaptation, trials, grade = self.adaptation, dict[str, Statistics](), False
        if adaptation is not None and self.choice is not None:
            trials = self.choice.trials() if adaptation.statistics is None else {}
            grade = bool(trials) or adaptation.fits_at(self.step + 1)
        device = self.growing.device
        scores = score_rows(self.runner, self.scorer, batches, rows, device, trials=trials, grade=grade)
        return Scored(scores.main, scores.rows, first, scores, trials)

    def _judged_groups(self) -> dict[str, list[str]]:
        """The slots whose seeds are judged, by the name of what is silenced together: each slot, or a group."""
        groups: dict[str, list[str]] = {}
        for slot_id, state in self.growing.states[0].items():
            if state.stage in JUDGED:
                name = slot_id if self.adaptation is None else self.adaptation.group(slot_id, state.blueprint)
                groups.setdefault(name, []).append(slot_id)
        return groups

    def measure(self, scored: Scored) -> Look:
        """Record the contributions of the seeds, then probe the slots."""
        growing, main = self.growing, scored.main
        if scored.rows is None:
            self._set_unit(main.loss)
            self.look = Look(Comparison(main, None, {}, {}), self.prober.without_data())
            return self.look
        if not len(main.losses):
            raise BadValueError(f"no validation sample counts: all targets are {IGNORED}, which marks padding")
        if broken := int((~main.losses.isfinite()).sum()):
            raise BadValueError(
                f"the loss is not finite for {broken} of {len(main.losses)} validation samples: lower the learning "
                "rate, or check the data and the loss"
            )
        if main.correct is None and main.loss <= 0:
            raise BadValueError(
                f"the mean validation loss is {main.loss:.4g}: gains are shares of it, so it must be positive; add a "
                "constant to the loss"
            )
        self._set_unit(main.loss)
        comparison = Comparison(main, main, {}, {})
        for name, members in self._judged_groups().items():
            contribution = paired_difference(scored.rows[None], scored.rows[name])
            for slot_id in members:
                comparison.contributions[slot_id] = contribution
                state = lifecycle.record_contribution(growing.states[0][slot_id], contribution.points)
                growing.states[0][slot_id] = state
                growing.modules[slot_id].settle(state)
        sensing = self.prober(to_device(scored.first, growing.device)) if self.sensing else self.prober.without_data()
        self.look = Look(comparison, sensing)
        return self.look

    def adapt(self, scored: Scored) -> tuple[str, ...]:
        """Choose the norm statistics of a frozen model, or fit its temperature, when it is time. Returns remarks."""
        adaptation, remarks = self.adaptation, list[str]()
        if adaptation is None or self.choice is None or self.look is None:
            return ()
        differences = self.look.comparison.contributions
        adaptation.worths = {slot_id: difference.loss for slot_id, difference in differences.items()}
        if adaptation.statistics is None:
            scores = scored.scores or RowScores(scored.main, {None: scored.main}, {})
            adaptation.statistics, remark = self.choice.choose(scores, scored.trials or {})
            remarks += [remark] if remark else []
        if scored.scores is not None and None in scored.scores.graded and adaptation.fits_at(self.step):
            adaptation.temperature = TEMPERATURES[int(scored.scores.graded[None].argmin())]
            self.scorer.temperature = adaptation.temperature
            if self.step == head_steps(self.steps):
                remarks.append(f"logits are compared at temperature {adaptation.temperature:.2g}")
        return tuple(remarks)

    def _set_unit(self, loss: float) -> None:
        if self.growing.random_guess_loss != self.growing.random_guess_loss:  # NaN: the first one
            self.growing.random_guess_loss = loss

    # -- deciding -----------------------------------------------------------------------------------------------------

    def decide(self) -> tuple[list[Action], list[StageChange]]:
        """Ask the policy and carry out its actions: rules may act several times in a step, other policies once."""
        self.growing.progress, self.choices = min(1.0, self.step / self.steps), {}
        if self.own is None:
            waits = self.adaptation is not None and self.step < head_steps(self.steps)
            return ([], []) if waits else self._act()
        actions = read_actions(self.own(self.report()))
        return actions, [self._carry_out(action) for action in actions]

    def _act(self) -> tuple[list[Action], list[StageChange]]:
        assert self.policy is not None
        view = self._view()
        ruled = [] if self.rule is None else self.rule.ops(view.signals)[0].tolist()
        generator = torch.Generator().manual_seed(derive_seed(self.growing.rng_seed, "actions", self.step))
        uniform = torch.rand(1, len(self.table.heads), generator=generator).to(self.growing.device)
        chosen, self.state = self.policy.act(view, self.state, uniform)
        if isinstance(self.policy, LearnedPolicy) and self.policy.decision is not None:
            self.choices = considered(self.names, self.policy.decision)
        indices = chosen[0].tolist()
        self.last_op = int(indices[0])
        actions = [*self._ruled(ruled), self._named(indices)]
        changes = [
            *apply_ops(self.growing, 0, ruled),
            apply_action(self.growing, 0, indices, self.table, self.growing.slot_config),
        ]
        return [action for action in actions if action is not None], [each for each in changes if each is not None]

    def _ruled(self, ops: list[int]) -> list[Action]:
        """The actions of the rule, one op per slot."""
        blueprints = {slot_id: state.blueprint or "" for slot_id, state in self.growing.states[0].items()}
        return [
            Action(LifecycleOp(op).name.lower(), slot_id, blueprint)
            for (slot_id, blueprint), op in zip(blueprints.items(), ops, strict=False)
            if op != LifecycleOp.WAIT
        ]

    def _view(self) -> PolicyView:
        assert self.look is not None
        device = self.growing.device
        nothing, done = torch.zeros(1, device=device), torch.ones(1, dtype=torch.bool, device=device)
        last_op = torch.full((1,), self.last_op, device=device)
        signals = self.observer.look([self.look.comparison], self.look.sensing, nothing, last_op, done)
        features = signals_to_features(signals, self.layout)
        return PolicyView(signals, features, growth_masks(signals, self.table, self.preset.ops), self.step)

    def _named(self, indices: list[int]) -> Action | None:
        op = LifecycleOp(indices[0])
        if op is LifecycleOp.WAIT:
            return None
        slots = self.growing.slot_config
        slot_id = slots.slot_ids[indices[self.table.index("slot")]]
        born = slots.blueprint_names[indices[self.table.index("blueprint")]]
        blueprint = born if op is LifecycleOp.GERMINATE else self.growing.states[0][slot_id].blueprint
        return Action(op.name.lower(), slot_id, blueprint or "")

    def _carry_out(self, action: Action) -> StageChange:
        growing = self.growing
        match OPS[action.op]:
            case LifecycleOp.GERMINATE:
                return growing.germinate(0, action.slot, action.blueprint)
            case LifecycleOp.FOSSILIZE:
                return growing.fossilize(0, action.slot)
            case LifecycleOp.PRUNE:
                return growing.prune(0, action.slot)
            case LifecycleOp.ADVANCE:
                return growing.advance(0, action.slot)
            case _:
                raise BadValueError(f"{action.op!r} is no action of a Grower: use germinate, fossilize or prune")

    def release(self) -> None:
        """Remove all hooks, at the end of growth."""
        self.growing.release()
        if self.choice is not None:
            self.choice.close()

    # -- telling ------------------------------------------------------------------------------------------------------

    def report(self) -> GrowthReport:
        """What the policy decides on."""
        growing = self.growing
        left = growing.budget - growing.grown_parameters(0)
        main = None if self.look is None else self.look.comparison.main
        worths = None if self.look is None else self.look.sensing.offers[0].tolist()
        names = growing.slot_config.blueprint_names
        offers = {
            spec.slot_id: {
                offer.name: Offer(offer.parameters, 0.0 if worths is None else worths[row][names.index(offer.name)])
                for offer in spec.blueprints
                if offer.parameters <= left and growing.states[0][spec.slot_id].stage is SeedStage.DORMANT
            }
            for row, spec in enumerate(growing.slot_config.slots)
        }
        accuracy = None if main is None or main.correct is None else main.accuracy
        loss = None if main is None else main.loss
        slots = {report.slot_id: report for report in growing.reports(0)}
        return GrowthReport(self.step, self.steps, left, accuracy, loss, slots, offers)

    # -- remembering --------------------------------------------------------------------------------------------------

    def notes(self) -> dict[str, Json]:
        """Everything that a later step depends on, as JSON."""
        return {
            "step": self.step,
            "unit": float(self.growing.random_guess_loss).hex(),
            "last_op": self.last_op,
            "observer": {name: pack(tensor) for name, tensor in self.observer.state().items()},
            "policy": [pack(tensor) for tensor in leaves_of(self.state)],
            "guard": self.guard.notes(),
            **({} if self.adaptation is None else {"adaptation": self.adaptation.notes()}),
        }

    def restore(self, notes: dict[str, Json]) -> None:
        """Continue from these notes."""
        self.step, self.last_op = int(notes["step"]), int(notes["last_op"])
        self.growing.random_guess_loss = float.fromhex(notes["unit"])
        self.observer.restore({name: unpack(packed) for name, packed in notes["observer"].items()})
        self.state = rebuilt(self.state, iter([unpack(packed) for packed in notes["policy"]]))
        self.guard.load(notes["guard"])
        if self.adaptation is not None and "adaptation" in notes:
            self.adaptation.restore(notes["adaptation"])
            self.scorer.temperature = self.adaptation.temperature
            if self.choice is not None and self.adaptation.statistics is not None:
                self.choice.close()


def _peek(validation: Iterable[Batch]) -> tuple[Batch, Iterable[Batch]]:
    """The first batch, and all batches."""
    iterator: Iterator[Batch] = iter(validation)
    try:
        first = next(iterator)
    except StopIteration:
        raise BadValueError(
            "the validation loader yielded no batch: there is nothing to measure. A generator is empty after its first "
            "use; pass a loader or a list"
        ) from None
    return first, chain([first], iterator)
