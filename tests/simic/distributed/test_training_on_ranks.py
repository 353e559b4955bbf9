"""Training on several ranks equals training in one process, bit by bit."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from simic.training.smallest import results
from simic.training.tiny import quick_config

from esper.simic.distributed import open_world
from esper.simic.training.config import TrainConfig
from esper.simic.training.follower import Follower
from esper.simic.training.trainer import Trainer

ROUNDS = 3


def train(config: TrainConfig, folder: Path, **settings: object) -> None:
    """As the command line does, on the rank of this process; rank 0 stores the last rollout."""
    with open_world() as world:
        if world.rank:
            Follower(world, config).run()
            return
        trainer = Trainer(config, folder, world=world, **settings)  # type: ignore[arg-type]  # by name
        trainer.run(progress=False)
        buffer = trainer.collector.buffer
        torch.save(buffer.rows(range(buffer.n_envs)), folder.with_suffix(".rollout"))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_rollout_and_weights_are_equal_to_the_bit(ranks: int, tmp_path: Path) -> None:
    """Three rounds: logs, the last checkpoint, and every tensor of the last rollout."""
    config = quick_config(ROUNDS, hosts=8)
    train(config, tmp_path / "one")
    ended = run_ranks(lambda rank: train(config, tmp_path / "several"), ranks, tmp_path)
    assert [rank.code for rank in ended] == [0] * ranks, ended
    one, several = (torch.load(tmp_path / f"{name}.rollout") for name in ("one", "several"))
    for name, tensor in one.items():
        assert torch.equal(several[name], tensor), name
    metrics, events, weights = results(tmp_path / "one")
    assert results(tmp_path / "several") == (metrics, events, weights)
    assert len(metrics) == ROUNDS
