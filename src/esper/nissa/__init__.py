"""Writing it down: the event log of a run."""

from esper.nissa.log import JsonLines, read_lines

__all__ = ["JsonLines", "read_lines"]
