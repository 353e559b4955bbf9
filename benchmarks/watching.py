"""What watching costs the one who watches: drawing a large fleet, and following a fast run.

Drawing: every line of the fleet with 200 hosts of 5 slots, on a terminal that shows all of them at once, and on one of
80 × 24. Following: one process writes a run folder, at an even pace, as a run of 24 growing hosts and 25 steps would;
the app, without a terminal but otherwise whole, follows it in a process of its own, with the fleet on its screen. Its
CPU time is a share of one core.

    python benchmarks/watching.py
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import RESULTS, print_table, write_result
from textual.pilot import Pilot
from watched_folder import SLOTS, STEPS, begin, step_line

from esper.karn.terminal.app import WatchApp, settle
from esper.karn.terminal.moment import Watched
from esper.karn.terminal.widgets import Fleet

Json = Any  # what will become JSON
BARS = {"redraw_ms": 50.0, "cpu_share": 0.25, "mib": 200.0}


def measure_following(per_second: float, seconds: float) -> Json:
    """Both processes, on one folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        begin(folder)
        script = [sys.executable, str(Path(__file__).with_name("watched_folder.py"))]
        commands = ["write", str(folder), str(per_second), str(seconds + 5)], ["follow", str(folder), str(seconds)]
        processes = [subprocess.Popen([*script, *command], stdout=subprocess.PIPE, text=True) for command in commands]
        result: dict[str, Json] = {}
        for process in processes:
            result |= json.loads(process.communicate(timeout=seconds + 120)[0])
        sizes = {each.name: each.stat().st_size for each in folder.glob("*.jsonl")}
    return {**result, "bytes": sizes}


def measure_drawing(hosts: int, size: tuple[int, int], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each redraw of the fleet, of the CPU and of the clock: what is shown changes, every visible line
    is drawn anew, and becomes what the terminal is sent."""
    cpu: list[float] = []
    wall: list[float] = []

    async def look(app: WatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("2")
        await pilot.pause()
        fleet = app.query_one(Fleet)
        for index in range(repeats + 1):
            app.watched.following, app.watched.trained = False, index % STEPS + 1
            start, clock = time.process_time(), time.perf_counter()
            app.redraw()
            fleet._styles_cache.clear()
            sent = app.screen._compositor.render_full_update().render_segments(app.console)
            cpu.append(1000 * (time.process_time() - start))
            wall.append(1000 * (time.perf_counter() - clock))
            assert f"{fleet.hosts[0].env:>4} " in sent
            await pilot.pause()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        begin(folder)
        header = {"kind": "live", "version": 1, "round": 0, "began": 1}
        lines = [header, *(step_line(0, step, hosts) for step in range(STEPS))]
        (folder / "live.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        _drive(folder, look, size)
    return {"cpu": cpu[1:], "wall": wall[1:]}


def _drive(folder: Path, look: Callable[..., Any], size: tuple[int, int]) -> None:
    async def run() -> None:
        app = WatchApp([Watched.of(folder)])
        async with app.run_test(size=size) as pilot:
            await look(app, pilot)

    asyncio.run(run())


def main() -> None:
    """Measure, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--per-second", type=float, default=1000.0, help="events that are written")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long they are followed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    settle()
    sizes = ((120, arguments.hosts + 10), (80, 24))
    drawn = {f"{width} x {height}": measure_drawing(arguments.hosts, (width, height), arguments.repeats)
             for width, height in sizes}  # fmt: skip
    followed = measure_following(arguments.per_second, arguments.seconds)
    mix = ", ".join(f"{count / followed['events']:.1%} {kind}" for kind, count in followed["kinds"].items())
    rows: list[tuple[str, str, str]] = [
        *((f"redraw, {size}, ms of {kind}: median (largest)",
           f"{statistics.median(times):.1f} ({max(times):.1f})", f"{BARS['redraw_ms']:g}")
          for size, kinds in drawn.items() for kind, times in kinds.items()),
        ("events per second", f"{followed['events'] / followed['seconds']:.0f}", ""),
        ("following, share of a core", f"{followed['cpu_share']:.3f}", f"{BARS['cpu_share']:g}"),
        ("following, MiB", f"{followed['mib']:.0f}", f"{BARS['mib']:g}"),
        ("bytes not read in the end", f"{followed['bytes_behind']}", ""),
    ]  # fmt: skip
    print_table(f"{arguments.hosts} hosts of {len(SLOTS)} slots; events: {mix}", ["figure", "value", "bar"], rows)
    result = {"bars": BARS, "hosts": arguments.hosts, "redraw_ms": drawn, "following": followed}
    write_result("watching", result, arguments.out)


if __name__ == "__main__":
    main()
