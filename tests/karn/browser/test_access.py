"""Who is answered, and what of a folder can be read."""

import asyncio
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest
from karn.run_folders import write_growth, write_run

from esper.karn.browser.access import Guard, Receive, Scope, Send, new_token
from esper.karn.browser.asked import Asked, asked_of
from esper.karn.browser.folder import RunFolders
from esper.karn.browser.watched import Watched, WatchedRuns
from esper.leyline import BadValueError

TOKEN = "right-token"


async def secret(scope: Scope, receive: Receive, send: Send) -> None:
    """What a guard stands before."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
    else:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"secret"})


def answers(token: str | None, path: str = "/", query: str = "", kind: str = "http", **headers: str) -> list[Any]:
    """The messages that a guard sends."""
    named = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope: Scope = {"type": kind, "path": path, "query_string": query.encode(), "headers": named}
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> MutableMapping[str, Any]:
        return {}

    asyncio.run(Guard(secret, token, 8265)(scope, receive, send))
    return sent


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "localhost:8265"}, 200),
        ({"host": "127.0.0.1:8265"}, 200),
        ({"host": "[::1]:8265"}, 200),
        ({"host": "evil.example:8265"}, 403),
        ({"host": "localhost.evil.example"}, 403),
        ({"host": "[::1"}, 403),
        ({}, 403),
        ({"host": "localhost:8265", "origin": "http://localhost:8265"}, 200),
        ({"host": "localhost:8265", "origin": "http://evil.example"}, 403),
        ({"host": "localhost:8265", "origin": "null"}, 403),
    ],
)
def test_on_localhost(headers: dict[str, str], status: int) -> None:
    """Without a token, only pages of this server under a local name are answered: for all else it is another's."""
    first, last = answers(None, **headers)
    assert first["status"] == status
    assert (last["body"] == b"secret") == (status == 200)


@pytest.mark.parametrize(
    ("cookie", "query", "status"),
    [
        ("", "", 401),
        ("esper_8265=wrong", "", 401),
        ("esper_8265=", "", 401),
        ("other=right-token", "", 401),
        ("esper_8265=right-tokens", "", 401),
        ("esper_8265=right-token", "", 200),
        ("a=b; esper_8265=right-token", "run=x", 200),
        ("", "token=wrong", 401),
        ("", "token=", 401),
        ("", "TOKEN=right-token", 401),
        ("", "token=right-token", 303),
        ("esper_8265=wrong", "token=right-token", 303),
        ("", "token=r%C3%A9", 401),
        ('=;;="', "", 401),
    ],
)
def test_with_a_token(cookie: str, query: str, status: int) -> None:
    """From the cookie, or from the address, which then moves it to the cookie. Any host may ask."""
    first, last = answers(TOKEN, query=query, host="here.example:8265", cookie=cookie)
    assert first["status"] == status
    assert (last["body"] == b"secret") == (status == 200)
    assert TOKEN not in str(last)


def test_the_token_moves_to_a_cookie() -> None:
    """It is gone from the address, which people share; the rest of the query stays, and no address leads elsewhere."""
    first, _ = answers(TOKEN, "/run", "run=a%2Fb&token=right-token&view=log", host="here")
    headers = dict(first["headers"])
    assert headers[b"location"] == b"/run?run=a%2Fb&view=log"
    assert headers[b"set-cookie"] == b"esper_8265=right-token; Path=/; HttpOnly; SameSite=Strict"
    for path in ("//evil.example/x", "/\\evil.example", "\\\\evil.example"):
        first, _ = answers(TOKEN, path, "token=right-token", host="here")
        assert dict(first["headers"])[b"location"].startswith(b"/evil.example")


def test_web_sockets_are_guarded_too() -> None:
    """Closed before they are accepted; a token in their address does not count."""
    assert [each["type"] for each in answers(TOKEN, kind="websocket", host="h")] == ["websocket.close"]
    assert answers(TOKEN, query="token=right-token", kind="websocket", host="h")[0]["type"] == "websocket.close"
    right = answers(TOKEN, kind="websocket", host="h", cookie="esper_8265=right-token")
    assert right[0]["type"] == "websocket.accept"
    strange = answers(None, kind="websocket", host="localhost", origin="http://evil.example")
    assert strange[0]["type"] == "websocket.close"


def test_nothing_from_elsewhere_is_loaded() -> None:
    """Browsers are told so, in every answer."""
    for token in (None, TOKEN):
        headers = dict(answers(token, host="localhost")[0]["headers"])
        policy = headers[b"content-security-policy"].decode()
        assert "default-src 'self'" in policy
        assert "//" not in policy
        assert headers[b"x-content-type-options"] == b"nosniff"


