"""Evaluations in independent jobs: some hosts and the policies that grow them, in this process or in workers."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from esper.leyline import BadValueError, EsperError, SeedStage, head_preset
from esper.leyline.numbers import require_whole
from esper.leyline.progress import Advance, ignore
from esper.simic.distributed import Message, World
from esper.simic.evaluation.arena import PolicyPlayer, SideBySide, divide, envs_at_once, fill, hardened, open_arena
from esper.simic.evaluation.cache import ResultCache, contender_key
from esper.simic.evaluation.costs import CostMeter
from esper.simic.evaluation.policies import ORACLE, Contender, EvaluationConfig, make_policy
from esper.simic.evaluation.recording import EvaluationRecords, write_records
from esper.simic.evaluation.results import Fossil, Result
from esper.simic.evaluation.yardsticks import retrain, run_oracle, train_static
from esper.simic.training.collect import action_draws
from esper.simic.training.episode import play_episode
from esper.simic.training.hosts import Groups, host_seed
from esper.simic.training.tape import EpisodeTape
from esper.tolaria import get_task

Call = Callable[[Any], Any]  # Any: items and results of any kind
RunAll = Callable[[Call, Iterable[Any]], Iterable[tuple[Any, Any]]]  # yields items with their results, in any order
MOST_POLICIES = 15  # policies side by side; a fleet still holds four hosts
ORACLE_HOSTS = 16  # hosts per job of the oracle, which runs an episode per plan on each of them
# Least envs of a job where work is divided further for several processes. Small fleets cost more per env. Measured on a
# CPU (digits_blind): an episode takes 14.5 s with 64 envs, 5.1 s with 16, 3.1 s with 8, 2.2 s with 4.
LEAST_ENVS = 8


@dataclass(frozen=True)
class Job:
    """Some contenders on some hosts of a task: policies side by side, or one yardstick."""

    contenders: tuple[Contender, ...]
    hosts: range
    indices: tuple[int, ...]  # of these contenders among all
    places: int  # hosts in the fleet that plays it; its jobs share a fleet, and the last one may have fewer hosts
    records: tuple[Path, ...] = ()  # where their episodes are recorded, one path per contender; empty: nowhere


def make_jobs(contenders: Mapping[int, Contender], processes: int = 1) -> list[Job]:
    """Divide the work into jobs, enough for all processes; policies of one task share the controls of their hosts."""
    together: dict[EvaluationConfig, list[int]] = {}
    yardsticks = []
    for index, one in contenders.items():
        if one.acts:
            together.setdefault(one.config, []).append(index)
        else:
            oracle = one.spec.kind == ORACLE
            most, least = (ORACLE_HOSTS, 1) if oracle else (envs_at_once(one.config.device), LEAST_ENVS)
            yardsticks += _jobs({index: one}, most, least, processes)
    jobs = []
    for config, indices in together.items():
        for part in divide(len(indices), MOST_POLICIES):
            chosen = {index: contenders[index] for index in indices[part.start : part.stop]}
            envs = len(chosen) + 1  # per host: a control, and one per policy
            most, least = max(1, envs_at_once(config.device) // envs), -(-LEAST_ENVS // envs)
            jobs += _jobs(chosen, most, least, processes)
    return jobs + yardsticks


def _jobs(chosen: Mapping[int, Contender], most: int, least: int, processes: int) -> list[Job]:
    """Jobs of at most `most` hosts, a multiple of the processes unless that leaves less than `least` hosts per job."""
    contenders = tuple(chosen.values())
    hosts = contenders[0].config.hosts
    fewest = -(-hosts // most)
    full = -(-fewest // processes) * processes
    parts = divide(hosts, -(-hosts // max(fewest, min(full, hosts // least))))
    return [Job(contenders, part, tuple(chosen), len(parts[0])) for part in parts]


def host_seeds(config: EvaluationConfig) -> list[int]:
    """The hosts of an evaluation."""
    return [host_seed(config.purpose, config.seed, number) for number in range(config.hosts)]


def host_draws(config: EvaluationConfig, hosts: Iterable[int], steps: int, heads: int) -> torch.Tensor:
    """Random draws of policies (steps, hosts, heads), a function of the host alone."""
    return action_draws(config.seed, config.purpose, [(host, 0) for host in hosts], steps, heads)


def run_job(job: Job) -> list[Result]:
    """Run a job: one result per contender, on the job's hosts."""
    first, width = job.contenders[0], len(job.contenders)
    config, chosen = first.config, slice(job.hosts.start, job.hosts.stop)
    settings = (config.final, config.isolation, config.device, config.data_dir)
    arena = open_arena(get_task(config.task), head_preset(config.preset), *settings)
    seeds = host_seeds(config)
    if first.spec.kind == ORACLE:
        return [run_oracle(arena, seeds[chosen])[0]]
    if first.base is not None:
        control = retrain if first.spec.kind == "retrained" else train_static
        return [control(arena, seeds[chosen], first.base.part(chosen))]
    runner = arena.runner(Groups(job.places, width))
    policies = [
        make_policy(one.spec, arena.task, runner.table, config.device, greedy=one.greedy) for one in job.contenders
    ]
    hosts = fill(job.hosts, runner.groups.count)
    draws = host_draws(config, hosts, arena.task.steps, len(runner.table)).repeat_interleave(width, 1)
    meter = CostMeter(runner.fleet, final=config.final)
    tape = EpisodeTape(runner) if job.records else None
    of_groups = [seeds[host] for host in hosts]
    player = PolicyPlayer(runner, SideBySide(policies), of_groups, draws, meter, tape)
    end = hardened(play_episode(runner, player.act, player.on_step))
    if tape is not None:
        write_records(job.contenders, job.records, tape, seeds[chosen])
    fossils = [
        [
            Fossil(slot_id, str(state.blueprint), state.style, state.alpha)
            for slot_id, state in runner.fleet.states[env].items()
            if state.stage is SeedStage.FOSSILIZED
        ]
        for env in runner.groups.envs
    ]
    of_envs = [seed for seed in of_groups for _ in range(width)]
    result = Result.scored(arena.task, of_envs, *end, fossils, meter.cost())
    return [result.part(slice(index, width * len(job.hosts), width)) for index in range(width)]


