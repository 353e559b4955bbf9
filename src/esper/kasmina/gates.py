"""Gates: pure functions that say whether a seed may take its next step, or why not.

G0 germinate · G1 → TRAINING · G2 → BLENDING · G3 → HOLDING · G5 → FOSSILIZED (there is no G4).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
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


def _verdict(conditions: list[tuple[bool, str]]) -> GateResult:
    """Passed if all conditions hold; the score is the share that do."""
    reasons = tuple(reason for holds, reason in conditions if not holds)
    return GateResult(not reasons, 1 - len(reasons) / len(conditions), reasons)


def _beyond_error(measured: Measurement | None, what: str) -> tuple[bool, str]:
    shown = "not measured" if measured is None else f"{measured.value:.2f} ± {measured.error:.2f} points"
    return measured is not None and measured.beyond_error, f"{what} is {shown}, not positive beyond its error"


def gate_germinate(
    stage: SeedStage, spec: BlueprintSpec, slot: SlotSpec, style: str, budget_left: int | None
) -> GateResult:
    """G0: the slot is free, the blueprint fits, and the budget pays for seed and gate (None: no budget)."""
    cost = spec.count(slot.width) + gate_parameters(style, slot.width)
    problem = spec.misfit(slot.width, slot.resolution)
    return _verdict(
        [
            (stage is SeedStage.DORMANT, f"the slot is {stage.name}, not DORMANT"),
            (problem is None, problem or ""),
            (
                budget_left is None or cost <= budget_left,
                f"{spec.name!r} costs {cost} parameters, {budget_left} of the budget are left",
            ),
        ]
    )


def gate_train(state: "SeedState", thresholds: GateThresholds) -> GateResult:
    """G1: always passes for a GERMINATED seed."""
    return _verdict([(state.stage is SeedStage.GERMINATED, f"the stage is {state.stage.name}, not GERMINATED")])


def gate_blend(state: "SeedState", thresholds: GateThresholds) -> GateResult:
    """G2: trained long enough, with measured and finite gradients."""
    measured = state.gradient_norm is not None
    finite = state.gradient_norm is not None and math.isfinite(state.gradient_norm)
    conditions = [
        (
            state.steps_in_stage >= thresholds.min_training_steps,
            f"{state.steps_in_stage} steps in TRAINING, {thresholds.min_training_steps} are needed",
        ),
        (measured, "its gradients were not measured: train it through a GrowingOptimizer or call observe_gradients()"),
        (finite or not measured, "its last gradient was not finite"),
    ]
    if thresholds.strict:
        conditions.append(_beyond_error(state.audition, "the audition"))
    return _verdict(conditions)


def gate_hold(state: "SeedState", thresholds: GateThresholds) -> GateResult:
    """G3: alpha is at its target."""
    return _verdict(
        [(state.controller.holding, f"alpha {state.alpha:.3f} is on its way to {state.controller.target:.3f}")]
    )


def gate_fossilize(state: "SeedState", thresholds: GateThresholds) -> GateResult:
    """G5: held long enough, with a measured contribution."""
    conditions = [
        (
            state.steps_in_stage >= thresholds.min_holding_steps,
            f"{state.steps_in_stage} steps in HOLDING, {thresholds.min_holding_steps} are needed",
        ),
        (state.contribution is not None, "its contribution was not measured: call measure() on validation data"),
    ]
    if thresholds.strict:
        conditions.append(_beyond_error(state.contribution, "the contribution"))
    return _verdict(conditions)


Gate = Callable[["SeedState", GateThresholds], GateResult]

GATES: Mapping[SeedStage, Gate] = MappingProxyType(
    {
        SeedStage.TRAINING: gate_train,
        SeedStage.BLENDING: gate_blend,
        SeedStage.HOLDING: gate_hold,
        SeedStage.FOSSILIZED: gate_fossilize,
    }
)
"""The gate in front of each stage."""
