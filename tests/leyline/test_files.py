"""Folders and files that are whole whatever happens, and what is done about a writer that was killed."""

import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from forks import forked_process

from esper.leyline import BadValueError, StorageError
from esper.storage import files
from esper.storage.files import (
    discard_folder,
    folder_taken,
    is_leftover,
    present_folder,
    remove_leftovers,
    replace_file,
)
from esper.storage.files import replace_folder as replace
from esper.storage.locks import let_go, take_lock

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NAMES = ("a", "b")


def fill(text: str) -> Any:  # Any: a function
    """Writes two files."""

    def write(new: Path) -> None:
        for name in NAMES:
            (new / name).write_text(text)

    return write


def read(folder: Path) -> list[str]:
    """Their contents."""
    return [(folder / name).read_text() for name in NAMES]


# -- kills at every operation -----------------------------------------------------------------------------------------

EVERY_KILL = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from kills import FileKill
from esper.storage import files

def fill(text):
    def write(new):
        for name in ("a", "b"):
            (new / name).write_text(text)
    return write

verbs = {
    "first": lambda place: files.replace_folder(place, fill("new"), ("a", "b")),
    "replace": lambda place: files.replace_folder(place, fill("new"), ("a", "b")),
    "discard": files.discard_folder,
    "file": lambda place: files.replace_file(place, "new"),
}
for verb, act in verbs.items():
    for at in range(1, 1000):
        root = Path(sys.argv[1]) / verb / str(at)
        root.mkdir(parents=True)
        place = root / "thing"
        if verb == "file":
            place.write_text("old")
        elif verb != "first":
            files.replace_folder(place, fill("old"), ("a", "b"))
        child = os.fork()
        if not child:
            FileKill(root, at)
            act(place)
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            break
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each verb, killed at its first, second … file operation; the last one is not killed any more."""
    root = tmp_path_factory.mktemp("killed")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", EVERY_KILL, str(root), str(BENCHMARKS)]
    subprocess.run(command, env=environment, check=True, timeout=120)
    return root


def places(killed: Path, verb: str) -> list[Path]:
    """What was written to, in the order of kills; several are left in every state."""
    found = [killed / verb / str(at + 1) / "thing" for at in range(len(list((killed / verb).iterdir())))]
    assert len(found) > 6
    return found


def test_a_folder_is_the_old_or_the_new(killed: Path) -> None:
    """Wherever the writer is killed, also between its two renames; the next one finishes its work and cleans up."""
    states, missing = [], []
    for place in places(killed, "replace"):
        states.append(read(present_folder(place)))
        missing.append(not place.exists())
        remove_leftovers(place.parent)
        assert [path.name for path in place.parent.iterdir()] == ["thing"]
        assert read(place) == states[-1]
        replace(place, fill("newer"), NAMES)
        assert read(place) == ["newer"] * 2
    assert {state[0] for state in states} == {"old", "new"} and all(one == other for one, other in states)
    assert states == sorted(states, reverse=True), "old, from some operation on new"
    assert any(missing), "the moment between two renames is among them"


def test_only_what_was_asked_for_is_finished(tmp_path: Path) -> None:
    """Of one target, or of all."""
    work = tmp_path / ".thing.abcd_123"
    for name in ("new", "old"):
        (work / name).mkdir(parents=True)
        fill(name)(work / name)
    remove_leftovers(tmp_path, "other")
    assert not (tmp_path / "thing").exists()
    remove_leftovers(tmp_path, "thing")
    assert read(tmp_path / "thing") == ["new"] * 2


def test_a_first_folder_is_there_or_not(killed: Path) -> None:
    """A half is never seen under its name."""
    there = [place.exists() for place in places(killed, "first")]
    assert there == sorted(there) and not there[0] and there[-1]
    for place in places(killed, "first"):
        assert not place.exists() or read(place) == ["new"] * 2
        remove_leftovers(place.parent)
        assert {path.name for path in place.parent.iterdir()} <= {"thing"}


def test_a_discarded_folder_is_there_or_not(killed: Path) -> None:
    """It does not come back either."""
    there = [place.exists() for place in places(killed, "discard")]
    assert there == sorted(there, reverse=True) and there[0] and not there[-1]
    for place in places(killed, "discard"):
        if place.exists():
            assert read(place) == ["old"] * 2
        remove_leftovers(place.parent)
        assert {path.name for path in place.parent.iterdir()} == ({"thing"} if place.exists() else set())


def test_a_file_is_the_old_or_the_new(killed: Path) -> None:
    texts = [place.read_text() for place in places(killed, "file")]
    assert set(texts) == {"old", "new"} and texts == sorted(texts, reverse=True)
    for place in places(killed, "file"):
        replace_file(place, "newer")
        assert [path.name for path in place.parent.iterdir()] == ["thing"]


# -- leftovers --------------------------------------------------------------------------------------------------------


def test_what_a_living_writer_works_on_is_left_alone(tmp_path: Path) -> None:
    """Two at once: the second neither removes nor finishes what the first has begun."""
    begun, go = threading.Event(), threading.Event()

    def slowly(new: Path) -> None:
        fill("first")(new)
        begun.set()
        assert go.wait(30)

    first = threading.Thread(target=replace, args=(tmp_path / "thing", slowly, NAMES))
    first.start()
    assert begun.wait(30)
    remove_leftovers(tmp_path)
    replace(tmp_path / "thing", fill("second"), NAMES)
    assert read(tmp_path / "thing") == ["second"] * 2
    go.set()
    first.join()
    assert read(tmp_path / "thing") == ["first"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]


def test_a_work_folder_that_somebody_removes_is_not_written_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it has no lock yet, another may have taken it for a leftover: it is still there, and soon is not."""
    taken = list[int | None]()

    def after_a_remover(folder: Path) -> int | None:
        if not taken:  # the first one: a remover was quicker
            taken.append(take_lock(folder))
        return take_lock(folder)

    monkeypatch.setattr(files, "take_lock", after_a_remover)
    replace(tmp_path / "thing", fill("new"), NAMES)
    assert read(tmp_path / "thing") == ["new"] * 2
    left = [path for path in tmp_path.iterdir() if path.name != "thing"]
    assert [list(path.iterdir()) for path in left] == [[]], "it belongs to the remover, and is empty"
    let_go(taken[0])


