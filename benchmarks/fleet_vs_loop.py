"""A fleet of hosts against the same hosts trained one by one, on the CPU: images a second, same work, seeds included.

Twelve of sixteen `digits_blind` hosts grow a seed in each of three slots, blueprints in turn; both ways train the same
step in turn, so that the machine's moods hit both.

    python benchmarks/fleet_vs_loop.py
"""

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from harness import RESULTS, print_table, write_result

from esper.kasmina import GateThresholds, LifecycleConfig
from esper.tolaria import HostFleet, HostTrainer, get_task

BLUEPRINTS = ("depthwise", "bottleneck", "conv_light")
STAGES = ("hosts alone", "seeds in TRAINING", "seeds acting")


def main() -> None:
    """Measure, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    task = replace(get_task("digits_blind"), budget=sys.maxsize)
    config = LifecycleConfig(thresholds=GateThresholds(min_training_steps=0, min_holding_steps=0))
    batches = task.load_batches()
    fleet = HostFleet(task, arguments.hosts, batches=batches, config=config)
    lone = [HostTrainer(task, batches, seed, config=config) for seed in fleet.seeds]
    growing = [(env, slot) for env in range(arguments.hosts * 3 // 4) for slot in fleet.slots]
    results = {}
    for stage in STAGES:
        for number, (env, slot_id) in enumerate(growing):
            if stage == STAGES[1]:
                blueprint = BLUEPRINTS[number % len(BLUEPRINTS)]
                fleet.germinate(env, slot_id, blueprint)
                lone[env].model.germinate_seed(slot_id, blueprint)
            if stage != STAGES[0]:
                fleet.advance(env, slot_id)
                lone[env].model.advance(slot_id)
        ratios = []
        for repeat in range(arguments.repeats + 1):
            times = [time.perf_counter()]
            fleet.train_step()
            times.append(time.perf_counter())
            for trainer in lone:
                trainer.train_step()
            times.append(time.perf_counter())
            if repeat:  # the first warms up
                ratios.append((times[2] - times[1]) / (times[1] - times[0]))
        results[stage] = ratios
    print_table(
        f"Images a second of a fleet of {arguments.hosts}, relative to one by one ({arguments.threads} threads)",
        ["what", "median", "low", "high"],
        [[s, *(f"{f(r):.2f}" for f in (statistics.median, min, max))] for s, r in results.items()],
    )
    write_result("fleet_vs_loop", {"hosts": arguments.hosts, "ratios": results}, arguments.out)


if __name__ == "__main__":
    main()
