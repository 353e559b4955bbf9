"""False alarms: healthy hosts, half of them growing at random, under the governor's eyes. Every panic is one too many.

python benchmarks/governor_alarms.py --tasks digits_blind digits
python benchmarks/governor_alarms.py --tasks fashion_small cifar_baseline --device cuda
"""

import argparse
import random
import sys
from dataclasses import replace
from pathlib import Path

import torch
from harness import RESULTS, Json, print_table, write_result
from random_growth import random_edit

from esper.tolaria import HostFleet, get_task


def run_healthy(name: str, arguments: argparse.Namespace) -> dict[str, Json]:
    """Train the hosts of one task and list all panics."""
    task = replace(get_task(name), budget=sys.maxsize, steps=arguments.steps)
    cuda = arguments.device == "cuda"
    fleet = HostFleet(
        task, arguments.hosts, arguments.device, data_dir=arguments.data_dir, compute=torch.bfloat16 if cuda else None
    )
    dice = random.Random(0)
    panics: list[Json] = []
    for step in range(arguments.steps):
        for env in range(0, fleet.n, 2):
            if dice.random() < 0.3:
                random_edit(fleet, env, dice)
        fleet.train_step()
        comparisons = fleet.validate()
        panics += [
            {"step": step, "env": panic.env, "symptoms": [symptom.name for symptom in panic.symptoms]}
            for panic in fleet.govern(comparisons)
        ]
        fleet.tick()
    accuracy = sum(comparison.main.accuracy for comparison in comparisons) / fleet.n
    return {"hosts": fleet.n, "steps": arguments.steps, "panics": panics, "mean_accuracy": accuracy}


def main() -> None:
    """Watch every task, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["digits_blind", "digits"])
    parser.add_argument("--hosts", type=int, default=200)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    for name in arguments.tasks:
        found = run_healthy(name, arguments)
        panics = found["panics"]
        assert isinstance(panics, list)
        print_table(
            f"{name}: {found['hosts']} hosts × {found['steps']} steps, mean accuracy {found['mean_accuracy']:.1f} %",
            ["step", "env", "symptoms"],
            [[p["step"], p["env"], ", ".join(p["symptoms"])] for p in panics] or [["-", "-", "no panic"]],
        )
        write_result(f"governor_alarms_{name}", {name: found}, arguments.out)


if __name__ == "__main__":
    main()
