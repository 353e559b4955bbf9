"""`esper watch`: runs in the terminal."""

from esper.karn.terminal.opening import SPEED, runs_in, watch

__all__ = ["SPEED", "runs_in", "watch"]
