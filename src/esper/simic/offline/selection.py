"""From record files to what a policy learns from: which episodes, and how much each counts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from esper.leyline import BadValueError
from esper.leyline.numbers import require_known, require_positive
from esper.simic.offline.episodes import RecordHeader
from esper.simic.offline.records import Records
from esper.simic.offline.transitions import Transitions, from_episodes, join
from esper.simic.rewards import RewardConfig

Weighting = Literal["none", "objective"]


class Selection(NamedTuple):
    """Transitions of one task, with its header and the number of episodes by policy."""

    data: Transitions
    header: RecordHeader
    counts: dict[str, int]


def select_transitions(
    paths: Sequence[Path],
    *,
    task: str | None = None,
    policies: Sequence[str] = (),
    reward: RewardConfig | None = None,
    weighting: Weighting = "none",
    beta: float = 1.0,
) -> Selection:
    """Read the episodes of some policies, or of all, from record files of one task into memory.

    Weighting by `objective`: the softmax of objective / β over the episodes of each host, so that every host counts
    alike.
    """
    require_positive("beta", beta)
    reward = reward or RewardConfig()
    records = Records.open(paths, task=task)
    for name in policies:
        require_known("recorded policy", name, records.policies)
    wanted = torch.tensor([records.policies.index(name) for name in policies or records.policies])
    parts, numbers, objectives = [], [], []
    for episodes in records.in_order():
        chosen = episodes.part(torch.isin(episodes.policy, wanted).nonzero().squeeze(1))
        parts.append(from_episodes(chosen, records.header, reward=reward))
        numbers.append(chosen.policy)
        objectives.append(chosen.objective(reward.rho))
    played = torch.cat(numbers)
    counts = {name: int((played == number).sum()) for number, name in enumerate(records.policies)}
    if empty := [name for name in policies if not counts[name]]:
        raise BadValueError(f"{_listed(paths)} name the policy {empty[0]!r} but hold no episode of it; omit it")
    data = join(parts)
    if weighting == "objective":
        weights = softmax_by_group(torch.cat(objectives) / beta, data.groups)
        data = data._replace(weights=data.weights * weights[:, None])
    return Selection(data, records.header, {name: count for name, count in counts.items() if count})


def softmax_by_group(values: Tensor, groups: Tensor) -> Tensor:
    """(n,): the softmax of values (n,) within each group (n,)."""
    index = groups.unique(return_inverse=True)[1]
    count = int(index.max()) + 1
    most = values.new_full((count,), -torch.inf).scatter_reduce(0, index, values, "amax")
    powers = (values - most[index]).exp()
    return powers / powers.new_zeros(count).index_add(0, index, powers)[index]


def _listed(paths: Sequence[Path]) -> str:
    return ", ".join(str(path) for path in paths)
