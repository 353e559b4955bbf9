"""Does the gain last when all hosts train for longer?

Each policy grows hosts, and each host has a control. After the T steps of an episode, hosts are hardened (only fossils
stay). Hosts and controls then train T more steps at their final rate. The share of the gain that is left is the ratio
of the means over hosts and training seeds, with a bootstrap interval over both.

Grown hosts are also compared with equal compute: a host that never grows trains with the whole work of the grown one,
including shadow, validation, ablation and probe passes. First it gets the work of the episode, with the schedule of the
rate stretched over it. Then it gets the work of the T steps after it, at the final rate.

    python benchmarks/gain_lasts.py --policies runs/s0+runs/s1+runs/s2+runs/s3+runs/s4 schedule heuristic --workers 7
    python benchmarks/gain_lasts.py --task cifar_growth --policies runs/seed0+runs/seed1 --device cuda --keep FOLDER
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from harness import RESULTS, Json, print_table, stored, write_result
from numpy.typing import NDArray
from torch import Tensor

from esper.kasmina import SeedState
from esper.leyline import SeedStage, head_preset
from esper.leyline.records import checksum, encode
from esper.simic.evaluation.arena import Arena, PolicyPlayer, divide, envs_at_once, fill, hardened
from esper.simic.evaluation.costs import CostMeter
from esper.simic.evaluation.final_log import sign_policies
from esper.simic.evaluation.policies import (
    EvaluationConfig,
    PolicySpec,
    check_specs,
    learned_runs,
    make_policy,
    preset_of,
    unfinished,
)
from esper.simic.evaluation.statistics import Difference, compare
from esper.simic.evaluation.workers import host_draws, host_seeds, worker_pool
from esper.simic.training.episode import play_episode
from esper.simic.training.hosts import Groups, growth_fleet
from esper.tamiyo import growth_table
from esper.tolaria import HostFleet, Task, get_task
from esper.tolaria.engine import rate_factor

BAR = 0.8
BOOTSTRAPS = 4000
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Job:
    """One policy on all hosts."""

    spec: str
    index: int
    """Of the policies that the spec stands for: the training seed."""
    task: str
    steps: int | None
    hosts: int
    rng_seed: int
    preset: str
    final: bool
    device: str
    data_dir: Path | None


@dataclass(frozen=True)
class Lasting:
    """Lists over hosts; accuracies in percent, at T and after T more steps; work in trainings of the plain host."""

    grown: list[float]
    control: list[float]
    grown_later: list[float]
    control_later: list[float]
    compute: list[float]
    """The host that never grew, given the work of the grown one."""
    compute_later: list[float]
    work: list[float]
    work_later: list[float]
    """Of the T steps after the episode alone."""


def shortened(name: str, steps: int | None) -> Task:
    """The task, with episodes of `steps` steps, or unchanged."""
    task = get_task(name)
    return task if steps is None else replace(task, steps=steps)


def run(job: Job) -> Lasting:
    """Grow, harden, train on; and the same compute without growth."""
    torch.set_num_threads(1)
    task, preset = shortened(job.task, job.steps), head_preset(job.preset)
    member = PolicySpec.parse(job.spec).members[job.index]
    policy = make_policy(member, task, growth_table(preset, task.slot_config), job.device)
    config = EvaluationConfig(job.task, job.hosts, job.rng_seed, job.preset, final=job.final)
    arena = Arena(task, preset, final=job.final, device=job.device, data_dir=job.data_dir)
    blocks = divide(job.hosts, envs_at_once(job.device) // 2)
    runner = arena.runner(groups := Groups(len(blocks[0]), 1))
    meter, parts = CostMeter(runner.fleet, final=job.final), dict[str, list[float]]()
    for block in blocks:
        hosts = fill(block, groups.count)
        seeds = [host_seeds(config)[host] for host in hosts]
        player = PolicyPlayer(runner, policy, seeds, host_draws(config, hosts, task.steps, len(runner.table)), meter)
        accuracy, control, _ = hardened(play_episode(runner, player.act, player.on_step))
        work = np.array(list(meter.cost().values())).sum(0)
        later, work_later = train_on(runner.fleet, groups.envs, final=job.final)
        same_compute = wait_for(arena, seeds, work, work_later)
        found = (
            *(accuracy, control, groups.grown_of(later), groups.control_of(later)),
            *(*same_compute, torch.from_numpy(work), torch.from_numpy(work_later)),
        )
        for name, values in zip(Lasting.__dataclass_fields__, found, strict=True):
            parts.setdefault(name, []).extend(values[: len(block)].tolist())
    return Lasting(**parts)


def run_stored(keep: Path | None, job: Job) -> Lasting:
    """The same, unless an earlier call has stored it."""
    identity = checksum(encode(replace(job, data_dir=None)))[:20]
    return Lasting(**stored(keep, identity, lambda: asdict(run(job))))


def train_on(fleet: HostFleet, envs: Sequence[int], *, final: bool) -> tuple[Tensor, Array]:
    """Harden all hosts where they are, and train them for as long again. Accuracies of the fleet; the envs' work."""
    for env, states in enumerate(fleet.states):
        for slot_id, state in states.items():
            if state.stage is not SeedStage.FOSSILIZED:
                fleet.uproot(env, slot_id)
        fossils = {s: state for s, state in states.items() if state.stage is SeedStage.FOSSILIZED}
        fleet.adopt(env, {slot_id: fossils.get(slot_id, SeedState(slot_id)) for slot_id in states})
    meter = CostMeter(fleet)
    meter.begin(envs)
    structure = meter.structure()
    for _ in range(fleet.task.steps):  # behind T the rate stays what it was there
        fleet.train_step()
        meter.train(structure)
        fleet.tick()
    work = np.array(list(meter.cost().values())).sum(0)
    return fleet.points(fleet.validate_committed(final=final)), work


