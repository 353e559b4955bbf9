"""Fixtures for the readers: the real sets where they are at hand, a private cache, and no network."""

import os
import socket
from pathlib import Path
from typing import NoReturn

import pytest

# Read before the fixture below hides it from the code under test.
_CONFIGURED = os.environ.get("ESPER_DATA")
_BESIDE_THE_REPOSITORY = Path(__file__).resolve().parents[4] / "shared" / "data"


@pytest.fixture(autouse=True)
def private_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache of this test's own; neither ESPER_DATA nor the network can be reached."""

    def refuse(*_: object) -> NoReturn:
        raise OSError("the network is unreachable")

    cache = tmp_path / "user-cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.delenv("ESPER_DATA", raising=False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return cache


@pytest.fixture
def real_data() -> Path:
    """The folder with the real sets, of which any may be missing."""
    folder = Path(_CONFIGURED).resolve() if _CONFIGURED else _BESIDE_THE_REPOSITORY
    if not folder.is_dir():
        pytest.skip(f"no data directory at {folder}; set ESPER_DATA")
    return folder
