"""The log of a run: in order, whole lines, and cut back to where a checkpoint was."""

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
from forks import forked_process

from esper.leyline import BadValueError, StorageError
from esper.storage.logs import JsonLines, read_lines


def test_lines_come_back_in_order(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "log.jsonl") as log:
        log.write(kind="stage", round=0)
        size = log.flush()
        log.write(kind="episode", gain=1.5, slot=None)
    assert list(read_lines(tmp_path / "log.jsonl")) == [
        {"kind": "stage", "round": 0},
        {"kind": "episode", "gain": 1.5, "slot": None},
    ]
    assert 0 < size < (tmp_path / "log.jsonl").stat().st_size


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"a":1}\n{"b":')
    assert list(read_lines(path)) == [{"a": 1}]


def test_damage_inside_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"a":1}\nnonsense\n{"b":2}\n')
    with pytest.raises(BadValueError, match="line 2"):
        list(read_lines(path))


def test_what_lies_behind_a_checkpoint_is_kept_aside(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with JsonLines(path) as log:
        log.write(round=0)
        offset = log.flush()
        log.write(round=1)
    with JsonLines(path, offset) as log:
        log.write(round="again")
    assert list(read_lines(path)) == [{"round": 0}, {"round": "again"}]
    assert list(read_lines(tmp_path / f"log.jsonl.tail-{offset}")) == [{"round": 1}]
    with pytest.raises(BadValueError, match="bytes"):
        JsonLines(path, 10_000)


def test_a_second_tail_does_not_replace_the_first(tmp_path: Path) -> None:
    """A run may be killed twice in the same round."""
    path = tmp_path / "log.jsonl"
    for number in range(3):
        with JsonLines(path, 0 if path.exists() else None) as log:
            log.write(life=number)
    assert list(read_lines(path)) == [{"life": 2}]
    tails = [tmp_path / name for name in ("log.jsonl.tail-0", "log.jsonl.tail-0.1")]
    assert [list(read_lines(tail)) for tail in tails] == [[{"life": 0}], [{"life": 1}]]


def test_numbers_that_json_lacks_are_refused(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "log.jsonl") as log, pytest.raises(BadValueError, match="nan"):
        log.write(loss=float("nan"))
    assert (tmp_path / "log.jsonl").read_text() == ""


def test_the_offset_is_where_the_next_line_begins(tmp_path: Path) -> None:
    """Also right after a tail was cut off, before anything is written."""
    path = tmp_path / "log.jsonl"
    path.write_text('{"a":1}\n{"b":2}\n')
    with JsonLines(path, 8) as log:
        assert log.flush() == 8
        log.write(c=3)
        assert log.flush() == 16


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    """The second is refused before it cuts anything off; a reader is not in the way."""
    path = tmp_path / "log.jsonl"
    with JsonLines(path) as log:
        log.write(a=1)
        log.flush()
        with pytest.raises(BadValueError, match=r"log\.jsonl is being written by another process"):
            JsonLines(path, 0)
        assert list(read_lines(path)) == [{"a": 1}]
    JsonLines(path).close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_does_not_hold_a_log(tmp_path: Path) -> None:
    """It has the file open as long as it lives, which may be longer than the one that writes."""
    with ExitStack() as child:
        with JsonLines(tmp_path / "log.jsonl") as log:
            log.write(number=1)
            log.flush()
            child.enter_context(forked_process())
        with JsonLines(tmp_path / "log.jsonl") as log:  # the child lives
            log.write(number=2)
    assert [line["number"] for line in read_lines(tmp_path / "log.jsonl")] == [1, 2]


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    """By the device that is always full: the file is closed all the same."""
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    log = JsonLines(tmp_path / "log.jsonl")
    log.write(a=1)
    message = r"log\.jsonl cannot be written \(No space left on device\); make room there"
    with pytest.raises(StorageError, match=message):
        log.flush()
    with pytest.raises(StorageError, match=message):
        log.close()


def test_no_place_for_a_log(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"log\.jsonl cannot be written \(No such file or directory\)"):
        JsonLines(tmp_path / "none" / "log.jsonl")


def test_a_log_is_on_the_disk_after_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, and a tail before it is cut off: a checkpoint must not know of lines that a power failure takes."""
    synced: list[tuple[str, int]] = []
    fsync = os.fsync

    def watched(handle: int) -> None:
        paths = {path.stat().st_ino: path for path in (tmp_path, *tmp_path.rglob("*"))}
        status = os.fstat(handle)
        path = paths[status.st_ino]
        if path.is_file():
            synced.append((str(path.relative_to(tmp_path)), status.st_size))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", watched)
    log = JsonLines(tmp_path / "log.jsonl")
    log.write(a=1)
    log.write(b=2)
    assert log.flush() == 16
    assert synced == [("log.jsonl", 16)]
    log.close()
    synced.clear()
    with JsonLines(tmp_path / "log.jsonl", 8):
        assert synced == [(".log.jsonl.tail-8.esper-tmp/file", 8), ("log.jsonl", 8)]
