"""Recurrent, masked, factored PPO, for growth and for any Gymnasium environment with discrete actions."""

from esper.simic.agent.callbacks import Checkpoints, CsvLog, Evaluation, TensorBoardLog
from esper.simic.agent.checkpoint import load_agent, save_agent
from esper.simic.agent.config import PPOConfig
from esper.simic.agent.learning import Learned, LearnProgress, learn
from esper.simic.agent.losses import compute_gae, compute_per_head_advantages
from esper.simic.agent.metrics import HeadMetrics, PPOUpdateMetrics, UpdateObserver
from esper.simic.agent.ppo import BehaviourGapError, NotFiniteError, PPOAgent
from esper.simic.agent.rollout import Step, TamiyoRolloutBuffer
from esper.simic.agent.spaces import SpaceError

__all__ = [
    "BehaviourGapError",
    "Checkpoints",
    "CsvLog",
    "Evaluation",
    "HeadMetrics",
    "LearnProgress",
    "Learned",
    "NotFiniteError",
    "PPOAgent",
    "PPOConfig",
    "PPOUpdateMetrics",
    "SpaceError",
    "Step",
    "TamiyoRolloutBuffer",
    "TensorBoardLog",
    "UpdateObserver",
    "compute_gae",
    "compute_per_head_advantages",
    "learn",
    "load_agent",
    "save_agent",
]
