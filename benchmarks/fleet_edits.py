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
from fleet_throughput import hold_seeds, make_fleet, row
from harness import RESULTS, Json, print_table, write_result
from random_growth import random_edit

from esper.tolaria import HostFleet
from esper.tolaria.graphs import CAPTURE_AFTER


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
    """Extra milliseconds, in the slowest minibatch, of a structure met for the first time, and of one seen before."""
    for index in range(CAPTURE_AFTER + 3):
        minibatch_ms(fleet, index)
    usual = statistics.median(minibatch_ms(fleet, index) for index in range(5))
    new, seen = [], []
    env = fleet.n - 1
    for slot_id in fleet.slots:
        for blueprint in ("norm", "conv_small"):
            fleet.germinate(env, slot_id, blueprint, tempo=0)
            fleet.advance(env, slot_id)
            runs = CAPTURE_AFTER + 1
            new.append(max(minibatch_ms(fleet, index) for index in range(runs)) - usual)
            fleet.prune(env, slot_id)
            for index in range(runs):
                minibatch_ms(fleet, index)
            for _ in range(fleet.config.cooldown):
                fleet.tick()
            fleet.germinate(env, slot_id, blueprint, tempo=0)
            fleet.advance(env, slot_id)
            seen.append(minibatch_ms(fleet, 0) - usual)
            fleet.prune(env, slot_id)
            for _ in range(fleet.config.cooldown):
                fleet.tick()
    return new, seen


def episodes(fleet: HostFleet, count: int) -> list[tuple[float, float]]:
    """Per episode of random legal edits: percentages of steps without a new graph, and of minibatches replayed."""
    graphs = fleet.graphs
    assert graphs is not None
    dice = random.Random(0)
    shares = []
    for episode in range(count):
        fleet.reset(range(1000 * episode, 1000 * episode + fleet.n))
        quiet, replays, eager_runs = 0, graphs.replays, graphs.eager_runs
        for _ in range(fleet.task.steps):
            for env in range(fleet.n):
                if dice.random() < 0.25:
                    random_edit(fleet, env, dice)
            before = graphs.captures
            fleet.train_step()
            quiet += graphs.captures == before
            fleet.validate()
            fleet.tick()
        replayed, eager = graphs.replays - replays, graphs.eager_runs - eager_runs
        shares.append((100 * quiet / fleet.task.steps, 100 * replayed / (replayed + eager)))
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
    fleet.task = replace(fleet.task, batches_per_step=10)
    for episode, (quiet, replayed) in enumerate(episodes(fleet, arguments.episodes)):
        rows.append(row(f"steps without a new graph, episode {episode + 1}", [quiet], "%"))
        rows.append(row(f"minibatches replayed, episode {episode + 1}", [replayed], "%"))
    cells = [[r["name"], *(f"{r[k]:.1f}" for k in ("median", "low", "high")), r["unit"]] for r in rows]
    print_table("Structure", ["what", "median", "low", "high", "unit"], cells)
    write_result("fleet_edits", {"rows": rows}, arguments.out)


if __name__ == "__main__":
    main()
