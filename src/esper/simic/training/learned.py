"""A trained agent as the beginning of another."""

from dataclasses import asdict
from pathlib import Path

from esper.leyline import CheckpointError
from esper.simic.agent import PPOAgent, load_agent
from esper.simic.agent.policy import check_compatible
from esper.simic.training.run_folder import RunFolder


def begin_with(agent: PPOAgent, run: Path) -> None:
    """Give a new agent what the last checkpoint of a run has learnt: weights, and the statistics of observations, which
    stay as they are, as they do wherever a policy that was trained is used."""
    folder = RunFolder.last_checkpoint(run)
    if folder is None:
        raise CheckpointError(f"{run} has no checkpoint to start from; name a run with at least one complete round")
    learned, _ = load_agent(folder, device=str(agent.device))
    check_compatible(learned, agent.table, agent.layout, folder)
    ours, its = (asdict(one.config.network) for one in (agent, learned))
    if differing := {name: (its[name], ours[name]) for name in ours if its[name] != ours[name]}:
        raise CheckpointError(f"{folder}: a network of another make, (its, this run's): {differing}; make them alike")
    agent.network.load_state_dict(learned.network.state_dict())
    agent.observations.statistics.load_state_dict(learned.observations.statistics.state_dict())
    agent.observations.frozen = True
    mine, theirs = agent.returns.statistics, learned.returns.statistics
    if len(mine.mean) == len(theirs.mean):  # with more tasks, or fewer, the critic finds its scale anew
        mine.load_state_dict(theirs.state_dict())
