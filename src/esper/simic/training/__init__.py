"""Learning to decide: rounds of hosts in lockstep, and the update of the policy that grows them."""

from esper.simic.training.config import TrainConfig
from esper.simic.training.episode import EpisodeRunner, play_episode
from esper.simic.training.hosts import Groups
from esper.simic.training.run_folder import RunFolder, read_config
from esper.simic.training.trainer import Trainer

__all__ = ["EpisodeRunner", "Groups", "RunFolder", "TrainConfig", "Trainer", "play_episode", "read_config"]
