"""Two more yardsticks for a policy: its final architectures trained from scratch, and static hosts of equal size.

Both train on the same hosts' seeds (weights, data order, augmentation), for as many minibatches, at the same rates, and
are scored on the same images, calibrated alike. Their gain is against the controls that the policy was measured by.

Static hosts of one size share a fleet, sizes come one after the other. A fleet gives every host the same bits however
many it carries, so this is training them singly, only faster; and where nothing was grown the static host is the
control, to the bit (CPU).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count as count_up
from typing import Any

import torch
from torch import Tensor

from esper.kasmina import AlphaController, CNNHost, GPTHost, Host, SeedState
from esper.leyline import BadValueError, SeedStage
from esper.simic.training.costs import PASSES, CostMeter, Structure
from esper.simic.training.evaluation import AT_ONCE, Trajectory, UnseenHosts
from esper.simic.training.fleets import growth_fleet
from esper.simic.training.observe import accuracy_of
from esper.simic.training.results import Fossil, Result
from esper.tolaria import HostFleet, Task


def retrain(unseen: UnseenHosts, base: Result) -> Result:
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


def train_static(unseen: UnseenHosts, base: Result) -> Result:
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
