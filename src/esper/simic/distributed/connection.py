"""How ranks meet: at a store, whose address the launcher tells, and from there over gloo, each with every other."""

import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import uuid4

from esper.leyline import EsperError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

JOIN = timedelta(minutes=5)  # that ranks may start apart: imports from a slow disk take minutes
POLL_S = 0.1
PATIENCE = timedelta(days=1)  # a rank may wait for a long round of another; lost processes break their connections


class RankLostError(EsperError, RuntimeError):
    """Another rank has gone without a message, or was never reached."""


def connect(rank: int, size: int) -> None:
    """Open torch's default process group. Raises RankLostError if not all ranks reach each other within JOIN.

    A group has one time limit, for connecting and for messages. A first group, with the short one, shows that all
    connections work; the run gets a second one."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    def open_group(name: str, timeout: timedelta) -> None:
        part = PrefixStore(f"{start}/{name}", store)
        dist.init_process_group("gloo", store=part, rank=rank, world_size=size, timeout=timeout)

    try:
        store, _, _ = next(rendezvous("env://", timeout=JOIN))
        start = _name_start(store, rank, size)
        open_group("trial", JOIN)
        dist.barrier()
        # No rank closes the first group while another still uses it.
        store.set(f"{start}/met/{rank}", "")
        store.wait([f"{start}/met/{each}" for each in range(size)], JOIN)
        dist.destroy_process_group()
        open_group("run", PATIENCE)
    except (RuntimeError, ValueError) as error:
        disconnect()
        address, port = (os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        device = os.environ.get("GLOO_SOCKET_IFNAME", "not set")
        raise RankLostError(
            f"rank {rank} of {size} did not meet the others at {address}:{port} ({str(error).splitlines()[0]}); check "
            f"that all ranks were started, that this machine reaches the address (MASTER_ADDR and MASTER_PORT, or "
            f"torchrun's --rdzv-endpoint and --local-addr), and that GLOO_SOCKET_IFNAME ({device}) is the network "
            "interface between the machines"
        ) from error


def disconnect() -> None:
    """Close all connections, if there are any."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _name_start(store: "Store", rank: int, size: int) -> str:
    """A name that only the ranks of this start agree on.

    torchrun's store outlives a restart, and would tell the addresses of processes that have ended. So rank 0 draws a
    name, each rank asks under it with a token, and rank 0 answers with that token: older answers have other ones."""
    token, deadline = uuid4().hex, time.monotonic() + JOIN.total_seconds()
    if rank == 0:
        store.set("start", token)
        store.wait([f"{token}/asked/{other}" for other in range(1, size)], JOIN)
        for other in range(1, size):
            store.set(f"{token}/answered/{other}", store.get(f"{token}/asked/{other}").decode())
        return token
    while time.monotonic() < deadline:
        start = store.get("start").decode()
        store.set(f"{start}/asked/{rank}", token)
        answer = f"{start}/answered/{rank}"
        if store.check([answer]) and store.get(answer).decode() == token:
            return start
        time.sleep(POLL_S)
    raise RuntimeError("the store is there, rank 0 is not")
