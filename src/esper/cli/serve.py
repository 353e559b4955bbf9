"""`esper serve`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from esper.karn.browser.access import LOCAL, new_token
from esper.karn.browser.server import Server, listen
from esper.leyline import BadValueError
from esper.leyline.numbers import require_whole


@dataclass(frozen=True)
class ServeCommand:
    """Show runs in the browser, live: overview, fleet, hosts as films, decisions, log, evaluations, SQL.

    Reads the run folders only. On localhost; for any other address a token is printed, without which nothing is shown.
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")] = Path("runs")
    """Folder with runs, or a run folder."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every address of this machine."""
    port: int = 8265
    """Port to listen on."""
    token: bool = False
    """Ask for a token on localhost too, where other users of this machine could look."""

    def run(self, console: Console) -> None:
        """Serve until Ctrl-C."""
        require_whole("port", self.port, 1)
        if self.port > 65535:
            raise BadValueError(f"--port {self.port} is too large; ports end at 65535")
        token = new_token() if self.token or self.host not in LOCAL else None
        app = Server(self.folder).app(token, self.port)
        named = f"[{self.host}]" if ":" in self.host else self.host
        address = f"http://{named}:{self.port}/" + (f"?token={token}" if token else "")
        console.print(f"{self.folder} is shown at {address}", markup=False, soft_wrap=True)
        if token is not None:
            console.print("whoever has this address can read these runs; it is not encrypted", soft_wrap=True)
        listen(app, self.host, self.port)
