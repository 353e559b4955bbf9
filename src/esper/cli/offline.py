"""`esper offline`: record policies, and learn from records."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.console import Console

from esper.leyline import RHO
from esper.leyline.progress import progress_bar
from esper.simic.agent.policy import write_policy
from esper.simic.evaluation.behaviour import Behaviour, parse_policies, record_behaviour
from esper.simic.offline.imitation import Imitation, ImitationConfig, imitate
from esper.simic.offline.iql import IQLConfig, iql
from esper.simic.offline.selection import Selection, Weighting, select_transitions
from esper.simic.rewards import RewardConfig
from esper.simic.tuning import check_free
from esper.tamiyo import NetworkConfig
from esper.tamiyo.memory import MemoryKind

IMITATION, VALUES = ImitationConfig(), IQLConfig()
RecordPaths = Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RECORDS")]


@dataclass(frozen=True)
class RecordFlags:
    """Play policies on fresh hosts and record every transition.

    The hosts are of a range that training, tuning and evaluation never use.
    """

    out: Path
    """Folder for the records. Must be new or empty."""
    task: str = "digits_blind"
    """Task of the hosts."""
    policies: str = "random,heuristic"
    """Policies, separated by commas, as in `esper evaluate`; no yardsticks."""
    episodes: int = 1000
    """Episodes of each policy. Episode i of all policies is on the same host."""
    seed: int = 0
    """Random seed that selects hosts and draws."""
    preset: str = "core"
    """Heads and ops of the policies: core, commit or full."""
    workers: int = 1
    """Number of processes, of one thread each. The records do not depend on it."""
    device: str = "cpu"
    """Device of the hosts, such as cpu or cuda:0."""
    data_dir: Path | None = None
    """Folder of the data sets (default: $ESPER_DATA, else the user's cache)."""

    def run(self, console: Console) -> None:
        """Record, and say what the folder holds."""
        policies = parse_policies([name.strip() for name in self.policies.split(",")])
        hosts = (self.episodes, self.seed, self.preset)
        behaviour = Behaviour(self.task, policies, *hosts, device=self.device, data_dir=self.data_dir)
        record_behaviour(behaviour, self.out, workers=self.workers)
        names = ", ".join(spec.text for spec in policies)
        console.print(f"{self.episodes} episodes each of {names} are in {self.out}", markup=False)


@dataclass(frozen=True)
class ImitateFlags:
    """Learn to do what recorded policies did; writes a policy file."""

    records: RecordPaths
    """Record files and folders."""
    out: Path
    """Policy file to write; it must not exist. Evaluate it by its path."""
    task: str | None = None
    """Task to learn from, if the records are of several."""
    policies: tuple[str, ...] = ()
    """Names of the recorded policies to imitate (default: all)."""
    weight: Weighting = "none"
    """Whether all episodes count alike, or those of a host by their objective: exp(objective / β), normalised per
    host."""
    beta: float = 1.0
    """β in points: an episode that is better by β counts e times as much."""
    rho: float = RHO
    """Rent in points per doubling of the host, for the objective."""
    memory: MemoryKind = "window"
    """What the policy remembers by: the last four observations, or an LSTM."""
    epochs: int = IMITATION.epochs
    """Passes over the episodes."""
    batch: int = IMITATION.batch
    """Episodes per minibatch."""
    rate: float = IMITATION.rate
    """Learning rate."""
    held_out: float = 0.2
    """Share of the hosts that the policy does not learn from; its accuracy is measured on them too."""
    seed: int = 0
    """Random seed of weights, minibatches and held-out hosts."""

    def run(self, console: Console) -> None:
        """Learn, write the policy, print how well it agrees with the records."""
        torch.set_num_threads(1)
        check_free(self.out)
        network = NetworkConfig(memory=self.memory)
        config = ImitationConfig(network, self.epochs, self.batch, self.rate, held_out=self.held_out)
        chosen = select_transitions(
            self.records,
            task=self.task,
            policies=self.policies,
            reward=RewardConfig(rho=self.rho),
            weighting=self.weight,
            beta=self.beta,
        )
        with progress_bar("imitating", config.epochs) as advance:
            learned = imitate(
                chosen.data, chosen.header.table, chosen.header.layout, config, rng_seed=self.seed, advance=advance
            )
        _finish(console, self.out, chosen, learned)


@dataclass(frozen=True)
class IqlFlags:
    """Learn from recorded rewards, by implicit Q-learning, to act better than what was recorded; writes a policy
    file."""

    records: RecordPaths
    """Record files and folders."""
    out: Path
    """Policy file to write; it must not exist. Evaluate it by its path."""
    task: str | None = None
    """Task to learn from, if the records are of several."""
    policies: tuple[str, ...] = ()
    """Names of the recorded policies to learn from (default: all)."""
    rho: float = RHO
    """Rent in points per doubling of the host, for the rewards."""
    gamma: float = VALUES.gamma
    """Discount of rewards and values."""
    expectile: float = VALUES.expectile
    """Which of the recorded actions a state is valued by: 0.5 is their mean, 1 would be the best of them."""
    temperature: float = VALUES.temperature
    """Advantage, in deviations of the returns, for which an action counts e times as much."""
    memory: MemoryKind = "window"
    """What the policy remembers by: the last four observations, or an LSTM."""
    epochs: int = VALUES.epochs
    """Passes over the episodes for the values."""
    policy_epochs: int = VALUES.policy.epochs
    """Passes over the episodes for the policy."""
    batch: int = VALUES.batch
    """Episodes per minibatch."""
    rate: float = VALUES.rate
    """Learning rate of the values."""
    seed: int = 0
    """Random seed of weights and minibatches."""

    def run(self, console: Console) -> None:
        """Learn values, then a policy; write it and print how it was learnt."""
        torch.set_num_threads(1)
        check_free(self.out)
        policy = ImitationConfig(NetworkConfig(memory=self.memory), self.policy_epochs, self.batch)
        config = IQLConfig(
            gamma=self.gamma,
            expectile=self.expectile,
            temperature=self.temperature,
            epochs=self.epochs,
            batch=self.batch,
            rate=self.rate,
            policy=policy,
        )
        reward = RewardConfig(rho=self.rho, gamma=self.gamma)
        chosen = select_transitions(self.records, task=self.task, policies=self.policies, reward=reward)
        with progress_bar("learning values and a policy", config.epochs + policy.epochs) as advance:
            learned = iql(
                chosen.data, chosen.header.table, chosen.header.layout, config, rng_seed=self.seed, advance=advance
            )
        _finish(console, self.out, chosen, learned.imitation)
        last = learned.losses[-1]
        console.print(
            f"losses of the values: V {last.v:.4f}, Q {last.q:.4f}; the weights are worth those of "
            f"{learned.effective_share:.0%} of the steps"
        )


def _finish(console: Console, out: Path, chosen: Selection, learned: Imitation) -> None:
    """Write a policy and print what it comes from."""
    write_policy(out, learned.agent, chosen.header.preset)
    counts = ", ".join(f"{count} of {name}" for name, count in chosen.counts.items())
    lines = [f"{chosen.data.n_episodes} episodes on {chosen.header.task}: {counts}"]
    lines += [f"agrees with what it learnt from: {_shares(learned.accuracy)}"]
    if learned.held_out is not None:
        lines += [f"on held-out hosts: {_shares(learned.held_out)}"]
    for line in [*lines, f"Written to {out}; evaluate it with --policies {out}"]:
        console.print(line, markup=False)


def _shares(accuracy: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in accuracy.items())


Chosen = (
    Annotated[RecordFlags, tyro.conf.subcommand("record")]
    | Annotated[ImitateFlags, tyro.conf.subcommand("imitate")]
    | Annotated[IqlFlags, tyro.conf.subcommand("iql")]
)


@dataclass(frozen=True)
class OfflineCommand:
    """Record policies, and learn from records without playing."""

    chosen: tyro.conf.OmitArgPrefixes[tyro.conf.OmitSubcommandPrefixes[Chosen]]

    def run(self, console: Console) -> None:
        """Carry out the chosen subcommand."""
        self.chosen.run(console)
