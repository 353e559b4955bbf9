"""Gates: each reason for which a seed may not take its next step."""

import math
from dataclasses import replace

import pytest

from esper.kasmina import AlphaController, BlueprintRegistry, GateThresholds, SeedState
from esper.kasmina.gates import (
    GATES,
    gate_blend,
    gate_fossilize,
    gate_germinate,
    gate_hold,
    gate_train,
)
from esper.leyline import LIVE_STAGES, GateResult, Measurement, SeedStage, SlotSpec

EASY, STRICT = GateThresholds(), GateThresholds(strict=True)
DEPTHWISE = BlueprintRegistry.spec("image", "depthwise")  # 64 parameters at width 4, minimum width 2
SLOT, NARROW = (SlotSpec("r0c0", width, "image", 0.5, 8) for width in (4, 1))
GOOD, POOR, NONE = (Measurement(2.0, 1.0),), (Measurement(1.0, 1.0),), ()


def reasons(result: GateResult) -> str:
    """All reasons in one line."""
    return "; ".join(result.reasons)


def state(stage: SeedStage, steps: int = 0, controller: AlphaController | None = None) -> SeedState:
    """A seed at a stage."""
    return SeedState("r0c0", stage, "norm", steps_in_stage=steps, controller=controller or AlphaController())


# -- G0 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [None, 64, 65])
def test_germinate_passes(budget: int | None) -> None:
    """A free slot, a blueprint that fits, a budget that just pays for it or none at all."""
    assert gate_germinate(SeedStage.DORMANT, DEPTHWISE, SLOT, "add", budget) == GateResult(True, 1.0)


@pytest.mark.parametrize("stage", sorted(set(SeedStage) - {SeedStage.DORMANT}))
def test_germinate_needs_a_free_slot(stage: SeedStage) -> None:
    """Any other stage is refused by name."""
    result = gate_germinate(stage, DEPTHWISE, SLOT, "add", None)
    assert result == GateResult(False, 1 - 1 / 3, (f"the slot is {stage.name}, not DORMANT",))


def test_germinate_needs_width() -> None:
    """Width 1 is below the blueprint's minimum of 2."""
    assert (
        reasons(gate_germinate(SeedStage.DORMANT, DEPTHWISE, NARROW, "add", None))
        == "width 1 is below its minimum of 2"
    )


def test_germinate_needs_budget() -> None:
    """4·4 + 12·4 = 64 parameters, 63 are left."""
    result = gate_germinate(SeedStage.DORMANT, DEPTHWISE, SLOT, "add", 63)
    assert not result.passed
    assert reasons(result) == "'depthwise' costs 64 parameters, 63 of the budget are left"


def test_germinate_pays_for_the_gate_too() -> None:
    """64 parameters and a gate of 4 + 1."""
    result = gate_germinate(SeedStage.DORMANT, DEPTHWISE, SLOT, "gate", 68)
    assert reasons(result) == "'depthwise' costs 69 parameters, 68 of the budget are left"


def test_germinate_lists_every_reason() -> None:
    """Nothing holds: three reasons, score 0."""
    result = gate_germinate(SeedStage.HOLDING, DEPTHWISE, NARROW, "add", 0)
    assert len(result.reasons) == 3 and result.score == 0.0


# -- G1 ---------------------------------------------------------------------------------------------------------------


def test_train_at_once() -> None:
    """A germinated seed trains without a wait."""
    assert gate_train(state(SeedStage.GERMINATED), EASY) == GateResult(True, 1.0)
    assert reasons(gate_train(state(SeedStage.DORMANT), EASY)) == "the stage is DORMANT, not GERMINATED"


