"""Searches on several ranks: rank 0 decides what to try, and all ranks try their shares of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from esper.leyline.progress import Advance, ignore
from esper.leyline.records import decode, encode
from esper.simic.distributed import Message, World
from esper.simic.evaluation.arena import Lineups
from esper.simic.evaluation.dealing import run_dealt
from esper.simic.evaluation.workers import RunAll
from esper.simic.tuning.trials import Trials
from esper.tamiyo.policies import HeuristicConfig, Plan

OWN = ("device", "data_dir", "record")  # fields of `Trials` that each rank has for itself


def try_on_ranks(
    world: World,
    trials: Trials,
    run_all: RunAll,
    workers: int,
    advance: Advance,
    lineups: Lineups[Any],  # Any: plans or thresholds
    hosts: Sequence[int],
) -> list[list[float]]:
    """Objectives [host][candidate], for rank 0; `run_all` comes from `run_dealt`. Folders of records are siblings."""
    if world.size > 1:
        plain = {name: value for name, value in vars(trials).items() if name not in OWN}
        record = None if trials.record is None else trials.record.name
        content = {"trials": encode(plain), "record": record, "lineups": encode(lineups), "hosts": list(hosts)}
        world.share(Message({}, content))
    return trials(run_all, workers * world.size, advance, lineups, hosts)


def serve_trials(world: World, message: Message, device: str, data_dir: Path | None) -> Message:
    """Try this rank's share of all that rank 0 shares; returns its first message about something else."""
    with run_dealt(world, 1, Path()) as (run_all, records):
        assert records is not None
        while "trials" in message.content:
            content = message.content
            record = None if content["record"] is None else records / content["record"]
            trials = Trials(**content["trials"], device=world.device(device), data_dir=data_dir, record=record)
            kind = HeuristicConfig if trials.kind == "heuristic" else Plan
            lineups = [[decode(kind, candidate, "candidate") for candidate in row] for row in content["lineups"]]
            trials(run_all, world.size, ignore, lineups, content["hosts"])
            message = world.share()
    return message
