"""Runs under torchrun end the same, whether or not a rank is killed (SIGKILL) at random moments.

python benchmarks/kill_ranks.py --runs 20 --ranks 2

torchrun starts the ranks again, and the same command continues the folder. A moment is a random time, or for rank 0 a
random operation on a file of the run; half of the runs are killed again after the restart. Metrics (without timing),
events and the last checkpoint must equal those of the run that nothing happened to, bit for bit. A run that ends before
its kill is made again with another one.

A run that fails counts as an outcome, with its error. With --keep FOLDER, finished runs are stored there, and the same
command continues after the last one.

With --elastic, two agents of torchrun (`--nnodes 1:2`) share the work, and the second one is killed with its rank: the
first one must continue alone.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

from harness import RESULTS, Json, print_table, write_result
from kept import Content, Kept
from kept import number as number_of
from kill_resume import differences, tiny_task
from kills import FileKill

from esper.leyline import EsperError
from esper.simic.distributed import open_world
from esper.simic.distributed.world import this_code
from esper.simic.training.config import TrainConfig
from esper.simic.training.follower import Follower
from esper.simic.training.run_folder import METRICS, SESSIONS
from esper.simic.training.trainer import Trainer
from esper.storage.files import remove_leftovers
from esper.storage.logs import read_lines

RESTARTS = 3
TAIL = 2000  # characters of a failed run's output that are stored
WHOLE = "whole.done"  # beside the run that nothing happened to, once it has ended
LIMIT_S = 300.0  # that a run may take before something is wrong with it
KILLS = "KILL_RANKS"  # the variable that tells ranks when they die: `restart:rank:kind:moment`, separated by commas


# -- in the ranks -----------------------------------------------------------------------------------------------------


def train(folder: Path, rounds: int, hosts: int) -> None:
    """Train on this rank, as `esper train` does."""
    config = TrainConfig(task=tiny_task("digits_blind"), rounds=rounds, hosts=hosts, members=1)
    _die_as_told(folder)
    try:
        with open_world() as world:
            if world.rank:
                Follower(world, config).run()
            else:
                Trainer(config, folder, world=world).run(progress=False)
    except EsperError as error:
        print(f"rank 0: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _die_as_told(folder: Path) -> None:
    restart, rank = (os.environ[name] for name in ("TORCHELASTIC_RESTART_COUNT", "RANK"))
    if rank == "0":
        _restarts_file(folder).write_text(restart)
    for kill in filter(None, os.environ.get(KILLS, "").split(",")):
        when, whom, kind, moment = kill.split(":")
        if (when, whom) == (restart, rank) and kind == "file":
            FileKill(folder, int(moment))
        elif (when, whom) == (restart, rank):
            timer = threading.Timer(float(moment), os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()


def _restarts_file(folder: Path) -> Path:
    """Beside a run: how often torchrun has started its ranks again."""
    return folder.with_name(f"{folder.name}.restarts")


# -- in the process that starts torchrun ------------------------------------------------------------------------------


def torchrun(*options: str) -> list[str]:
    """The command that starts ranks of this file."""
    return [sys.executable, "-m", "torch.distributed.run", *options, __file__]


def start(command: list[str], kills: str = "") -> "subprocess.Popen[str]":
    """Start torchrun in a session of its own, on the loopback device."""
    environment = {**os.environ, KILLS: kills, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def run(folder: Path, arguments: argparse.Namespace, kills: str = "") -> str | None:
    """One run until torchrun ends; returns what went wrong, if anything did."""
    options = ["--nproc-per-node", str(arguments.ranks), "--standalone", "--max-restarts", str(RESTARTS)]
    process = start([*torchrun(*options), *worker_arguments(folder, arguments)], kills)
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        for number in _tree(process.pid):
            os.kill(number, signal.SIGKILL)
        output, _ = process.communicate()
        return f"no end after {LIMIT_S:.0f} s: {output[-TAIL:]}"
    return f"torchrun ended with {process.returncode}: {output[-TAIL:]}" if process.returncode else None


def worker_arguments(folder: Path, arguments: argparse.Namespace) -> list[str]:
    """What the ranks are told."""
    return ["--train", str(folder), "--rounds", str(arguments.rounds), "--hosts", str(arguments.hosts)]


def draw_kills(dice: random.Random, ranks: int, seconds: float) -> str:
    """When which rank dies; half of the runs again after the restart."""
    kills = []
    for restart in range(1 + (dice.random() < 0.5)):
        rank = dice.randrange(ranks)
        if rank == 0 and dice.random() < 0.5:
            kills.append(f"{restart}:0:file:{dice.randint(1, 60)}")
        else:
            kills.append(f"{restart}:{rank}:clock:{dice.uniform(0.0, seconds):.3f}")
    return ",".join(kills)


def sessions(folder: Path) -> list[dict[str, Any]]:
    """The begins of a run's sessions."""
    return [line for line in read_lines(folder / SESSIONS) if line["kind"] in ("begun", "resumed")]


def run_whole(folder: Path, arguments: argparse.Namespace) -> None:
    """The run that nothing happens to."""
    if failure := run(folder, arguments):
        raise RuntimeError(f"the run without kills: {failure}")


