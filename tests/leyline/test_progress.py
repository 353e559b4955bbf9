"""The progress bar: drawn on a terminal, and harmless everywhere else."""

import io
import sys

import pytest

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