def wait_for(arena: Arena, seeds: list[int], work: Array, work_later: Array) -> tuple[Tensor, Tensor]:
    """Accuracies of hosts that never grow, after so much work each: an episode of that length, then its final rate."""
    task = arena.task
    fleet = growth_fleet(task, len(seeds), arena.device, seeds, batches=arena.batches)
    minibatches = task.steps * task.batches_per_step
    episode = np.rint(work * minibatches)
    ends = np.stack([episode, episode + np.rint(work_later * minibatches)])
    found = torch.zeros(ends.shape)
    for done in range(int(ends.max())):
        factors = torch.tensor([rate_factor(done / length) for length in episode])
        fleet.rate_scale[: len(seeds)] = factors.to(fleet.rate_scale)
        fleet.train_minibatch(fleet.draw(done), task.optimiser.rate)
        if (now := torch.from_numpy(ends == done + 1)).any():
            # Each host at its own ends; what it does afterwards, while others train, is not looked at.
            found = torch.where(now, fleet.points(fleet.validate_committed(final=arena.final)).cpu(), found)
    return found[0], found[1]


# -- figures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """One policy over all hosts and training seeds."""

    gain: float
    gain_later: float
    share: float | None
    """Of the gain that is kept; None where there was none"""
    share_low: float | None
    share_high: float | None
    work: float
    over_compute: Difference
    """Accuracy at T against the host that never grew, of equal compute"""
    over_compute_later: Difference


def summarise(found: Sequence[Lasting]) -> Figures:
    """One entry per training seed."""
    columns = {name: np.array([getattr(each, name) for each in found]) for name in Lasting.__dataclass_fields__}
    gain, later = columns["grown"] - columns["control"], columns["grown_later"] - columns["control_later"]
    low, high = share_interval(gain, later)
    return Figures(
        float(gain.mean()),
        float(later.mean()),
        share_of(gain, later),
        low,
        high,
        float(columns["work"].mean()),
        compare(columns["grown"].tolist(), columns["compute"].tolist(), paired=True),
        compare(columns["grown_later"].tolist(), columns["compute_later"].tolist(), paired=True),
    )


def share_of(gain: Array, later: Array) -> float | None:
    """Ratio of means: hosts that gained little would make a mean of ratios noise. None where nothing was gained."""
    return float(later.mean() / gain.mean()) if gain.mean() > 0 else None


