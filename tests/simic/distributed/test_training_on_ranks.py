"""Training on several ranks equals training in one process, bit by bit."""

import time
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from simic.training.smallest import results
from simic.training.tiny import quick_config

from esper.simic.distributed import open_world
from esper.simic.training.collect import RoundCollector
from esper.simic.training.config import TrainConfig
from esper.simic.training.follower import Follower
from esper.simic.training.trainer import Trainer
from esper.storage.logs import read_lines

ROUNDS = 3


def train(config: TrainConfig, folder: Path, hosts_by_rank: tuple[int, ...] | None = None) -> None:
    """As the command line does, on the rank of this process; rank 0 stores the last rollout."""
    with open_world() as world:
        if world.rank:
            Follower(world, config, hosts_by_rank=hosts_by_rank).run()
            return
        trainer = Trainer(config, folder, world=world, hosts_by_rank=hosts_by_rank)
        trainer.run(progress=False)
        buffer = trainer.collector.buffer
        torch.save(buffer.rows(range(buffer.n_envs)), folder.with_suffix(".rollout"))


@pytest.mark.parametrize(
    ("ranks", "hosts_by_rank"),
    [(2, None), (2, (8, 4)), pytest.param(4, None, marks=pytest.mark.slow)],
    ids=["2", "unequal", "4"],
)
def test_rollout_and_weights_are_equal_to_the_bit(
    ranks: int, hosts_by_rank: tuple[int, ...] | None, tmp_path: Path
) -> None:
    """Three rounds: logs, the last checkpoint, and every tensor of the last rollout."""
    config = quick_config(ROUNDS, hosts=8 if hosts_by_rank is None else sum(hosts_by_rank))
    train(config, tmp_path / "one")
    ended = run_ranks(lambda rank: train(config, tmp_path / "several", hosts_by_rank), ranks, tmp_path)
    assert [rank.code for rank in ended] == [0] * ranks, ended
    one, several = (torch.load(tmp_path / f"{name}.rollout") for name in ("one", "several"))
    for name, tensor in one.items():
        assert torch.equal(several[name], tensor), name
    metrics, events, weights = results(tmp_path / "one")
    assert results(tmp_path / "several") == (metrics, events, weights)
    assert len(metrics) == ROUNDS


@pytest.mark.slow
def test_a_straggler_is_printed_and_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that takes a second longer in four rounds is reported in the third, and only then."""
    config, play = quick_config(4), RoundCollector._play

    def slow(self: RoundCollector, round_index: int, task: int) -> object:
        time.sleep(float(self.world.rank))
        return play(self, round_index, task)

    monkeypatch.setattr(RoundCollector, "_play", slow)
    first, second = run_ranks(lambda rank: train(config, tmp_path / "run"), 2, tmp_path)
    assert (first.code, second) == (0, (0, "")), first.output
    (told,) = [line for line in read_lines(tmp_path / "run" / "sessions.jsonl") if line["kind"] == "straggled"]
    assert (told["round"], told["rank"]) == (2, 1) and told["why"].startswith("rank 1 took ")
    assert first.output == f"warning: round 2: {told['why']}\n"
    for line in read_lines(tmp_path / "run" / "metrics.jsonl"):
        ranks = line["timing"]["ranks"]
        assert ranks["wait_s"][0] > 0.5 and ranks["wait_s"][1] == 0.0 and ranks["exchanged_bytes"] > 1000