def test_tokens() -> None:
    """Random, and long enough not to be guessed."""
    assert len({new_token() for _ in range(100)}) == 100
    assert len(new_token()) >= 32


def test_runs_of_a_folder(tmp_path: Path) -> None:
    """Runs in folders and their folders; hidden ones are not listed; a run folder itself is one too."""
    (tmp_path / "deep" / ".hidden").mkdir(parents=True)
    write_run(tmp_path / "one")
    write_growth(tmp_path / "deep" / "two")
    write_run(tmp_path / "deep" / ".hidden" / "three")
    assert sorted(run.name for run in RunFolders(tmp_path).runs()) == ["deep/two", "one"]
    assert [run.name for run in RunFolders(tmp_path / "one").runs()] == ["."]
    with pytest.raises(BadValueError, match=r"is no folder; name a run"):
        RunFolders(tmp_path / "missing")


@pytest.fixture
def served(tmp_path: Path) -> RunFolders:
    """A folder with one run, beside another folder that is not served, and links that lead there."""
    inside, outside = tmp_path / "runs", tmp_path / "private"
    inside.mkdir()
    write_run(outside)
    (outside / "evaluation.json").write_text("{}")
    write_run(inside / "own")
    (inside / "linked").symlink_to(outside)
    (inside / "files").mkdir()
    for name in ("config.json", "metrics.jsonl", "events.jsonl"):
        (inside / "files" / name).symlink_to(outside / name)
    (inside / "own" / "evaluation.json").symlink_to(outside / "evaluation.json")
    return RunFolders(inside)


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "../private",
        "own/../../private",
        "%2e%2e/private",
        "/etc",
        "linked",
        "files",
        "own/",
        "OWN",
        "",
        "\x00",
        "~",
    ],
)
def test_no_name_leads_out(served: RunFolders, name: str) -> None:
    """Neither by dots, nor encoded, nor absolute, nor by a link."""
    assert [run.name for run in served.runs()] == ["own"]
    with pytest.raises(BadValueError, match="there is no run"):
        served.find(name)


def test_no_file_leads_out(served: RunFolders, tmp_path: Path) -> None:
    """Evaluations that are links are not read; nor is a log that becomes one while it is watched."""
    own = served.find("own")
    assert served.evaluations(own) == []
    assert served.file(own, "config.json") is not None
    assert served.file(own, "..", "..", "private", "config.json") is None
    watched = Watched(served, own)
    watched.poll(0.01)
    (own.path / "live.jsonl").symlink_to(tmp_path / "private" / "events.jsonl")
    with pytest.raises(BadValueError, match=r"own/live\.jsonl leads out of the folder and is not read"):
        watched.poll(0.01)


def test_a_link_inside_the_folder_is_no_way_out(served: RunFolders) -> None:
    """A file may be a link to another of the same folder."""
    own = served.find("own")
    (own.path / "evaluation-2.json").symlink_to(own.path / "config.json")
    assert [path.name for path in served.evaluations(own)] == ["evaluation-2.json"]


def test_runs_are_followed_once(served: RunFolders) -> None:
    """Whoever asks gets the same follower; a name that is none is an error."""
    runs = WatchedRuns(served)
    assert runs.get("own") is runs.get("own")
    assert runs.get("own").state.complete == 1
    with pytest.raises(BadValueError, match="there is no run 'linked'"):
        runs.get("linked")


def test_addresses() -> None:
    """An address says everything that a page shows; what is wrong in it is named."""
    asked = Asked("a/b c", "host", 3, 12, 7, "")
    assert asked.link() == "/run?run=a%2Fb+c&view=host&round=3&host=12&step=7"
    assert asked_of({"run": "a/b c", "view": "host", "round": "3", "host": "12", "step": "7"}) == asked
    assert asked.link(round=None, step=None) == "/run?run=a%2Fb+c&view=host&host=12"
    assert asked.film("png") == "/film?run=a%2Fb+c&round=3&host=12&step=7&as=png"
    assert asked_of({}) == Asked(".")
    with pytest.raises(BadValueError, match="no view 'files'; the views are overview"):
        asked_of({"view": "files"})
    for wrong in ("-1", "1e3", "٣", "9999999999", "x" * 100):
        with pytest.raises(BadValueError, match="it should be a number"):
            asked_of({"round": wrong})
