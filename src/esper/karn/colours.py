"""The colours of every picture: each has a value for light and one for dark pages.

Pictures are drawn with the light value; inside the page it becomes a CSS variable, so that one drawing serves both.
The hues are those of Okabe and Ito, which people with any kind of colour vision can tell apart.
"""

from typing import NamedTuple

from esper.leyline import SeedStage


class Colour(NamedTuple):
    """A colour by name."""

    name: str
    light: str
    dark: str


INK = Colour("ink", "#1b1f24", "#e6e9ec")
MUTED = Colour("muted", "#59636e", "#a3adb7")
FAINT = Colour("faint", "#d8dde2", "#39414a")
BLUE = Colour("blue", "#0072b2", "#5cb3ea")
VERMILION = Colour("vermilion", "#c9500a", "#ff8f52")
GREEN = Colour("green", "#00865f", "#2fc596")
PURPLE = Colour("purple", "#a8527f", "#dd93ba")
ORANGE = Colour("orange", "#b87400", "#f2b04c")
SKY = Colour("sky", "#3391c9", "#9ad4f7")
OLIVE = Colour("olive", "#7d7300", "#e0d648")
GREY = Colour("grey", "#7a828a", "#b8c0c8")

SERIES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, OLIVE, GREY)
"""In the order in which lines take them"""
ALL = (INK, MUTED, FAINT, *SERIES)

STAGES = {
    SeedStage.GERMINATED: "#f0e442",
    SeedStage.TRAINING: "#e69f00",
    SeedStage.BLENDING: "#56b4e9",
    SeedStage.HOLDING: "#0a6fae",
    SeedStage.FOSSILIZED: "#009e73",
    SeedStage.PRUNED: "#d55e00",
    SeedStage.EMBARGOED: "#8c8c8c",
    SeedStage.RESETTING: "#c4c4c4",
}
"""Bars of stages keep their colour on any page; an empty slot has none"""
ON_BARS, AROUND = "#000000", "#ffffff"
"""A line over a bar, and its rim"""
