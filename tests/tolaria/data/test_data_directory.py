"""Where data is looked for, and that a fetched file is whole and verified or not there."""

import hashlib
import io
import os
import time
import urllib.request
from email.message import Message
from pathlib import Path
from typing import NoReturn
from urllib.error import HTTPError, URLError

import pytest

from esper.leyline.errors import DataError
from esper.tolaria.data import directory
from esper.tolaria.data.directory import RemoteFile, data_directory, fetch, locate

CONTENT = b"forty-two" * 1000


def remote(*urls: str, content: bytes = CONTENT, algorithm: str = "md5") -> RemoteFile:
    if algorithm == "md5":
        return RemoteFile("file.bin", len(content), "md5", hashlib.md5(content).hexdigest(), urls)
    return RemoteFile("file.bin", len(content), "sha256", hashlib.sha256(content).hexdigest(), urls)


@pytest.fixture
def mirror(tmp_path: Path) -> str:
    """Address of a mirror that needs no network."""
    path = tmp_path / "mirror.bin"
    path.write_bytes(CONTENT)
    return path.as_uri()


def test_given_comes_before_environment_before_cache(
    tmp_path: Path, private_surroundings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert data_directory() == private_surroundings / "esper" / "data"
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "from-environment"))
    assert data_directory() == tmp_path / "from-environment"
    assert data_directory(tmp_path / "given") == tmp_path / "given"
    assert data_directory(str(tmp_path / "given")) == tmp_path / "given"


def test_empty_settings_count_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPER_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_directory("") == tmp_path / ".cache" / "esper" / "data"


@pytest.mark.parametrize("algorithm", ["md5", "sha256"])
def test_fetches_a_missing_file_once(tmp_path: Path, mirror: str, algorithm: str) -> None:
    wanted = remote(mirror, algorithm=algorithm)
    folder = tmp_path / "data" / "set"
    assert locate(wanted, folder).read_bytes() == CONTENT
    assert os.listdir(folder) == ["file.bin"]
    Path(tmp_path / "mirror.bin").unlink()
    assert locate(wanted, folder) == folder / "file.bin"


def test_goes_on_to_the_next_address(tmp_path: Path, mirror: str) -> None:
    bad = tmp_path / "bad.bin"
    bad.write_bytes(CONTENT[::-1])
    urls = (bad.as_uri(), (tmp_path / "absent.bin").as_uri(), mirror)
    assert fetch(remote(*urls), tmp_path / "set").read_bytes() == CONTENT


def assert_refused(wanted: RemoteFile, folder: Path, *words: str) -> None:
    """Fetching fails, the message holds what a user needs, and nothing is left behind."""
    with pytest.raises(DataError) as caught:
        locate(wanted, folder)
    path = str(folder / wanted.name)
    for word in (wanted.name, wanted.digest, path, *wanted.urls, "ESPER_DATA", "--data-dir", *words):
        assert word in str(caught.value)
    assert os.listdir(folder) == []


def test_no_network(tmp_path: Path) -> None:
    assert_refused(remote("http://localhost:9/file.bin"), tmp_path / "set", "unreachable")


def test_no_name_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise URLError("Temporary failure in name resolution")

    monkeypatch.setattr(urllib.request, "urlopen", fail)
    assert_refused(remote("https://nowhere.example/file.bin"), tmp_path / "set", "name resolution")


def test_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise HTTPError("https://nowhere.example/file.bin", 404, "Not Found", Message(), io.BytesIO())

    monkeypatch.setattr(urllib.request, "urlopen", fail)
    assert_refused(remote("https://nowhere.example/file.bin"), tmp_path / "set", "HTTP 404 Not Found")


@pytest.mark.parametrize(
    ("delivered", "word"),
    [
        (CONTENT[:-1] + b"!", "delivered md5"),
        (CONTENT[:-1], "delivered 8999 bytes instead of 9000"),
        (CONTENT + b"!", "delivered more than 9000 bytes"),
    ],
    ids=["tampered", "truncated", "too long"],
)
def test_wrong_bytes_are_thrown_away(tmp_path: Path, delivered: bytes, word: str) -> None:
    source = tmp_path / "mirror.bin"
    source.write_bytes(delivered)
    assert_refused(remote(source.as_uri()), tmp_path / "set", word)


def test_an_interrupted_download_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell():
                raise KeyboardInterrupt
            return super().read(10)

    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: Interrupted(CONTENT))
    with pytest.raises(KeyboardInterrupt):
        fetch(remote("https://nowhere.example/file.bin"), tmp_path / "set")
    assert os.listdir(tmp_path / "set") == []


def test_a_present_file_is_verified_and_never_replaced(tmp_path: Path, mirror: str) -> None:
    wanted = remote(mirror)
    path = tmp_path / wanted.name
    for content, word in ((b"short", "5 bytes instead of 9000"), (CONTENT[::-1], wanted.digest)):
        path.write_bytes(content)
        with pytest.raises(DataError, match=word) as caught:
            locate(wanted, tmp_path)
        assert str(path) in str(caught.value)
        assert path.read_bytes() == content


def test_a_read_only_directory_is_read_and_not_written(tmp_path: Path, mirror: str) -> None:
    # Root can write anywhere, so this also tests that the mode of the folder is respected.
    folder = tmp_path / "read-only"
    folder.mkdir()
    (folder / "file.bin").write_bytes(CONTENT)
    folder.chmod(0o555)
    try:
        assert locate(remote(mirror), folder).read_bytes() == CONTENT
        for missing in (folder, folder / "set"):
            absent = RemoteFile("absent.bin", 1, "md5", "0" * 32, (mirror,))
            with pytest.raises(DataError, match="read-only"):
                locate(absent, missing)
        assert os.listdir(folder) == ["file.bin"]
    finally:
        folder.chmod(0o755)


def test_a_file_in_place_of_the_folder(tmp_path: Path, mirror: str) -> None:
    (tmp_path / "set").write_bytes(b"")
    with pytest.raises(DataError, match=r"file\.bin"):
        locate(remote(mirror), tmp_path / "set")


def test_of_several_processes_one_fetches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it, and find the file."""
    content, told = b"numbers", tmp_path / "told.txt"
    remote = RemoteFile("file", len(content), "sha256", hashlib.sha256(content).hexdigest(), ("https://a.invalid",))

    def download(url: str, wanted: RemoteFile) -> bytes:
        with told.open("a") as log:
            log.write("!")
        time.sleep(0.3)
        return content

    monkeypatch.setattr(directory, "_download", download)
    children = []
    for _ in range(3):
        if not (child := os.fork()):
            os._exit(0 if locate(remote, tmp_path / "data").read_bytes() == content else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 3
    assert told.read_text() == "!"
