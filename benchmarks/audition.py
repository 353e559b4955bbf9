"""Does the audition, before a host weight has moved, rank seeds like the gain after blending?

Every image blueprint grows in every slot of `digits_blind`, with several seeds each. The audition after shadow training
is compared with the gain over a host that never grows, after the ramp, on the same images. Auditions are measured in
accuracy and loss, once calibrated and once with the host's running statistics.

    python benchmarks/audition.py                 # the full table, about three minutes on one core
"""

import argparse
import statistics
from pathlib import Path
from typing import NamedTuple

import torch
from harness import RESULTS, Json, print_table, spread, write_result
from one_seed import Plan, grow, unlimited
from scipy.stats import spearmanr

from esper.kasmina import BlueprintRegistry, Comparison
from esper.kasmina.compare import paired_difference, score_row
from esper.kasmina.slot import Role
from esper.leyline import SeedStage
from esper.tolaria import HostTrainer, Task, get_task
from esper.tolaria.batches import Batches

GERMINATE_AT = 4


class Trial(NamedTuple):
    """One cell on one seed; accuracies in points, losses as reductions in nats."""

    audition: float
    audition_loss: float
    running: float
    """Audition with the host's running statistics."""
    running_loss: float
    gain: float
    gain_loss: float


class Watcher:
    """Keeps what a trial needs: the last audition, both ways, and the score after each step."""

    def __init__(self, slot_id: str) -> None:
        self.slot_id = slot_id
        self.audition = self.running = (float("nan"), float("nan"))
        self.after_ramp: Comparison | None = None
        self.after_ramp_step = -1

    def __call__(self, trainer: HostTrainer, found: Comparison) -> None:
        state = trainer.model.seed_slots[self.slot_id].state
        if self.slot_id in found.auditions:
            best = found.auditions[self.slot_id]
            self.audition = best.points.value, best.loss.value
            samples = trainer.batches.validation()
            row = score_row(trainer.model.body, *samples, {self.slot_id: Role.SHADOW}, None)
            assert found.deployed is not None, "a single model is always scored as deployed"
            running = paired_difference(row, found.deployed)
            self.running = running.points.value, running.loss.value
        if state.stage is SeedStage.HOLDING and self.after_ramp is None:
            self.after_ramp, self.after_ramp_step = found, trainer.step_index


def run_trial(task: Task, batches: Batches, rng_seed: int, plan: Plan, control: list[Comparison]) -> Trial:
    """Grow one seed and compare it with the control after the same number of steps."""
    watcher = Watcher(plan.slot_id)
    grow(task, batches, rng_seed, plan, watcher)
    assert watcher.after_ramp is not None, "the seed never reached HOLDING"
    yardstick = control[watcher.after_ramp_step].main
    difference = paired_difference(watcher.after_ramp.main, yardstick)
    gain, gain_loss = difference.points.value, difference.loss.value
    return Trial(*watcher.audition, *watcher.running, gain, gain_loss)


def main() -> None:
    """Run all cells, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, choices=range(1, 1001), metavar="N")
    parser.add_argument("--shadow-steps", type=int, default=6, choices=range(2, 11), metavar="2..10")
    names = BlueprintRegistry.names("image")
    parser.add_argument("--blueprints", nargs="+", default=names, choices=names)
    slots = list(get_task("digits_blind").slot_ids)
    parser.add_argument("--slots", nargs="+", default=slots, choices=slots)
    parser.add_argument("--name", default="audition", help="name of the JSON")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the task is small: more threads cost more than they give
    task = unlimited(get_task("digits_blind"))
    batches = task.load_batches()
    cells: dict[tuple[str, str], list[Trial]] = {}
    for rng_seed in range(arguments.seeds):
        control: list[Comparison] = []
        grow(task, batches, rng_seed, None, lambda trainer, found, kept=control: kept.append(found))  # type: ignore[misc]
        for slot_id in arguments.slots:
            for blueprint in arguments.blueprints:
                plan = Plan(slot_id, blueprint, GERMINATE_AT, arguments.shadow_steps)
                cells.setdefault((slot_id, blueprint), []).append(run_trial(task, batches, rng_seed, plan, control))
        print(f"seed {rng_seed} done", flush=True)
    report(cells, arguments.shadow_steps, arguments.name, arguments.out)


def report(cells: dict[tuple[str, str], list[Trial]], shadow_steps: int, name: str, folder: Path) -> None:
    """The table of cell means, the rank correlations, the JSON."""
    means = {
        key: Trial(*(statistics.fmean(column) for column in zip(*trials, strict=True))) for key, trials in cells.items()
    }
    seeds = len(next(iter(cells.values())))
    print_table(
        f"digits_blind, {shadow_steps} shadow steps, {seeds} seeds (points; loss in 0.01 nats)",
        ["slot blueprint", "audition", "by loss", "running stats", "by loss", "gain after ramp", "by loss"],
        [
            [f"{slot} {blueprint}", *(spread([_shown(field, t) for t in trials]) for field in Trial._fields)]
            for (slot, blueprint), trials in cells.items()
        ],
    )
    columns = {field: [getattr(mean, field) for mean in means.values()] for field in Trial._fields}
    pairs = {
        "accuracy": ("audition", "gain"),
        "loss": ("audition_loss", "gain_loss"),
        "accuracy, running statistics": ("running", "gain"),
        "loss, running statistics": ("running_loss", "gain_loss"),
    }
    # One cell has no rank; JSON has no NaN.
    ranks = {
        label: float(spearmanr(columns[a], columns[b]).statistic) if len(cells) > 1 else None
        for label, (a, b) in pairs.items()
    }
    print_table(
        f"Spearman over {len(cells)} cell means",
        ["by", "rho"],
        [[label, "-" if rho is None else f"{rho:.2f}"] for label, rho in ranks.items()],
    )
    first = cells.get(("r1c0", "depthwise"), [])
    print(f"\ndepthwise in r1c0: audition positive on {sum(t.audition > 0 for t in first)} of {len(first)} seeds")
    print(f"  with running statistics on {sum(t.running > 0 for t in first)} of {len(first)}")
    trials: Json = {f"{slot} {blueprint}": [t._asdict() for t in ts] for (slot, blueprint), ts in cells.items()}
    path = write_result(name, {"shadow_steps": shadow_steps, "spearman": ranks, "trials": trials}, folder)
    print(f"wrote {path.name}")


def _shown(field: str, trial: Trial) -> float:
    value = float(getattr(trial, field))
    return 100 * value if field.endswith("loss") else value


if __name__ == "__main__":
    main()