def run_here(call: Call, items: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Call a function with one item after the other in this process."""
    return ((item, call(item)) for item in items)


def run_contenders(
    contenders: Sequence[Contender],
    run_all: RunAll = run_here,
    advance: Advance = ignore,
    cache: ResultCache | None = None,
    records: EvaluationRecords | None = None,
    world: World | None = None,
    workers: int = 1,
) -> list[Result]:
    """Run contenders on all their hosts, except for what the cache holds. `advance` counts hosts × contenders.

    `run_all` runs jobs on all ranks of the world, or in so many workers. With `records`, what the cache holds but
    nothing has recorded runs again. The cache is rank 0's.
    """
    # Before they run: training may continue meanwhile.
    keys = [contender_key(one) for one in contenders] if cache is not None or records is not None else []
    by_host = [cache.read(key) for key in keys] if cache else [{} for _ in contenders]
    if records is not None:
        by_host = [
            records.of_recorded(key, results) if one.acts else results
            for one, key, results in zip(contenders, keys, by_host, strict=True)
        ]
    if world is not None and world.size > 1:
        keys, by_host = share_known(world, keys, by_host)
    left = {index: one for index, one in enumerate(contenders) if len(by_host[index]) < one.config.hosts}
    made = make_jobs(left, workers * (1 if world is None else world.size))
    jobs = [job for job in made if any(host not in by_host[index] for index in job.indices for host in job.hosts)]
    if records is not None:
        jobs = [
            replace(job, records=tuple(records.target(keys[index], job.hosts) for index in job.indices))
            if job.contenders[0].acts
            else job
            for job in jobs
        ]
    work = sum(len(job.hosts) * len(job.indices) for job in jobs)
    advance(sum(one.config.hosts for one in contenders) - work)
    for job, results in run_all(run_job, jobs):
        for index, result in zip(job.indices, results, strict=True):
            if cache is not None:
                cache.write(keys[index], job.hosts, result)
            by_host[index].update(zip(job.hosts, result.by_host(), strict=True))
        advance(len(job.hosts) * len(job.indices), job.contenders[0].spec.text if len(job.indices) == 1 else "")
    return [Result.joined([hosts[host] for host in sorted(hosts)]) for hosts in by_host]


def share_known(
    world: World, keys: list[str], by_host: list[dict[int, Result]]
) -> tuple[list[str], list[dict[int, Result]]]:
    """Rank 0's keys of contenders, and their results by host, on all ranks."""
    known = [[[host, asdict(result)] for host, result in results.items()] for results in by_host]
    content = world.share(None if world.rank else Message({}, {"keys": keys, "known": known})).content
    shared = [{host: Result.from_json(values) for host, values in results} for results in content["known"]]
    return content["keys"], shared


@contextmanager
def run_with(workers: int) -> Iterator[RunAll]:
    """Run calls in this process or in spawned ones, which know the tasks of esper and of the main module."""
    require_whole("workers", workers, 1)
    if workers == 1:
        try:
            yield run_here
        finally:
            open_arena.cache_clear()
        return
    with worker_pool(workers) as pool:

        def run_there(call: Call, items: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
            futures = {pool.submit(call_in_worker, call, item): item for item in items}
            return ((futures[future], future.result()) for future in as_completed(futures))  # raises the first error

        yield run_there


def call_in_worker(call: Call, item: Any) -> Any:
    """Call a function in a worker process."""
    try:
        return call(item)
    except EsperError as error:
        raise BadValueError(str(error)) from None  # errors with arguments of their own cannot be sent back


@contextmanager
def worker_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes of one thread each. They end with this process, and are not waited for if the block raises."""
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin_worker)
    try:
        yield pool
    except BaseException:
        # A pool can only be waited for. This attribute is private, but every version so far has it.
        for process in list((getattr(pool, "_processes", None) or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker() -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work forever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
