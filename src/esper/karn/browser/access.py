"""Who may ask: on localhost whoever sits at this machine, elsewhere whoever knows the token.

Other pages in the same browser may not: neither under another name for this machine (DNS rebinding), nor over a
WebSocket of theirs.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from secrets import compare_digest, token_urlsafe
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

Scope = MutableMapping[str, Any]  # as ASGI defines them
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOCAL = ("localhost", "127.0.0.1", "::1")
KEY = "token"
"""The name of the token in an address"""
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; object-src 'none'; base-uri 'self'; form-action 'self'; "
    "frame-ancestors 'none'"
)
"""Nothing is loaded from elsewhere. Vue, on which nicegui stands, compiles its templates in the browser."""
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
)


def new_token() -> str:
    """A random token: 192 bits."""
    return token_urlsafe(24)


class Guard:
    """An ASGI app that answers 401 or 403 in place of another, unless the asker may see it."""

    def __init__(self, app: App, token: str | None, port: int) -> None:
        """Without a token, only requests to a local name are answered."""
        self.app, self.token, self.cookie = app, token, f"esper_{port}"  # cookies do not know ports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request or WebSocket."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get("host", ""), headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            await _refuse(scope, send, 403, "this is not a page of this server")
        elif self.token is None:
            if _hostname(host) in LOCAL:
                await self.app(scope, receive, _with_headers(send))
            else:
                await _refuse(scope, send, 403, "without a token, this server answers to localhost only")
        else:
            await self._check(scope, receive, send, headers)

    async def _check(self, scope: Scope, receive: Receive, send: Send, headers: dict[str, str]) -> None:
        """Look for the token in the cookie and in the address. One in the address moves to the cookie."""
        query = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        given = [value for key, value in query if key == KEY]
        if given and self._is_right(given[-1]) and scope["type"] == "http":
            rest = urlencode([(key, value) for key, value in query if key != KEY])
            # Relative to this server: a path of two slashes would name another.
            path = "/" + quote(scope["path"].lstrip("/\\"))
            location = path + (f"?{rest}" if rest else "")
            cookie = f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"
            sent = [(b"location", location.encode()), (b"set-cookie", cookie.encode())]
            await _answer(send, 303, b"", sent)
        elif self._is_right(_cookie(headers.get("cookie", ""), self.cookie)):
            await self.app(scope, receive, _with_headers(send))
        else:
            await _refuse(scope, send, 401, "open the address with the token that `esper serve` printed")

    def _is_right(self, given: str) -> bool:
        """Whether this is the token, in a time that does not depend on how much of it is right."""
        return self.token is not None and compare_digest(given.encode(), self.token.encode())


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _cookie(header: str, name: str) -> str:
    try:
        morsel = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return "" if morsel is None else morsel.value


def _with_headers(send: Send) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *HEADERS]}
        await send(message)

    return sending


async def _refuse(scope: Scope, send: Send, status: int, why: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
    else:
        await _answer(send, status, f"{why}\n".encode(), [(b"content-type", b"text/plain; charset=utf-8")])


async def _answer(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    sized = [*headers, (b"content-length", str(len(body)).encode())]
    await _with_headers(send)({"type": "http.response.start", "status": status, "headers": sized})
    await send({"type": "http.response.body", "body": body})
