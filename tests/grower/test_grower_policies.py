"""Policies of a grower: the folder of a trained run, random actions, and the rule that spreads the budget."""

from dataclasses import replace
from pathlib import Path

import pytest
from loops import digits, loader, make, train_epoch

from esper.grower.rules import spread
from esper.leyline import BlueprintOffer, CheckpointError, SlotConfig, head_preset
from esper.simic.agent import PPOAgent, PPOConfig
from esper.simic.agent.policy import write_policy
from esper.simic.training.config import TrainConfig
from esper.simic.training.trainer import Trainer
from esper.storage.logs import read_lines
from esper.tamiyo import NetworkConfig, growth_layout, growth_table
from esper.tolaria import get_task

DATA = digits(200)
VALIDATION = digits(300)[0][200:], digits(300)[1][200:]


@pytest.mark.slow
def test_a_learned_policy_decides_and_resumes(tmp_path: Path) -> None:
    """It was trained on a fleet with other slots; after a resume it decides as if nothing had happened."""
    run = tmp_path / "run"
    Trainer(TrainConfig(task="digits_blind", rounds=1, hosts=4), run).run(progress=False)
    model, optimizer, grower = make(policy=run, budget=3000)
    for epoch in range(2):
        train_epoch(model, optimizer, DATA, epoch)
        grower.step(loader(VALIDATION))
    again, other, resumed = make(policy=str(run), budget=3000)
    again.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    for net, own in ((model, optimizer), (again, other)):
        train_epoch(net, own, DATA, 2)
    assert str(resumed.step(loader(VALIDATION))) == str(grower.step(loader(VALIDATION)))
    assert grower.report().offers["stage1"]  # its slots were probed


def test_a_policy_file_that_knows_fewer_blueprints(tmp_path: Path) -> None:
    """It is offered those that it knows, by name; others are never chosen."""
    slots = replace(get_task("digits_blind").slot_config.slots[0], blueprints=())
    known = ("conv_small", "depthwise")
    offers = tuple(BlueprintOffer(name, 1, 1, 10) for name in known)
    config = SlotConfig((replace(slots, blueprints=offers),))
    table, layout = growth_table(head_preset("core"), config), growth_layout(config)
    eager = NetworkConfig(first_bias=(-9.0, 9.0, 0.0, 0.0, 0.0, 0.0))  # germinate whenever that is legal
    write_policy(tmp_path / "file", PPOAgent(table, layout, PPOConfig(network=eager)), "core")
    model, optimizer, grower = make(policy=tmp_path / "file", budget=3000, folder=tmp_path / "run")
    for epoch in range(3):
        train_epoch(model, optimizer, DATA, epoch)
        record = grower.step(loader(VALIDATION))
        for chances in record.choices.values():
            assert abs(sum(chances.values()) - 1) < 0.01
    grown = {seed.blueprint for seed in grower.report().slots.values()} - {None}
    assert grown and grown <= set(known)
    logged = [line for line in read_lines(tmp_path / "run" / "events.jsonl") if line["kind"] == "followed"]
    assert logged and set(logged[0]["choices"][0]["blueprint"]) <= set(known)


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    """The error says what is missing."""
    model, optimizer, _ = make(policy=tmp_path)
    with pytest.raises(CheckpointError, match="holds no policy"):
        train_epoch(model, optimizer, DATA)


def test_the_budget_is_spread_by_cheapest_upgrade() -> None:
    """By hand: 10 → a small; 20 → b small; +40 → a large; +80 for b large does not fit into 120."""
    costs = {"a": {"small": 10, "large": 50}, "b": {"small": 20, "large": 100}}
    assert spread(costs, 120) == {"a": "large", "b": "small"}
    assert spread(costs, 150) == {"a": "large", "b": "large"}
    assert spread(costs, 9) == {}
