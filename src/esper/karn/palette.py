"""The colours of pages, drawings and the terminal. A stage also has a letter, so that nothing is told by colour alone.

The hues are those of Okabe and Ito, which people with any kind of colour vision can tell apart.
"""

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
"""Name → value on light pages, value on dark pages"""
INK, MUTED, FAINT, *SERIES = (light for light, _ in PALETTE.values())
BLUE, VERMILION, *_ = SERIES
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
EMPTY_SLOT = "#39414a"
"""Where a drawing shows empty slots too"""
LETTERS = {stage: stage.letter for stage in SeedStage} | {SeedStage.DORMANT: "·"}
"""How a stage is written where there is room for one character"""


def ink_on(colour: str) -> str:
    """Black or white, whichever is easier to read on a colour."""
    red, green, blue = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.45 else "#ffffff"
