"""The progress bar: drawn on a terminal, and harmless everywhere else."""

import io
import sys

import pytest

from esper.leyline import progress
from esper.leyline.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run() -> str:
    """What appears on a terminal while half of the work is done."""
    stream = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        with progress_bar("decoding", 10) as advance:
            advance(5)
    return stream.getvalue()


def test_shows_a_bar_on_a_terminal() -> None:
    assert "decoding" in run()


def test_works_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert run() == ""


def test_is_silent_in_a_log(capfd: pytest.CaptureFixture[str]) -> None:
    with progress_bar("decoding", 10, in_bytes=True) as advance:
        advance(5)
    assert capfd.readouterr() == ("", "")


def test_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """At 4, 11, 15 and 22 s: the second and the fourth call are ten seconds after the line before."""
    times = iter([0.0, 4.0, 11.0, 11.0, 15.0, 22.0, 22.0])
    monkeypatch.setattr("esper.leyline.progress.time.monotonic", lambda: next(times))
    with progress.progress_bar("rounds", 2_500, done=500) as advance:  # resumed
        for number in range(4):
            advance(500, f"objective +{number}")
    assert capsys.readouterr().err == "rounds: 1,500 of 2,500 objective +1\nrounds: 2,500 of 2,500 objective +3\n"


def test_nothing_where_nothing_is_wanted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    with progress.progress_bar("rounds", 3, shown=False) as advance:
        advance(3)
    assert capsys.readouterr().err == ""
