"""The controller that is shipped: small, with a model card, and usable by name wherever a policy file is."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from simic.training.smallest import close
from simic.training.tiny import make_runner, play, quick_config

from esper.leyline import CheckpointError
from esper.simic.agent.policy import fit_policy
from esper.simic.evaluation.policies import PolicySpec, make_policy, preset_of
from esper.simic.training.config import growth_ppo
from esper.simic.training.policy_files import PRETRAINED, SHIPPED, open_policy, policy_path, policy_preset
from esper.simic.training.trainer import Trainer
from esper.tolaria import get_task


def test_it_is_shipped_with_a_model_card() -> None:
    """At most 2 MB; the card says how it was made, what it scores, and where it ends."""
    assert SHIPPED.stat().st_size <= 2_000_000
    card = (SHIPPED.parent / "README.md").read_text()
    for word in ("## Recipe", "## Data", "## Scores", "## Limits", "esper train"):
        assert word in card
    assert "safetensors" in (Path(__file__).parents[3] / "pyproject.toml").read_text(), "it is part of the package"


def test_its_name_stands_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In evaluations, as the start of a run and in a Grower; a folder of that name comes first."""
    monkeypatch.chdir(tmp_path)
    assert policy_path(Path(PRETRAINED)) == SHIPPED
    assert preset_of([PRETRAINED, "wait"]) == policy_preset(Path(PRETRAINED)) == "commit"
    runner = make_runner(1, 1, "commit")
    make_policy(PolicySpec.parse(PRETRAINED), get_task("digits_blind"), runner.table)
    (tmp_path / PRETRAINED).mkdir()
    (tmp_path / PRETRAINED / SHIPPED.name).write_bytes(SHIPPED.read_bytes())
    assert policy_path(Path(PRETRAINED)) == Path(PRETRAINED) / SHIPPED.name


def test_it_grows_hosts_that_cannot_see() -> None:
    """It germinates something on hosts with 1×1 kernels."""
    runner = make_runner(2, 1, "commit")
    policy = fit_policy(open_policy(Path(PRETRAINED))[0], runner.slots, greedy=True)
    _, actions, _ = play(runner, policy)
    assert bool((torch.stack(actions)[..., 0] == 1).any())


def test_it_starts_runs_of_its_own_preset_alone(tmp_path: Path) -> None:
    """`core` has the same heads and other ops, so nothing else would tell."""
    settings = replace(quick_config(1), start=Path(PRETRAINED), sensing=True)
    with pytest.raises(CheckpointError, match="the policy has head preset commit; use --preset commit"):
        Trainer(settings, tmp_path / "core")
    begun = Trainer(replace(settings, preset="commit", ppo=growth_ppo()), tmp_path / "commit")
    taught = open_policy(Path(PRETRAINED))[0]
    assert torch.equal(begun.agent.network.actor.weight, taught.network.actor.weight)
    close(begun)
