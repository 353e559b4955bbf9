"""Runs that begin with the controller of another."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from simic.training.smallest import close
from simic.training.tiny import quick_config

from esper.leyline import BadValueError, CheckpointError
from esper.simic.agent import PPOAgent
from esper.simic.agent.policy import write_policy
from esper.simic.training.policy_files import POLICY
from esper.simic.training.run_folder import read_config
from esper.simic.training.trainer import Trainer


@pytest.fixture
def learned(tmp_path: Path) -> Trainer:
    """A run of two rounds."""
    trainer = Trainer(quick_config(2), tmp_path / "learned")
    trainer.run(progress=False)
    return trainer


def weights(agent: PPOAgent) -> dict[str, torch.Tensor]:
    """Copies of all of them."""
    return {name: value.clone() for name, value in agent.network.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether all tensors are equal, bit for bit."""
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_begins_with_what_another_has_learnt(tmp_path: Path, learned: Trainer) -> None:
    """Weights, scales of observations, which stay, and of returns; rounds, settings and chance are its own."""
    settings = replace(learned.config, start=tmp_path / "learned", seed=5, rounds=1)
    begun, fresh = Trainer(settings, tmp_path / "begun"), Trainer(replace(settings, start=None), tmp_path / "fresh")
    taken = weights(begun.agent)
    assert same(taken, weights(learned.agent))
    assert not same(taken, weights(fresh.agent))
    scales = learned.agent.observations.statistics.state_dict()
    assert same(begun.agent.returns.statistics.state_dict(), learned.agent.returns.statistics.state_dict())
    assert begun.round == begun.agent.updates == 0
    for trainer in (begun, fresh):
        trainer.run(progress=False)
    assert not same(taken, weights(begun.agent)), "it learns"
    assert same(begun.agent.observations.statistics.state_dict(), scales)
    assert not same(fresh.agent.observations.statistics.state_dict(), scales)
    assert read_config(tmp_path / "begun") == settings


@pytest.mark.slow
def test_a_run_that_was_killed_as_it_began_begins_alike(tmp_path: Path, learned: Trainer) -> None:
    """What it started from may have gone on meanwhile, or be gone: it has a checkpoint of its own before its first
    round."""
    settings = replace(learned.config, start=tmp_path / "learned", seed=5)
    whole, part = (Trainer(settings, tmp_path / name) for name in ("whole", "part"))
    whole.run(progress=False)
    part.folder.__exit__(None, None, None)
    shutil.rmtree(tmp_path / "learned")
    again = Trainer(settings, tmp_path / "part", resume=True)
    assert again.round == 0
    with again.folder:
        again.run_round()
    last = Trainer(read_config(tmp_path / "part"), tmp_path / "part", resume=True)
    last.run(progress=False)
    assert same(weights(last.agent), weights(whole.agent))


def test_what_cannot_be_begun_with_is_refused(tmp_path: Path, learned: Trainer) -> None:
    """Nothing is left behind."""
    settings = replace(learned.config, start=tmp_path / "learned")
    ppo = settings.ppo
    other = replace(settings, ppo=replace(ppo, network=replace(ppo.network, hidden=8)))
    with pytest.raises(CheckpointError, match=r"another make.*'hidden': \(16, 8\)"):
        Trainer(other, tmp_path / "new")
    with pytest.raises(CheckpointError, match="sees other columns"):
        Trainer(replace(settings, sensing=True), tmp_path / "new")
    with pytest.raises(CheckpointError, match="another head preset"):
        Trainer(replace(settings, preset="full"), tmp_path / "new")
    with pytest.raises(BadValueError, match="nothing: there is no such policy"):
        Trainer(replace(settings, start=tmp_path / "nothing"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_policy_file_serves_as_a_start(tmp_path: Path, learned: Trainer) -> None:
    """A file alone, or the folder that holds it: the same weights and scales as from the run."""
    write_policy(tmp_path / POLICY, learned.agent, learned.config.preset)
    for start in (tmp_path / POLICY, tmp_path):
        begun = Trainer(replace(learned.config, start=start, seed=5, rounds=1), tmp_path / f"from {start.name}")
        close(begun)
        assert same(weights(begun.agent), weights(learned.agent))
        scales = [agent.observations.statistics.state_dict() for agent in (begun.agent, learned.agent)]
        assert same(*scales)