def share_interval(gain: Array, later: Array) -> tuple[float | None, float | None]:
    """95 % by the bootstrap over training seeds and hosts (seeds, hosts); None where some draws gained nothing."""
    dice, shares = np.random.default_rng(0), []
    for _ in range(BOOTSTRAPS):
        rows = dice.integers(len(gain), size=(len(gain), 1))
        hosts = dice.integers(gain.shape[1], size=(1, gain.shape[1]))
        shares.append(share_of(gain[rows, hosts], later[rows, hosts]))
    values = [share for share in shares if share is not None]
    if len(values) < len(shares):
        return None, None
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def main() -> None:
    """Measure, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", required=True, help="as `esper evaluate` names them")
    parser.add_argument("--task", default="digits_blind")
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--seed", type=int, default=7, help="which unseen hosts")
    parser.add_argument("--final", action="store_true", help="hosts of the final range, scored on test images")
    parser.add_argument("--steps", type=int, default=None, help="shorten episodes")
    parser.add_argument("--workers", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--keep", type=Path, default=None, help="folder from which a stopped call continues")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    arguments = parser.parse_args()
    task = shortened(arguments.task, arguments.steps)
    preset = preset_of(arguments.policies)
    hosts = EvaluationConfig(arguments.task, arguments.hosts, arguments.seed, preset, device=arguments.device)
    specs = [PolicySpec.parse(policy) for policy in arguments.policies]
    check_specs(specs, hosts)
    jobs = [
        Job(
            *(spec, index, arguments.task, arguments.steps, arguments.hosts, arguments.seed),
            *(preset, arguments.final, arguments.device, arguments.data_dir),
        )
        for spec in arguments.policies
        for index in range(len(PolicySpec.parse(spec).members))
    ]
    arguments.out.mkdir(parents=True, exist_ok=True)  # where nothing can be written, no look is wasted
    warnings = unfinished(learned_runs(specs))
    if arguments.final:
        resumed = arguments.keep is not None
        warnings += sign_policies(specs, [arguments.task], arguments.hosts, arguments.seed, resumed=resumed)
    print(*(f"warning: {warning}\n" for warning in warnings), sep="", end="")
    if arguments.workers > 1:
        with worker_pool(arguments.workers) as pool:
            found = dict(zip(jobs, pool.map(partial(run_stored, arguments.keep), jobs), strict=True))
    else:
        found = {job: run_stored(arguments.keep, job) for job in jobs}
    by_spec = {spec: [found[job] for job in jobs if job.spec == spec] for spec in arguments.policies}
    report(by_spec, arguments, task, warnings)


def report(by_spec: dict[str, list[Lasting]], arguments: argparse.Namespace, task: Task, warnings: list[str]) -> None:
    """The table and the JSON."""
    figures = {spec: summarise(found) for spec, found in by_spec.items()}
    images = "test" if arguments.final else "validation"
    print_table(
        f"{arguments.task}, {arguments.hosts} unseen hosts, {images} images, T = {task.steps} steps; points, 95 % "
        f"intervals; share of the gain kept after T more steps: bar {BAR}",
        ["policy", "seeds", "gain at T", "later", "share", "work", "over equal compute", "later"],
        [
            [
                _short(spec),
                len(by_spec[spec]),
                f"{each.gain:+.2f}",
                f"{each.gain_later:+.2f}",
                _interval(each.share, each.share_low, each.share_high),
                f"{each.work:.1f}",
                *(_interval(d.mean, d.low, d.high) for d in (each.over_compute, each.over_compute_later)),
            ]
            for spec, each in figures.items()
        ],
    )
    written: dict[str, Json] = {
        _short(spec): {
            "seeds": len(found),
            "figures": _finite(asdict(figures[spec])),
            "by_seed": [asdict(each) for each in found],
        }
        for spec, found in by_spec.items()
    }
    settings = {"task": arguments.task, "hosts": arguments.hosts, "seed": arguments.seed, "final": arguments.final}
    path = write_result(
        f"gain_lasts_{arguments.task}",
        {**settings, "steps": task.steps, "bar": BAR, "policies": written, "warnings": warnings},
        arguments.out,
    )
    print(f"wrote {path.name}")


def _short(spec: str) -> str:
    """Run folders by their names alone: where they lay is nobody's business."""
    return "+".join(Path(part).name if Path(part).is_dir() else part for part in spec.split("+"))


def _interval(mean: float | None, low: float | None, high: float | None) -> str:
    inner = "-" if low is None or high is None else f"{low:.2f} … {high:.2f}"
    return f"{'-' if mean is None else f'{mean:.2f}'} ({inner})"


def _finite(values: dict[str, Json]) -> dict[str, Json]:
    """JSON has neither NaN nor infinity."""
    cleaned: dict[str, Json] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            cleaned[name] = _finite(value)
        else:
            cleaned[name] = None if isinstance(value, float) and not math.isfinite(value) else value
    return cleaned


if __name__ == "__main__":
    main()
