"""How fast a fleet trains when one thing changes: the hosts, their width, the resolution, the slots.

    python benchmarks/fleet_factors.py --device cuda

Every line differs from the first in one factor. Rates count images of main rows. Wider hosts and larger images have
more numbers to move; the columns `numbers` say how many of them pass in a second, relative to the first line. Without
a cliff they stay near 1 or rise.
"""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fleet_throughput import BLUEPRINTS, hold_seeds, make_fleet, throughput
from harness import RESULTS, Json, print_table, write_result

from esper.kasmina import BlueprintRegistry, CNNHost
from esper.leyline import FleetMemoryError
from esper.tolaria import Task, get_task

SLOTS = ("r1c0", "r1c1", "r1c2", "r0c1", "r0c0")
"""The first three are those of the task."""


class Setting(NamedTuple):
    """One line of the table."""

    name: str
    hosts: int
    width: int = 8  # of the first block; the next two have twice and four times as many
    resolution: int = 32
    slots: int = 3
    blueprints: tuple[str, ...] = BLUEPRINTS

    @property
    def task(self) -> Task:
        """Of such hosts."""
        channels = (self.width, 2 * self.width, 4 * self.width)
        build = partial(CNNHost, channels, 3, 3, 10, resolution=self.resolution)
        return replace(
            get_task("cifar_baseline"), build_host=build, resolution=self.resolution, slot_ids=SLOTS[: self.slots]
        )

    @property
    def numbers(self) -> int:
        """In proportion to those of an image's activations."""
        return self.width * self.resolution**2


def settings(hosts: int) -> Iterator[Setting]:
    """The base point, and one factor at a time."""
    every = tuple(BlueprintRegistry.names("image"))
    yield Setting("base", hosts)
    yield from (Setting(f"hosts {n}", n) for n in (1, 4, 16, 256, 1024))
    yield from (Setting(f"width {width}", hosts, width=width) for width in (16, 32, 64))
    yield from (Setting(f"resolution {side}", hosts, resolution=side) for side in (16, 64))
    yield from (Setting(f"slots {count}", hosts, slots=count) for count in (1, 2, 4, 5))
    yield from (Setting(f"slots {count}, all blueprints", hosts, slots=count, blueprints=every) for count in (3, 5))


def measure(setting: Setting, arguments: argparse.Namespace, *, grown: bool) -> list[float]:
    """Millions of images a second over repeats; none if the fleet does not fit into memory."""
    try:
        fleet = make_fleet(arguments, setting.hosts, arguments.batch, task=setting.task)
        if grown:
            hold_seeds(fleet, max(1, setting.hosts * 3 // 4), setting.blueprints)
        return throughput(fleet, arguments)
    except FleetMemoryError:
        return []


def main() -> None:
    """Measure, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--hosts", type=int, default=64, help="of the base point")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--minibatches", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fp32", dest="bf16", action="store_false")
    parser.add_argument("--only", default="", help="settings whose name begins so, beside the base")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows: list[dict[str, Json]] = []
    base: dict[bool, float] = {}
    cells = []
    for setting in settings(arguments.hosts):
        if setting.name != "base" and not setting.name.startswith(arguments.only):
            continue
        line: list[object] = [setting.name]
        for grown in (False, True):
            rates = measure(setting, arguments, grown=grown)
            rate = statistics.median(rates) if rates else 0.0
            passed = rate * setting.numbers
            relative = passed / base.setdefault(grown, passed)
            line += [f"{rate:.3f}" if rates else "does not fit", f"{relative:.2f}"]
            rows.append({"setting": setting.name, "grown": grown, "rates": list(rates), "relative": relative})
        cells.append(line)
        print(*line, sep="  ", flush=True)
    header = ["setting", "hosts only, M images/s", "numbers", "three of four grow", "numbers"]
    print_table(f"{arguments.hosts} hosts of 8, 16, 32 channels, 32×32, batch {arguments.batch}", header, cells)
    write_result("fleet_factors", {"hosts": arguments.hosts, "batch": arguments.batch, "rows": rows}, arguments.out)


if __name__ == "__main__":
    main()
