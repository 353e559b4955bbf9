"""The runners of a run: each rank has its share of every task's groups."""

from collections.abc import Sequence
from dataclasses import replace

from esper.leyline import head_preset
from esper.simic.distributed import Share, World, divide_hosts
from esper.simic.training.config import TrainConfig
from esper.simic.training.episode import EpisodeRunner
from esper.simic.training.hosts import Groups, MakeFleet, growth_fleet
from esper.tolaria import get_task


def divide_groups(config: TrainConfig, world: World, hosts_by_rank: Sequence[int] | None = None) -> list[Share]:
    """The groups of every rank; all tasks have the same number."""
    tasks = len(config.tasks)
    Groups.of(config.hosts // tasks, config.members)  # raises if there are no whole groups
    return divide_hosts(config.hosts, config.members, tasks, world.size, hosts_by_rank)


def make_runner(
    config: TrainConfig, task: str, share: Share | None = None, make_fleet: MakeFleet = growth_fleet
) -> EpisodeRunner:
    """The hosts of one task in their groups, or a share of them."""
    groups = Groups.of(config.hosts // len(config.tasks), config.members)
    groups = groups if share is None else replace(groups, count=len(share.groups))
    spec = get_task(task) if config.batch is None else replace(get_task(task), batch=config.batch)
    fleet = make_fleet(spec, groups.hosts, config.device, data_dir=config.data_dir, isolation=config.isolation)
    return EpisodeRunner(fleet, groups, head_preset(config.preset), sensing=config.sensing)
