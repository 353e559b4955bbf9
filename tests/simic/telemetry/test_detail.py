"""More is recorded for a while after an alarm."""

from dataclasses import replace

import pytest
from simic.telemetry.healthy import metrics_with

from esper.leyline import BadValueError
from esper.leyline.records import decode, encode
from esper.simic.telemetry import Alarm, AnomalyDetector, Detail, DetailLevel

(WARNING,) = AnomalyDetector().look(0, metrics_with(max_kl=0.2))
INFO = replace(WARNING, severity="info", ended=True)


def levels(detail: Detail, rounds: list[list[Alarm]]) -> list[DetailLevel]:
    """Of the round after each."""
    found = []
    for alarms in rounds:
        detail = detail.after(alarms)
        found.append(detail.level)
    return found


def test_so_many_rounds() -> None:
    """Debug for exactly three rounds after the alarm."""
    expected = [DetailLevel.DEBUG] * 3 + [DetailLevel.NORMAL] * 2
    assert levels(Detail(3), [[WARNING], [], [], [], []]) == expected


def test_an_info_switches_nothing_on() -> None:
    """Nor does an end, nor nothing; a critical one does."""
    normal = Detail()
    assert normal.level is DetailLevel.NORMAL
    assert normal.after([INFO]) == normal.after([]) == normal
    assert normal.after([INFO, replace(WARNING, severity="critical")]).level is DetailLevel.DEBUG


def test_another_alarm_starts_again() -> None:
    """Three rounds from the last one; infos do not prolong it."""
    expected = [DetailLevel.DEBUG] * 5 + [DetailLevel.NORMAL]
    assert levels(Detail(3), [[WARNING], [], [WARNING], [INFO], [], []]) == expected


def test_never() -> None:
    """With no rounds it stays as it is."""
    assert Detail(0).after([WARNING]).level is DetailLevel.NORMAL


def test_stored() -> None:
    """In mid-debugging, through a checkpoint."""
    detail = Detail(4).after([WARNING]).after([])
    assert decode(Detail, encode(detail), "detail") == detail
    assert detail.left == 3


def test_rounds_are_whole() -> None:
    """And not negative."""
    with pytest.raises(BadValueError, match="rounds"):
        Detail(-1)
