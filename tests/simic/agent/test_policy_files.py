"""Policies in files: what was written is what acts, and nothing else is accepted."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from esper.leyline import CheckpointError
from esper.simic.agent import PPOAgent, PPOConfig
from esper.simic.agent.policy import read_policy, write_policy
from esper.tamiyo import NetworkConfig, discrete_table, vector_layout
from esper.tamiyo.memory import MemoryKind

TABLE, LAYOUT = discrete_table([3, 2]), vector_layout(5)


def make_agent(memory: MemoryKind = "lstm") -> PPOAgent:
    """A small agent that has seen something."""
    config = PPOConfig(network=NetworkConfig(8, 1, 8, 8, memory=memory, head_gain=1.0))
    agent = PPOAgent(TABLE, LAYOUT, config, rng_seed=3)
    agent.observations.update(torch.randn(50, 5) * 3 + 1)
    return agent


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A policy file."""
    write_policy(tmp_path / "policy.safetensors", make_agent(), "core")
    return tmp_path / "policy.safetensors"


@pytest.mark.parametrize("memory", ["lstm", "window", "off"])
def test_it_acts_as_it_did(memory: MemoryKind, tmp_path: Path) -> None:
    """Over several steps, to the bit; its statistics no longer move."""
    agent = make_agent(memory)
    write_policy(tmp_path / "file", agent, "core")
    again, preset = read_policy(tmp_path / "file")
    assert (preset, again.observations.frozen) == ("core", True)
    states = [each.network.initial_state(4) for each in (agent, again)]
    for step in range(6):
        raw, uniform = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)), torch.full((4, 2), 0.3)
        found = []
        for index, each in enumerate((agent, again)):
            decision, values, states[index] = each.act(
                each.normalise(raw), TABLE.open_masks(4), states[index], uniform=uniform
            )
            found.append((decision.actions, decision.log_probs, values))
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_it_is_readable_without_esper(path: Path) -> None:
    """safetensors and JSON."""
    with safe_open(path, "pt") as file:
        content = json.loads(file.metadata()["content"])
    assert content["network"]["hidden"] == 8
    assert [head["name"] for head in content["table"]["heads"]] == ["action0", "action1"]
    assert load_file(path)["network.actor.weight"].shape == (8, 8)


def test_damage_is_noticed(path: Path, tmp_path: Path) -> None:
    """A changed byte, a truncated file, another format, another version, no file."""
    raw = path.read_bytes()
    changed = tmp_path / "changed"
    changed.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="changed or damaged"):
        read_policy(changed)
    changed.write_bytes(raw[:-9])
    with pytest.raises(CheckpointError, match="is no policy file, or it is truncated"):
        read_policy(changed)
    save_file({"a": torch.zeros(1)}, changed)
    with pytest.raises(CheckpointError, match="its format is None, not 'esper-policy'"):
        read_policy(changed)
    with safe_open(path, "pt") as file:
        header = file.metadata()
    save_file(load_file(path), changed, {**header, "version": "99"})
    with pytest.raises(CheckpointError, match="version 99 of esper-policy; this Esper reads version 1"):
        read_policy(changed)
    with pytest.raises(CheckpointError, match="there is no such file"):
        read_policy(tmp_path / "nothing")


def test_a_forged_network_is_refused_before_it_is_built(path: Path) -> None:
    """A width for which no machine has the memory."""
    from esper.simic.agent.policy import POLICY_FILE
    from esper.storage.tensor_files import read_tensor_file, write_tensor_file

    content, tensors = read_tensor_file(path, POLICY_FILE)
    content["network"]["hidden"] = 40_000_000
    write_tensor_file(path, POLICY_FILE, content, tensors)
    with pytest.raises(CheckpointError, match="this agent needs"):
        read_policy(path)
