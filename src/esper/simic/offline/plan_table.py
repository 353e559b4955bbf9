"""The table of a search: what every plan gained on every host that it was tried on."""

import json
from typing import NamedTuple

import torch
from torch import Tensor

from esper.leyline import RHO, BadValueError
from esper.leyline.records import decode
from esper.simic.offline.records import Records
from esper.tamiyo.policies import Plan


class PlanTable(NamedTuple):
    """Objectives of plans on hosts."""

    plans: list[Plan]
    host_seeds: list[int]
    objectives: Tensor  # (plans, hosts), points; NaN where a plan was not tried on a host


def plan_table(records: Records, rho: float = RHO) -> PlanTable:
    """The table of records of `esper tune --kind schedule`, at any rent. Plans are sorted by name, hosts by seed."""
    header = records.header
    found: dict[tuple[str, int], float] = {}
    for episodes in records.in_order():
        columns = (episodes.policy, episodes.host_seed, episodes.objective(rho))
        for number, seed, value in zip(*(column.tolist() for column in columns), strict=True):
            found[header.policies[number], seed] = value
    names, seeds = (sorted(set(each)) for each in zip(*found, strict=True))
    objectives = torch.full((len(names), len(seeds)), torch.nan)
    for (name, seed), value in found.items():
        objectives[names.index(name), seeds.index(seed)] = value
    return PlanTable([_plan(name) for name in names], seeds, objectives)


def _plan(name: str) -> Plan:
    try:
        plan: Plan = decode(Plan, json.loads(name), "plan")
    except ValueError as error:
        raise BadValueError(
            f"policy {name!r} is no plan ({error}); open records of `esper tune` for schedules"
        ) from error
    return plan
