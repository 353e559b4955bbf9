"""Does what a controller can sense of an empty slot predict what a seed will gain there?

    python benchmarks/sensing.py --task digits_varied --hosts 16
    python benchmarks/sensing.py --task cifar_varied --hosts 16 --device cuda

Every blueprint grows in every slot of the same hosts from the first step. Its final gain is compared with what was
known before: the columns of the probe at step 0, from one minibatch or several, and auditions after a few steps of
shadow training. Ranks correlate over all cells and hosts after the mean of each cell over hosts is subtracted, since
a controller that knows the task knows those means. The raw correlation stands beside it. Intervals of 95 % come from a
bootstrap over hosts.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from harness import RESULTS, Json, print_table, write_result
from scipy.stats import rankdata
from torch import Tensor

from esper.leyline import gain_over, head_preset, objective
from esper.simic.evaluation.arena import Arena, divide, envs_at_once, fill, hardened
from esper.simic.evaluation.yardsticks import extensions, plan_policy
from esper.simic.training.episode import EpisodeRunner, StepResult
from esper.simic.training.hosts import Groups, host_seed
from esper.tamiyo.policies import Plan, PlannedSeed
from esper.tolaria import get_task
from esper.tolaria.measurement import worths_of

AFTER = (1, 3, 5)
"""Steps of shadow training after which auditions are read"""
RESAMPLES = 2_000


def cells_of(arena: Arena) -> list[Plan]:
    """One seed in the first step: every blueprint in every slot."""
    return [plan for plan in extensions(Plan(), arena.task) if plan.seeds[0].germinate_at == 0]


def final_gains(arena: Arena, plans: Sequence[Plan], seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Gains and objectives (hosts, cells), on validation images."""

    def measure(runner: EpisodeRunner, result: StepResult) -> Tensor:
        accuracy, control, added = (column.double() for column in hardened(result))
        gain = gain_over(control, accuracy, by_loss=result.by_loss)
        return torch.stack([gain, objective(gain, added, runner.host_sizes.double())], -1)

    gain, worth = arena.run(plan_policy, [list(plans)] * len(seeds), seeds, measure).unbind(-1)
    return gain, worth


def probes(arena: Arena, plans: Sequence[Plan], seeds: Sequence[int], minibatches: Sequence[int]) -> dict[str, Tensor]:
    """Columns (hosts, cells) of fresh hosts. Those of a slot are the same for all its blueprints."""
    runner = arena.runner(Groups(len(seeds), 1, controls=False))
    runner.begin(list(seeds))
    prober, slots = runner.prober, runner.slots
    chosen = [(slots.index(plan.seeds[0].slot), prober.names.index(plan.seeds[0].blueprint)) for plan in plans]
    slot, blueprint = (torch.tensor(part) for part in zip(*chosen, strict=True))
    columns = {name: getattr(runner.sensing, name).cpu()[:, slot] for name in ("rms", "rank", "gradient")}
    columns["worth, relative"] = runner.sensing.offers.cpu()[:, slot, blueprint]
    taps = [prober.taps(number) for number in range(max(minibatches))]
    for count in minibatches:
        # The worth is the norm of a sum over samples, so minibatches are joined before it is taken.
        streams, gradients = (
            [torch.cat(parts, 1) for parts in zip(*(getattr(one, name) for one in taps[:count]), strict=True)]
            for name in ("streams", "gradients")
        )
        with torch.no_grad():
            worths = [
                worths_of([prober.newborns.get((slot_id, name)) for name in prober.names], h, g, let_through)
                for slot_id, h, g, let_through in zip(
                    slots.slot_ids, streams, gradients, taps[0].conductance.unbind(1), strict=True
                )
            ]
        columns[f"worth, minibatches: {count}"] = torch.stack(worths, 1)[: len(seeds)].cpu()[:, slot, blueprint]
    return columns


