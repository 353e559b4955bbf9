"""Yardsticks of a policy: its architectures retrained, static hosts of equal size, and the oracle."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count as count_up
from typing import Any

import torch
from torch import Tensor

from esper.kasmina import AlphaController, CNNHost, GPTHost, Host
from esper.leyline import BadValueError, SeedStage, gain_over, objective
from esper.simic.evaluation.arena import Arena, Lineups
from esper.simic.evaluation.costs import CostMeter
from esper.simic.evaluation.results import Fossil, Result
from esper.simic.training.episode import EpisodeRunner, StepResult
from esper.simic.training.hosts import growth_fleet
from esper.tamiyo.policies import Plan, PlannedSeed, SchedulePolicy
from esper.tolaria import HostFleet, Task


def retrain(arena: Arena, seeds: Sequence[int], base: Result) -> Result:
    """Train a policy's hosts from scratch, with every fossil in place from the first minibatch."""
    accuracy, work = _train(arena, arena.task, seeds, base.fossils)
    control, added = base.control_accuracy, base.added_params
    return Result.scored(arena.task, seeds, accuracy, control, added, base.fossils, work)


def install(fleet: HostFleet, env: int, fossils: Sequence[Fossil]) -> None:
    """Give an env fresh seeds as fossils, at the strength of the given ones."""
    for fossil in fossils:
        fleet.germinate(env, fossil.slot_id, fossil.blueprint, style=fossil.style, alpha_target=fossil.alpha)
    states = dict(fleet.states[env])
    for slot_id, state in states.items():
        if state.stage is SeedStage.GERMINATED:
            held = AlphaController().retarget(state.alpha_target, 0)
            states[slot_id] = replace(state, stage=SeedStage.FOSSILIZED, controller=held)
    fleet.adopt(env, states)


def train_static(arena: Arena, seeds: Sequence[int], base: Result) -> Result:
    """Train static hosts of about the size that the policy's hosts reached."""
    sizes = static_hosts(arena.task, base.added_params)
    by_host: dict[int, Result] = {}
    for build in dict.fromkeys(sizes):
        task = replace(arena.task, build_host=build)
        hosts = [host for host, size in enumerate(sizes) if size is build]
        own = [seeds[host] for host in hosts]
        accuracy, work = _train(arena, task, own)
        control = [base.control_accuracy[host] for host in hosts]
        added = [task.size_of(seed) - arena.task.size_of(seed) for seed in own]
        result = Result.scored(arena.task, own, accuracy, control, added, [[] for _ in hosts], work)
        by_host.update(zip(hosts, result.by_host(), strict=True))
    return Result.joined([by_host[host] for host in range(len(seeds))])


def _train(
    arena: Arena, task: Task, seeds: Sequence[int], fossils: Sequence[Sequence[Fossil]] = ()
) -> tuple[Tensor, dict[str, list[float]]]:
    """Train hosts for an episode without decisions. Returns the accuracy (n,) at its end, and the work."""
    fleet = growth_fleet(task, len(seeds), arena.device, seeds, batches=arena.batches)
    for env, installed in enumerate(fossils):
        install(fleet, env, installed)
    meter = CostMeter(fleet, final=arena.final, plain=arena.task)
    meter.begin(range(fleet.n))
    structure = meter.structure()
    for _ in range(task.steps):
        fleet.train_step()
        meter.train(structure)
        fleet.tick()
    accuracy = fleet.points(fleet.validate_committed(final=arena.final))
    meter.harden(structure)
    return accuracy, meter.cost()


Build = Callable[[], Host]
LAST_MORE = 4  # widths of the last block that are tried at each size; they change the size in small steps


def static_hosts(task: Task, added: Sequence[int]) -> list[Build]:
    """For every number of added parameters, build the static host of the nearest size; equal hosts are one object."""
    ladder: list[tuple[int, Build]] = []
    for rung in _wider(task.build_host()):
        ladder += [(sum(parameter.numel() for parameter in build().parameters()), build) for build in rung]
        if ladder[-len(rung)][0] >= task.host_parameters + max(added):
            break
    return [min(ladder, key=lambda step: abs(step[0] - task.host_parameters - more))[1] for more in added]


