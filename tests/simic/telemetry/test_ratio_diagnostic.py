"""Ratios out of bounds: counted exactly, listed up to a cap."""

import math

import pytest
import torch

from esper.simic.telemetry.examination import Offender, RatioExplosionDiagnostic, RatioReport

HEADS = ("op", "slot")


def offenders(report: RatioReport) -> int:
    """Their number, listed or not."""
    return sum(sum(counts.values()) for counts in (report.exploded, report.vanished, report.not_a_number))


@pytest.mark.requirement(41)
def test_counts_and_worst_by_hand() -> None:
    """|ln 20| = 3.0, |ln 0.01| = 4.6 and |ln 6| = 1.8 give the order of the list."""
    ratios = torch.ones(2, 3, 2)
    ratios[0, 1, 0], ratios[1, 2, 1], ratios[1, 0, 0] = 20.0, 0.01, 6.0
    actions = torch.arange(12).view(2, 3, 2)
    report = RatioExplosionDiagnostic()(ratios, actions=actions, heads=HEADS)
    assert report.examined == {"op": 6, "slot": 6}
    assert report.exploded == {"op": 2, "slot": 0}
    assert report.vanished == {"op": 0, "slot": 1}
    assert report.not_a_number == {"op": 0, "slot": 0}
    assert [(o.env, o.step, o.head, round(o.ratio, 3)) for o in report.worst] == [
        (1, 2, "slot", 0.01),
        (0, 1, "op", 20.0),
        (1, 0, "op", 6.0),
    ]
    assert [o.action for o in report.worst] == [(10, 11), (2, 3), (6, 7)]
    assert offenders(report) == 3


def test_limits_are_respected() -> None:
    """A ratio at a limit is within it."""
    ratios = torch.tensor([[2.0, 0.5, 2.1, 0.4]])
    report = RatioExplosionDiagnostic(high=2.0, low=0.5)(ratios)
    assert (report.exploded, report.vanished) == ({"joint": 1}, {"joint": 1})
    assert {offender.step for offender in report.worst} == {2, 3}


@pytest.mark.requirement(41)
@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (0, 0)])
def test_empty(shape: tuple[int, int]) -> None:
    """A round without steps has nothing to report."""
    report = RatioExplosionDiagnostic()(torch.ones(shape), actions=torch.zeros((*shape, 3), dtype=torch.long))
    assert offenders(report) == 0
    assert report.examined == {"joint": 0}
    assert report.worst == ()


@pytest.mark.requirement(41)
def test_all_masked() -> None:
    """Steps that decided nothing are ignored, whatever their values."""
    ratios = torch.full((2, 2), torch.nan)
    assert offenders(RatioExplosionDiagnostic()(ratios, torch.zeros(2, 2, dtype=torch.bool))) == 0


def test_mask_keeps_what_counts() -> None:
    """Of ratios that exploded, vanished and broke, one counts."""
    mask = torch.tensor([[True, False, False, False]])
    report = RatioExplosionDiagnostic()(torch.tensor([[9.0, 99.0, 1e-9, torch.nan]]), mask)
    assert offenders(report) == 1
    assert report.worst == (Offender(0, 0, "joint", 9.0, ()),)
    assert report.examined == {"joint": 1}


@pytest.mark.requirement(41)
def test_not_finite() -> None:
    """NaN and infinity come first; infinity counts as exploded, 0 as vanished."""
    ratios = torch.tensor([[30.0, torch.nan], [torch.inf, 0.0]])
    report = RatioExplosionDiagnostic()(ratios)
    assert (report.exploded, report.vanished, report.not_a_number) == ({"joint": 2}, {"joint": 1}, {"joint": 1})
    assert [(o.env, o.step) for o in report.worst] == [(0, 1), (1, 0), (1, 1), (0, 0)]
    assert math.isnan(report.worst[0].ratio)


@pytest.mark.requirement(41, 80)
@pytest.mark.parametrize("cap", [0, 1, 7, 1000])
def test_widespread_explosion_is_capped(cap: int) -> None:
    """The list keeps the worst up to the cap, and the counts stay exact."""
    ratios = 10.0 + torch.rand(50, 12, 2, generator=torch.Generator().manual_seed(2))
    ratios[3, 4, 1] = 1.0
    report = RatioExplosionDiagnostic(cap=cap)(ratios, heads=HEADS)
    assert report.exploded == {"op": 600, "slot": 599}
    assert len(report.worst) == min(cap, 1199)
    assert offenders(report) == 1199
    largest = ratios.flatten().sort(descending=True).values[: min(cap, 1199)]
    assert torch.tensor([offender.ratio for offender in report.worst]).equal(largest)