def test_a_leftover_is_locked_until_it_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a writer that meets it in between takes it for its own."""
    (tmp_path / ".thing.abcdefgh").mkdir()
    remove, locked = shutil.rmtree, list[bool]()

    def look(folder: Path, *, ignore_errors: bool) -> None:
        locked.append(take_lock(folder) is None)
        remove(folder, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", look)
    remove_leftovers(tmp_path)
    assert locked == [True]
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_does_not_hold_a_folder(tmp_path: Path) -> None:
    """It may outlive the one that took it; and it lets go of nothing that is still that one's."""
    with ExitStack() as child:
        with folder_taken(tmp_path):
            child.enter_context(forked_process())
            told = pytest.raises(BadValueError, match="by another process, or by another object of this one")
            with told, folder_taken(tmp_path):
                pass
        with folder_taken(tmp_path):  # the child lives
            pass


@pytest.mark.parametrize("name", [".thing.abc", "thing.abcd_123", ".thing.ABCD_123", ".thing"])
def test_other_names_are_not_leftovers(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    remove_leftovers(tmp_path)
    assert (tmp_path / name).exists()


def test_other_contents_are_not_leftovers(tmp_path: Path) -> None:
    """A folder of somebody else's, even under such a name; and a file."""
    (tmp_path / ".thing.abcd_123").mkdir()
    (tmp_path / ".thing.abcd_123" / "notes").write_text("mine")
    (tmp_path / ".thing.abcd_456").write_text("mine")
    assert not any(is_leftover(path) for path in tmp_path.iterdir())
    remove_leftovers(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


# -- what the system refuses ------------------------------------------------------------------------------------------


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    """A file where a folder should be: refused for everybody, also for root, whom permissions do not bind."""
    (tmp_path / "file").write_text("")
    message = r"thing cannot be written \(.+\); make room there, or make it writable"
    with pytest.raises(StorageError, match=message):
        replace(tmp_path / "file" / "thing", fill("new"), NAMES)
    with pytest.raises(OSError, match=message):  # whoever does not know Esper can catch it
        replace_file(tmp_path / "file" / "thing", "new")
    with pytest.raises(StorageError, match=message):
        discard_folder(tmp_path / "thing")


FULL = """
import json, resource, sys
from pathlib import Path
from esper.leyline import StorageError
from esper.storage import files
root = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
found = []
for act in (
    lambda: files.replace_folder(root / "folder", lambda new: (new / "a").write_text("x" * 2000), ("a", "b")),
    lambda: files.replace_file(root / "file", "x" * 2000),
):
    try:
        act()
    except StorageError as error:
        found.append(str(error))
print(json.dumps(found))
"""


def test_a_disk_that_takes_no_more(tmp_path: Path) -> None:
    """A limit of the system on the size of files: what was there stays, and nothing is left beside it."""
    replace(tmp_path / "folder", fill("old"), NAMES)
    replace_file(tmp_path / "file", "old")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    messages = json.loads(done.stdout)
    assert [message.split(" (")[0] for message in messages] == [
        f"{tmp_path / name} cannot be written" for name in ("folder", "file")
    ]
    assert all("File too large" in message for message in messages)
    assert read(tmp_path / "folder") == ["old"] * 2
    assert (tmp_path / "file").read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "file"}


def test_strangers_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thing").mkdir()
    (tmp_path / "thing" / "notes").write_text("mine")
    with pytest.raises(BadValueError, match=r"holds \['notes'\]; what is written replaces the folder"):
        replace(tmp_path / "thing", fill("new"), NAMES)
    assert (tmp_path / "thing" / "notes").read_text() == "mine"
