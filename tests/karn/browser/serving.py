"""A server in a process of its own, and Debian's Chromium."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[3] / "src"
CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


@contextmanager
def server(root: Path, cache: Path, *arguments: str) -> Iterator[str]:
    """Serve a folder; the address that the command printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "esper", "serve", str(root), "--port", str(port), *arguments]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = line.split()[-1]
        assert address.startswith("http://"), line
        wait_for(f"http://127.0.0.1:{port}/")
        yield address.replace("0.0.0.0", "127.0.0.1")
    finally:
        process.terminate()
        rest, _ = process.communicate(timeout=30)
    assert "Traceback" not in rest, rest


def wait_for(address: str) -> None:
    """Until a server answers, with whatever status."""
    for _ in range(600):
        try:
            urllib.request.urlopen(address).close()
            return
        except urllib.error.HTTPError as error:
            error.close()
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(address)


def get(address: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer."""
    try:
        with urllib.request.urlopen(address) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()
