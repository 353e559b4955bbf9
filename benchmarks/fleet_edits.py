"""What structure costs a fleet on CUDA: kernels per minibatch against N, new graphs, episodes of random edits.

python benchmarks/fleet_edits.py --device cuda
"""

import argparse
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

import fleet_throughput
import torch
from fleet_throughput import BLUEPRINTS, hold_seeds, make_fleet, row
from harness import RESULTS, Json, print_table, write_result

from esper.leyline import EsperError, SeedStage
from esper.tolaria import HostFleet


def kernels(fleet: HostFleet) -> int:
    """CUDA kernels that one eager minibatch launches."""
    samples = fleet.draw(0)
    fleet.train_minibatch(samples, 0.01)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        fleet.train_minibatch(samples, 0.01)
        torch.cuda.synchronize()
    return sum(event.count for event in found.key_averages() if not event.key.startswith(("Mem", "cuda")))


def minibatch_ms(fleet: HostFleet, index: int) -> float:
    """Wall time of one minibatch."""
    samples = fleet.draw(index)
    torch.cuda.synchronize()
    start = time.perf_counter()
    fleet.train_minibatch(samples, 0.01)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def bucket_changes(fleet: HostFleet) -> tuple[list[float], list[float]]:
    """Extra milliseconds of a structure met for the first time (eager run and capture), and of one seen before."""
    for index in range(6):
        minibatch_ms(fleet, index)
    usual = statistics.median(minibatch_ms(fleet, index) for index in range(5))
    new, seen = [], []
    env = fleet.n - 1
    for slot_id in fleet.slots:
        for blueprint in ("norm", "conv_small"):
            fleet.germinate(env, slot_id, blueprint, tempo=0)
            fleet.advance(env, slot_id)
            new.append(sum(minibatch_ms(fleet, index) for index in range(2)) - 2 * usual)
            fleet.prune(env, slot_id)
            minibatch_ms(fleet, 0), minibatch_ms(fleet, 0)
            for _ in range(fleet.config.cooldown):
                fleet.tick()
            fleet.germinate(env, slot_id, blueprint, tempo=0)
            fleet.advance(env, slot_id)
            seen.append(minibatch_ms(fleet, 0) - usual)
            fleet.prune(env, slot_id)
            for _ in range(fleet.config.cooldown):
                fleet.tick()
    return new, seen


def random_edit(fleet: HostFleet, env: int, dice: random.Random) -> None:
    """One op on one slot of an env, if it is legal there."""
    slot_id = dice.choice(list(fleet.slots))
    stage = fleet.states[env][slot_id].stage
    try:
        if stage is SeedStage.DORMANT:
            fleet.germinate(env, slot_id, dice.choice((*BLUEPRINTS, "norm", "attention", "conv_small", "conv_heavy")))
        elif stage is SeedStage.TRAINING:
            dice.choice([fleet.advance, fleet.prune])(env, slot_id)
        elif stage is SeedStage.HOLDING:
            dice.choice([fleet.fossilize, fleet.prune])(env, slot_id)
    except EsperError:
        return  # not legal just now: the env waits


def episodes(fleet: HostFleet, count: int) -> list[float]:
    """Per episode of random legal edits: the percentage of steps that needed no new graph."""
    assert fleet.graphs is not None
    dice = random.Random(0)
    shares = []
    for episode in range(count):
        fleet.reset(range(1000 * episode, 1000 * episode + fleet.n))
        quiet = 0
        for _ in range(fleet.task.steps):
            for env in range(fleet.n):
                if dice.random() < 0.25:
                    random_edit(fleet, env, dice)
            before = fleet.graphs.captures
            fleet.train_step()
            quiet += fleet.graphs.captures == before
            fleet.validate()
            fleet.tick()
        shares.append(100 * quiet / fleet.task.steps)
    return shares


def main() -> None:
    """Measure, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--episodes", type=int, default=4)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    arguments.bf16 = True
    rows: list[dict[str, Json]] = []
    for n in (16, 128):
        fleet = make_fleet(arguments, n, 64, graphs=False)
        hold_seeds(fleet, n * 3 // 4)
        rows.append(row(f"kernels per minibatch, N={n}", [float(kernels(fleet))], "kernels"))
        del fleet
    fleet = make_fleet(arguments, arguments.hosts, 512)
    hold_seeds(fleet, arguments.hosts * 3 // 4)
    new, seen = bucket_changes(fleet)
    rows += [row("a new structure", new, "ms"), row("a structure seen before", seen, "ms")]
    del fleet
    fleet_throughput.VALIDATION = 200
    fleet = make_fleet(arguments, arguments.hosts, 128)
    fleet.task = replace(fleet.task, batches_per_step=3)
    for episode, share in enumerate(episodes(fleet, arguments.episodes)):
        rows.append(row(f"steps without a new graph, episode {episode + 1}", [share], "%"))
    cells = [[r["name"], *(f"{r[k]:.1f}" for k in ("median", "low", "high")), r["unit"]] for r in rows]
    print_table("Structure", ["what", "median", "low", "high", "unit"], cells)
    write_result("fleet_edits", {"rows": rows}, arguments.out)


if __name__ == "__main__":
    main()
