"""More is recorded for a while after an alarm."""

from dataclasses import replace

from simic.telemetry.healthy import metrics_with

from esper.leyline.records import decode, encode
from esper.simic.telemetry import Alarm, AnomalyDetector, Detail

(WARNING,) = AnomalyDetector().look(0, metrics_with(max_kl=0.2))
INFO = replace(WARNING, severity="info", ended=True)


def examined(detail: Detail, rounds: list[list[Alarm]]) -> list[bool]:
    """Whether the round after each is examined."""
    result = []
    for alarms in rounds:
        detail = detail.after(alarms)
        result.append(detail.left > 0)
    return result


def test_so_many_rounds() -> None:
    """Exactly three rounds after the alarm are examined."""
    expected = [True] * 3 + [False] * 2
    assert examined(Detail(3), [[WARNING], [], [], [], []]) == expected


def test_an_info_switches_nothing_on() -> None:
    """Nor does an end, nor nothing; a critical one does."""
    normal = Detail()
    assert normal.left == 0
    assert normal.after([INFO]) == normal.after([]) == normal
    assert normal.after([INFO, replace(WARNING, severity="critical")]).left == 5


def test_another_alarm_starts_again() -> None:
    """Three rounds from the last one; infos do not prolong it."""
    expected = [True] * 5 + [False]
    assert examined(Detail(3), [[WARNING], [], [WARNING], [INFO], [], []]) == expected


def test_never() -> None:
    """With no rounds it stays as it is."""
    assert Detail(0).after([WARNING]).left == 0


def test_stored() -> None:
    """In mid-debugging, through a checkpoint."""
    detail = Detail(4).after([WARNING]).after([])
    assert decode(Detail, encode(detail), "detail") == detail
    assert detail.left == 3
