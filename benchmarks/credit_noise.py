"""How much of what a plan gains is the host's doing, and what a critic can know of that.

Over the episodes of trained runs: the variance of the gain among those that committed the same seeds; what is left of
it where the host's first accuracies are known; where the control's last one is known too; and within groups, whose
members begin alike. A decision is credited with the rest by mistake.

    python benchmarks/credit_noise.py --runs runs/blind0 runs/blind1
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from harness import RESULTS, Json, print_table, write_result
from numpy.typing import NDArray

from esper.karn.fields import checked_lines
from esper.karn.lines import commits_of
from esper.karn.stage_columns import changes_of
from esper.leyline import BadValueError
from esper.simic.training.run_folder import EVENTS, read_config

Array = NDArray[np.float64]
EARLY = 3
"""Accuracies that host and control have in common: no seed is blended in so soon."""


class Episode(NamedTuple):
    """One host of a run."""

    group: tuple[str, int, int]
    plan: tuple[str, ...]
    gain: float
    control: list[float]
    """Its accuracies"""


def read(folder: Path, first_round: int) -> Iterator[Episode]:
    """Episodes that committed something."""
    members = read_config(folder).members
    for line in checked_lines(folder / EVENTS):
        if line.text("kind") == "episode" and line.whole("round") >= first_round:
            env = line.whole("env")
            plan = sorted(f"{each.slot}/{each.blueprint}" for each in commits_of(changes_of(line, env)))
            group = (folder.name, line.whole("round"), env // members)
            if plan:
                yield Episode(group, tuple(plan), line.number("gain"), line.numbers("control_accuracies"))


def residuals(episodes: list[Episode], known: Array) -> tuple[float, Array]:
    """Variance of gains that plan and `known` (episodes, columns) leave open, and what is left of each."""
    gains = np.array([one.gain for one in episodes])
    plans = sorted({one.plan for one in episodes})
    chosen = np.zeros((len(episodes), len(plans)))
    chosen[np.arange(len(episodes)), [plans.index(one.plan) for one in episodes]] = 1
    columns = np.concatenate([chosen, known], 1)
    left: Array = gains - columns @ np.linalg.lstsq(columns, gains, rcond=None)[0]
    return float(left @ left) / (len(gains) - columns.shape[1]), left


def within_groups(episodes: list[Episode], left: Array) -> float:
    """Variance among members of a group."""
    groups: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for one, value in zip(episodes, left, strict=True):
        groups[one.group].append(float(value))
    return float(np.mean([np.var(values, ddof=1) for values in groups.values() if len(values) > 1]))


def main() -> None:
    """Read runs, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, nargs="+", required=True)
    parser.add_argument("--first-round", type=int, default=6, help="leave out rounds in which little is committed")
    parser.add_argument("--least", type=int, default=8, help="episodes that a plan needs to count")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    tasks = {read_config(folder).task for folder in arguments.runs}
    if len(tasks) > 1:
        raise BadValueError(f"runs of one task, please; these are of {sorted(tasks)}")
    found = [one for folder in arguments.runs for one in read(folder, arguments.first_round)]
    counts = {plan: sum(one.plan == plan for one in found) for plan in {one.plan for one in found}}
    episodes = [one for one in found if counts[one.plan] >= arguments.least]
    if not episodes:
        raise BadValueError(f"no plan was committed {arguments.least} times; give longer runs, or a smaller --least")
    control = np.array([one.control for one in episodes])
    plain, _ = residuals(episodes, control[:, :0])
    early, _ = residuals(episodes, control[:, :EARLY])
    told, left = residuals(episodes, np.concatenate([control[:, :EARLY], control[:, -1:]], 1))
    figures: dict[str, Json] = {
        "plan": plain,
        "plan, first accuracies": early,
        "plan, first accuracies, control's end": told,
        "the same, within groups": within_groups(episodes, left),
    }
    task = tasks.pop()
    print_table(
        f"{task}: {len(episodes)} episodes, {len({one.plan for one in episodes})} plans",
        ["known", "variance of the gain, squared points"],
        [[name, f"{value:.1f}"] for name, value in figures.items()],
    )
    write_result(f"credit_noise_{task}", {"episodes": len(episodes), "variance": figures}, arguments.out)


if __name__ == "__main__":
    main()
