"""Ranks that are forked from a test: processes that meet over gloo on the loopback device."""

import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from esper.leyline import EsperError

LIMIT_S = 120


class Ended(NamedTuple):
    """How a rank ended, and what it printed."""

    code: int
    output: str


def run_ranks(work: Callable[[int], None], size: int, folder: Path, **environment: str) -> list[Ended]:
    """Let each rank do the work, which gets its number; errors end like those of the command line."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | environment
    children = [_fork(work, rank, folder / f"rank-{rank}.txt", world) for rank in range(size)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return [Ended(code, (folder / f"rank-{rank}.txt").read_text()) for rank, code in enumerate(codes)]


def _fork(work: Callable[[int], None], rank: int, output: Path, environment: dict[str, str]) -> int:
    sys.stdout.flush()
    if child := os.fork():
        return child
    code = 1
    try:
        with output.open("w") as file:
            for handle in (1, 2):
                os.dup2(file.fileno(), handle)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
            try:
                work(rank)
                code = 0
            except EsperError as error:
                print(f"esper: {error}")
                code = 2
            except SystemExit as error:
                code = int(error.code or 0)
            except BaseException:
                traceback.print_exc(file=sys.stdout)
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        os._exit(code)