def _wider(host: Host) -> Iterator[list[Build]]:
    """The host, then wider ones; each item is a host that is wider throughout, and its variants."""
    config: dict[str, Any] = dict(host.config() or {})  # Any: arguments of its constructor
    if isinstance(host, CNNHost):
        for *front, last in _widths(config["channels"]):
            variants = [[*front, last + more] for more in range(LAST_MORE)]
            yield [partial(CNNHost, **{**config, "channels": widths}) for widths in variants]
    elif isinstance(host, GPTHost):
        for more in count_up():
            yield [partial(GPTHost, **{**config, "width": config["width"] + more * config["heads"]})]
    else:
        raise BadValueError(f"a {type(host).__name__} cannot be widened; `static:` needs {' or '.join(Host.KINDS)}")


def _widths(channels: list[int]) -> Iterator[list[int]]:
    """All blocks wider by one common factor, in the smallest steps that rounding allows."""
    widths = list(channels)
    while True:
        yield list(widths)
        # The factor at which each block would be rounded up; the smallest goes first, ties together.
        factors = [(width + 0.5) / bare for width, bare in zip(widths, channels, strict=True)]
        widths = [width + (factor == min(factors)) for width, factor in zip(widths, factors, strict=True)]


CHOOSING, SCORED = slice(0, None, 2), slice(1, None, 2)  # the images that choose the plan, and the images that score it


def extensions(plan: Plan, task: Task) -> list[Plan]:
    """The plan with one more seed: slot × blueprint × germination at 0, T/4, T/2, within the parameter budget."""
    slots, occupied = task.slot_config.slots, {seed.slot for seed in plan.seeds}
    sizes = {(slot.slot_id, offer.name): offer.parameters for slot in slots for offer in slot.blueprints}
    budget = task.parameter_budget - sum(sizes[seed.slot, seed.blueprint] for seed in plan.seeds)
    times = list(dict.fromkeys((0, task.steps // 4, task.steps // 2)))
    return [
        Plan((*plan.seeds, PlannedSeed(slot, blueprint, when)))
        for (slot, blueprint), parameters in sizes.items()
        for when in times
        if slot not in occupied and parameters <= budget
    ]


def plan_policy(runner: EpisodeRunner, lineups: Lineups[Plan]) -> SchedulePolicy:
    """A policy that gives each env the plan of its place in the lineups."""
    return SchedulePolicy(runner.table, runner.slots, [plan for lineup in lineups for plan in lineup])


def run_oracle(arena: Arena, seeds: Sequence[int]) -> tuple[Result, list[Plan]]:
    """The best plan of each host, with hindsight, and its result. It is a bound, so its search has no cost."""
    task, plans = arena.task, extensions(Plan(), arena.task)
    columns = arena.run(plan_policy, [plans] * len(seeds), seeds, _by_half).unbind(-1)
    chosen, chosen_control, accuracy, control, added = columns  # (hosts, plans)
    gain = gain_over(chosen_control, chosen, by_loss=task.by_loss)
    sizes = torch.tensor([[task.size_of(seed)] for seed in seeds], dtype=torch.float64)
    objectives, best = objective(gain, added, sizes).max(1)
    accuracy, control, added = (column[range(len(seeds)), best] for column in (accuracy, control, added))
    grows = objectives > 0  # else it waits, at an objective of 0
    accuracy, added = accuracy.where(grows, control), added.where(grows, 0.0)
    picked = [plans[index] if grown else Plan() for index, grown in zip(best.tolist(), grows.tolist(), strict=True)]
    fossils = [
        [Fossil(seed.slot, seed.blueprint) for seed in plan.seeds if grown]
        for plan, grown in zip(picked, added.tolist(), strict=True)
    ]
    return Result.scored(task, seeds, accuracy, control, added, fossils), picked


def _by_half(runner: EpisodeRunner, result: StepResult) -> Tensor:
    """(n, 5): accuracy and control on the choosing images, the same on the scored ones, parameters."""
    groups = runner.groups
    rows = [[row.part(images) for row in runner.committed] for images in (CHOOSING, SCORED)]
    halves = [runner.fleet.points(half).double() for half in rows]
    columns = [part for half in halves for part in (groups.grown_of(half), groups.control_of(half))]
    return torch.stack([*columns, result.fossil_parameters.double()], -1)
