"""Several training seeds that share their fleets: separate learners, hosts trained as one batched program.

Each learner is a `Trainer` in a thread of its own, with its own agent, rollout, recorder and folder. Only one thread
runs at a time. A learner runs until it needs its fleet. Once all learners of that fleet have come so far, the main
thread trains, validates or probes all their hosts at once. So a learner does what it would have done alone, in the same
order, and on the CPU its run folder is the same to the bit.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Semaphore, Thread
from typing import Any, NamedTuple, cast

import torch

from esper.kasmina.slot import Isolation
from esper.leyline import BadValueError
from esper.leyline.records import decode
from esper.nissa import SinkSettings
from esper.simic.training.config import TrainConfig
from esper.simic.training.hosts import growth_fleet
from esper.simic.training.run_folder import CONFIG, RunFolder, read_config
from esper.simic.training.trainer import Begin, Trainer
from esper.storage.files import replace_file, storage_errors
from esper.storage.interrupts import interrupts_held, termination_interrupts
from esper.storage.series import KEEP
from esper.tolaria import HostFleet, Task
from esper.tolaria.batches import Batches
from esper.tolaria.shares import Call, FleetShare, SharedFleet

SEEDS = "seeds.json"  # names the seeds of the runs in a folder


class NewFleet(NamedTuple):
    """A learner's request for hosts of a task."""

    task: Task
    hosts: int
    device: str
    isolation: Isolation
    batches: Batches | None
    data_dir: Path | str | None

    def fits(self, other: "NewFleet") -> bool:
        """Whether one fleet can serve both requests."""
        return (self.task, self.device, self.isolation) == (other.task, other.device, other.isolation)


class Learner:
    """Work in a thread of its own that stops at each `ask` until it is answered."""

    def __init__(self, work: Callable[["Learner"], object]) -> None:
        self.request: Call | NewFleet | None = None  # what it waits for; None before it begins and after it has ended
        self.shares: list[FleetShare] = []  # of the fleets that it has not left
        self.error: BaseException | None = None  # what ended it
        self._answer: Any = None  # to its request
        self._failure: BaseException | None = None
        self._search: FleetShare | None = None
        self._resumed, self._stopped = Semaphore(0), Semaphore(0)
        self._work = work
        Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self._resumed.acquire()
        try:
            self._work(self)
        except BaseException as error:  # the main thread raises it again
            self.error = error
        self.request, self.shares = None, []
        self._stopped.release()

    def go(self, answer: object = None, failure: BaseException | None = None) -> None:
        """Answer the request, or raise the failure where it waits; returns at its next request or its end.

        Ctrl-C waits until then: the learner may be writing a checkpoint."""
        self._answer, self._failure = answer, failure
        with interrupts_held():
            self._resumed.release()
            self._stopped.acquire()

    def ask(self, request: Call | NewFleet) -> Any:  # Any: what was asked for
        """Wait for the answer to a request. The learner's own thread calls this."""
        self.request = request
        self._stopped.release()
        self._resumed.acquire()
        if self._failure is not None:
            raise self._failure
        return self._answer

    def fleet(
        self,
        task: Task,
        hosts: int,
        device: torch.device | str = "cpu",
        seeds: Sequence[int] | None = None,
        *,
        batches: Batches | None = None,
        data_dir: Path | str | None = None,
        isolation: Isolation = "shadow",
    ) -> HostFleet:
        """A share of a fleet for the whole run; takes the place of `growth_fleet`."""
        assert seeds is None, "a runner resets its fleet before an episode"
        share = self.ask(NewFleet(task, hosts, str(device), isolation, batches, data_dir))
        self.shares.append(share)
        return cast(HostFleet, share)  # it has what runners, observers and policies use of a fleet

    def search_fleet(self, *arguments: Any, **settings: Any) -> HostFleet:  # Any: those of `fleet`
        """A share of a fleet until the next call of this function: the fleets of a search change their shape."""
        self.end_search()
        fleet = self.fleet(*arguments, **settings)
        self._search = self.shares[-1]
        return fleet

    def end_search(self) -> None:
        """Leave the fleet of the search, so that nobody waits for this learner there."""
        if self._search is not None:
            self.shares.remove(self._search)
            self._search = None


def conduct(works: Sequence[Callable[[Learner], object]]) -> None:
    """Run learners in turn to their ends, and do what they ask for. If one fails, or on Ctrl-C, all are stopped."""
    learners = [Learner(work) for work in works]
    try:
        for learner in learners:
            _go(learner)
        while waiting := [learner for learner in learners if learner.request is not None]:
            _answer(waiting)
    except BaseException as error:
        ended = isinstance(error, KeyboardInterrupt) or any(learner.error is error for learner in learners)
        for learner in learners:
            while learner.request is not None:
                learner.go(failure=KeyboardInterrupt() if ended else error)
        raise


