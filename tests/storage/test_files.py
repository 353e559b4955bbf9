"""Folders and files that are whole whatever happens, and what is done about a writer that was killed."""

import json
import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import forked_process

from esper.leyline import BadValueError, StorageError
from esper.storage.files import (
    discard_folder,
    existing_folder,
    folder_lock,
    free_path,
    is_leftover,
    remove_leftovers,
    replace_file,
)
from esper.storage.files import replace_folder as replace
from esper.storage.stored import StoredFormat, write_stored

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
    "again": lambda place: files.replace_folder(place, fill("new"), ("a", "b")),
    "failing": lambda place: files.replace_folder(place, fill("new"), ("a", "b")),
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


def paths(killed: Path, verb: str) -> list[Path]:
    """What was written to, in the order of kills; several are left in every state."""
    count = len(list((killed / verb).iterdir()))
    assert count > 6
    return [killed / verb / str(at + 1) / "thing" for at in range(count)]


def test_a_folder_is_the_old_or_the_new(killed: Path) -> None:
    """Wherever the writer is killed, also between its two renames: the old is read then, and put back."""
    states, missing = [], []
    for path in paths(killed, "replace"):
        states.append(read(existing_folder(path)))
        missing.append(not path.exists())
        remove_leftovers(path.parent)
        assert [each.name for each in path.parent.iterdir()] == ["thing"]
        assert read(path) == states[-1]
    assert {state[0] for state in states} == {"old", "new"} and all(one == other for one, other in states)
    assert states == sorted(states, reverse=True), "old, from some operation on new"
    assert any(missing), "the moment between two renames is among them"


def test_a_folder_is_replaced_after_a_kill(killed: Path) -> None:
    """Without anybody tidying up before."""
    for path in paths(killed, "again"):
        assert read(existing_folder(path)) in (["old"] * 2, ["new"] * 2)
        replace(path, fill("newer"), NAMES)
        assert read(path) == ["newer"] * 2
        assert [each.name for each in path.parent.iterdir()] == ["thing"]


def test_a_folder_moved_aside_is_put_back_when_writing_fails(killed: Path) -> None:
    """The next writer finds no target, only `old`, and fails: its target is the old one."""
    (path,) = (each for each in paths(killed, "failing") if not each.exists())

    def fail(new: Path) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        replace(path, fail, NAMES)
    assert read(path) == ["old"] * 2
    assert [each.name for each in path.parent.iterdir()] == ["thing"]


def test_a_first_folder_is_there_or_not(killed: Path) -> None:
    """A half is never seen under its name."""
    there = [place.exists() for place in paths(killed, "first")]
    assert there == sorted(there) and not there[0] and there[-1]
    for place in paths(killed, "first"):
        assert not place.exists() or read(place) == ["new"] * 2
        remove_leftovers(place.parent)
        assert {path.name for path in place.parent.iterdir()} <= {"thing"}


def test_a_discarded_folder_is_there_or_not(killed: Path) -> None:
    """It does not come back either."""
    there = [place.exists() for place in paths(killed, "discard")]
    assert there == sorted(there, reverse=True) and there[0] and not there[-1]
    for place in paths(killed, "discard"):
        if place.exists():
            assert read(place) == ["old"] * 2
        remove_leftovers(place.parent)
        assert {path.name for path in place.parent.iterdir()} == ({"thing"} if place.exists() else set())


def test_a_file_is_the_old_or_the_new(killed: Path) -> None:
    texts = [place.read_text() for place in paths(killed, "file")]
    assert set(texts) == {"old", "new"} and texts == sorted(texts, reverse=True)
    for place in paths(killed, "file"):
        replace_file(place, "newer")
        assert [path.name for path in place.parent.iterdir()] == ["thing"]


# -- leftovers --------------------------------------------------------------------------------------------------------