def kill_one(number: int, place: Path, whole: Path, arguments: argparse.Namespace) -> dict[str, Json]:
    """One run with kills, and how it differs from the whole one. Its folder is removed."""
    lines = list(read_lines(whole / METRICS))
    # From the start of training to its end; starting torch is not counted, nor killed.
    seconds = 2.0 + sum(line["timing"]["collect_s"] + line["timing"]["update_s"] for line in lines)
    kills = draw_kills(random.Random(f"{arguments.seed} {number}"), arguments.ranks, seconds)
    begin = time.perf_counter()
    failure = run(place, arguments, kills)
    outcome: dict[str, Json] = {"kills": kills, "seconds": time.perf_counter() - begin, "failure": failure}
    if failure is None:
        remove_leftovers(place)
        outcome |= {
            "restarts": int(_restarts_file(place).read_text()),
            "sessions": len(sessions(place)),
            "differences": list(differences(whole, place)),
        }
    _remove(place)
    return outcome


def _remove(place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    _restarts_file(place).unlink(missing_ok=True)


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Json]:
    """The run that nothing happens to, then the others, unless a run with this number is stored."""
    settings = {name: getattr(arguments, name) for name in ("ranks", "rounds", "hosts", "seed")}
    kept, whole = Kept(folder / "runs.jsonl", {**settings, **this_code()}), folder / "whole"
    if not (folder / WHOLE).exists():
        shutil.rmtree(whole, ignore_errors=True)
        run_whole(whole, arguments)
        (folder / WHOLE).touch()
    outcomes: list[Content] = []
    for number in count():
        if len(outcomes) == arguments.runs:
            break
        if str(number) not in kept.runs:
            place = folder / f"run-{number}"
            _remove(place)
            kept.add(str(number), kill_one(number, place, whole, arguments))
            print(f"{number}: {kept.runs[str(number)]}", flush=True)
        outcome = kept.runs[str(number)]
        if outcome["failure"] is not None or outcome["restarts"]:
            outcomes.append(outcome)
    finished = [outcome for outcome in outcomes if outcome["failure"] is None]
    return {
        **{"runs": arguments.runs, **settings},
        "runs_equal": sum(not outcome["differences"] for outcome in finished),
        "failed": len(outcomes) - len(finished),
        "resumed": sum(number_of(outcome, "sessions") > 1 for outcome in finished),
        "restarts": sum(int(number_of(outcome, "restarts")) for outcome in finished),
        "outcomes": list(map(dict, outcomes)),
    }


def lose_an_agent(arguments: argparse.Namespace, folder: Path) -> dict[str, Json]:
    """Two agents; the second is killed with its rank in the second round, and the first continues alone."""
    whole, place = folder / "whole", folder / "elastic"
    arguments.ranks = 1
    run_whole(whole, arguments)
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", str(RESTARTS), "--rdzv-backend", "c10d"]
    conf = ["--rdzv-conf", "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"]
    options += ["--rdzv-endpoint", f"localhost:{arguments.port}", "--rdzv-id", "kills", *conf]
    command = [*torchrun(*options), *worker_arguments(place, arguments)]
    first = start(command)  # it has the store at which agents meet
    time.sleep(1.0)
    second = start(command)
    log, deadline = place / METRICS, time.monotonic() + LIMIT_S
    while not log.exists() or sum(1 for _ in read_lines(log)) < 2:
        if time.monotonic() > deadline or first.poll() is not None:
            raise RuntimeError(f"no second round came: {first.communicate()[0]}")
        time.sleep(0.05)
    leads = Counter(line["machine"].get("ranks", 1) for line in sessions(place))
    for number in _tree(second.pid):
        os.kill(number, signal.SIGKILL)
    second.wait()
    output, _ = first.communicate(timeout=LIMIT_S)
    remarks = [remark for line in sessions(place) for remark in line.get("remarks", ())]
    return {
        "exit_code": first.returncode,
        "ranks_before": max(leads),
        "remarks": remarks,
        "differences": list(differences(whole, place)) if first.returncode == 0 else [output[-TAIL:]],
    }


def _tree(root: int) -> list[int]:
    """A process and all that it has started."""
    children = Path(f"/proc/{root}/task/{root}/children").read_text().split()
    return [root, *(number for child in children for number in _tree(int(child)))]


def main() -> None:
    """Kill and compare, print one table, write one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=29876)
    parser.add_argument("--keep", type=Path, help="folder in which finished runs are stored")
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.train is not None:
        train(arguments.train, arguments.rounds, arguments.hosts)
        return
    with tempfile.TemporaryDirectory() as folder:
        if arguments.elastic:
            result = lose_an_agent(arguments, Path(folder))
            print_table("two agents, one killed", ["what", "value"], [(k, str(v)) for k, v in result.items()])
            write_result("kill_agent", result, arguments.out)
            good = not result["differences"] and result["ranks_before"] == 2
        else:
            result = measure(arguments, arguments.keep or Path(folder))
            names = ("runs", "runs_equal", "resumed", "restarts", "failed")
            print_table(f"{arguments.ranks} ranks", ["what", "number"], [(name, result[name]) for name in names])
            write_result("kill_ranks", result, arguments.out)
            good = result["runs_equal"] == arguments.runs
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
