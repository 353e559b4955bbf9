"""The gradient norm against its own past."""

import json
import math

import pytest

from esper.leyline import BadValueError
from esper.leyline.records import decode, encode
from esper.simic.telemetry.detector import DriftState, GradientEMATracker


@pytest.mark.requirement(42)
def test_by_hand() -> None:
    """Drift is measured before the norm is added. Momentum 0.75: weights 1, 1/2, 1/3, 1/4, 1/4 …"""
    tracker = GradientEMATracker(momentum=0.75)
    assert tracker.observe(1.0) == 1.0
    assert tracker.observe(4.0) == pytest.approx(4.0)
    assert math.exp(tracker.state.log_mean) == pytest.approx(2.0)  # exp(ln 4 / 2)
    assert tracker.observe(2.0) == pytest.approx(1.0)
    tracker.observe(2.0)
    assert tracker.observe(32.0) == pytest.approx(16.0)
    assert math.exp(tracker.state.log_mean) == pytest.approx(4.0)  # 2 · 16^(1/4)


@pytest.mark.requirement(42)
def test_threefold_norm() -> None:
    """Three times the usual norm has a drift of 3, and so has a third of it."""
    for factor in (3.0, 1 / 3):
        tracker = GradientEMATracker()
        for _ in range(30):
            assert tracker.observe(1.7) == pytest.approx(1.0)
        assert tracker.observe(1.7 * factor) == pytest.approx(3.0)


@pytest.mark.requirement(42)
@pytest.mark.parametrize("age", [5, 6, 100])
def test_doubtful_norms_hardly_move_a_young_mean(age: int) -> None:
    """A lasting factor of 3 reads 3.0, 2.84, 2.70 at any age; smaller factors weigh 1/k."""
    tracker = GradientEMATracker(momentum=0.95)
    for _ in range(age):
        tracker.observe(1.7)
    start = tracker.state
    for norm in (5.1, 1.7 / 3):
        tracker.state = start
        drifts = [tracker.observe(norm, doubtful=2.4) for _ in range(3)]
        assert drifts == pytest.approx([3.0, 3**0.95, 3 ** (0.95**2)])
    tracker.state = start
    tracker.observe(1.7 * 2.3, doubtful=2.4)
    assert math.exp(tracker.state.log_mean) == pytest.approx(1.7 * 2.3 ** max(1 / (age + 1), 0.05))


def test_the_mean_follows() -> None:
    """A lasting change becomes what is usual."""
    tracker = GradientEMATracker(momentum=0.9)
    for _ in range(20):
        tracker.observe(1.0)
    drifts = [tracker.observe(3.0) for _ in range(50)]
    assert drifts == sorted(drifts, reverse=True)
    assert drifts[1] == pytest.approx(3**0.9)
    assert drifts[-1] < 1.01


@pytest.mark.parametrize("norm", [math.nan, math.inf, 0.0, -1.0])
def test_what_is_no_norm_is_refused(norm: float) -> None:
    """And leaves the mean as it was."""
    tracker = GradientEMATracker()
    tracker.observe(2.0)
    with pytest.raises(BadValueError, match="norm"):
        tracker.observe(norm)
    assert tracker.state == DriftState(math.log(2.0), 1)


@pytest.mark.requirement(42)
def test_goes_on_from_its_state() -> None:
    """After a round trip through JSON, the next drifts are bit-equal."""
    tracker = GradientEMATracker()
    for norm in (1.0, 2.5, 0.7, 3.1):
        tracker.observe(norm)
    stored = json.loads(json.dumps(encode(tracker.state)))
    again = GradientEMATracker(state=decode(DriftState, stored, "drift"))
    assert [again.observe(norm) for norm in (1.3, 9.0)] == [tracker.observe(norm) for norm in (1.3, 9.0)]
    assert again.state == tracker.state


@pytest.mark.parametrize("momentum", [1.0, -0.1, math.nan])
def test_momentum(momentum: float) -> None:
    """With 1 nothing would ever be taken in."""
    with pytest.raises(BadValueError, match="momentum"):
        GradientEMATracker(momentum)
