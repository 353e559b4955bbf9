"""Yardsticks for a policy: its architectures retrained, static hosts of equal size, and the oracle."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count as count_up
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.kasmina import AlphaController, CNNHost, GPTHost, Host, SeedState
from esper.leyline import RHO, BadValueError, HeadPreset, SeedStage, objective
from esper.leyline.progress import Advance
from esper.simic.evaluation.arena import Arena, Block
from esper.simic.evaluation.costs import PASSES, CostMeter, Structure
from esper.simic.evaluation.results import Fossil, Result
from esper.simic.evaluation.unseen import AT_ONCE, EvaluationHosts, Trajectory
from esper.simic.training.hosts import growth_fleet
from esper.simic.training.observe import accuracy_of
from esper.simic.tuning.candidates import one_seed_plans, plan_policy
from esper.tamiyo.policies import Plan
from esper.tolaria import HostFleet, Task
from esper.tolaria.batches import Batches


def retrain(unseen: EvaluationHosts, base: Result) -> Result:
    """The hosts that a policy ended with, every fossil in place from the first minibatch."""
    runner, meter = unseen.open()
    fleet, parts = runner.fleet, []
    for numbers in unseen.parts(fleet.n):
        fleet.reset([unseen.seeds[number] for number in numbers])
        for env, number in enumerate(numbers):
            install(fleet, env, base.fossils[number])
        accuracy, work = _train_through(fleet, meter, final=unseen.final)
        parts.append(
            Trajectory(
                accuracy,
                torch.tensor([base.control_accuracy[number] for number in numbers], dtype=torch.float64),
                torch.tensor([base.added_params[number] for number in numbers]),
                [base.fossils[number] for number in numbers],
                work,
            )
        )
    return unseen.result(parts)


def install(fleet: HostFleet, env: int, fossils: Sequence[Fossil]) -> None:
    """Fresh seeds as fossils, acting as strongly as those did."""
    for fossil in fossils:
        fleet.germinate(env, fossil.slot_id, fossil.blueprint, style=fossil.style, alpha_target=fossil.alpha)
    fleet.adopt(env, {slot_id: _committed(state) for slot_id, state in fleet.states[env].items()})


def _committed(state: SeedState) -> SeedState:
    if state.stage is not SeedStage.GERMINATED:
        return state
    held = AlphaController().retarget(state.alpha_target, 0)
    return replace(state, stage=SeedStage.FOSSILIZED, controller=held)


def train_static(unseen: EvaluationHosts, base: Result) -> Result:
    """Hosts that never grow, as near as they come in size to those that a policy ended with."""
    sizes = static_hosts(unseen.task, base.added_params)
    accuracy, added = torch.zeros(unseen.hosts), torch.zeros(unseen.hosts)
    work = {name: [0.0] * unseen.hosts for name in PASSES}
    for build in dict.fromkeys(sizes):
        task = replace(unseen.task, build_host=build)
        members = [number for number, size in enumerate(sizes) if size is build]
        for begin in range(0, len(members), AT_ONCE):
            numbers = members[begin : begin + AT_ONCE]
            seeds = [unseen.seeds[number] for number in numbers]
            fleet = growth_fleet(task, len(numbers), unseen.device, seeds, batches=unseen.data)
            meter = CostMeter(fleet, final=unseen.final, plain=unseen.task)
            accuracy[numbers], cost = _train_through(fleet, meter, final=unseen.final)
            added[numbers] = float(task.host_parameters - unseen.task.host_parameters)
            for name, values in cost.items():
                for number, value in zip(numbers, values, strict=True):
                    work[name][number] = value
    control = torch.tensor(base.control_accuracy, dtype=torch.float64)
    return unseen.result([Trajectory(accuracy, control, added, [[] for _ in sizes], work)])


def _train_through(fleet: HostFleet, meter: CostMeter, *, final: bool) -> tuple[Tensor, dict[str, list[float]]]:
    """A whole episode in which nothing is decided; accuracy at its end (n,), and the work."""
    meter.begin(fleet.n)
    structure = Structure.of_states(fleet.states, fleet.task.slot_config.blueprint_names)
    for _ in range(fleet.task.steps):
        fleet.train_step()
        meter.train(structure)
        fleet.tick()
    scores = accuracy_of(fleet.validate_committed(final=final))
    meter.harden(structure)
    return scores.cpu(), meter.cost()


Build = Callable[[], Host]
LAST_MORE = 4
"""Widths of the last block that are tried at each rung: its steps are small, those of an early block are not."""


def static_hosts(task: Task, added: Sequence[int]) -> list[Build]:
    """How to build, for every number of added parameters, the static host that comes nearest to the grown one in size;
    equal sizes are the same object."""
    ladder: list[tuple[int, Build]] = []
    for rung in _wider(task.build_host()):
        ladder += [(sum(parameter.numel() for parameter in build().parameters()), build) for build in rung]
        if ladder[-len(rung)][0] >= task.host_parameters + max(added):
            break
    return [min(ladder, key=lambda step: abs(step[0] - task.host_parameters - more))[1] for more in added]


def _wider(host: Host) -> Iterator[list[Build]]:
    """The host, and then wider and wider ones of its kind. A rung of the ladder is the even one, then its variants."""
    config: dict[str, Any] = dict(host.config() or {})  # Any: arguments of its constructor
    if isinstance(host, CNNHost):
        for *front, last in _widths(config["channels"]):
            variants = [[*front, last + more] for more in range(LAST_MORE)]
            yield [partial(CNNHost, **{**config, "channels": widths}) for widths in variants]
    elif isinstance(host, GPTHost):
        for more in count_up():
            yield [partial(GPTHost, **{**config, "width": config["width"] + more * config["heads"]})]
    else:
        raise BadValueError(f"a {type(host).__name__} cannot be widened: static: is for {', '.join(Host.KINDS)}")


def _widths(channels: list[int]) -> Iterator[list[int]]:
    """All blocks wider by one common factor, in the smallest steps that rounding allows."""
    widths = list(channels)
    while True:
        yield list(widths)
        # The factor at which each block would be rounded up next; whoever comes first moves, ties together.
        factors = [(width + 0.5) / bare for width, bare in zip(widths, channels, strict=True)]
        widths = [width + (factor == min(factors)) for width, factor in zip(widths, factors, strict=True)]


CHOOSING, SCORED = slice(0, None, 2), slice(1, None, 2)
"""Which images choose, and which are scored."""


@dataclass(frozen=True)
class OracleHost:
    """What was best for one host; points and percent, on the scored images unless something else is said."""

    plan: Plan
    objective: float
    accuracy: float
    control_accuracy: float
    added_params: int
    commits: list[str]
    """`slot/blueprint` of the fossil, if there is one"""
    chosen_objective: float
    """On the choosing images: never below 0, which waiting has"""


def run_oracle(
    task: Task,
    seeds: Sequence[int],
    preset: HeadPreset,
    *,
    rho: float = RHO,
    final: bool = False,
    device: torch.device | str = "cpu",
    data_dir: Path | None = None,
    batches: Batches | None = None,
    advance: Advance | None = None,
) -> list[OracleHost]:
    """The best for each of these hosts. An episode per host and plan; `advance` counts hosts × plans.

    `batches` are the task's data where a fleet has them already; `final` reads the test images.
    """
    plans = one_seed_plans(task)
    arena = Arena(
        task, preset, partial(plan_policy, task), device=device, data_dir=data_dir, batches=batches, final=final
    )
    found = torch.zeros((len(seeds), len(plans), 5), dtype=torch.float64)
    for block in arena.run(plans, seeds):
        scores = _scores(block).cpu()
        found[block.hosts.start : block.hosts.stop, block.candidates.start : block.candidates.stop] = scores
        if advance is not None:
            advance(len(block.hosts) * len(block.candidates), "oracle")
    return [_choose(plans, scores, task, rho) for scores in found]


def _scores(block: Block) -> Tensor:
    """(hosts, plans, 5): accuracy and control on the choosing images, the same on the scored ones, parameters."""
    groups = block.runner.groups
    correct = 100 * torch.stack([row.correct for row in block.runner.committed]).double()  # (envs, images)
    halves = [correct[:, images].mean(1) for images in (CHOOSING, SCORED)]
    columns = [part for half in halves for part in (groups.grown_of(half), groups.control_of(half))]
    columns.append(block.result.fossil_parameters.double())
    return torch.stack([block.by_host(column) for column in columns], -1)


def _choose(plans: Sequence[Plan], scores: Tensor, task: Task, rho: float) -> OracleHost:
    """The best plan of one host, from its scores (plans, 5)."""
    chosen, chosen_control, accuracy, control, added = scores.unbind(-1)
    promised = objective(chosen - chosen_control, added, task.host_parameters, rho)
    best = int(promised.argmax())
    if float(promised[best]) <= 0:
        return OracleHost(Plan(), 0.0, float(control[best]), float(control[best]), 0, [], 0.0)
    (seed,) = plans[best].seeds
    return OracleHost(
        plan=plans[best],
        objective=float(objective(accuracy - control, added, task.host_parameters, rho)[best]),
        accuracy=float(accuracy[best]),
        control_accuracy=float(control[best]),
        added_params=int(added[best]),
        commits=[f"{seed.slot}/{seed.blueprint}"] if added[best] > 0 else [],
        chosen_objective=float(promised[best]),
    )