def test_two_writers_take_turns(tmp_path: Path) -> None:
    """The second one waits for the first, and wins; nobody removes what the first one is writing."""
    begun, go = threading.Event(), threading.Event()

    def slowly(new: Path) -> None:
        fill("first")(new)
        begun.set()
        assert go.wait(30)

    first = threading.Thread(target=replace, args=(tmp_path / "thing", slowly, NAMES))
    second = threading.Thread(target=replace, args=(tmp_path / "thing", fill("second"), NAMES))
    first.start()
    assert begun.wait(30)
    remove_leftovers(tmp_path)
    second.start()
    second.join(0.2)
    assert second.is_alive() and not (tmp_path / "thing").exists()
    go.set()
    first.join()
    second.join()
    assert read(tmp_path / "thing") == ["second"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]


def test_many_writers_at_once(tmp_path: Path) -> None:
    """Each one locks the folder that it writes in, and not one that the writer before has removed."""
    errors: list[BaseException] = []

    def write(text: str) -> None:
        try:
            for _ in range(30):
                replace(tmp_path / "thing", fill(text), NAMES)
        except BaseException as error:
            errors.append(error)

    writers = [threading.Thread(target=write, args=(text,)) for text in "abcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert errors == []
    assert len(set(read(tmp_path / "thing"))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_does_not_hold_a_folder(tmp_path: Path) -> None:
    """It may outlive the one that took it; and it lets go of nothing that is still that one's."""
    with ExitStack() as child:
        with folder_lock(tmp_path):
            child.enter_context(forked_process())
            told = pytest.raises(BadValueError, match="by another process, or by another object of this one")
            with told, folder_lock(tmp_path):
                pass
        with folder_lock(tmp_path):  # the child lives
            pass


@pytest.mark.parametrize("name", [".thing", "thing.esper-tmp", ".thing.esper-tmp.old", ".thing.tmp"])
def test_other_names_are_not_leftovers(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / ".file.esper-tmp").write_text("mine")
    assert not any(is_leftover(path) for path in tmp_path.iterdir())
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {name, ".file.esper-tmp"}


def test_free_path(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    (tmp_path / "a.1").mkdir()
    assert [free_path(tmp_path / name).name for name in ("a", "b")] == ["a.2", "b"]


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
    with pytest.raises(BadValueError, match=r"holds \['notes'\], which would be lost; use a new folder"):
        replace(tmp_path / "thing", fill("new"), NAMES)
    assert (tmp_path / "thing" / "notes").read_text() == "mine"


# -- power failures ---------------------------------------------------------------------------------------------------


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is synced or renamed, in order, each by its number on the disk."""
    done: list[tuple[str, int]] = []
    fsync, rename, replaced = os.fsync, Path.rename, Path.replace

    def synced(handle: int) -> None:
        done.append(("sync", os.fstat(handle).st_ino))
        fsync(handle)

    def renamed(path: Path, target: Path) -> Path:
        done.append(("rename", path.stat().st_ino))
        return rename(path, target)

    def moved(path: Path, target: Path) -> Path:
        done.append(("rename", path.stat().st_ino))
        return replaced(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(Path, "replace", moved)
    return done


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, order: list[tuple[str, int]]) -> None:
    """And its name is, before the call returns: else a power failure could leave an empty file."""
    replace_file(tmp_path / "file", "text")
    file, folder = (path.stat().st_ino for path in (tmp_path / "file", tmp_path))
    assert order == [("sync", file), ("rename", file), ("sync", folder)]


def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path: Path, order: list[tuple[str, int]]) -> None:
    """A checkpoint: both of its files, then their names, then the folder's own."""
    kind = StoredFormat("test", 1, "thing.json", "thing.safetensors")
    write_stored(tmp_path / "thing", kind, {"a": 1}, {"x": torch.zeros(2)})
    thing = tmp_path / "thing"
    weights, document, folder, parent = (
        path.stat().st_ino for path in (thing / kind.weights, thing / kind.document, thing, tmp_path)
    )
    assert order == [
        ("sync", weights),
        ("sync", document),
        ("sync", folder),
        ("rename", folder),
        ("sync", parent),
    ]
