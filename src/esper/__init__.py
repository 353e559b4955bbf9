"""Esper grows a neural network while it trains."""

__version__ = "0.1.0"
