"""The upper bound: per host the best of waiting and of all plans of one seed, with hindsight but without luck.

The plan is chosen by its objective on the even images and scored on the odd ones, host and control alike: the best of
sixty plans on the images that chose it would also be the luckiest. `SchedulePolicy` replays what was chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from esper.leyline import HeadPreset
from esper.leyline.progress import Advance
from esper.simic.training.tuning_schedule import one_seed_plans, plan_policy
from esper.simic.training.tuning_trials import Arena, Block
from esper.tamiyo.policies import Plan
from esper.tolaria import Task
from esper.tolaria.batches import Batches

CHOOSING, SCORED = slice(0, None, 2), slice(1, None, 2)
"""Which images choose, and which are scored."""


@dataclass(frozen=True)
class OracleHost:
    """What was best for one host; points and percent, on the scored images unless something else is said."""

    plan: Plan
    objective: float
    accuracy: float
    control_accuracy: float
    added_params: int
    commits: list[str]
    """`slot/blueprint` of the fossil, if there is one"""
    chosen_objective: float
    """On the choosing images: never below 0, which waiting has"""


def run_oracle(
    task: Task,
    seeds: Sequence[int],
    preset: HeadPreset,
    *,
    rho: float = 2.0,
    final: bool = False,
    device: torch.device | str = "cpu",
    data_dir: Path | None = None,
    batches: Batches | None = None,
    advance: Advance | None = None,
) -> list[OracleHost]:
    """The best for each of these hosts. An episode per host and plan; `advance` counts hosts × plans.

    `batches` are the task's data where a fleet has them already; `final` reads the test images.
    """
    plans = one_seed_plans(task)
    arena = Arena(
        task, preset, partial(plan_policy, task), device=device, data_dir=data_dir, batches=batches, final=final
    )
    found = torch.zeros((len(seeds), len(plans), 5), dtype=torch.float64)
    for block in arena.run(plans, seeds):
        scores = _scores(block).cpu()
        found[block.hosts.start : block.hosts.stop, block.candidates.start : block.candidates.stop] = scores
        if advance is not None:
            advance(len(block.hosts) * len(block.candidates), "oracle")
    return [_choose(plans, scores, task, rho) for scores in found]


def _scores(block: Block) -> Tensor:
    """(hosts, plans, 5): accuracy and control on the choosing images, the same on the scored ones, parameters."""
    groups = block.runner.groups
    correct = 100 * torch.stack([row.correct for row in block.runner.committed]).double()  # (envs, images)
    halves = [correct[:, images].mean(1) for images in (CHOOSING, SCORED)]
    columns = [part for half in halves for part in (groups.grown_of(half), groups.control_of(half))]
    columns.append(block.result.fossil_parameters.double())
    return torch.stack([block.by_host(column) for column in columns], -1)


def _choose(plans: Sequence[Plan], scores: Tensor, task: Task, rho: float) -> OracleHost:
    """The best plan of one host, from its scores (plans, 5)."""
    chosen, chosen_control, accuracy, control, added = scores.unbind(-1)
    rent = rho * torch.log2(1 + added / task.host_parameters)
    promised = chosen - chosen_control - rent
    best = int(promised.argmax())
    if float(promised[best]) <= 0:
        return OracleHost(Plan(), 0.0, float(control[best]), float(control[best]), 0, [], 0.0)
    (seed,) = plans[best].seeds
    return OracleHost(
        plan=plans[best],
        objective=float((accuracy - control - rent)[best]),
        accuracy=float(accuracy[best]),
        control_accuracy=float(control[best]),
        added_params=int(added[best]),
        commits=[f"{seed.slot}/{seed.blueprint}"] if added[best] > 0 else [],
        chosen_objective=float(promised[best]),
    )
