"""Weak scaling over ranks: each rank has the same number of hosts, and the round should take as long as with one rank.

    python benchmarks/scaling.py                               # 1, 2, 4, 8, 16 ranks of 32 hosts, one thread each
    python benchmarks/scaling.py --device cuda --ranks 1 2     # ranks that share a GPU
    torchrun --nproc-per-node 4 benchmarks/scaling.py          # this world alone, also on several machines
    python benchmarks/scaling.py --policies-equal --device cuda --ranks 1 2

Efficiency is the median round of one rank over that of N ranks. It is the product of two factors:

    hardware    one rank's round over that of N *independent* processes, which run side by side with the hosts of the N
                ranks, but exchange nothing: what cores, caches and memory take from each other
    joining     the independent processes' round over that of N ranks: what exchange, one update for all hosts, and
                waiting for the rank whose hosts grow most take

Independent processes begin their rounds together. All parts come from the metrics that a run records. The first round
is not counted: torch compiles and allocates in it. CPU seconds, of rank 0 and of the independent processes, tell more
work (they rise, too) from cores that others use (they do not).

With --policies-equal all worlds have --hosts hosts together. The table shows how far their last policies are from that
of the first world, and whether all ranks hold the same one. The script fails if ranks differ, or on the CPU any bit.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import safetensors.torch
from harness import RESULTS, Json, print_table, write_result

from esper.leyline import EsperError
from esper.simic.agent.checkpoint import agent_tensors
from esper.simic.distributed import Message, Share, World, open_world
from esper.simic.distributed.world import launched
from esper.simic.training.config import TrainConfig
from esper.simic.training.follower import Follower
from esper.simic.training.rollouts import RoundRecord
from esper.simic.training.run_folder import METRICS, checkpoints_of
from esper.simic.training.trainer import Trainer
from esper.storage.logs import read_lines

FACTORS = ("efficiency", "hardware", "joining")
TIMES_OF_ROUNDS = ("round_s", "independent_s", "cpu_s", "independent_cpu_s")
PARTS = ("collect_s", "mean_wait_s", "exchange_s", "update_s")
HEADER = ["ranks", "hosts", "round s", "independent s", "CPU s", "independent CPU s", *FACTORS, "hosts/s"]
HEADER += ["collect s", "wait s", "exchange s", "update s", "kB"]
TIMES = "rounds.json"  # beside a run: seconds of its rounds, and whether all ranks ended with one policy


# -- in the ranks -----------------------------------------------------------------------------------------------------


class TimedTrainer(Trainer):
    """A trainer that notes how long whole rounds take, with logs and checkpoint."""

    seconds: list[float]
    cpu_seconds: list[float]
    others: World | None = None  # processes that begin their rounds together with this one

    def note_times(self) -> None:
        """Begin to note them."""
        self.seconds, self.cpu_seconds = [], []

    def run_round(self) -> list[RoundRecord]:
        """As ever, timed."""
        if self.others is not None:
            self.others.agree({})
        begin, cpu = time.perf_counter(), time.process_time()
        records = super().run_round()
        self.seconds.append(time.perf_counter() - begin)
        self.cpu_seconds.append(time.process_time() - cpu)
        return records


def train(arguments: argparse.Namespace, hosts: int, folder: Path, *, independent: bool) -> int:
    """Train on this rank, whose number is returned, and then, if told, independently of the others; rank 0 writes."""
    names = ("task", "rounds", "members", "device", "data_dir")
    config = TrainConfig(hosts=hosts, **{name: getattr(arguments, name) for name in names})
    with open_world() as world:
        trained: Trainer | Follower
        if world.rank:
            trained = Follower(world, config)
            trained.run()
        else:
            trained = TimedTrainer(config, folder, world=world)
            trained.note_times()
            trained.run(progress=False)
        assert trained.agent is not None
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in agent_tensors(trained.agent).items()}
        policies = world.gather(Message({}, {"policy": sha256(safetensors.torch.save(tensors)).hexdigest()}))
        own = (trained.seconds, trained.cpu_seconds) if isinstance(trained, TimedTrainer) else ([], [])
        del trained  # and its memory
        apart = train_apart(config, world) if world.size > 1 and independent else own
        by_rank = world.gather(Message({}, dict(zip(("seconds", "cpu_seconds"), apart, strict=True))))
        if world.rank == 0:
            times = {
                "seconds": own[0],
                "cpu_seconds": own[1],
                "independent_seconds": [message.content["seconds"] for message in by_rank],
                "independent_cpu_seconds": [message.content["cpu_seconds"] for message in by_rank],
                "ranks": world.size,
                "ranks_hold_one_policy": len({message.content["policy"] for message in policies}) == 1,
            }
            (folder / TIMES).write_text(json.dumps(times))
        return world.rank


def train_apart(config: TrainConfig, world: World) -> tuple[list[float], list[float]]:
    """Seconds and CPU seconds of the rounds of this rank's hosts, without the others, at the same time as theirs."""
    config = replace(config, hosts=config.hosts // world.size, device=world.device(config.device))
    with tempfile.TemporaryDirectory() as folder:
        trainer = TimedTrainer(config, Path(folder) / "run")
        groups = len(trainer.collector.share.groups)
        first = groups * world.rank
        trainer.collector.share = Share(range(first, first + groups), groups * world.size)
        trainer.note_times()
        trainer.others = world
        trainer.run(progress=False)
    return trainer.seconds, trainer.cpu_seconds


# -- in the process that starts them ----------------------------------------------------------------------------------


def start(arguments: argparse.Namespace, ranks: int, hosts: int, folder: Path, *, independent: bool) -> None:
    """Run this file on ranks of this machine until they end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__]
    names = ("task", "rounds", "members", "device")
    flags = [word for name in names for word in (f"--{name}", str(getattr(arguments, name)))]
    flags += [] if arguments.data_dir is None else ["--data-dir", str(arguments.data_dir)]
    flags += ["--independent"] if independent else []
    environment = {"GLOO_SOCKET_IFNAME": "lo"} | os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *flags, "--train", str(folder), str(hosts)], env=environment, check=True)


def figures(folder: Path, hosts: int, warm: int) -> dict[str, Any]:
    """Medians over the rounds of a run, the first ones omitted."""
    times = json.loads((folder / TIMES).read_text())
    lines = [line["timing"] for line in read_lines(folder / METRICS)]
    first = min(warm, len(lines) - 1)
    return {
        "ranks": times["ranks"],
        "hosts": hosts,
        "ranks_hold_one_policy": times["ranks_hold_one_policy"],
        "round_s": statistics.median(times["seconds"][first:]),
        "cpu_s": statistics.median(times["cpu_seconds"][first:]),
        **{
            f"independent_{kind}s": statistics.median(
                seconds for of_rank in times[f"independent_{kind}seconds"] for seconds in of_rank[first:]
            )
            for kind in ("", "cpu_")
        },
        **_medians([_parts(line, times["ranks"]) for line in lines[first:]]),
        "rounds_s": times["seconds"],
        "independent_rounds_s": times["independent_seconds"],
    }


def _parts(timing: dict[str, Any], count: int) -> dict[str, float]:
    """What one round consists of, as rank 0 saw it."""
    alone = {"collect_s": [timing["collect_s"]], "wait_s": [0.0], "exchanged_bytes": 0}
    ranks, spans = timing.get("ranks", alone), timing["spans"]
    gather = spans.get("collect/gather", 0.0) - ranks["wait_s"][0] if count > 1 else 0.0
    return {
        "collect_s": max(ranks["collect_s"]),
        "mean_wait_s": statistics.fmean(ranks["wait_s"]),
        "longest_wait_s": max(ranks["wait_s"]),
        "exchange_s": max(0.0, gather) + spans.get("share", 0.0),
        "update_s": timing["update_s"],
        "exchanged_bytes": ranks["exchanged_bytes"],
    }


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def table(rows: list[dict[str, Any]]) -> None:
    """Print all worlds. Efficiency needs a world of one rank."""
    cells = []
    for row in rows:
        times = [f"{row[name]:.2f}" for name in TIMES_OF_ROUNDS]
        factors = ["-" if row[name] is None else f"{row[name]:.2f}" for name in FACTORS]
        rate, size = row["hosts"] / row["round_s"], row["exchanged_bytes"] / 1e3
        parts = [f"{row[name]:.3f}" for name in PARTS]
        cells.append([row["ranks"], row["hosts"], *times, *factors, rate, *parts, size])
    print_table("Weak scaling, medians over rounds", HEADER, cells)


def measure(arguments: argparse.Namespace, name: str) -> None:
    """One run per number of ranks; the JSON has all that are finished."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in arguments.ranks:
            hosts = arguments.hosts * ranks
            start(arguments, ranks, hosts, Path(folder) / str(ranks), independent=True)
            rows.append(figures(Path(folder) / str(ranks), hosts, arguments.warm))
            print(f"{ranks} ranks: {rows[-1]['round_s']:.2f} s a round", flush=True)
            write_result(name, described(arguments, rows), arguments.out)
    table(with_efficiency(rows))


def with_efficiency(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with their efficiency and its factors, beside the row of a single rank."""
    alone = next((row["round_s"] for row in rows if row["ranks"] == 1), None)
    return [
        row
        | {
            "efficiency": None if alone is None else alone / row["round_s"],
            "hardware": None if alone is None else alone / row["independent_s"],
            "joining": row["independent_s"] / row["round_s"],
        }
        for row in rows
    ]


def described(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Json]:
    """Rows with their efficiency, and the settings behind them."""
    names = ("task", "hosts", "members", "rounds", "warm", "device")
    return {**{name: getattr(arguments, name) for name in names}, "worlds": with_efficiency(rows)}


def compare_policies(arguments: argparse.Namespace) -> dict[str, Json]:
    """The same hosts on other numbers of ranks: how far their last policies are from that of the first."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / str(ranks) for ranks in arguments.ranks]
        for ranks, place in zip(arguments.ranks, places, strict=True):
            start(arguments, ranks, arguments.hosts, place, independent=False)
            found = figures(place, arguments.hosts, arguments.warm)
            kept = {name: found[name] for name in ("ranks", "hosts", "ranks_hold_one_policy", "round_s")}
            rows.append({**kept, **distance(places[0], place)})
    cells = [[r["ranks"], r["round_s"], str(r["ranks_hold_one_policy"]), f"{r['relative_distance']:.3g}"] for r in rows]
    header = ["ranks", "round s", "one policy on all ranks", "distance from the first"]
    print_table(f"{arguments.hosts} hosts, {arguments.rounds} rounds, {arguments.device}", header, cells)
    names = ("task", "hosts", "members", "rounds", "device")
    return {**{name: getattr(arguments, name) for name in names}, "worlds": rows}


def distance(one: Path, other: Path) -> dict[str, Json]:
    """Between the weights of two runs' last checkpoints."""
    first, second = (_weights(place) for place in (one, other))
    square = sum(float((second[name] - tensor).square().sum()) for name, tensor in first.items())
    size = sum(float(tensor.square().sum()) for tensor in first.values())
    largest = max(float((second[name] - tensor).abs().max()) for name, tensor in first.items())
    return {"relative_distance": (square / size) ** 0.5, "largest_difference": largest, "weights_equal": largest == 0}


def _weights(folder: Path) -> dict[str, Any]:
    newest = checkpoints_of(folder).newest()
    assert newest is not None
    tensors = safetensors.torch.load_file(newest / "agent.safetensors")
    return {name: value.double() for name, value in tensors.items() if value.is_floating_point()}


def main() -> None:
    """Measure, print one table, write one JSON. Under torchrun: this world; else several, started by torchrun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--hosts", type=int, default=32, help="per rank, controls included")
    parser.add_argument("--members", type=int, default=3, help="hosts per group, without its control")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--warm", type=int, default=1, help="rounds that are not counted")
    parser.add_argument("--task", default="digits_blind")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--policies-equal", action="store_true")
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--independent", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    where = "cuda" if arguments.device.startswith("cuda") else f"{os.cpu_count()}_cores"
    try:
        if arguments.train is not None:
            train(arguments, int(arguments.train[1]), Path(arguments.train[0]), independent=arguments.independent)
        elif launched():
            measure_this_world(arguments, where)
        elif arguments.policies_equal:
            result = compare_policies(arguments)
            write_result(f"scaling_policies_{where}", result, arguments.out)
            sys.exit(0 if policies_equal(result) else 1)
        else:
            measure(arguments, f"scaling_{where}")
    except EsperError as error:
        print(f"rank 0: {error}", file=sys.stderr)
        sys.exit(2)


def measure_this_world(arguments: argparse.Namespace, where: str) -> None:
    """The world that torchrun has started; rank 0 reports."""
    ranks = int(os.environ["WORLD_SIZE"])
    with tempfile.TemporaryDirectory() as folder:
        if train(arguments, arguments.hosts * ranks, Path(folder) / "run", independent=True) == 0:
            rows = [figures(Path(folder) / "run", arguments.hosts * ranks, arguments.warm)]
            table(with_efficiency(rows))
            write_result(f"scaling_{where}_{ranks}_ranks", described(arguments, rows), arguments.out)


def policies_equal(result: dict[str, Any]) -> bool:
    """One policy on all ranks; on the CPU also the same one in all worlds. On CUDA fleets of other sizes round alike
    only up to their kernels' order of sums."""
    alike = all(row["ranks_hold_one_policy"] for row in result["worlds"])
    return alike and (result["device"] != "cpu" or all(row["weights_equal"] for row in result["worlds"]))


if __name__ == "__main__":
    main()
