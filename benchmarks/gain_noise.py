"""How far hosts that train alike drift apart: the accuracies of a group whose members all wait.

On the CPU they are equal to the last bit, and their gains exactly 0; on CUDA rounding differs from row to row, and the
spread is the noise below which no gain means anything.

    python benchmarks/gain_noise.py --device cuda
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from harness import RESULTS, Json, print_table, write_result

from esper.tolaria import HostFleet, get_task


def noise(name: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Spread of calibrated accuracy within each of two groups, in points."""
    task = replace(get_task(name), steps=arguments.steps)
    cuda = arguments.device == "cuda"
    members = arguments.members
    fleet = HostFleet(
        task,
        2 * members,
        arguments.device,
        [0] * members + [1] * members,
        data_dir=arguments.data_dir,
        compute=torch.bfloat16 if cuda else None,
    )
    for _ in range(arguments.steps):
        fleet.train_step()
        fleet.tick()
    accuracy = torch.tensor([each.main.accuracy for each in fleet.validate()], dtype=torch.float64).view(2, members)
    return {
        "gain_noise": accuracy.std(1).tolist(),
        "largest_gain": (accuracy.amax(1) - accuracy.amin(1)).tolist(),
        "accuracy": accuracy.mean(1).tolist(),
    }


def main() -> None:
    """Measure, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["digits_blind"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    found = {name: noise(name, arguments) for name in arguments.tasks}
    rows = [
        [name, group, *(f"{figures[key][group]:.3f}" for key in ("gain_noise", "largest_gain", "accuracy"))]
        for name, figures in found.items()
        for group in range(2)
    ]
    print_table(f"gain_noise on {arguments.device}", ["task", "group", "deviation", "range", "accuracy %"], rows)
    written: dict[str, Json] = {name: dict(figures) for name, figures in found.items()}
    write_result("gain_noise", {"device": arguments.device, "steps": arguments.steps, "tasks": written}, arguments.out)


if __name__ == "__main__":
    main()
