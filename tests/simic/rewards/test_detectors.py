"""Seeds that look better than they are."""

import pytest
import torch
from simic.rewards.trajectories import Move, play, slot_view, stack

from esper.leyline import SeedStage
from esper.simic.rewards import DetectorLimits, Finding, Suspects, detect, findings
from esper.tamiyo.signals import SlotView

HELD, TRAINING, EMPTY = SeedStage.HOLDING, SeedStage.TRAINING, SeedStage.DORMANT


def views(*rows: SlotView) -> SlotView:
    """Several envs."""
    template = play(lambda host: Move(), 1)[0]
    return stack([template._replace(before=row, after=row) for row in rows]).after


def judge(contribution: float, gain: float, **options: float) -> Suspects:
    """One held seed."""
    view = slot_view([HELD], [options.get("alpha", 1.0)], [contribution], error=options.get("error", 0.0))
    limits = DetectorLimits(options.get("least", 1.0), options.get("ratio", 5.0))
    return detect(view, torch.tensor([gain]), limits)


def flagged(suspects: Suspects) -> tuple[bool, bool]:
    """Hacking, ransomware."""
    return bool(suspects.hacking.any()), bool(suspects.ransomware.any())


@pytest.mark.requirement(15)
@pytest.mark.parametrize(
    ("contribution", "gain", "expected"),
    [
        (6.0, 1.0, (True, False)),
        (5.0, 1.0, (True, False)),
        (4.9, 1.0, (False, False)),
        (2.0, -0.5, (False, True)),
        (2.0, 0.0, (False, True)),
        (0.9, -0.5, (False, False)),
        (-6.0, -6.0, (False, False)),
        (4.0, 4.0, (False, False)),
    ],
)
def test_by_hand(contribution: float, gain: float, expected: tuple[bool, bool]) -> None:
    """A contribution of 6 in a gain of 1 is hacking; 2 in a loss of 0.5 is ransomware."""
    assert flagged(judge(contribution, gain)) == expected


@pytest.mark.requirement(37)
def test_only_what_was_measured() -> None:
    """Neither silent seeds nor noise are accused."""
    assert flagged(judge(6.0, 1.0, alpha=0.0)) == (False, False)
    assert flagged(judge(6.0, 1.0, error=6.5)) == (False, False)
    unmeasured = slot_view([HELD], [1.0], [None])
    assert flagged(detect(unmeasured, torch.tensor([-1.0]), DetectorLimits())) == (False, False)


def test_limits() -> None:
    """They may be 0: then whatever acts on a host without gain is suspicious."""
    assert flagged(judge(0.1, 0.0, least=0.0, ratio=0.0)) == (False, True)
    assert flagged(judge(6.0, 1.0, ratio=7.0)) == (False, False)


@pytest.mark.requirement(15)
def test_findings() -> None:
    """Each suspicious seed gives one record per episode and kind, with all that an event needs."""
    slots = views(
        slot_view([HELD, EMPTY, TRAINING], [1.0, 0.0, 0.0], [6.0, None, None]),
        slot_view([HELD, HELD, HELD], [1.0, 1.0, 1.0], [0.5, 1.0, 0.5]),
        slot_view([EMPTY, HELD, SeedStage.FOSSILIZED], [0.0, 0.7, 1.0], [None, 2.0, 3.0]),
    )
    gains = torch.tensor([[1.0, 2.0, -0.5], [0.5, 2.0, 0.25]])
    steps = [detect(slots, gain, DetectorLimits()) for gain in gains]
    suspects = Suspects.over(steps)
    assert suspects.hacking.shape == suspects.ransomware.shape == (2, 3, 3)
    assert not (suspects.hacking & suspects.ransomware).any()
    contribution = slots.contribution.value.expand(2, -1, -1)
    assert findings(suspects, torch.ones(2, 3, 3), contribution, gains, ("a", "b", "c")) == (
        Finding(0, 0, "a", "hacking", "warning", 6.0, 1.0),
        Finding(0, 2, "b", "ransomware", "critical", 2.0, -0.5),
        Finding(0, 2, "c", "ransomware", "critical", 3.0, -0.5),
        Finding(1, 2, "b", "hacking", "warning", 2.0, 0.25),
        Finding(1, 2, "c", "hacking", "warning", 3.0, 0.25),
    )


def test_nobody_is_suspicious() -> None:
    """No records."""
    slots = views(slot_view([HELD, EMPTY], [1.0, 0.0], [2.0, None]))
    gain = torch.tensor([2.0])
    suspects = Suspects.over([detect(slots, gain, DetectorLimits())])
    assert findings(suspects, torch.ones(1, 1, 2), slots.contribution.value[None], gain[None], ("a", "b")) == ()


def test_the_next_seed_of_a_slot_is_another_suspect() -> None:
    """It is told of too, with its own contribution; one that is suspicious off and on is told of once."""
    flags = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1, 1]).bool()[:, None, None]
    germinations = torch.tensor([1, 1, 1, 1, 2, 2, 2, 2, 2])[:, None, None]
    contribution = torch.arange(9.0)[:, None, None]
    suspects = Suspects(flags, torch.zeros_like(flags))
    found = findings(suspects, germinations, contribution, torch.ones(9, 1), ("a",))
    assert [(one.step, one.contribution) for one in found] == [(1, 1.0), (5, 5.0)]
    at_once = torch.tensor([1, 1, 2, 2, 2, 2, 2, 2, 2])[:, None, None]  # cut, and germinated again in the next step
    found = findings(suspects, at_once, contribution, torch.ones(9, 1), ("a",))
    assert [one.step for one in found] == [1, 2]
