"""How the hosts of a run are divided among ranks: whole groups, so that every host has its control beside it."""

from collections.abc import Sequence
from dataclasses import dataclass

from esper.leyline import BadValueError


@dataclass(frozen=True)
class Share:
    """The groups of one rank in each task, out of all; groups of a task are numbered from 0."""

    groups: range
    of: int  # groups of each task on all ranks together


def divide_hosts(
    hosts: int, members: int, tasks: int, ranks: int, hosts_by_rank: Sequence[int] | None = None
) -> list[Share]:
    """A share per rank. Without `hosts_by_rank`, which counts controls, they differ by at most one group per task."""
    smallest = (members + 1) * tasks
    groups = hosts // smallest
    if ranks > groups:
        raise BadValueError(
            f"{ranks} ranks are more than the {groups} groups of {members} hosts and their control"
            + (f" in each of {tasks} tasks" if tasks > 1 else "")
            + f"; start at most {groups} ranks, or use --hosts {ranks * smallest} or more"
        )
    if hosts_by_rank is None:
        counts = [groups // ranks + (rank < groups % ranks) for rank in range(ranks)]
    else:
        counts = [share // smallest for share in hosts_by_rank]
        if len(counts) != ranks or sum(hosts_by_rank) != hosts:
            raise BadValueError(
                f"hosts by rank {list(hosts_by_rank)}: {len(counts)} numbers with sum {sum(hosts_by_rank)}; give one "
                f"for each of {ranks} ranks, which add up to {hosts} hosts"
            )
        if any(share < smallest or share % smallest for share in hosts_by_rank):
            raise BadValueError(
                f"hosts by rank {list(hosts_by_rank)}: a rank has whole groups; use multiples of {smallest}"
            )
    ends = [sum(counts[: rank + 1]) for rank in range(ranks)]
    return [Share(range(end - count, end), groups) for count, end in zip(counts, ends, strict=True)]