def auditions(arena: Arena, plans: Sequence[Plan], seeds: Sequence[int]) -> dict[str, Tensor]:
    """Auditions (hosts, cells) by accuracy and by loss after each number of steps in the shadow."""
    parts = divide(len(seeds), max(1, envs_at_once(arena.device) // (len(plans) + 1)))
    runner = arena.runner(Groups(len(parts[0]), len(plans)))
    held = [Plan((PlannedSeed(plan.seeds[0].slot, plan.seeds[0].blueprint, 0, max(AFTER) + 2),)) for plan in plans]
    slot = torch.tensor([runner.slots.index(plan.seeds[0].slot) for plan in plans] * len(parts[0]))[:, None]
    read: dict[str, list[Tensor]] = {}
    for part in parts:
        some = fill([seeds[index] for index in part], runner.groups.count)
        runner.begin(some)
        policy = plan_policy(runner, [held] * runner.groups.count)
        state = policy.initial_state([seed for seed in some for _ in plans])
        for step in range(max(AFTER) + 1):  # a seed that germinates in step 0 trains from step 1 on
            view = runner.view()
            actions, state = policy.act(view, state, torch.zeros(runner.groups.grown, len(runner.table)))
            result = runner.step(actions)
            if step in AFTER:
                both = {"accuracy": result.slots.audition.value, "loss": result.slots.audition_loss}
                for name, values in both.items():
                    chosen = values.cpu().gather(1, slot).view(-1, len(plans))[: len(part)]
                    read.setdefault(f"audition by {name}, steps: {step}", []).append(chosen)
    return {name: torch.cat(blocks) for name, blocks in read.items()}


def centred(values: Tensor) -> Tensor:
    """Values (hosts, cells) without the mean of each cell over hosts."""
    return values - values.mean(0)


def spearman(one: Tensor, other: Tensor) -> float:
    """Rank correlation over all numbers; 0 if either is constant."""
    ranks = torch.stack([torch.from_numpy(rankdata(values.flatten().numpy())) for values in (one, other)])
    return float(torch.nan_to_num(torch.corrcoef(ranks))[0, 1])


def bootstrapped(column: Tensor, gain: Tensor, generator: torch.Generator) -> dict[str, Json]:
    """Both correlations, and the interval of the centred one."""
    hosts = len(gain)
    draws = torch.randint(hosts, (RESAMPLES, hosts), generator=generator)
    values = torch.tensor([spearman(centred(column[rows]), centred(gain[rows])) for rows in draws])
    low, high = values.quantile(torch.tensor([0.025, 0.975])).tolist()
    return {
        "centred": spearman(centred(column), centred(gain)),
        "low": low,
        "high": high,
        "raw": spearman(column, gain),
    }


def main() -> None:
    """Grow and probe, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits_varied")
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--minibatches", type=int, nargs="*", default=[1, 4, 16], help="of the probes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arena = Arena(get_task(arguments.task), head_preset("core"), device=arguments.device, data_dir=arguments.data_dir)
    seeds = [host_seed("tuning", arguments.seed, number) for number in range(arguments.hosts)]
    plans = cells_of(arena)
    gain, worth = final_gains(arena, plans, seeds)
    columns = probes(arena, plans, seeds, arguments.minibatches) | auditions(arena, plans, seeds)
    generator = torch.Generator().manual_seed(arguments.seed)
    found = {name: bootstrapped(column.double(), gain, generator) for name, column in columns.items()}
    rows = [
        [name, f"{one['centred']:+.2f} ({one['low']:+.2f} to {one['high']:+.2f})", f"{one['raw']:+.2f}"]
        for name, one in found.items()
    ]
    title = f"{arguments.task}: {len(plans)} cells × {len(seeds)} hosts; rank correlation with the final gain"
    print_table(title, ["column", "cell means subtracted", "raw"], rows)
    content: dict[str, Json] = {
        "task": arguments.task,
        "seed": arguments.seed,
        "kinds": [arena.task.defect_of(seed) for seed in seeds],
        "cells": [f"{plan.seeds[0].slot} {plan.seeds[0].blueprint}" for plan in plans],
        "correlations": found,
        **{name: rounded(values) for name, values in (("gain", gain), ("objective", worth))},
        "columns": {name: rounded(column) for name, column in columns.items()},
    }
    print(write_result(f"sensing_{arguments.task}", content, arguments.out))


def rounded(values: Tensor) -> list[list[float]]:
    """Numbers (hosts, cells) with five significant digits."""
    return [[float(f"{value:.5g}") for value in row] for row in values.tolist()]


if __name__ == "__main__":
    main()
