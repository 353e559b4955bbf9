"""The work of an evaluation in pieces that are independent: some hosts, and the policies that grow them."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import torch

from esper.kasmina.slot import Isolation
from esper.leyline import BadValueError, EsperError, head_preset
from esper.leyline.numbers import require_whole
from esper.leyline.progress import Advance
from esper.simic.agent.policy import LearnedPolicy
from esper.simic.evaluation.arena import divide
from esper.simic.evaluation.policies import RULES, check_same_recipe, make_policies
from esper.simic.evaluation.results import Fossil, Result
from esper.simic.evaluation.unseen import AT_ONCE, MOST_POLICIES, EvaluationHosts, Trajectory
from esper.simic.evaluation.yardsticks import retrain, run_oracle, train_static
from esper.simic.training.hosts import check_device
from esper.tamiyo import Policy, growth_table
from esper.tolaria import Task, get_task

ORACLE = "oracle"
ORACLE_HOSTS = 16
"""Hosts per job of the oracle, which lives an episode per plan on each of them."""
CONTROLS: dict[str, Callable[[EvaluationHosts, Result], Result]] = {"retrained": retrain, "static": train_static}
"""Policies that follow from another's results: `retrained:POLICY`, `static:POLICY`."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Which hosts, and how they live."""

    task: str
    hosts: int
    seed: int
    preset: str = "core"
    final: bool = False
    isolation: Isolation = "shadow"
    device: str = "cpu"
    data_dir: Path | None = None

    def __post_init__(self) -> None:
        require_whole("hosts", self.hosts, 2, remark="; one host has no interval")
        head_preset(self.preset)
        get_task(self.task)

    def open(self) -> EvaluationHosts:
        """The hosts, with what their fleets need."""
        return EvaluationHosts(
            get_task(self.task),
            self.hosts,
            self.seed,
            head_preset(self.preset),
            final=self.final,
            isolation=self.isolation,
            device=self.device,
            data_dir=self.data_dir,
        )


@dataclass(frozen=True)
class Contender:
    """One policy of one training seed, or a yardstick. Plain values: it travels to other processes."""

    config: EvaluationConfig
    spec: str
    greedy: bool = False
    """The likeliest action instead of a sampled one; for learned policies"""
    base: Result | None = None
    """What `retrained:` and `static:` start from"""

    @property
    def acts(self) -> bool:
        """Whether it is a policy, which can grow hosts beside others."""
        return self.base is None and self.spec != ORACLE


@dataclass(frozen=True)
class Job:
    """Some contenders on some hosts of a task: policies that act side by side, or one of any other kind."""

    contenders: tuple[Contender, ...]
    hosts: range
    places: tuple[int, ...]
    """Of the contenders, among all that take part"""


