"""Numbered folders: which is the newest, which are removed, and what becomes of those that cannot be read."""

from pathlib import Path

import pytest

from esper.leyline import BadValueError, CheckpointError
from esper.storage.series import Series


def make(folder: Path, *names: str) -> Series:
    """A series with these folders; each holds its own name."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "name").write_text(name)
    return Series(folder, "round", 2)


def read(number: int, place: Path) -> str:
    """What a folder holds, unless it is marked as bad."""
    if (place / "bad").exists():
        raise CheckpointError(f"{place} is bad")
    return f"{number} {(place / 'name').read_text()}"


def names(folder: Path) -> list[str]:
    """What is there."""
    return sorted(path.name for path in folder.iterdir())


def test_numbers_are_numbers(tmp_path: Path) -> None:
    """The hundred-thousandth comes after the one before it; other names are nobody's business."""
    series = make(tmp_path, "round-99999", "round-100000", "round-00003", "round-1", "step-00009", "round-00003.old")
    assert series.numbers() == [3, 99999, 100000]
    assert series.newest() == tmp_path / "round-100000"
    assert series.path_of(100001) == tmp_path / "round-100001"


def test_nothing_there(tmp_path: Path) -> None:
    series = Series(tmp_path / "none", "round")
    assert (series.numbers(), series.newest(), series.read_newest(read)) == ([], None, None)
    series.prune()
    assert not (tmp_path / "none").exists()


def test_the_last_are_kept(tmp_path: Path) -> None:
    series = make(tmp_path, "round-00001", "round-00002", "round-00010", "refused-round-00011", "notes")
    series.prune()
    assert names(tmp_path) == ["notes", "refused-round-00011", "round-00002", "round-00010"]
    series.prune()
    assert series.numbers() == [2, 10]


def test_what_is_next_is_not_below_the_newest(tmp_path: Path) -> None:
    """It would be removed as soon as it is there; the newest itself, and what was set aside, may come again."""
    series = make(tmp_path, "round-00010", "round-00011", "round-00012", "refused-round-00013")
    for number in (1, 9, 11):
        with pytest.raises(
            BadValueError,
            match=rf"round {number} is below round 12, .*continue from that one, remove .* another folder",
        ):
            series.require_newest(number)
    for number in (12, 13, 14):
        series.require_newest(number)
    assert series.numbers() == [10, 11, 12]
    Series(tmp_path / "none", "round").require_newest(1)
    assert not (tmp_path / "none").exists()


def test_the_newest_may_be_with_a_killed_writer(tmp_path: Path) -> None:
    """Killed between two renames, as it replaced the newest: that one counts, and is put in its place."""
    series = make(tmp_path, "round-00001", ".round-00002.esper-tmp/new", ".round-00002.esper-tmp/old")
    with pytest.raises(BadValueError, match="round 1 is below round 2"):
        series.require_newest(1)
    assert names(tmp_path) == ["round-00001", "round-00002"]
    assert (tmp_path / "round-00002" / "name").read_text() == ".round-00002.esper-tmp/old"


def test_the_newest_is_read(tmp_path: Path) -> None:
    assert make(tmp_path, "round-00001", "round-00002").read_newest(read) == "2 round-00002"
    assert names(tmp_path) == ["round-00001", "round-00002"]


def test_what_is_refused_is_told_and_set_aside(tmp_path: Path) -> None:
    """Under a name that is not taken."""
    series = make(tmp_path, "round-00001", "round-00002", "round-00003", "refused-round-00003")
    for number in (2, 3):
        (series.path_of(number) / "bad").write_text("")
    with pytest.warns(RuntimeWarning) as told:
        assert series.read_newest(read) == "1 round-00001"
    assert [str(each.message) for each in told] == [
        f"round-0000{number} is not used: {series.path_of(number)} is bad. It is kept as {aside}; "
        "continuing from round-00001"
        for number, aside in ((3, "refused-round-00003.1"), (2, "refused-round-00002"))
    ]
    assert names(tmp_path) == ["refused-round-00002", "refused-round-00003", "refused-round-00003.1", "round-00001"]
    assert (tmp_path / "refused-round-00003.1" / "name").read_text() == "round-00003"


def test_all_are_refused(tmp_path: Path) -> None:
    """Nothing is moved."""
    series = make(tmp_path, "round-00001", "round-00002")
    for number in (1, 2):
        (series.path_of(number) / "bad").write_text("")
    with pytest.raises(CheckpointError, match=r"none of .*\(round-00002: .*bad; round-00001: .*bad\); restore"):
        series.read_newest(read)
    assert names(tmp_path) == ["round-00001", "round-00002"]


def test_other_errors_are_not_hidden(tmp_path: Path) -> None:
    """A mistake in the program is no damage."""
    series = make(tmp_path, "round-00001")
    (series.path_of(1) / "name").unlink()
    with pytest.raises(FileNotFoundError):
        series.read_newest(read)


@pytest.mark.parametrize("keep", [0, -1, 2.0, True])
def test_the_newest_is_always_kept(tmp_path: Path, keep: int) -> None:
    with pytest.raises(BadValueError, match=r"is not an integer of 1 or more: the newest is always kept"):
        Series(tmp_path, "round", keep)
