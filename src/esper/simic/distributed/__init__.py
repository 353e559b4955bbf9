"""Several processes, the *ranks*, that work as one: what they exchange, and how work is divided among them."""

from esper.simic.distributed.shares import Share, divide_hosts
from esper.simic.distributed.timing import RoundTiming, Stragglers
from esper.simic.distributed.world import Message, World, open_world

__all__ = ["Message", "RoundTiming", "Share", "Stragglers", "World", "divide_hosts", "open_world"]
