"""All colours, and the letters of stages. Pages, pictures, the browser and the terminal take them from here.

The hues are those of Okabe and Ito, which people with any kind of colour vision can tell apart. A stage is never shown
by its colour alone: where there is room it has its letter.
"""

from collections.abc import Mapping

from esper.leyline import SeedStage

PALETTE = {
    "ink": ("#1b1f24", "#e6e9ec"),
    "muted": ("#59636e", "#a3adb7"),
    "faint": ("#d8dde2", "#39414a"),
    "blue": ("#0072b2", "#5cb3ea"),
    "vermilion": ("#c9500a", "#ff8f52"),
    "green": ("#00865f", "#2fc596"),
    "purple": ("#a8527f", "#dd93ba"),
    "orange": ("#b87400", "#f2b04c"),
    "sky": ("#3391c9", "#9ad4f7"),
    "olive": ("#7d7300", "#e0d648"),
    "grey": ("#7a828a", "#b8c0c8"),
}
"""Name → value on light backgrounds, value on dark ones"""
INK, MUTED, FAINT, *SERIES = (light for light, _ in PALETTE.values())
BLUE, VERMILION, *_ = SERIES
STAGES: Mapping[SeedStage, str] = {
    SeedStage.GERMINATED: "#f0e442",
    SeedStage.TRAINING: "#e69f00",
    SeedStage.BLENDING: "#56b4e9",
    SeedStage.HOLDING: "#0a6fae",
    SeedStage.FOSSILIZED: "#009e73",
    SeedStage.PRUNED: "#d55e00",
    SeedStage.EMBARGOED: "#8c8c8c",
    SeedStage.RESETTING: "#c4c4c4",
}
"""Stages keep their colour on any background. An empty slot (DORMANT) has none."""
LETTERS: Mapping[SeedStage, str] = {stage: stage.letter for stage in SeedStage} | {SeedStage.DORMANT: "·"}
"""How a stage is written where there is room for one character: G T B H F P E R, and a dot for an empty slot"""
ON_BARS, AROUND = "#000000", "#ffffff"
"""A line over a colour of a stage, and its rim"""
EMPTY_SLOT = "#39414a"
"""Where a drawing shows empty slots too"""


def ink_on(colour: str) -> str:
    """Black or white, whichever has more contrast on a colour."""
    red, green, blue = (_linear(int(colour[place : place + 2], 16) / 255) for place in (1, 3, 5))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return ON_BARS if luminance > 0.179 else AROUND  # where both have a contrast of 4.6


def _linear(part: float) -> float:
    """Light of a part of an sRGB colour."""
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4


def themed(colour: str) -> str:
    """The CSS variable of a colour of the palette, which pages set for light and dark; other colours as they are."""
    return _VARIABLES.get(colour, colour)


PAPER = "#ffffff"
"""The background of pictures; pages have a variable for it too"""
_VARIABLES = {light: f"var(--{name})" for name, (light, _) in PALETTE.items()}