# -- G2 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "norm", "score", "reason"),
    [
        (2, 0.0, 1.0, ""),
        (9, 3.5, 1.0, ""),
        (1, 3.5, 2 / 3, "1 steps in TRAINING, 2 are needed"),
        (2, None, 2 / 3, "its gradients were not measured"),
        (2, math.inf, 2 / 3, "its last gradient was not finite"),
        (0, None, 1 / 3, "0 steps in TRAINING, 2 are needed; its gradients were not measured"),
    ],
)
def test_blend(steps: int, norm: float | None, score: float, reason: str) -> None:
    """Long enough in TRAINING, with gradients that were measured and finite."""
    result = gate_blend(replace(state(SeedStage.TRAINING, steps), gradient_norm=norm), EASY)
    assert result.passed == (reason == "")
    assert result.score == pytest.approx(score)
    assert reasons(result).startswith(reason)


@pytest.mark.parametrize(
    ("auditions", "passed", "reason"),
    [
        (GOOD, True, ""),
        (POOR, False, "the audition is 1.00 ± 1.00 points, not positive beyond its error"),
        (NONE, False, "the audition is not measured, not positive beyond its error"),
        # mean (2 − 2)/2 = 0
        ((*GOOD, Measurement(-2.0, 1.0)), False, "the audition is 0.00 ± 0.71 points"),
    ],
)
def test_blend_strict(auditions: tuple[Measurement, ...], passed: bool, reason: str) -> None:
    """Strict: the mean of the last two auditions is positive beyond its error. Not strict: nobody asks."""
    seed = replace(state(SeedStage.TRAINING, 2), gradient_norm=1.0, auditions=auditions)
    assert gate_blend(seed, EASY).passed
    assert gate_blend(seed, STRICT).passed is passed
    assert reasons(gate_blend(seed, STRICT)).startswith(reason)


# -- G3 ---------------------------------------------------------------------------------------------------------------


def test_hold() -> None:
    """Alpha is at its target."""
    ramp = AlphaController().retarget(1.0, 2).step()
    assert reasons(gate_hold(state(SeedStage.BLENDING, 0, ramp), EASY)) == "alpha 0.500 is on its way to 1.000"
    assert gate_hold(state(SeedStage.BLENDING, 0, ramp.step()), EASY) == GateResult(True, 1.0)


# -- G5 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "contributions", "reason"),
    [
        (1, GOOD, ""),
        (1, POOR, ""),
        (0, GOOD, "0 steps in HOLDING, 1 are needed"),
        (1, NONE, "its contribution was not measured"),
        (0, NONE, "0 steps in HOLDING, 1 are needed; its contribution was not measured"),
    ],
)
def test_fossilize(steps: int, contributions: tuple[Measurement, ...], reason: str) -> None:
    """Held long enough, with a contribution that was measured, whatever it is."""
    result = gate_fossilize(replace(state(SeedStage.HOLDING, steps), contributions=contributions), EASY)
    assert result.passed == (reason == "")
    assert reasons(result).startswith(reason)


@pytest.mark.parametrize(("contributions", "passed"), [(GOOD, True), (POOR, False), (NONE, False)])
def test_fossilize_strict(contributions: tuple[Measurement, ...], passed: bool) -> None:
    """Strict: positive beyond its error."""
    result = gate_fossilize(replace(state(SeedStage.HOLDING, 1), contributions=contributions), STRICT)
    assert result.passed is passed
    assert passed or "the contribution is" in reasons(result)


@pytest.mark.parametrize(("steps", "passed"), [(4, False), (5, True)])
def test_thresholds_count(steps: int, passed: bool) -> None:
    """The configured numbers of steps are those that the gates ask for."""
    thresholds = GateThresholds(min_training_steps=5, min_holding_steps=5)
    assert gate_blend(replace(state(SeedStage.TRAINING, steps), gradient_norm=1.0), thresholds).passed is passed
    assert gate_fossilize(replace(state(SeedStage.HOLDING, steps), contributions=GOOD), thresholds).passed is passed


def test_every_step_forward_has_a_gate() -> None:
    """Each live stage but the first is guarded by a gate of its own."""
    assert set(GATES) == LIVE_STAGES - {SeedStage.GERMINATED}
    assert list(GATES.values()) == [gate_train, gate_blend, gate_hold, gate_fossilize]
