"""Where a minibatch of the growth loop spends its time: kernels, device time by part, padding, graphs.

    python benchmarks/loop_profile.py --device cuda
    python benchmarks/loop_profile.py --task digits_blind --hosts 16

Random edits grow the fleet for some episodes, as an untrained policy would. Then minibatches are profiled without
graphs, so that each kernel can be traced to the part that launched it. A kernel of the backward pass belongs to the
part of its forward operation. On the CPU, operations stand for kernels.
"""

import argparse
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, Json, print_table, write_result
from random_growth import random_edit
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from esper.tolaria import HostFleet, get_task, passes
from esper.tolaria.banks import StackedOptimizer
from esper.tolaria.governor import Governor
from esper.tolaria.passes import StackedHost

SHADOWS = "hosts, shadow rows"
PARTS = {  # by part, what it consists of; inner parts count for themselves
    "draw": (HostFleet, "draw"),
    "hosts": (StackedHost, "run"),
    SHADOWS: (passes, "living_rows"),
    "banks": (passes, "_act"),
    "optimiser": (StackedOptimizer, "step"),
    "governor": (Governor, "observe"),
}
REST, UNLISTED = "all else", "custom kernels"
PART = "part: "


@contextmanager
def labelled() -> Iterator[None]:
    """Within this block, every part announces itself to the profiler."""
    originals = {part: getattr(*place) for part, place in PARTS.items()}

    def wrapped(part: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with record_function(PART + part):
                return original(*arguments, **options)

        @contextmanager
        def block(*arguments: Any) -> Iterator[None]:
            with record_function(PART + part), original(*arguments):
                yield

        return block if part == SHADOWS else call

    for part, (owner, name) in PARTS.items():
        setattr(owner, name, wrapped(part, originals[part]))
    try:
        yield
    finally:
        for part, (owner, name) in PARTS.items():
            setattr(owner, name, originals[part])


def grow(fleet: HostFleet, dice: random.Random, members: int) -> None:
    """One episode of random edits; the first host of every group is its control."""
    groups = [int(dice.random() * 2**31) for _ in range(fleet.n // members)]
    fleet.reset([seed for seed in groups for _ in range(members)])
    for _ in range(fleet.task.steps):
        for env in range(fleet.n):
            if env % members:
                random_edit(fleet, env, dice)
        fleet.train_step()
        fleet.validate(deployed=False)
        fleet.tick()


def part_of(event: FunctionEvent, by_sequence: dict[int, str]) -> str:
    """The innermost part around an operation, or around its forward operation."""
    at: FunctionEvent | None = event
    while at is not None:
        if at.name.startswith(PART):
            return at.name.removeprefix(PART)
        if at.name.startswith("autograd::engine") and at.sequence_nr in by_sequence:
            return by_sequence[at.sequence_nr]
        at = at.cpu_parent
    return REST


def by_part(events: list[FunctionEvent], *, cuda: bool) -> tuple[Counter[str], dict[str, float]]:
    """Kernels, and their milliseconds, by part."""
    forward: dict[int, str] = {}
    for event in events:
        if event.sequence_nr >= 0 and not event.name.startswith("autograd::engine"):
            part = part_of(event, {})
            if part != REST:
                forward.setdefault(event.sequence_nr, part)
    counts, milliseconds = Counter[str](), defaultdict[str, float](float)
    for event in events:
        if event.device_type.name == "CUDA":
            continue  # a kernel, which the operation that launched it lists
        part = part_of(event, forward)
        if cuda:
            counts[part] += len(event.kernels)
            milliseconds[part] += sum(kernel.duration for kernel in event.kernels) / 1e3
        elif event.name.startswith("aten::") and not event.cpu_children:
            counts[part] += 1
            milliseconds[part] += event.self_cpu_time_total / 1e3
    return counts, milliseconds


def on_device(events: list[FunctionEvent]) -> list[FunctionEvent]:
    """All kernels and copies of the device; no operation lists custom kernels. Parts announce themselves there, too."""
    return [event for event in events if event.device_type.name == "CUDA" and not event.name.startswith(PART)]


def padding(fleet: HostFleet) -> dict[str, tuple[int, int]]:
    """Real and padded entries of the banks of each slot, and of the shadow rows."""
    plan = fleet.update_plan()
    found = {}
    for group in plan.acts.values():
        slot_id = group[0].bank.slot.slot_id
        found[slot_id] = sum(int(act.valid.sum()) for act in group), sum(len(act.valid) for act in group)
    if plan.shadow is not None and plan.shadow.valid is not None:
        found["shadow rows"] = int(plan.shadow.valid.sum()), len(plan.shadow)
    return found


def main() -> None:
    """Grow, profile, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="cifar_baseline")
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--members", type=int, default=4, help="hosts per group, its control included")
    parser.add_argument("--episodes", type=int, default=2, help="of random growth, before the profile")
    parser.add_argument("--minibatches", type=int, default=8, help="that are profiled")
    parser.add_argument("--kernels", type=int, default=0, help="also list this many kernels, the slowest first")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    cuda, dice = arguments.device.startswith("cuda"), random.Random(arguments.seed)
    torch.set_num_threads(1)
    compute = torch.bfloat16 if cuda else None
    fleet = HostFleet(get_task(arguments.task), arguments.hosts, arguments.device, compute=compute)
    graphs = []
    for _ in range(arguments.episodes):
        before = Counter({} if fleet.graphs is None else counts_of(fleet))
        grow(fleet, dice, arguments.members)
        graphs.append({} if fleet.graphs is None else dict(Counter(counts_of(fleet)) - before))
    plan, rates = fleet.update_plan(), torch.full((), 0.05, device=fleet.device, dtype=fleet.dtype)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with labelled(), profile(activities=activities, acc_events=True) as profiled:
        for index in range(arguments.minibatches):
            fleet.run_minibatch(plan, fleet.draw(index), rates, torch.ones_like(rates))
    events = list(profiled.events())
    counts, milliseconds = by_part(events, cuda=cuda)
    if cuda:
        every = on_device(events)
        counts[UNLISTED] = len(every) - counts.total()
        milliseconds[UNLISTED] = sum(event.device_time for event in every) / 1e3 - sum(milliseconds.values())
    report(arguments, fleet, counts, milliseconds, graphs)
    if arguments.kernels:
        list_kernels(events, arguments.kernels, arguments.minibatches)


def list_kernels(events: list[FunctionEvent], most: int, minibatches: int) -> None:
    """Print the kernels that take most of the device's time."""
    counts, milliseconds = Counter[str](), defaultdict[str, float](float)
    for event in on_device(events):
        counts[event.name] += 1
        milliseconds[event.name] += event.device_time / 1e3
    slowest = sorted(milliseconds.items(), key=lambda item: -item[1])[:most]
    rows = [[name[:90], f"{counts[name] / minibatches:.1f}", f"{value / minibatches:.3f}"] for name, value in slowest]
    print_table("kernels", ["name", "a minibatch", "ms"], rows)


def counts_of(fleet: HostFleet) -> dict[str, int]:
    """What the graphs of a fleet did so far."""
    return {name: getattr(fleet.graphs, name) for name in ("captures", "replays", "eager_runs")}


def report(
    arguments: argparse.Namespace,
    fleet: HostFleet,
    counts: Counter[str],
    milliseconds: dict[str, float],
    graphs: list[dict[str, int]],
) -> None:
    """Print the tables, write the JSON."""
    many, total = arguments.minibatches, sum(milliseconds.values())
    rows = [
        [part, f"{counts[part] / many:.0f}", f"{value / many:.2f}", 100 * value / total]
        for part, value in sorted(milliseconds.items(), key=lambda item: -item[1])
    ]
    rows.append(["total", f"{counts.total() / many:.0f}", f"{total / many:.2f}", 100.0])
    banks = len(fleet.busy_banks())
    title = f"{fleet.task.name}, {fleet.n} hosts, {banks} banks: a minibatch"
    print_table(title, ["part", "kernels" if fleet.device.type == "cuda" else "operations", "ms", "%"], rows)
    entries = padding(fleet)
    print_table("entries", ["where", "real", "padded"], [[name, *pair] for name, pair in entries.items()])
    for number, episode in enumerate(graphs, 1):
        print(f"episode {number}: {episode or 'no graphs'}")
    content: dict[str, Json] = {
        **{name: getattr(arguments, name) for name in ("task", "hosts", "members", "episodes", "minibatches")},
        "banks": banks,
        "kernels": {part: count / many for part, count in counts.items()},
        "milliseconds": {part: value / many for part, value in milliseconds.items()},
        "entries": {name: list(pair) for name, pair in entries.items()},
        "graphs": graphs,
    }
    print(write_result(f"loop_profile_{fleet.task.name}_{fleet.device.type}", content, arguments.out))


if __name__ == "__main__":
    main()
