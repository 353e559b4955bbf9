"""`esper evaluate`: named policies on the same unseen hosts, paired and crossed."""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from esper.leyline import head_preset
from esper.leyline.numbers import require_whole
from esper.leyline.progress import progress_bar
from esper.leyline.records import Json
from esper.simic.training.evaluation import AT_ONCE, Result, evaluate
from esper.simic.training.named import RULES, make_policies
from esper.simic.training.statistics import Difference, compare, holm
from esper.tamiyo import growth_table
from esper.tolaria import HostFleet, get_task

CLAIM_SEEDS = 5
"""Training seeds below which a difference is a report and no claim."""


@dataclass(frozen=True)
class Compared:
    """One policy against another, adjusted for all comparisons of the task."""

    policy: str
    against: str
    difference: Difference
    adjusted_p: float
    superior: bool
    """At least five training seeds, Holm-adjusted p below 0.05, and above 0"""


@dataclass(frozen=True)
class Comparison:
    """Everything that `esper evaluate` found."""

    task: str
    hosts: int
    seed: int
    final: bool
    policies: dict[str, list[Result]]
    """By name, one result per training seed; rules have one"""
    compared: list[Compared]

    def to_json(self) -> dict[str, Json]:
        """Means over training seeds per host, and each seed beside them."""
        return {
            "task": self.task,
            "hosts": self.hosts,
            "seed": self.seed,
            "final": self.final,
            "policies": {name: _merged(results) for name, results in self.policies.items()},
            "differences": [asdict(compared) for compared in self.compared],
        }


def _merged(results: list[Result]) -> dict[str, Json]:
    names = ("objective", "accuracy", "added_params")
    merged = {name: np.mean([getattr(result, name) for result in results], 0).tolist() for name in names}
    return {
        **merged,
        "control_accuracy": results[0].control_accuracy,
        "commits": results[0].commits,
        "by_seed": [asdict(result) for result in results] if len(results) > 1 else [],
    }


def run_comparison(
    task_name: str,
    specs: list[str],
    hosts: int,
    rng_seed: int,
    *,
    final: bool = False,
    preset: str = "core",
    data_dir: Path | None = None,
    device: str = "cpu",
    progress: bool = True,
) -> Comparison:
    """Evaluate policies given by name: a rule, `heuristic:FILE`, `schedule:FILE`, or run folders joined by `+`."""
    require_whole("hosts", hosts, 2, remark="; one host has no interval")
    task, heads = get_task(task_name), head_preset(preset)
    fleet = HostFleet(task, 2 * min(hosts, AT_ONCE), device, data_dir=data_dir)
    built = {spec: make_policies(spec, task, growth_table(heads, task.slot_config), device) for spec in specs}
    flat = {(spec, index): policy for spec, made in built.items() for index, policy in enumerate(made)}
    named = {f"{spec}#{index}": policy for (spec, index), policy in flat.items()}
    batches = -(-hosts // min(hosts, AT_ONCE))
    with progress_bar("evaluating", batches * len(named), shown=progress) as advance:
        found = evaluate(task, named, hosts, rng_seed, heads, final=final, fleet=fleet, advance=advance)
    results = {spec: [found[f"{spec}#{index}"] for index in range(len(made))] for spec, made in built.items()}
    return Comparison(task_name, hosts, rng_seed, final, results, compare_all(results))


def compare_all(results: dict[str, list[Result]]) -> list[Compared]:
    """Every learned policy against all others, Holm-adjusted; without one, the first against the rest.

    A claim needs five training seeds of every learned policy in it.
    """
    learned = [name for name in results if name.split(":")[0] not in RULES]
    firsts = learned or list(results)[:1]
    pairs = [
        (name, other) for place, name in enumerate(firsts) for other in results if other not in firsts[: place + 1]
    ]
    differences = [
        compare([result.objective for result in results[name]], [result.objective for result in results[other]])
        for name, other in pairs
    ]
    adjusted = holm([difference.p for difference in differences])

    def enough(*names: str) -> bool:
        counts = [len(results[name]) for name in names if name in learned]
        return bool(counts) and min(counts) >= CLAIM_SEEDS

    return [
        Compared(name, other, d, p, enough(name, other) and p < 0.05 and d.mean > 0)
        for (name, other), d, p in zip(pairs, differences, adjusted, strict=True)
    ]
