"""Training on ranks other than 0: they collect their share of each round, and rank 0 tells them the policy.

Rank 0, the `Trainer`, shares in this order: the settings of the run; after all ranks have agreed, plans of a search to
try, if the controller is taught; then, before the first round and after every update, the agent's state.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from esper.leyline import EsperError
from esper.leyline.records import Json, decode, encode
from esper.simic.agent import PPOAgent
from esper.simic.agent.checkpoint import SavedAgent, agent_tensors, make_agent, plain_agent, restore_agent
from esper.simic.distributed import Message, World
from esper.simic.distributed.world import this_code
from esper.simic.training.collect import RoundCollector
from esper.simic.training.config import TrainConfig, decode_config
from esper.simic.training.run_folder import data_of
from esper.simic.training.runners import divide_groups, make_runner

Serve = Callable[[World, Message], Message]  # tries plans together with rank 0 until a message is about another thing


def settings_message(config: TrainConfig) -> Message:
    """The settings of a run, without folders, which belong to machines."""
    return Message({}, {"config": encode({**asdict(config), "start": None, "data_dir": None})})


def agreed_content(config: TrainConfig, hosts_by_rank: Sequence[int] | None) -> dict[str, Json]:
    """What must be equal on all ranks: settings, code and data."""
    return {
        "settings": settings_message(config).content["config"],
        "hosts_by_rank": None if hosts_by_rank is None else list(hosts_by_rank),
        "data": dict(zip(config.tasks, data_of(config), strict=True)),
        **this_code(),
    }


def state_message(agent: PPOAgent, round_index: int, *, taped: bool, stop: bool = False) -> Message:
    """The whole state of an agent before this round. `stop`: the round is not to be played."""
    content = {"agent": encode(plain_agent(agent)), "round": round_index, "taped": taped, "stop": stop}
    return Message(agent_tensors(agent), content)


class Follower:
    """A rank other than 0 in a run. It needs the data, but neither the run's folder nor the policy that it starts from.

    `agent` and `collector` exist once rank 0 has told the state."""

    def __init__(
        self,
        world: World,
        config: TrainConfig | None = None,
        *,
        hosts_by_rank: Sequence[int] | None = None,
        data_dir: Path | None = None,
    ) -> None:
        """`config`: the settings that this rank was started with; by default those of rank 0, with this `data_dir`."""
        told = decode_config(world.share().content["config"], "settings")
        self.world, self.config, self.round = world, config or replace(told, data_dir=data_dir), 0
        torch.set_num_threads(self.config.threads)
        try:
            self.shares = divide_groups(self.config, world, hosts_by_rank)
            share, self.device = self.shares[world.rank], world.device(self.config.device)
            local = replace(self.config, device=self.device)
            self.runners = [make_runner(local, name, share) for name in self.config.tasks]
            content = agreed_content(self.config, hosts_by_rank)
        except EsperError as failure:
            world.agree({}, failure)
            raise
        world.agree(content)
        self.agent: PPOAgent | None = None
        self.collector: RoundCollector | None = None

    def run(self, serve: Serve | None = None) -> None:
        """Collect until rank 0 has no further round. `serve` helps with the search of a controller that is taught."""
        message = self.world.share()
        if serve is not None:
            message = serve(self.world, message)
        with self.world.stops_deferred():
            while not self._follow(message):
                config, collector = self.config, self.collector
                assert collector is not None
                collector.reward = config.reward.at(self.round / config.rounds)
                collector.collect(self.round)
                message = self.world.share()

    def _follow(self, message: Message) -> bool:
        """Take over the agent's state; whether the run ends here."""
        saved: SavedAgent = decode(SavedAgent, message.content["agent"], "agent")
        if self.agent is None:
            self.agent = make_agent(saved, "off", self.device)
        restore_agent(self.agent, saved, message.tensors, "the policy of rank 0")
        if self.collector is None:
            taped, settings = message.content["taped"], (self.config.reward, self.config.seed)
            self.collector = RoundCollector(
                self.runners, self.agent, *settings, taped=taped, world=self.world, shares=self.shares
            )
        self.round = message.content["round"]
        return bool(message.content["stop"]) or self.round >= self.config.rounds