def make_jobs(contenders: Sequence[Contender]) -> list[Job]:
    """The work in small pieces. Policies of one task share the controls of their hosts, fifteen at most at a time."""
    together: dict[EvaluationConfig, list[int]] = {}
    jobs = []
    for place, one in enumerate(contenders):
        if one.acts:
            together.setdefault(one.config, []).append(place)
        else:
            most = ORACLE_HOSTS if one.spec == ORACLE else AT_ONCE
            jobs += [Job((one,), hosts, (place,)) for hosts in divide(one.config.hosts, most)]
    shared = []
    for config, places in together.items():
        for some in divide(len(places), MOST_POLICIES):
            chosen = tuple(places[some.start : some.stop])
            at_once = max(1, AT_ONCE // (len(chosen) + 1))
            side_by_side = tuple(contenders[place] for place in chosen)
            shared += [Job(side_by_side, hosts, chosen) for hosts in divide(config.hosts, at_once)]
    return shared + jobs


def base_of(spec: str) -> str:
    """The policy that a control of it names; any other policy itself."""
    kind, _, rest = spec.partition(":")
    return rest if kind in CONTROLS else spec


def is_learned(spec: str) -> bool:
    """Whether it is a run folder or several; not for controls of one."""
    return spec.split(":")[0] not in (*RULES, *CONTROLS, ORACLE)


def members(spec: str) -> list[str]:
    """The policies behind a name: one, or one per run folder."""
    return spec.split("+") if is_learned(spec) else [spec]


def learned_runs(specs: Iterable[str]) -> list[Path]:
    """The run folders behind names, each once."""
    runs = [Path(member) for spec in specs if is_learned(spec) for member in members(spec)]
    return list({run.resolve(): run for run in runs}.values())


def policy_of(spec: str, task: Task, preset: str, device: str) -> Policy:
    """The policy of a name that stands for one."""
    (policy,) = make_policies(spec, task, growth_table(head_preset(preset), task.slot_config), device)
    return policy


def check_specs(specs: Sequence[str], config: EvaluationConfig) -> None:
    """Raise for what cannot be evaluated, before anything runs."""
    check_device(config.device)
    if repeated := [spec for spec in specs if list(specs).count(spec) > 1]:
        raise BadValueError(f"policy {repeated[0]!r} is there twice")
    for spec in specs:
        kind, base = spec.partition(":")[0], base_of(spec)
        if kind in CONTROLS and (base not in specs or base.partition(":")[0] in (*CONTROLS, ORACLE)):
            # The oracle's gains are measured on half the images.
            raise BadValueError(f"{spec!r}: {base!r} must be another policy of the list, no control and not the oracle")
        if spec == ORACLE and config.isolation != "shadow":
            raise BadValueError(f"the oracle's seeds learn from shadow rows; leave it out with {config.isolation!r}")
        if kind not in CONTROLS and spec != ORACLE:
            for member in members(spec):
                policy_of(member, get_task(config.task), config.preset, config.device)
        if is_learned(spec):
            check_same_recipe(members(spec))


def run_job(unseen: EvaluationHosts, job: Job) -> list[Result]:
    """Do it: a result per contender, of the job's hosts."""
    some, (first, *_) = unseen.part(job.hosts), job.contenders
    if first.base is not None:
        return [CONTROLS[first.spec.partition(":")[0]](some, first.base.part(job.hosts))]
    if first.spec == ORACLE:
        return [_run_oracle(some, first.config)]
    return some.grow([_policy(one) for one in job.contenders])


def _policy(one: Contender) -> Policy:
    policy = policy_of(one.spec, get_task(one.config.task), one.config.preset, one.config.device)
    if not one.greedy:
        return policy
    assert isinstance(policy, LearnedPolicy)
    return LearnedPolicy(policy.agent, greedy=True)


def _run_oracle(unseen: EvaluationHosts, config: EvaluationConfig) -> Result:
    """With hindsight, on the half of the images that did not choose; it is a bound, so its search has no cost here."""
    found = run_oracle(
        unseen.task,
        unseen.seeds,
        head_preset(config.preset),
        rho=unseen.rho,
        final=unseen.final,
        device=config.device,
        batches=unseen.data,
    )
    accuracy, control, added = (
        torch.tensor([getattr(host, name) for host in found], dtype=torch.float64)
        for name in ("accuracy", "control_accuracy", "added_params")
    )
    fossils = [[Fossil.named(commit) for commit in host.commits] for host in found]
    return unseen.result([Trajectory(accuracy, control, added, fossils, {})])


Run = Callable[[Sequence[Contender]], list[Result]]


class Done(NamedTuple):
    """A job and what it led to."""

    job: Job
    results: list[Result]


RunJobs = Callable[[list[Job]], Iterable[Done]]
Recall = Callable[[Sequence[Contender], RunJobs], Iterable[Done]]
"""All of the contenders' work: what is known already, and what the given function finds about the rest."""


def run_everything(contenders: Sequence[Contender], run_jobs: RunJobs) -> Iterable[Done]:
    """Nothing is known."""
    return run_jobs(make_jobs(contenders))


@contextmanager
def job_runner(workers: int, advance: Advance | None = None, recall: Recall = run_everything) -> Iterator[Run]:
    """Runs contenders here, or in so many processes of one thread each; the results are the same, in their order.

    Processes are spawned: they know the tasks that are registered by importing esper, or the main module. `advance`
    counts hosts × contenders.
    """
    require_whole("workers", workers, 1)
    if workers == 1:
        opened = lru_cache(maxsize=1)(EvaluationConfig.open)  # jobs come task by task

        def run_here(jobs: list[Job]) -> Iterator[Done]:
            return (_run_job(job, opened) for job in jobs)

        yield lambda contenders: collect(contenders, recall(contenders, run_here), advance)
        return
    with worker_pool(workers) as pool:

        def run_there(jobs: list[Job]) -> Iterator[Done]:
            futures = [pool.submit(run_in_worker, job) for job in jobs]
            return (future.result() for future in as_completed(futures))  # the first failure ends all

        yield lambda contenders: collect(contenders, recall(contenders, run_there), advance)


def collect(contenders: Sequence[Contender], done: Iterable[Done], advance: Advance | None = None) -> list[Result]:
    """Collect the parts of every contender's result."""
    parts: list[dict[int, Result]] = [{} for _ in contenders]
    for job, results in done:
        for place, result in zip(job.places, results, strict=True):
            parts[place][job.hosts.start] = result
        if advance is not None:
            advance(len(job.hosts) * len(job.places), job.contenders[-1].spec if len(job.places) == 1 else "")
    return [Result.joined([found[start] for start in sorted(found)]) for found in parts]


@contextmanager
def worker_pool(
    workers: int, begin: Callable[..., None] | None = None, *given: object
) -> Iterator[ProcessPoolExecutor]:
    """Processes of one thread each; `begin(*given)` is called first in each of them. They end with this process,
    however that ends; where the block ends with an error, or by Ctrl-C, what they are at is not waited for."""
    first = partial(_begin_worker, begin, *given)
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=first)
    try:
        yield pool
    except BaseException:
        # A pool can only be waited for. Private, and there in every version so far; without it, it is waited for.
        for process in list((getattr(pool, "_processes", None) or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker(begin: Callable[..., None] | None, *given: object) -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    if begin is not None:
        begin(*given)


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work forever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_job(job: Job, opened: Callable[[EvaluationConfig], EvaluationHosts]) -> Done:
    return Done(job, run_job(opened(job.contenders[0].config), job))


_opened = lru_cache(maxsize=1)(EvaluationConfig.open)
"""Of a worker process: its fleet serves job after job."""


def run_in_worker(job: Job) -> Done:
    """Do it in a worker process."""
    try:
        return _run_job(job, _opened)
    except EsperError as error:
        # Errors with arguments of their own do not survive the way back.
        raise BadValueError(f"{', '.join(one.spec for one in job.contenders)}: {error}") from None
