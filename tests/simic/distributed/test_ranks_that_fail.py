"""One clear message from rank 0, an exit code other than 0, and nothing half-written, whatever is wrong."""

import os
import signal
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from ranks import Ended, run_ranks
from simic.training.tiny import quick_config

from esper.leyline import BadValueError, DataError
from esper.simic.distributed import Stragglers, divide_hosts, open_world, world
from esper.simic.training.collect import RoundCollector
from esper.simic.training.config import TrainConfig
from esper.simic.training.follower import Follower
from esper.simic.training.trainer import Trainer
from esper.storage.logs import read_lines


def train(config: TrainConfig, folder: Path, hosts_by_rank: tuple[int, ...] | None = None) -> None:
    """On the rank of this process."""
    warnings.simplefilter("ignore", RuntimeWarning)  # of a run without checkpoints
    with open_world() as ours:
        if ours.rank:
            Follower(ours, config, hosts_by_rank=hosts_by_rank).run()
        else:
            Trainer(config, folder, world=ours, hosts_by_rank=hosts_by_rank).run(progress=False)


def check(ended: list[Ended], folder: Path, *words: str) -> None:
    """The message is rank 0's alone, and the run's folder was not made."""
    first, *others = ended
    assert [rank.code for rank in ended] == [2] * len(ended), ended
    assert all(word in first.output for word in words), first.output
    assert first.output.count("\n") == 1
    assert not any(rank.output for rank in others)
    assert not folder.exists()


def test_more_ranks_than_groups(tmp_path: Path) -> None:
    """Two groups cannot be divided among three."""
    config = quick_config()
    ended = run_ranks(lambda rank: train(config, tmp_path / "run"), 3, tmp_path)
    check(ended, tmp_path / "run", "3 ranks are more than the 2 groups", "at most 2 ranks")


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (
            (8, 8),
            (8, 8),
            "hosts by rank [8, 8]: 2 numbers with sum 16; give one for each of 2 ranks, which add up to 12",
        ),
        ((9, 3), (9, 3), "hosts by rank [9, 3]: a rank has whole groups; use multiples of 2"),
        ((8, 4), (4, 8), "rank 1 differs from rank 0: hosts_by_rank [4, 8], not [8, 4]"),
    ],
    ids=["sum", "groups", "differ"],
)
def test_wrong_hosts_by_rank(first: tuple[int, ...], second: tuple[int, ...], words: str, tmp_path: Path) -> None:
    """A wrong sum, half a group, and ranks that were told different shares."""
    config = quick_config(hosts=12)
    ended = run_ranks(lambda rank: train(config, tmp_path / "run", (first, second)[rank]), 2, tmp_path)
    check(ended, tmp_path / "run", words)


def test_other_settings(tmp_path: Path) -> None:
    """The message names the setting, both values and the rank."""
    config = quick_config()
    ended = run_ranks(lambda rank: train(replace(config, seed=rank), tmp_path / "run"), 2, tmp_path)
    check(ended, tmp_path / "run", "rank 1 differs from rank 0: settings/seed 1, not 0")


def test_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest of the sources is compared."""
    config = quick_config()
    monkeypatch.setattr(world, "source_digest", lambda: os.environ["RANK"])
    ended = run_ranks(lambda rank: train(config, tmp_path / "run"), 2, tmp_path)
    check(ended, tmp_path / "run", "rank 1 differs from rank 0: code '1', not '0'")


def test_a_rank_without_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own error, told by rank 0."""
    config = quick_config()

    def work(rank: int) -> None:
        if rank:
            monkeypatch.setattr("esper.simic.training.follower.make_runner", missing)
        train(config, tmp_path / "run")

    def missing(*_: object, **__: object) -> None:
        raise DataError("digits.csv is not here; fetch it")

    ended = run_ranks(work, 2, tmp_path)
    check(ended, tmp_path / "run", "rank 1: digits.csv is not here; fetch it")


def test_all_ranks_stop_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM to one of them: the round is completed, and all end alike."""
    config, collect = quick_config(3), RoundCollector.collect

    def stop(rank: int) -> None:
        def collect_and_stop(self: RoundCollector, round_index: int) -> object:
            if rank and round_index == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return collect(self, round_index)

        monkeypatch.setattr(RoundCollector, "collect", collect_and_stop)
        train(config, tmp_path / "run")

    first, second = run_ranks(stop, 2, tmp_path)
    assert (first.code, second.code) == (0, 0)  # the command line makes it 130
    assert "stopped after round 2; continue with --resume" in first.output
    assert len(list(read_lines(tmp_path / "run" / "metrics.jsonl"))) == 2


def test_shares() -> None:
    """By hand: 7 groups of 3 and a control on 3 ranks; then unequal ones."""
    assert [share.groups for share in divide_hosts(28, 3, 1, 3)] == [range(3), range(3, 5), range(5, 7)]
    assert [share.groups for share in divide_hosts(24, 1, 2, 2, (16, 8))] == [range(4), range(4, 6)]
    for bad, words in (((16, 4), "add up to 24"), ((24,), "one for each of 2"), ((14, 10), "multiples of 4")):
        with pytest.raises(BadValueError, match=words):
            divide_hosts(24, 1, 2, 2, bad)


def test_a_straggler_is_reported_once() -> None:
    """After three rounds in a row in which it took more than 1.5 times as long."""
    watch = Stragglers()
    told = [watch.look(seconds) for seconds in ([1, 2, 1], [1, 2, 1], [1, 2, 1], [1, 2, 1], [1, 1.4, 1])]
    assert [[rank for rank, _ in found] for found in told] == [[], [], [1], [], []]
    assert "rank 1 took 2 s" in told[2][0][1]
