"""The live file: a filling per round, and nothing that goes wrong with it is anybody's business."""

import json
import math
from pathlib import Path

import pytest

from esper.nissa import LiveFile, StepTaken
from esper.nissa.live import VERSION


def step(number: int = 0, accuracy: float | None = 50.0) -> StepTaken:
    """A step of one host."""
    own: list[float | None] = [accuracy]
    return StepTaken(1.0, 2, "digits", number, 8, 0, ["r1c0"], own, [40.0], [10.0], [0.5], [], [], [0.5], [{}], [], [])


def lines_of(file: LiveFile) -> list[dict[str, object]]:
    """All lines."""
    return [json.loads(line) for line in file.path.read_text().splitlines()]


def test_a_filling_per_round(tmp_path: Path) -> None:
    """Each with a header of its own, though rounds repeat; nothing is left in the end."""
    with LiveFile(tmp_path) as live:
        live.write(step)
        assert not live.path.exists()
        live.begin(2)
        live.write(step)
        live.write(lambda: step(1))
        header, first, second = lines_of(live)
        assert (header["kind"], header["version"], header["round"]) == ("live", VERSION, 2)
        assert (first["kind"], first["step"], second["step"], first["accuracies"]) == ("step", 0, 1, [50.0])
        live.begin(2)
        (again,) = lines_of(live)
        assert again["round"] == 2 and again["began"] != header["began"]
    assert live.path.read_bytes() == b""


def test_numbers_that_json_lacks(tmp_path: Path) -> None:
    """They become words, which readers take for no number."""
    with LiveFile(tmp_path) as live:
        live.begin(0)
        live.write(lambda: step(0, math.nan))
        assert lines_of(live)[1]["accuracies"] == ["nan"]


def test_it_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Grower has one round only."""
    monkeypatch.setattr("esper.nissa.live.LARGEST", 1000)
    with LiveFile(tmp_path) as live:
        live.begin(0)
        for number in range(50):
            live.write(lambda number=number: step(number))  # type: ignore[misc]
            assert live.path.stat().st_size <= 1000 + 100
        assert lines_of(live)[0]["kind"] == "live" and lines_of(live)[-1]["step"] == 49


def test_a_file_that_cannot_be_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said once, and nothing is raised."""
    (tmp_path / "live.jsonl").mkdir()
    with LiveFile(tmp_path) as live:
        for number in range(2):
            live.begin(number)
            live.write(step)
    assert live.failed
    told = capsys.readouterr().err
    assert told.count("is no longer written") == 1 and "the run continues" in told


def test_a_disk_that_is_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As /dev/full is."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (tmp_path / "live.jsonl").symlink_to("/dev/full")
    with LiveFile(tmp_path) as live:
        live.begin(0)
        live.write(step)
    assert "no longer written" in capsys.readouterr().err


def test_a_builder_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also a fault of our own costs the view only."""

    def broken() -> StepTaken:
        raise IndexError("no such host")

    with LiveFile(tmp_path) as live:
        live.begin(0)
        live.write(broken)
        live.write(step)
    assert "no such host" in capsys.readouterr().err