def _go(learner: Learner, answer: object = None) -> None:
    learner.go(answer)
    if learner.error is not None:
        raise learner.error


def _answer(waiting: Sequence[Learner]) -> None:
    """Carry out the calls of a fleet whose learners all wait for it; if there is none, make a fleet."""
    for shared in dict.fromkeys(share.shared for learner in waiting for share in learner.shares):
        members = [one for one in waiting if any(share.shared is shared for share in one.shares)]
        calls = {one: one.request for one in members if isinstance(one.request, Call)}
        own = {one: call for one, call in calls.items() if call.share.shared is shared}
        if len(own) == len(members):
            return _carry_out(shared, own)
    asked = {one: one.request for one in waiting if isinstance(one.request, NewFleet)}
    first = next(iter(asked.values()))
    return _make({one: request for one, request in asked.items() if request.fits(first)})


def _carry_out(shared: SharedFleet, calls: Mapping[Learner, Call]) -> None:
    (name,) = {call.name for call in calls.values()}  # episodes have equal lengths, and begin together
    results = shared.carry_out(name, {call.share.envs: call.argument for call in calls.values()})
    for learner, call in calls.items():
        _go(learner, results[call.share.envs])


def _make(requests: Mapping[Learner, NewFleet]) -> None:
    sizes, first = [request.hosts for request in requests.values()], next(iter(requests.values()))
    settings = {"batches": first.batches, "data_dir": first.data_dir, "isolation": first.isolation}
    shared = SharedFleet(growth_fleet(first.task, sum(sizes), first.device, **settings), sizes)
    for learner, envs in zip(requests, shared.ranges, strict=True):
        _go(learner, FleetShare(shared, envs, learner.ask))


# -- runs -------------------------------------------------------------------------------------------------------------

MakeBegin = Callable[[TrainConfig, Learner], Begin]  # what teaches the new agent of a learner


def train_together(
    config: TrainConfig,
    folder: Path,
    seeds: Sequence[int],
    *,
    make_begin: MakeBegin | None = None,
    keep_checkpoints: int = KEEP,
    sinks: SinkSettings | None = None,
    record: Path | None = None,
    progress: bool = True,
) -> list[Trainer]:
    """Train one learner per seed in `folder/seed<number>`, or resume those that have begun. Returns them, ended.

    `config` gives everything but the seed. Records go to folders of the same names in `record`.
    """
    if len(set(seeds)) < len(seeds) or not seeds:
        raise BadValueError(f"seeds {list(seeds)} must be different ones, at least one")
    torch.set_num_threads(config.threads)  # hosts are trained here, not where the trainers are
    resumed = (folder / SEEDS).is_file()
    if not resumed:
        RunFolder.check_free(folder)
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / SEEDS, json.dumps({"seeds": list(seeds)}) + "\n")
    trainers: dict[int, Trainer] = {}

    def work(seed: int, learner: Learner) -> None:
        own, settings = folder / f"seed{seed}", replace(config, seed=seed)
        trainer = trainers[seed] = Trainer(
            settings,
            own,
            resume=(own / CONFIG).is_file(),
            keep_checkpoints=keep_checkpoints,
            sinks=sinks,
            record=None if record is None else record / own.name,
            begin=None if make_begin is None else make_begin(settings, learner),
            make_fleet=learner.fleet,
        )
        trainer.run(progress=progress and seed == seeds[0])  # one bar for all: they run in step

    try:
        with termination_interrupts():
            conduct([partial(work, seed) for seed in seeds])
    except BaseException:
        if not resumed and not trainers:  # what cannot start leaves nothing behind
            (folder / SEEDS).unlink(missing_ok=True)
            with suppress(OSError):
                folder.rmdir()
        raise
    return [trainers[seed] for seed in seeds]


def is_together(folder: Path) -> bool:
    """Whether a folder holds runs of several seeds."""
    return (folder / SEEDS).is_file()


def read_together(folder: Path) -> tuple[TrainConfig, tuple[int, ...]]:
    """The settings and the seeds of the runs in a folder."""
    try:
        seeds = decode(tuple[int, ...], json.loads((folder / SEEDS).read_text(encoding="utf-8"))["seeds"], SEEDS)
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise BadValueError(f"{folder / SEEDS} is damaged ({error}); restore it, or resume each run alone") from error
    begun = [own for seed in seeds if ((own := folder / f"seed{seed}") / CONFIG).is_file()]
    if not begun:
        raise BadValueError(f"none of the runs in {folder} has begun; remove the folder and start again")
    return read_config(begun[0]), seeds
