"""Many candidates on many hosts: a group is one host, its members differ in their candidate and share one control."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from esper.leyline import HeadPreset, objective
from esper.leyline.progress import Advance
from esper.simic.training.episode import EpisodeRunner, StepResult
from esper.simic.training.hosts import Groups, growth_fleet, host_seed
from esper.tamiyo import ActionTable, Policy
from esper.tolaria import Task
from esper.tolaria.batches import Batches

AT_ONCE = 64
"""Envs per fleet, controls included."""

Candidate = TypeVar("Candidate")
MakePolicy = Callable[[ActionTable, Sequence[Candidate]], Policy]
"""One policy over a fleet whose envs have these candidates, one each."""


class Block(NamedTuple):
    """An episode of some candidates on some hosts, both given by their places; env = host × candidate."""

    candidates: range
    hosts: range
    runner: EpisodeRunner
    result: StepResult
    """Of the last step"""

    def by_host(self, values: Tensor) -> Tensor:
        """(grown envs,) → (hosts, candidates)."""
        return values.view(self.runner.groups.count, -1)[: len(self.hosts), : len(self.candidates)]


class Arena(Generic[Candidate]):
    """Packs episodes into fleets of at most AT_ONCE envs."""

    def __init__(
        self,
        task: Task,
        preset: HeadPreset,
        make_policy: MakePolicy[Candidate],
        *,
        device: torch.device | str = "cpu",
        data_dir: Path | str | None = None,
        batches: Batches | None = None,
        final: bool = False,
    ) -> None:
        """`batches` are the task's data where they are loaded already; `final` scores on test images."""
        self.task, self.preset, self.make_policy, self.device = task, preset, make_policy, device
        self.batches = task.load_batches(data_dir, device) if batches is None else batches
        self.final = final
        self._runner: EpisodeRunner | None = None

    def run(self, candidates: Sequence[Candidate], seeds: Sequence[int]) -> Iterator[Block]:
        """Every candidate on every host, block by block."""
        candidate_parts = divide(len(candidates), AT_ONCE - 1)
        members = len(candidate_parts[0])
        host_parts = divide(len(seeds), AT_ONCE // (members + 1))
        runner = self._runner_for(groups := Groups(len(host_parts[0]), members))
        for some in candidate_parts:
            # A block that is not full is filled up with its last: the same episodes once more, which nobody reads.
            policy = self.make_policy(runner.table, _filled(candidates, some, groups.members) * groups.count)
            for hosts in host_parts:
                yield Block(some, hosts, runner, play(runner, policy, _filled(seeds, hosts, groups.count)))

    def _runner_for(self, groups: Groups) -> EpisodeRunner:
        """The last one where it has that shape: a new fleet costs memory, and CUDA graphs."""
        if self._runner is None or self._runner.groups != groups:
            self._runner = None
            fleet = growth_fleet(self.task, groups.hosts, self.device, batches=self.batches)
            self._runner = EpisodeRunner(fleet, groups, self.preset)
            self._runner.final = self.final
        return self._runner


@dataclass(frozen=True)
class Trials(Generic[Candidate]):
    """What a search evaluates by: objectives on hosts of the tuning range, on validation images."""

    arena: Arena[Candidate]
    rng_seed: int
    rho: float
    """Points of rent per doubling of the host."""
    advance: Advance

    def __call__(self, candidates: Sequence[Candidate], hosts: Sequence[int]) -> list[list[float]]:
        """Objectives [candidate][host]."""
        found = torch.zeros((len(hosts), len(candidates)), dtype=torch.float64)
        seeds = [host_seed("tuning", self.rng_seed, number) for number in hosts]
        for block in self.arena.run(candidates, seeds):
            values = block.by_host(end_objective(block.result, self.arena.task, self.rho)).cpu()
            found[block.hosts.start : block.hosts.stop, block.candidates.start : block.candidates.stop] = values
            self.advance(values.numel(), f"best of these {float(values.mean(0).max()):+.1f}")
        objectives: list[list[float]] = found.T.tolist()
        return objectives


def play(runner: EpisodeRunner, policy: Policy, seeds: Sequence[int]) -> StepResult:
    """One episode of these hosts, one per group, under a policy that draws nothing; its last step."""
    runner.begin(list(seeds))
    hidden_state = policy.initial_state([seed for seed in seeds for _ in range(runner.groups.members)])
    undrawn = torch.zeros((runner.groups.grown, len(runner.table)), device=runner.fleet.device)
    while not runner.done:
        actions, hidden_state = policy.act(runner.view(), hidden_state, undrawn)
        result = runner.step(actions)
    return result


def end_objective(result: StepResult, task: Task, rho: float) -> Tensor:
    """Of every grown env at the end of its episode: gain of the hardened host − rent of the fossils, points."""
    assert result.hardened_accuracy is not None
    assert result.hardened_control is not None
    gain = result.hardened_accuracy.double() - result.hardened_control.double()
    return objective(gain, result.fossil_parameters.double(), task.host_parameters, rho)


def divide(count: int, most: int) -> list[range]:
    """Even parts of at most `most`; the last may be smaller."""
    parts = -(-count // most)
    width = -(-count // parts)
    return [range(begin, min(begin + width, count)) for begin in range(0, count, width)]


def _filled(values: Sequence[Candidate], places: range, width: int) -> list[Candidate]:
    some = [values[place] for place in places]
    return some + some[-1:] * (width - len(some))
