"""The work of an evaluation in pieces that are independent: one policy of one training seed on all hosts."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

import torch

from esper.kasmina.slot import Isolation
from esper.leyline import BadValueError, EsperError, head_preset
from esper.leyline.numbers import require_whole
from esper.leyline.progress import Advance
from esper.simic.training.controls import retrain, train_static
from esper.simic.training.evaluation import AT_ONCE, Fossil, Result, Trajectory, UnseenHosts
from esper.simic.training.fleets import growth_fleet
from esper.simic.training.groups import Groups
from esper.simic.training.learned import LearnedPolicy
from esper.simic.training.named import RULES, make_policies
from esper.simic.training.oracle import run_oracle
from esper.tamiyo import Policy, growth_table
from esper.tolaria import Task, get_task

ORACLE = "oracle"
CONTROLS: dict[str, Callable[[UnseenHosts, Result], Result]] = {"retrained": retrain, "static": train_static}
"""Policies that follow from another's results: `retrained:POLICY`, `static:POLICY`."""

RunJobs = Callable[[Sequence["Job"]], list[Result]]


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

    def open(self) -> UnseenHosts:
        """The hosts, with a fleet for them."""
        task, n = get_task(self.task), Groups(min(self.hosts, AT_ONCE), 1).hosts
        fleet = growth_fleet(task, n, self.device, data_dir=self.data_dir, isolation=self.isolation)
        return UnseenHosts(task, self.hosts, self.seed, head_preset(self.preset), final=self.final, fleet=fleet)


@dataclass(frozen=True)
class Job:
    """One policy on all hosts of a task. Plain values: it travels to other processes."""

    config: EvaluationConfig
    spec: str
    greedy: bool = False
    """The likeliest action instead of a sampled one; for learned policies"""
    base: Result | None = None
    """What `retrained:` and `static:` start from"""


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


def policy_of(spec: str, task: Task, preset: str, device: str) -> Policy:
    """The policy of a name that stands for one."""
    (policy,) = make_policies(spec, task, growth_table(head_preset(preset), task.slot_config), device)
    return policy


def check_specs(specs: Sequence[str], config: EvaluationConfig) -> None:
    """Raise for what cannot be evaluated, before anything runs."""
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


def run_job(unseen: UnseenHosts, job: Job) -> Result:
    """Do it."""
    if job.base is not None:
        return CONTROLS[job.spec.partition(":")[0]](unseen, job.base)
    if job.spec == ORACLE:
        return _run_oracle(unseen, job.config)
    policy = policy_of(job.spec, unseen.task, job.config.preset, job.config.device)
    if job.greedy:
        assert isinstance(policy, LearnedPolicy)
        policy = LearnedPolicy(policy.agent, greedy=True)
    return unseen.grow(policy)


def _run_oracle(unseen: UnseenHosts, config: EvaluationConfig) -> Result:
    """With hindsight, on the half of the images that did not choose; it is a bound, so its search has no cost here."""
    found = run_oracle(
        unseen.task,
        unseen.seeds,
        head_preset(config.preset),
        rho=unseen.rho,
        final=unseen.final,
        device=config.device,
        batches=unseen.fleet.batches,
    )
    accuracy, control, added = (
        torch.tensor([getattr(host, name) for host in found], dtype=torch.float64)
        for name in ("accuracy", "control_accuracy", "added_params")
    )
    fossils = [[Fossil.named(commit) for commit in host.commits] for host in found]
    return unseen.result([Trajectory(accuracy, control, added, fossils, {})])


@contextmanager
def job_runner(workers: int, advance: Advance) -> Iterator[RunJobs]:
    """Runs jobs here, or in so many processes of one thread each; the results are the same, in the order of jobs.

    Processes are spawned: they know the tasks that are registered by importing esper, or the main module.
    """
    require_whole("workers", workers, 1)
    if workers == 1:
        opened = lru_cache(maxsize=1)(EvaluationConfig.open)  # jobs come task by task

        def run_here(jobs: Sequence[Job]) -> list[Result]:
            found = []
            for job in jobs:
                found.append(run_job(opened(job.config), job))
                advance(1, job.spec)
            return found

        yield run_here
        return
    pool = worker_pool(workers)

    def run_there(jobs: Sequence[Job]) -> list[Result]:
        futures = {pool.submit(run_in_worker, job): job for job in jobs}
        for future in as_completed(futures):
            future.result()  # the first failure ends all
            advance(1, futures[future].spec)
        return [future.result() for future in futures]

    try:
        yield run_there
    finally:
        pool.shutdown(cancel_futures=True)


def worker_pool(workers: int) -> ProcessPoolExecutor:
    """Processes of one thread each for `run_in_worker`."""
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin_worker)


def _begin_worker() -> None:
    torch.set_num_threads(1)


@lru_cache(maxsize=1)
def _opened(config: EvaluationConfig) -> UnseenHosts:
    """Of a worker process: its fleet serves job after job."""
    return config.open()


def run_in_worker(job: Job) -> Result:
    """Do it in a worker process."""
    try:
        return run_job(_opened(job.config), job)
    except EsperError as error:
        # Errors with arguments of their own do not survive the way back.
        raise BadValueError(f"{job.spec}: {error}") from None
