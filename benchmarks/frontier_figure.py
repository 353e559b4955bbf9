"""The frontier as one picture: parameters (log) against accuracy, from the JSON of `frontier.py`.

    python benchmarks/frontier_figure.py benchmarks/results/frontier_cifar_growth.json --out docs/frontier.png

An arrow leads from each host to what it grew into. The line is the curve of static widths, the cloud are architectures
that were drawn at random, hollow marks are grown architectures that were trained again from scratch.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from esper.karn.canvas import new_figure, to_png
from esper.karn.palette import BLUE, INK, MUTED, VERMILION

SECNN = ((11_400, 70.0), (33_700, 80.0), (62_700, 84.1))  # parameters, test accuracy on the original CIFAR-10
PIXELS = 1_200
Point = tuple[float, float]  # parameters, accuracy
Content = Mapping[str, Any]  # Any: JSON


def arrows(size: Content) -> Iterator[tuple[Point, Point]]:
    """From host to grown network, for every training seed and host."""
    host, grown = size["host"], size["grown"]
    for parameters, accuracies in zip(grown["parameters"], grown["accuracy"], strict=True):
        for before, after, accuracy in zip(host["accuracy"], parameters, accuracies, strict=True):
            yield (host["parameters"], before), (after, accuracy)


def static_curve(sizes: Sequence[Content]) -> list[Point]:
    """Hosts alone and widened hosts, by size."""
    points = [
        (size[kind]["parameters"], fmean(size[kind]["accuracy"])) for size in sizes for kind in ("host", "static")
    ]
    return sorted(points)


def cloud(sizes: Sequence[Content]) -> list[Point]:
    """Drawn architectures."""
    pairs = [zip(size["search"]["parameters"], size["search"]["accuracy"], strict=True) for size in sizes]
    return [point for some in pairs for point in some]


def retrained(sizes: Sequence[Content]) -> list[Point]:
    """Grown architectures, trained again."""
    return [
        (parameters, accuracy)
        for size in sizes
        for row, again in zip(size["grown"]["parameters"], size["retrained"]["accuracy"], strict=True)
        for parameters, accuracy in zip(row, again, strict=True)
    ]


def draw(axis: Axes, content: Content) -> None:
    """All marks of one panel."""
    sizes = content["sizes"]
    axis.scatter(*_columns(cloud(sizes)), s=12, color=MUTED, alpha=0.35, linewidths=0, label="drawn at random")
    axis.plot(*_columns(static_curve(sizes)), color=INK, marker="s", markersize=4, label="static widths")
    for number, (begin, end) in enumerate(arrow for size in sizes for arrow in arrows(size)):
        properties = {"arrowstyle": "-|>", "color": BLUE, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 2, "alpha": 0.8}
        axis.annotate("", xy=end, xytext=begin, arrowprops=properties)
        axis.scatter(*end, s=14, color=BLUE, label="grown" if number == 0 else None)
    hollow: dict[str, Any] = {"facecolors": "none", "edgecolors": VERMILION, "linewidths": 1.2}
    axis.scatter(*_columns(retrained(sizes)), s=34, label="grown, then retrained", **hollow)
    if content["task"].startswith("cifar"):
        axis.scatter(*_columns(SECNN), s=26, marker="D", color=MUTED, label="SECNN (original CIFAR-10)")
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xticks(sorted({round(parameters, -3) or parameters for parameters, _ in static_curve(sizes)}))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("parameters")
    axis.set_ylabel("accuracy on test images, %" if content["final"] else "accuracy on validation images, %")
    axis.grid(visible=True)
    axis.legend(loc="lower right")


def _columns(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def main() -> None:
    """Read the JSON and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="the picture")
    arguments = parser.parse_args()
    content = json.loads(arguments.result.read_text(encoding="utf-8"))
    with new_figure(7.2, 4.4) as figure:
        draw(figure.add_subplot(), content)
        arguments.out.write_bytes(to_png(figure, PIXELS))
    print(arguments.out)


if __name__ == "__main__":
    main()
