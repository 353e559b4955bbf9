"""How many images a second a fleet trains, validates and ablates, and what an edit costs.

The shape is that of `cifar_baseline` (3→8→16→32 channels, 32×32 images); the images are random, so nothing has to be
there but torch, numpy and safetensors. Throughput counts main-row images.

    python benchmarks/fleet_throughput.py --device cuda
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from harness import RESULTS, Json, print_table, write_result

from esper.kasmina import GateThresholds, LifecycleConfig
from esper.tolaria import HostFleet, Task, get_task
from esper.tolaria.batches import ImageBatches
from esper.tolaria.data import ImageData, ImagePart

BLUEPRINTS = ("depthwise", "bottleneck", "conv_light")
AT_ONCE = LifecycleConfig(min_prune_age=0, thresholds=GateThresholds(min_training_steps=0, min_holding_steps=0))
IMAGES = 48_000
VALIDATION = 2_000
"""As in the task."""


def random_batches(task: Task, device: torch.device) -> ImageBatches:
    """Data of the task's shape without its content."""
    generator, side = torch.Generator().manual_seed(0), task.resolution or 32

    def part(count: int) -> ImagePart:
        images = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=generator)
        return ImagePart(images, torch.randint(0, task.classes, (count,), generator=generator))

    classes = tuple(str(label) for label in range(task.classes))
    data = ImageData("random", part(IMAGES), part(VALIDATION), part(VALIDATION), classes, (0.5,) * 3, (0.25,) * 3)
    return ImageBatches(data, task.batch, shift=task.shift, flip=task.flip, device=device)


def make_fleet(
    arguments: argparse.Namespace, n: int, batch: int, *, graphs: bool = True, task: Task | None = None
) -> HostFleet:
    """A fleet of the benchmark's shape, or of another task's."""
    task = replace(task or get_task("cifar_baseline"), batch=batch, budget=sys.maxsize)
    device = torch.device(arguments.device)
    return HostFleet(
        task,
        n,
        device,
        batches=random_batches(task, device),
        compute=torch.bfloat16 if arguments.bf16 else None,
        config=AT_ONCE,
        graphs=graphs,
    )


def hold_seeds(fleet: HostFleet, envs: int, blueprints: Sequence[str] = BLUEPRINTS) -> None:
    """A HOLDING seed in every slot of the first `envs` hosts, blueprints in turn."""
    for env in range(envs):
        for column, slot_id in enumerate(fleet.slots):
            fleet.germinate(env, slot_id, blueprints[(env + column) % len(blueprints)], tempo=0)
            fleet.advance(env, slot_id)
    note_gradients(fleet)
    for env in range(envs):
        for slot_id in fleet.slots:
            fleet.advance(env, slot_id)
            fleet.advance(env, slot_id)


def note_gradients(fleet: HostFleet) -> None:
    """One step of one minibatch, so that gates find measured gradients."""
    task = fleet.task
    fleet.task = replace(task, batches_per_step=1)
    fleet.train_step()
    fleet.task = task


def seconds(work: Callable[[], object], device: torch.device, repeats: int, warmup: int = 4) -> list[float]:
    """Wall time of each repeat, the device's queue empty before and after."""
    times = []
    for repeat in range(warmup + repeats):
        _synchronize(device)
        start = time.perf_counter()
        work()
        _synchronize(device)
        if repeat >= warmup:
            times.append(time.perf_counter() - start)
    return times


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def throughput(fleet: HostFleet, arguments: argparse.Namespace) -> list[float]:
    """Main-row images per second, in millions, over repeats of several minibatches."""
    place = iter(range(10**9))

    def work() -> None:
        for _ in range(arguments.minibatches):
            fleet.train_minibatch(fleet.draw(next(place)), 0.01)

    images = fleet.n * fleet.task.batch * arguments.minibatches
    return [images / s / 1e6 for s in seconds(work, fleet.device, arguments.repeats)]


def row(name: str, values: list[float], unit: str) -> dict[str, Json]:
    """Median and range of one figure."""
    return {"name": name, "median": statistics.median(values), "low": min(values), "high": max(values), "unit": unit}


def measure(arguments: argparse.Namespace) -> list[dict[str, Json]]:
    """All figures."""
    rows = []
    n, batch = arguments.hosts, arguments.batch
    host_only = make_fleet(arguments, n, batch)
    rows.append(row(f"host only, N={n}, batch {batch}", throughput(host_only, arguments), "M images/s"))
    if arguments.device == "cuda":
        eager = make_fleet(arguments, n, batch, graphs=False)
        rows.append(row(f"host only, N={n}, batch {batch}, eager", throughput(eager, arguments), "M images/s"))
        del eager
    if arguments.profile:
        profile(host_only)
    del host_only
    grown = make_fleet(arguments, n, batch)
    hold_seeds(grown, n * 3 // 4)
    rows.append(
        row(f"{n * 3 // 4} of {n} with three HOLDING seeds, batch {batch}", throughput(grown, arguments), "M images/s")
    )
    if arguments.profile:
        profile(grown)
    rows.append(row("an edit inside a bucket, host side", edit_times(grown), "ms"))
    del grown
    wide = make_fleet(arguments, 4 * n, batch // 4)
    hold_seeds(wide, 3 * n)
    rows.append(row(f"the same, N={4 * n}, batch {batch // 4}", throughput(wide, arguments), "M images/s"))
    del wide
    full = make_fleet(arguments, n, batch)
    hold_seeds(full, n)
    rows.append(
        row(f"main and {3 * n} ablation rows, {VALIDATION} images", seconds(full.validate, full.device, 5), "s")
    )
    return rows


def edit_times(fleet: HostFleet) -> list[float]:
    """Milliseconds to apply an edit that keeps the structure: silence one seed, bring it back, plan again."""
    times = []
    slot_id = next(iter(fleet.slots))
    for repeat in range(20):
        env = repeat % min(8, fleet.n * 3 // 4)
        start = time.perf_counter()
        fleet.set_alpha_target(env, slot_id, 0.5 + 0.01 * repeat, steps=0)
        fleet.update_plan()
        _synchronize(fleet.device)
        times.append(1e3 * (time.perf_counter() - start))
        fleet.advance(env, slot_id)
    return times


def profile(fleet: HostFleet) -> None:
    """Where the time of a minibatch goes on the device."""
    samples = fleet.draw(0)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        for _ in range(3):
            fleet.train_minibatch(samples, 0.01)
        _synchronize(fleet.device)
    print(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=22, max_name_column_width=70))


def main() -> None:
    """Measure, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--minibatches", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--fp32", dest="bf16", action="store_false")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = measure(arguments)
    cells = [[r["name"], *(f"{r[k]:.3f}" for k in ("median", "low", "high")), r["unit"]] for r in rows]
    print_table("Fleet throughput", ["what", "median", "low", "high", "unit"], cells)
    write_result("fleet_throughput", {"rows": rows}, arguments.out)


if __name__ == "__main__":
    main()
