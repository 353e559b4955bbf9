"""Where a learned policy comes from: a policy file, a folder that holds one, the newest checkpoint of a run, or Esper
itself (`pretrained`)."""

from pathlib import Path

import torch

from esper.leyline import BadValueError, CheckpointError
from esper.simic.agent import PPOAgent, load_agent
from esper.simic.agent.policy import check_columns, check_heads, read_policy, read_preset
from esper.simic.training.run_folder import CONFIG, checkpoints_of, read_config

POLICY = "policy.safetensors"  # the policy file of a folder
PRETRAINED = "pretrained"  # the name of the policy that is shipped with Esper
SHIPPED = Path(__file__).parent / "pretrained" / POLICY


def is_run(path: Path) -> bool:
    """Whether a path is the folder of a training run."""
    return path.is_dir() and not (path / POLICY).is_file() and (path / CONFIG).is_file()


def is_policy(path: Path) -> bool:
    """Whether a path exists or names the shipped policy."""
    return path.exists() or str(path) == PRETRAINED


def policy_path(path: Path) -> Path:
    """The file, or the folder of the checkpoint, that a policy is read from."""
    if str(path) == PRETRAINED and not path.exists():
        return SHIPPED
    if path.is_file():
        return path
    if (path / POLICY).is_file():
        return path / POLICY
    if not path.is_dir():
        raise BadValueError(f"{path}: there is no such policy; name a policy file or the folder of a run")
    if (checkpoint := checkpoints_of(path).newest()) is None:
        raise CheckpointError(f"{path} holds no policy: it is no run, or its first round is not complete")
    return checkpoint


def open_policy(path: Path, *, device: torch.device | str = "cpu") -> tuple[PPOAgent, str]:
    """The agent of a policy, and the name of its head preset."""
    source = policy_path(path)
    if source.is_file():
        return read_policy(source, device=device)
    return load_agent(source, device=device)[0], read_config(path).preset


def policy_preset(path: Path) -> str:
    """The name of a policy's head preset."""
    source = policy_path(path)
    return read_preset(source) if source.is_file() else read_config(path).preset


def begin_with(agent: PPOAgent, path: Path, preset: str) -> None:
    """Give a new agent what a policy has learnt: its weights, and its observation statistics, frozen."""
    learned, its_preset = open_policy(path, device=agent.device)
    if {preset, its_preset} == {"core", "commit"}:  # they have the same heads, but other ops
        raise CheckpointError(f"{path}: the policy has head preset {its_preset}; use --preset {its_preset}")
    check_heads(learned, agent.table, path)
    check_columns(learned, agent.layout, path)
    ours, its = (vars(one.config.network) for one in (agent, learned))
    if differing := {name: (its[name], ours[name]) for name in ours if its[name] != ours[name]}:
        raise CheckpointError(f"{path}: a network of another make, (its, this run's): {differing}; make them alike")
    copy_knowledge(learned, agent)
    if agent.config.leash > 0:
        agent.hold_to_start()


def copy_knowledge(source: PPOAgent, agent: PPOAgent) -> None:
    """Give an agent the weights of another like it, its observation statistics, frozen, and its scale of returns."""
    agent.network.load_state_dict(source.network.state_dict())
    agent.observations.statistics.load_state_dict(source.observations.statistics.state_dict())
    agent.observations.freeze()
    returns, its_returns = agent.returns.statistics, source.returns.statistics
    if len(returns.mean) == len(its_returns.mean):  # otherwise the critic finds its scale anew
        returns.load_state_dict(its_returns.state_dict())
