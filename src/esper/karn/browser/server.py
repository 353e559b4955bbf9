"""The server of `esper serve`: pages by nicegui, films as files, and nothing else."""

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from esper.karn.browser.access import Guard
from esper.karn.browser.asked import asked_of
from esper.karn.browser.draw import draw_view, film_of_asked, heading, status_of, version_of
from esper.karn.browser.folder import RunFolders
from esper.karn.browser.look import head
from esper.karn.browser.runs import MOST_COMPARED, compared, run_list, summary_of
from esper.karn.browser.watched import WatchedRuns
from esper.karn.canvas import warm_up
from esper.karn.film_files import to_gif, to_picture
from esper.karn.page import Markup, element, note, page
from esper.leyline import BadValueError, EsperError, MissingPackageError

if TYPE_CHECKING:
    from fastapi import FastAPI, Response
    from nicegui.elements.html import Html

T_ = TypeVar("T_")
_FAVICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><circle cx="8" cy="8" r="7" fill="#009e73"/></svg>'
)
TICK_S = 1.0
"""How often a page asks whether its run has changed"""
PAGE_S = 60.0
"""How long a page may take to be drawn"""


class Server:
    """The pages of a folder. nicegui keeps pages in one place, so there is one server per process."""

    def __init__(self, root: Path) -> None:
        self.runs = WatchedRuns(RunFolders(root))
        # matplotlib is for one thread at a time. Films take seconds, and pages shall not wait for them.
        self._drawing = ThreadPoolExecutor(1, "esper-draw")
        self._filming = ThreadPoolExecutor(1, "esper-film")

    def app(self, token: str | None, port: int) -> Guard:
        """The whole application, behind its guard."""
        try:
            from fastapi import FastAPI
            from nicegui import ui
        except ImportError as error:
            raise MissingPackageError("esper serve", "nicegui", "esper-morph[serve]") from error

        @asynccontextmanager
        async def lifespan(_: FastAPI):  # type: ignore[no-untyped-def]  # FastAPI knows it
            self._drawing.submit(warm_up)
            with self.runs.following():
                yield

        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
        self._add_films(app)
        self._add_pages()
        ui.run_with(app, title="Esper", tailwind=False, dark=None, show_welcome_message=False, favicon=_FAVICON)
        return Guard(app, token, port)

    async def _draw(self, draw: Callable[[], T_]) -> T_:
        return await asyncio.get_running_loop().run_in_executor(self._drawing, draw)

    def _add_films(self, app: "FastAPI") -> None:
        from fastapi import Request, Response

        @app.get("/film")
        async def film(request: Request) -> Response:
            """A film as GIF, or a step of it as PNG."""
            try:
                asked = asked_of(request.query_params)
                film = await self._draw(lambda: film_of_asked(self.runs.get(asked.run), asked))
            except EsperError as error:
                return Response(f"{error}\n", 404, media_type="text/plain")
            suffix = "png" if request.query_params.get("as") == "png" else "gif"
            make = (lambda: to_picture(film, asked.step)) if suffix == "png" else (lambda: to_gif(film))
            content = await asyncio.get_running_loop().run_in_executor(self._filming, make)
            disposition = f'attachment; filename="growth.{suffix}"'
            return Response(content, media_type=f"image/{suffix}", headers={"content-disposition": disposition})

    def _add_pages(self) -> None:
        from fastapi import Request, Response
        from nicegui import ui

        @ui.page("/", response_timeout=PAGE_S)
        async def index() -> None:
            """All runs."""
            content = await self._draw(self._list)
            _compose(_top("Runs"), content)

        @ui.page("/compare", response_timeout=PAGE_S)
        async def compare(request: Request) -> Response | None:
            """Several runs side by side."""
            names = list(dict.fromkeys(request.query_params.getlist("run")))[:MOST_COMPARED]
            try:
                content = await self._draw(lambda: self._compare(names))
            except EsperError as error:
                return _not_found(error)
            _compose(_top("Runs compared"), content)
            return None

        @ui.page("/run", response_timeout=PAGE_S)
        async def run(request: Request) -> Response | None:
            """A view of a run, which follows it."""
            try:
                asked = asked_of(request.query_params)
                watched = await self._draw(lambda: self.runs.get(asked.run))
                content = await self._draw(lambda: draw_view(watched, asked))
            except EsperError as error:
                return _not_found(error)
            version = version_of(watched, asked)
            status, main = _compose(heading(watched, asked), content, status_of(watched))

            async def follow() -> None:
                nonlocal version, watched
                try:
                    watched = await self._draw(lambda: self.runs.get(asked.run))
                    status.set_content(status_of(watched))
                    if (now := version_of(watched, asked)) != version:
                        main.set_content(_joined(await self._draw(lambda: draw_view(watched, asked))))
                        version = now
                except EsperError as error:  # deleted, and no longer followed
                    status.set_content(element("b", str(error)))

            ui.timer(TICK_S, follow)
            return None

    def _list(self) -> list[Markup]:
        return run_list([summary_of(run) for run in self.runs.folders.runs()])

    def _compare(self, names: list[str]) -> list[Markup]:
        if not names:
            return [note("Choose runs in the list, then compare them.")]
        watched = {name: self.runs.get(name) for name in names}
        return compared({name: each.state for name, each in watched.items()})


def _compose(top: Markup, content: list[Markup], status: str = "") -> tuple["Html", "Html"]:
    """Put a page together; its status line and its content can be replaced. All text in them is escaped already."""
    from nicegui import ui

    ui.add_head_html(head())
    ui.html(top, sanitize=False, tag="header").classes("top")
    line = ui.html(status, sanitize=False, tag="p").classes("status")
    return line, ui.html(_joined(content), sanitize=False).classes("view")


def _joined(parts: list[Markup]) -> Markup:
    return Markup("".join(parts))


def _top(title: str) -> Markup:
    return element("div", element("h1", title), element("nav", element("a", "all runs", href="/")))


def _not_found(error: EsperError) -> "Response":
    from fastapi.responses import HTMLResponse

    back = element("p", element("a", "all runs", href="/"))
    return HTMLResponse(page("Esper", element("h1", "Not found"), element("p", str(error)), back), 404)


def listen(app: Guard, host: str, port: int) -> None:
    """Answer requests until Ctrl-C."""
    import uvicorn

    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, port))
        except OSError as error:
            raise BadValueError(f"cannot listen on {host}, port {port}: {error.strerror}; choose another") from error
        config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, proxy_headers=False)
        uvicorn.Server(config).run([bound])
