"""Ranks that cannot reach each other say where they tried, and what to change."""

import os
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Ended, run_ranks
from torch._C._distributed_c10d import TCPStore

from esper.leyline import BadValueError
from esper.simic.distributed import Message, connection, open_world, waiting

REMEDIES = ("MASTER_ADDR", "--rdzv-endpoint", "GLOO_SOCKET_IFNAME")


@pytest.fixture
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds to meet."""
    monkeypatch.setattr(connection, "JOIN", timedelta(seconds=2))


def meet(_: int) -> None:
    """Open a world, exchange a message, and leave."""
    with open_world() as ours:
        ours.agree({})


def check(ended: Ended, *words: str) -> None:
    """Code 2, and a last line with the address and all remedies. (torch warns in the lines before.)"""
    last = ended.output.splitlines()[-1]
    assert ended.code == 2, ended
    assert last.startswith("esper: rank ") and all(word in last for word in (*words, *REMEDIES)), last


@pytest.mark.usefixtures("little_patience")
@pytest.mark.default_cases("0")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_alone(rank: int, tmp_path: Path) -> None:
    """Rank 0 waits for rank 1 at its store; rank 1 finds no store."""

    def come(mine: int) -> None:
        if mine == rank:
            meet(mine)

    ended = run_ranks(come, 2, tmp_path)[rank]
    check(ended, f"rank {rank} of 2", "127.0.0.1:")


@pytest.mark.usefixtures("little_patience")
def test_a_name_of_no_machine(tmp_path: Path) -> None:
    """A wrong MASTER_ADDR: the rank that has it names it."""

    def come(rank: int) -> None:
        if rank:
            os.environ["MASTER_ADDR"] = "nowhere.invalid"
            meet(rank)

    check(run_ranks(come, 2, tmp_path)[1], "nowhere.invalid:")


@pytest.mark.usefixtures("little_patience")
def test_a_network_interface_that_does_not_exist(tmp_path: Path) -> None:
    """The rank with the wrong name says it; the other one ends within its patience."""

    def come(rank: int) -> None:
        if rank:
            os.environ["GLOO_SOCKET_IFNAME"] = "eth99"
        meet(rank)

    first, second = run_ranks(come, 2, tmp_path)
    check(first, "GLOO_SOCKET_IFNAME (lo)")
    check(second, "Unable to find address for: eth99", "GLOO_SOCKET_IFNAME (eth99)")


@pytest.mark.usefixtures("little_patience")
def test_a_port_that_is_no_number(tmp_path: Path) -> None:
    """It is part of the address."""
    ended = run_ranks(meet, 2, tmp_path, MASTER_PORT="first")
    for each in ended:
        check(each, "127.0.0.1:first")


@pytest.mark.slow
def test_ranks_wait_longer_for_messages_than_to_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of another rank may take longer than meeting does."""
    monkeypatch.setattr(connection, "JOIN", timedelta(seconds=3))

    def come(rank: int) -> None:
        with open_world() as ours:
            if rank:
                time.sleep(3.5)
            ours.gather(Message({}, {}))
            ours.agree({})

    assert [rank.code for rank in run_ranks(come, 2, tmp_path)] == [0, 0]


def stop(seconds: float) -> None:
    """Stop this process; another one lets it continue."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.default_cases("gather")
@pytest.mark.parametrize(("shared", "whom"), [(False, "rank 1"), (True, "another rank")], ids=["gather", "share"])
def test_a_rank_that_is_frozen(shared: bool, whom: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 warns again and again, ever more rarely; when the rank continues, so do all."""
    monkeypatch.setattr(waiting, "FIRST_S", 0.25)
    many = Message({"much": torch.zeros(10_000_000)}, {})  # more than the connection holds

    def come(rank: int) -> None:
        with open_world() as ours:
            ours.agree({})
            if rank:
                stop(2.5)
            if shared:
                ours.share(None if rank else many)
            ours.gather(Message({}, {}))

    first, second = run_ranks(come, 2, tmp_path)
    assert (first.code, second) == (0, (0, "")), first.output
    waits = [line.partition(";")[0] for line in first.output.splitlines()]
    assert waits[:3] == [f"warning: rank 0 has waited {seconds} s for {whom}" for seconds in ("0.25", "0.5", "1")]


@pytest.mark.parametrize("error", [None, BadValueError, ZeroDivisionError, SystemExit])
def test_connections_are_closed_at_the_end(error: type[BaseException] | None, tmp_path: Path) -> None:
    """However a run ends on rank 0."""

    def come(rank: int) -> None:
        try:
            with open_world() as ours:
                ours.agree({})
                if error is not None and rank == 0:
                    raise error("the end")
        except BaseException as raised:
            assert type(raised) is error
        print("open" if dist.is_initialized() else "closed")

    first = run_ranks(come, 2, tmp_path)[0]
    assert (first.code, first.output) == (0, "closed\n")


def test_a_store_that_remembers_the_ranks_of_an_earlier_start(tmp_path: Path) -> None:
    """torchrun's store outlives a restart. The new rank 1 comes first, and must not take the old rank 0 for the new."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}

    def come_late(rank: int) -> None:
        if rank == 0:
            time.sleep(1.0)
        meet(rank)

    for come in (meet, come_late):
        assert [rank.code for rank in run_ranks(come, 2, tmp_path, **shared)] == [0, 0]


@pytest.mark.usefixtures("little_patience")
def test_a_store_without_rank_0(tmp_path: Path) -> None:
    """The store of an earlier start answers, but nobody else does."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("start", "earlier")
    shared = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ended = run_ranks(lambda rank: meet(rank) if rank else None, 2, tmp_path, **shared)
    check(ended[1], "rank 0 is not")
