"""Alpha schedules."""

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.kasmina import AlphaController
from esper.kasmina.blending import curve_value
from esper.leyline import ALPHA_CURVES, BadValueError, StageError, UnknownNameError
from esper.leyline.records import decode, encode

alphas = st.floats(0, 1)
curves = st.sampled_from(ALPHA_CURVES)


def walk(controller: AlphaController) -> list[AlphaController]:
    """The controller and everything that follows, until it holds."""
    path = [controller]
    while not path[-1].holding:
        path.append(path[-1].step())
    return path


@pytest.mark.parametrize(
    ("curve", "t", "value"),
    [
        ("linear", 0.25, 0.25),
        ("cosine", 0.5, 0.5),
        ("cosine", 1 / 3, 0.25),  # (1 − cos 60°)/2 = (1 − ½)/2
        ("sigmoid6", 0.5, 0.5),
        ("sigmoid12", 0.5, 0.5),
        # σ(−1.5) = 0.182426, σ(−3) = 0.047426, σ(3) = 0.952574: (0.182426 − 0.047426) / (0.952574 − 0.047426)
        ("sigmoid6", 0.25, 0.149146),
    ],
)
def test_curves_by_hand(curve: str, t: float, value: float) -> None:
    """The share of the way after the share t of the time."""
    assert curve_value(curve, t) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("curve", ALPHA_CURVES)
def test_curves_begin_and_end(curve: str) -> None:
    """0 at 0 and 1 at 1."""
    assert curve_value(curve, 0.0) == 0.0
    assert curve_value(curve, 1.0) == pytest.approx(1.0, abs=1e-15)


def test_ramp_of_three() -> None:
    """From 0 to 1 in three steps: ⅓, ⅔, 1."""
    path = walk(AlphaController().retarget(1.0, 3))
    assert [controller.alpha for controller in path] == pytest.approx([0, 1 / 3, 2 / 3, 1])


@pytest.mark.invariant(4)
@given(start=alphas, target=alphas, steps=st.integers(1, 50), curve=curves)
def test_monotone_and_exact(start: float, target: float, steps: int, curve: str) -> None:
    """Alpha never moves backwards or past the target, and the last step lands exactly on it."""
    path = walk(AlphaController(start, start, start).retarget(target, steps, curve))
    assert len(path) == steps + 1
    assert path[0].alpha == start and path[-1].alpha == target
    sign = math.copysign(1, target - start)
    assert all(sign * (after.alpha - before.alpha) >= 0 for before, after in pairwise(path))
    assert all(min(start, target) <= controller.alpha <= max(start, target) for controller in path)


@pytest.mark.invariant(4)
@given(start=alphas, target=alphas, steps=st.integers(0, 20), done=st.integers(0, 20), curve=curves)
def test_json_round_trip(start: float, target: float, steps: int, done: int, curve: str) -> None:
    """A schedule restored from JSON at any point equals the original and continues like it."""
    controller = AlphaController(start, start, start).retarget(target, steps, curve)
    for _ in range(done):
        controller = controller.step()
    again = decode(AlphaController, json.loads(json.dumps(encode(controller), allow_nan=False)), "controller")
    assert again == controller
    assert walk(again) == walk(controller)


@given(start=alphas, target=alphas, curve=curves)
def test_no_steps(start: float, target: float, curve: str) -> None:
    """A ramp of 0 steps is at its target at once and holds."""
    controller = AlphaController(start, start, start).retarget(target, 0, curve)
    assert controller.alpha == target and controller.holding


@given(target=alphas, steps=st.integers(1, 8))
def test_holding_does_not_move(target: float, steps: int) -> None:
    """After the end, a step changes nothing."""
    end = walk(AlphaController().retarget(target, steps))[-1]
    assert end.step() == end


def test_no_retarget_in_mid_ramp() -> None:
    """Retarget only while it holds; the controller is as before."""
    controller = AlphaController().retarget(1.0, 3).step()
    with pytest.raises(StageError, match=r"on its way to 1.0, step 1 of 3"):
        controller.retarget(0.0, 3)
    assert controller == AlphaController(1 / 3, 0.0, 1.0, 3, 1)


@pytest.mark.invariant(15)
@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf])
@pytest.mark.parametrize("name", ["alpha", "start", "target"])
def test_values_out_of_range(name: str, value: float) -> None:
    """Alpha outside [0, 1] is refused, and the error names the field."""
    with pytest.raises(BadValueError, match=rf"{name} .* is not in \[0, 1\]"):
        decode(AlphaController, encode(AlphaController()) | {name: value}, "controller")


@pytest.mark.parametrize(("steps", "done"), [(-1, 0), (3, 4), (3, -1), (0, 1)])
def test_places_out_of_range(steps: int, done: int) -> None:
    """A place in a schedule lies between 0 and its steps."""
    with pytest.raises(BadValueError, match=f"step {done} of {steps}"):
        AlphaController(steps=steps, done=done)


@pytest.mark.invariant(15)
def test_unknown_curve() -> None:
    """The error lists the curves."""
    with pytest.raises(UnknownNameError, match="unknown alpha curve 'jump'; allowed: linear, cosine"):
        AlphaController().retarget(1.0, 3, "jump")
