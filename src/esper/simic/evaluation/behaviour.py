"""Records of policies on fresh hosts, for offline learning. Neither training nor evaluations use these hosts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from esper.kasmina.slot import Isolation
from esper.leyline import BadValueError, head_preset
from esper.leyline.numbers import require_whole
from esper.leyline.progress import progress_bar
from esper.simic.evaluation.arena import PolicyPlayer, SideBySide, divide, envs_at_once, fill, open_arena
from esper.simic.evaluation.policies import CONTROLS, ORACLE, PolicySpec, make_policy
from esper.simic.evaluation.workers import run_with
from esper.simic.offline.records import RecordWriter
from esper.simic.training.collect import action_draws
from esper.simic.training.episode import play_episode
from esper.simic.training.hosts import Groups, check_device, host_seed
from esper.simic.training.tape import EpisodeTape, record_header
from esper.storage.files import storage_errors
from esper.tamiyo import growth_table
from esper.tolaria import get_task


@dataclass(frozen=True)
class Behaviour:
    """Policies to record, each on the same hosts. Plain values, because it is sent to workers."""

    task: str
    policies: tuple[PolicySpec, ...]
    hosts: int
    rng_seed: int = 0
    preset: str = "core"
    isolation: Isolation = "shadow"
    device: str = "cpu"
    data_dir: Path | None = None

    def __post_init__(self) -> None:
        require_whole("episodes", self.hosts, 1)
        check_device(self.device)
        task, preset = get_task(self.task), head_preset(self.preset)
        for number, spec in enumerate(self.policies):
            if spec in self.policies[:number]:
                raise BadValueError(f"policy {spec.text!r} is listed twice; list it once")
            if spec.kind in (*CONTROLS, ORACLE):
                raise BadValueError(f"{spec.text!r} is a yardstick, which takes no actions to record; list policies")
            make_policy(spec, task, growth_table(preset, task.slot_config), self.device)  # raises if it cannot be

    @property
    def hosts_at_once(self) -> int:
        """Hosts in a fleet: each has a control and an env per policy."""
        return min(self.hosts, max(1, envs_at_once(self.device) // (len(self.policies) + 1)))

    def record(self, folder: Path, hosts: range) -> None:
        """Play all policies on some of the hosts, and write a file."""
        preset, width = head_preset(self.preset), len(self.policies)
        arena = open_arena(get_task(self.task), preset, False, self.isolation, self.device, self.data_dir)
        runner = arena.runner(Groups(self.hosts_at_once, width))
        policies = [make_policy(spec, arena.task, runner.table, self.device) for spec in self.policies]
        numbers = fill(hosts, runner.groups.count)
        seeds = [host_seed("recording", self.rng_seed, number) for number in numbers]
        positions = [(number, member) for number in numbers for member in range(width)]
        draws = action_draws(self.rng_seed, "recording", positions, arena.task.steps, len(runner.table))
        tape = EpisodeTape(runner)
        player = PolicyPlayer(runner, SideBySide(policies), seeds, draws, tape=tape)
        play_episode(runner, player.act, player.on_step)
        header = record_header(arena.task, preset, [spec.text for spec in self.policies], runner.layout)
        rows = range(len(hosts) * width)  # without what was filled up
        with RecordWriter(folder, header, f"{hosts.start:05d}-") as writer:
            writer.append(tape.episodes(rows, [row % width for row in rows], [seeds[row // width] for row in rows]))


@dataclass(frozen=True)
class _Block:
    """Records some hosts of a behaviour; a call that workers can be sent."""

    behaviour: Behaviour
    folder: Path

    def __call__(self, hosts: range) -> None:
        self.behaviour.record(self.folder, hosts)


def parse_policies(specs: Sequence[str]) -> tuple[PolicySpec, ...]:
    """The policies of these specs; training seeds that are joined by + become one policy each."""
    return tuple(member for text in specs for member in PolicySpec.parse(text).members)


def record_behaviour(behaviour: Behaviour, folder: Path, *, workers: int = 1, progress: bool = True) -> None:
    """Record one episode of each policy on each host to a folder, which must be new or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadValueError(f"{folder} is not an empty folder; choose another one for the records")
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    blocks = divide(behaviour.hosts, behaviour.hosts_at_once)
    total = behaviour.hosts * len(behaviour.policies)
    with progress_bar("recording", total, shown=progress) as advance, run_with(workers) as run_all:
        for hosts, _ in run_all(_Block(behaviour, folder), blocks):
            advance(len(hosts) * len(behaviour.policies))
