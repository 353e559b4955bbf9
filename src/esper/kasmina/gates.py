"""Gates: pure functions that say whether a seed may take its next step, or why not.

G0 germinate · G1 → TRAINING · G2 → BLENDING · G3 → HOLDING · G5 → FOSSILIZED (there is no G4).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from esper.kasmina.blending import gate_parameters
from esper.kasmina.blueprints.registry import BlueprintSpec
from esper.leyline import BadValueError, GateResult, Measurement, SeedStage, SlotSpec
from esper.leyline.numbers import require_whole

if TYPE_CHECKING:
    from esper.kasmina.lifecycle import SeedState


@dataclass(frozen=True)
class GateThresholds:
    """What the gates require."""

    min_training_steps: int = 2
    """G2: steps in TRAINING."""
    min_holding_steps: int = 1
    """G5: steps in HOLDING."""
    strict: bool = False
    """Also require a positive audition (G2) and contribution (G5), each beyond its own error."""

    def __post_init__(self) -> None:
        require_whole("min_training_steps", self.min_training_steps, 0)
        require_whole("min_holding_steps", self.min_holding_steps, 0)
        if not isinstance(self.strict, bool):
            raise BadValueError(f"strict {self.strict!r} is not True or False")


def _verdict(conditions: Mapping[str, bool]) -> GateResult:
    """Passed if all conditions hold, by what to say where one does not. The score is the share that hold."""
    reasons = tuple(reason for reason, holds in conditions.items() if not holds)
    return GateResult(not reasons, 1 - len(reasons) / len(conditions), reasons)


def _beyond_error(measured: Measurement | None, what: str) -> dict[str, bool]:
    shown = "not measured" if measured is None else f"{measured.value:.2f} ± {measured.error:.2f} points"
    return {f"{what} is {shown}, not positive beyond its error": measured is not None and measured.beyond_error}


def gate_germinate(
    stage: SeedStage, spec: BlueprintSpec, slot: SlotSpec, style: str, budget_left: int | None
) -> GateResult:
    """G0: the slot is free, the blueprint fits, and the budget pays for seed and gate (None: no budget)."""
    cost = spec.parameters_in(slot) + gate_parameters(style, slot.width)
    problem, paid = spec.misfit_in(slot), budget_left is None or cost <= budget_left
    conditions = {
        f"the slot is {stage.name}, not DORMANT": stage is SeedStage.DORMANT,
        problem or "the blueprint fits": problem is None,
        f"{spec.name!r} costs {cost} parameters, {budget_left} of the budget are left": paid,
    }
    return _verdict(conditions)


def gate_train(state: "SeedState", thresholds: GateThresholds) -> GateResult:
    """G1: always passes for a GERMINATED seed."""
    return _verdict({f"the stage is {state.stage.name}, not GERMINATED": state.stage is SeedStage.GERMINATED})


def gate_blend(state: "SeedState", thresholds: GateThresholds) -> GateResult:
    """G2: trained long enough, with measured and finite gradients."""
    norm, trained = state.gradient_norm, state.steps_in_stage >= thresholds.min_training_steps
    unmeasured = "its gradients were not measured: train it through a GrowingOptimizer or call observe_gradients()"
    conditions = {
        f"{state.steps_in_stage} steps in TRAINING, {thresholds.min_training_steps} are needed": trained,
        unmeasured: norm is not None,
        "its last gradient was not finite": norm is None or math.isfinite(norm),
    }
    return _verdict(conditions | (_beyond_error(state.audition, "the audition") if thresholds.strict else {}))


def gate_hold(state: "SeedState", thresholds: GateThresholds) -> GateResult:
    """G3: alpha is at its target."""
    ramp = state.controller
    return _verdict({f"alpha {ramp.alpha:.3f} is on its way to {ramp.target:.3f}": ramp.holding})


def gate_fossilize(state: "SeedState", thresholds: GateThresholds) -> GateResult:
    """G5: held long enough, with a measured contribution."""
    held = state.steps_in_stage >= thresholds.min_holding_steps
    conditions = {
        f"{state.steps_in_stage} steps in HOLDING, {thresholds.min_holding_steps} are needed": held,
        "its contribution was not measured: call measure() on validation data": state.contribution is not None,
    }
    return _verdict(conditions | (_beyond_error(state.contribution, "the contribution") if thresholds.strict else {}))


# The gate in front of each stage.
GATES: Mapping[SeedStage, Callable[["SeedState", GateThresholds], GateResult]] = {
    SeedStage.TRAINING: gate_train,
    SeedStage.BLENDING: gate_blend,
    SeedStage.HOLDING: gate_hold,
    SeedStage.FOSSILIZED: gate_fossilize,
}
