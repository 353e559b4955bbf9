"""An agent on disk: a folder with `agent.json` and `agent.safetensors`, enough to resume training exactly.

It holds weights, Adam's moments, statistics of observations and returns, the generator's state, counters and the
configuration. Loading checks everything before it builds an agent, and executes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.leyline import CheckpointError
from esper.leyline.numbers import require_whole
from esper.leyline.records import decode, encode
from esper.simic.agent.config import CompileMode, PPOConfig
from esper.simic.agent.ppo import PPOAgent
from esper.simic.control import RunningMeanStd
from esper.storage.stored import StoredFormat, checkpoint_errors, read_stored, write_stored
from esper.tamiyo import ActionTable, ObservationLayout

AGENT = StoredFormat("esper-agent", 1, "agent.json", "agent.safetensors")
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class SavedAgent:
    """An agent without its tensors."""

    table: ActionTable
    layout: ObservationLayout
    config: PPOConfig
    compile_mode: CompileMode
    total_updates: int
    updates: int
    failures: int
    tasks: int
    observations_frozen: bool
    leashed: bool  # whether the policy that the leash holds to is stored too

    def __post_init__(self) -> None:
        for name in ("updates", "failures"):
            require_whole(name, getattr(self, name), 0)


def save_agent(agent: PPOAgent, folder: Path, extras: Mapping[str, object] | None = None) -> None:
    """Write an agent; `extras` are frozen dataclasses to store with it."""
    content = {"agent": encode(plain_agent(agent)), **{name: encode(value) for name, value in (extras or {}).items()}}
    write_stored(folder, AGENT, content, agent_tensors(agent))


def plain_agent(agent: PPOAgent) -> SavedAgent:
    """Everything of an agent but its tensors."""
    counters = agent.total_updates, agent.updates, agent.failures, len(agent.returns.statistics.mean)
    made_of = agent.table, agent.layout, agent.config, agent.compile_mode
    return SavedAgent(*made_of, *counters, agent.observations.frozen, agent.start is not None)


def policy_tensors(agent: PPOAgent) -> dict[str, Tensor]:
    """The weights of an agent and its statistics by name, without what only the next update needs."""
    tensors = {f"network.{name}": tensor for name, tensor in agent.network.state_dict().items()}
    for part, statistics in _statistics(agent).items():
        tensors |= {f"{part}.{name}": value for name, value in statistics.state_dict().items()}
    return tensors


def agent_tensors(agent: PPOAgent) -> dict[str, Tensor]:
    """All tensors of an agent by name."""
    tensors = policy_tensors(agent)
    for name, weight in agent.network.named_parameters():
        state = agent.optimizer.state.get(weight, {})
        tensors |= {f"adam.{moment}.{name}": state[moment] for moment in MOMENTS if moment in state}
    if agent.start is not None:
        tensors |= {f"start.{name}": tensor for name, tensor in agent.start.state_dict().items()}
    return tensors | {"generator": agent.generator.get_state()}


def _statistics(agent: PPOAgent) -> dict[str, RunningMeanStd]:
    return {"observations": agent.observations.statistics, "returns": agent.returns.statistics}


def load_agent(
    folder: Path,
    extras: Mapping[str, type] | None = None,
    *,
    device: torch.device | str = "cpu",
    compile_mode: CompileMode | None = None,
) -> tuple[PPOAgent, dict[str, Any]]:  # Any: dataclasses of the given types
    """Read an agent and the named extras. `compile_mode` overrides the stored one."""
    content, tensors = read_stored(folder, AGENT)
    wanted = {"agent": SavedAgent, **(extras or {})}
    with checkpoint_errors(str(folder)):
        if missing := sorted(set(wanted) - set(content)):
            raise CheckpointError(f"{folder} lacks {missing}; it holds {sorted(content)}")
        parts = {name: decode(kind, content[name], name) for name, kind in wanted.items()}
        saved: SavedAgent = parts.pop("agent")
        agent = make_agent(saved, saved.compile_mode if compile_mode is None else compile_mode, device)
        restore_agent(agent, saved, tensors, str(folder))
    return agent, parts


def make_agent(saved: SavedAgent, compile_mode: CompileMode, device: torch.device | str) -> PPOAgent:
    """An agent like the saved one, with fresh weights."""
    config, tasks = replace(saved.config, compile=compile_mode), saved.tasks
    return PPOAgent(saved.table, saved.layout, config, total_updates=saved.total_updates, tasks=tasks, device=device)


def restore_agent(agent: PPOAgent, saved: SavedAgent, tensors: Mapping[str, Tensor], where: str) -> None:
    """Bring an agent into a saved state. `where`: what errors name."""
    if saved.leashed and agent.start is None:
        agent.hold_to_start()
    restore_tensors(agent, tensors, where)
    agent.updates, agent.failures = saved.updates, saved.failures
    agent.observations.frozen = saved.observations_frozen


def restore_tensors(agent: PPOAgent, tensors: Mapping[str, Tensor], where: str) -> None:
    """Restore an agent's tensors, after checking all of them."""
    weights = dict(agent.network.named_parameters())
    trained = [name for name in weights if f"adam.step.{name}" in tensors]  # those that had a gradient
    expected = {name: tensor for name, tensor in agent_tensors(agent).items() if not name.startswith("adam.")}
    for name in trained:
        moments = (weights[name], weights[name], torch.zeros(()))
        expected |= {f"adam.{moment}.{name}": tensor for moment, tensor in zip(MOMENTS, moments, strict=True)}
    check_tensors(tensors, expected, where)
    agent.generator.set_state(tensors["generator"])  # first: a generator may refuse a state of the right size
    restore_policy(agent, tensors)
    if agent.start is not None:
        agent.start.load_state_dict(_part(tensors, "start."))
    for name in trained:
        agent.optimizer.state[weights[name]] = {
            moment: tensors[f"adam.{moment}.{name}"].to(agent.device, copy=True) for moment in MOMENTS
        }


def restore_policy(agent: PPOAgent, tensors: Mapping[str, Tensor]) -> None:
    """Restore weights and statistics from tensors that were checked."""
    agent.network.load_state_dict(_part(tensors, "network."))
    for name, statistics in _statistics(agent).items():
        statistics.load_state_dict(_part(tensors, f"{name}."))


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str) -> None:
    """Raise unless the tensors are finite and have the names, shapes and dtypes of the expected ones."""
    if set(tensors) != set(expected):
        unknown, missing = sorted(set(tensors) - set(expected)), sorted(set(expected) - set(tensors))
        raise CheckpointError(f"{where}: unknown tensors {unknown[:3]}, missing {missing[:3]}")
    for name, tensor in tensors.items():
        own, needed = ((tuple(each.shape), each.dtype) for each in (tensor, expected[name]))
        if own != needed:
            raise CheckpointError(f"{where}: tensor {name!r} is {own}; this agent needs {needed}")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{where}: tensor {name!r} has numbers that are not finite")
