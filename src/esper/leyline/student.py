"""Student's t: intervals and p-values of means over few units."""

import math

import numpy as np


def t_quantile(freedom: float) -> float:
    """The 97.5 % point of Student's t, by bisection of the two-sided p."""
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle, 1.0, freedom) > 0.05 else (low, middle)
    return high


def p_value(mean: float, error: float, freedom: float) -> float:
    """Of Student's t, by integrating its density numerically."""
    if error == 0:
        return 0.0 if mean else 1.0
    t = abs(mean) / error
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    # Substituting x = √ν·tan(u) makes the tail a finite stretch.
    angles = np.linspace(math.atan(t / math.sqrt(freedom)), math.pi / 2, 4001)
    density = np.cos(angles) ** (freedom - 1)
    return float(min(1.0, 2 * scale * math.sqrt(freedom) * np.trapezoid(density, angles)))
