"""Who can watch a run beside its log. Each sink finds its package where it is asked for it."""

from esper.nissa.sinks.console import ConsoleSink
from esper.nissa.sinks.tensorboard import TensorBoardSink
from esper.nissa.sinks.wandb import WandbSink

__all__ = ["ConsoleSink", "TensorBoardSink", "WandbSink"]
