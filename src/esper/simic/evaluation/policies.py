"""Policy specs: the names of policies on the command line, and what they stand for."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path

from esper.kasmina.slot import Isolation
from esper.leyline import BadValueError, SlotConfig, UnknownNameError, head_preset
from esper.leyline.numbers import require_whole
from esper.leyline.records import flatten
from esper.simic.agent.policy import check_heads, fit_policy
from esper.simic.evaluation.results import Result
from esper.simic.training.config import TrainConfig
from esper.simic.training.hosts import Purpose, check_device
from esper.simic.training.policy_files import PRETRAINED, is_policy, is_run, open_policy, policy_path, policy_preset
from esper.simic.training.run_folder import checkpoints_of, read_config
from esper.tamiyo import ActionTable, Policy, growth_table
from esper.tamiyo.policies import (
    HeuristicTamiyo,
    RandomCommitPolicy,
    RandomPolicy,
    SchedulePolicy,
    ToldPolicy,
    WaitPolicy,
)
from esper.tamiyo.policies.shipped import TUNED_KINDS, read_heuristic, read_plan, read_told, search_of, shipped_file
from esper.tolaria import Task, get_task

ORACLE, TOLD = "oracle", "told"
RULES = ("wait", "random", "random-commit", "heuristic", "schedule", TOLD, ORACLE)  # kinds that are not learned
CONTROLS = ("retrained", "static")  # kinds that start from another policy's results: `retrained:POLICY` …
LEARNED = "learned"
SHIPPED = "shipped"  # `heuristic:shipped`, `schedule:shipped` …: the task's file that comes with Esper


@dataclass(frozen=True)
class PolicySpec:
    """The name of a policy, parsed: a rule, run folders, or a yardstick."""

    text: str
    kind: str  # one of RULES or CONTROLS, or `learned`
    runs: tuple[str, ...] = ()  # of a learned policy: run folders, one per training seed
    tuned: tuple[str, ...] = ()  # tuned files, one per search seed, or `shipped`; a heuristic without one is untuned
    base: "PolicySpec | None" = None  # of a control: the policy whose results it starts from

    @classmethod
    def parse(cls, text: str) -> "PolicySpec":
        """Parse one name of the command line; whether its files exist is checked by `make_policy`."""
        kind, _, rest = text.partition(":")
        if kind in CONTROLS:
            return cls(text, kind, base=cls.parse(rest))
        if kind in RULES:
            if rest and kind not in TUNED_KINDS:
                raise BadValueError(f"policy {text!r}: {kind} takes no file; omit ':{rest}'")
            if not rest:
                return cls(text, kind, tuned=(SHIPPED,) if kind in ("schedule", TOLD) else ())
            return cls(text, kind, tuned=_split(text, rest))
        return cls(text, LEARNED, _split(text, text))

    @property
    def learned(self) -> bool:
        """Whether it consists of run folders; controls of a learned policy do not count."""
        return self.kind == LEARNED

    @property
    def members(self) -> list["PolicySpec"]:
        """One spec per training seed or search seed; other rules and controls have one member."""
        if len(self.tuned) > 1:
            return [replace(self, text=f"{self.kind}:{file}", tuned=(file,)) for file in self.tuned]
        return [replace(self, text=run, runs=(run,)) for run in self.runs] or [self]

    @property
    def short(self) -> str:
        """The name without folders; several seeds are named by what their folders or files have in common."""
        if self.base is not None:
            return f"{self.kind}:{self.base.short}"
        sources = self.runs or self.tuned
        if not sources or self.text == self.kind:
            return self.text
        first = Path(sources[0])
        name = first.name or sources[0]
        if len(sources) > 1:
            stem = name if self.learned else first.stem
            name = f"{stem.rstrip('0123456789') or stem} ({len(sources)} seeds)"
        return name if self.learned else f"{self.kind}:{name}"

    def tuned_files(self, task: Task) -> list[Path]:
        """The files of a tuned policy, one per search seed."""
        kind = next((kind for kind in TUNED_KINDS if kind == self.kind), None)
        return [shipped_file(kind, task.name) if file == SHIPPED else Path(file) for file in self.tuned if kind]

    def files(self, task: Task) -> list[Path]:
        """The files that define the policy: plans, thresholds, or the last checkpoint of every run."""
        sources = [policy_path(Path(run)) for run in self.runs]
        weights = [path for source in sources for path in (sorted(source.iterdir()) if source.is_dir() else [source])]
        return self.tuned_files(task) + weights


def _split(text: str, names: str) -> tuple[str, ...]:
    """The names that are joined by +."""
    parts = tuple(names.split("+"))
    if not all(part.strip() for part in parts):
        # As a path, an empty name would be the working directory.
        raise BadValueError(f"policy {text!r} has an empty name; allowed: {', '.join(RULES)}, or a run folder")
    return parts


def base_of(text: str) -> PolicySpec:
    """The policy that a control starts from; any other spec itself."""
    spec = PolicySpec.parse(text)
    return spec.base or spec


def short_names(specs: Iterable[str]) -> dict[str, str]:
    """Short names by spec; specs whose short names are equal are given in full."""
    short = {spec: PolicySpec.parse(spec).short for spec in specs}
    times = Counter(short.values())
    return {spec: name if times[name] == 1 else spec for spec, name in short.items()}


def make_policy(
    spec: PolicySpec, task: Task, table: ActionTable, device: str = "cpu", *, greedy: bool = False
) -> Policy:
    """Build the policy of one training or search seed. `greedy`: a learned policy takes the likeliest action."""
    slots = task.slot_config
    file = next(iter(spec.tuned_files(task)), None)
    match spec.kind:
        case "learned":
            return _load_run(Path(spec.runs[0]), table, slots, device, greedy=greedy)
        case "wait":
            return WaitPolicy(table)
        case "random":
            return RandomPolicy(table)
        case "random-commit":
            return RandomCommitPolicy(table, task.steps)
        case "heuristic":
            return HeuristicTamiyo(table, slots, read_heuristic(file) if file else None)
        case "schedule" if file:
            return SchedulePolicy(table, slots, read_plan(file))
        case "told" if file:
            return ToldPolicy(table, slots, read_told(file, task.defects), task.defect_of)
    raise BadValueError(f"{spec.text!r} is a yardstick, not a policy; `esper evaluate` runs it")


def _load_run(path: Path, table: ActionTable, slots: SlotConfig, device: str, *, greedy: bool) -> Policy:
    if not is_policy(path):
        raise UnknownNameError("policy", str(path), (*RULES, PRETRAINED, "a run folder", "a policy file"))
    agent = open_policy(path, device=device)[0]
    check_heads(agent, table, path)
    return fit_policy(agent, slots, greedy=greedy)


@dataclass(frozen=True)
class EvaluationConfig:
    """Which hosts an evaluation takes, and how they are trained."""

    task: str
    hosts: int
    seed: int
    preset: str = "core"
    final: bool = False  # hosts of the final range, scored on test images
    isolation: Isolation = "shadow"
    device: str = "cpu"
    data_dir: Path | None = None

    def __post_init__(self) -> None:
        require_whole("hosts", self.hosts, 2, remark="; one host has no interval")
        head_preset(self.preset)
        get_task(self.task)

    @property
    def purpose(self) -> Purpose:
        """The range of its host seeds."""
        return "final" if self.final else "evaluation"


@dataclass(frozen=True)
class Contender:
    """One policy of one training seed, or a yardstick. Plain values, because it is sent to other processes."""

    config: EvaluationConfig
    spec: PolicySpec
    greedy: bool = False  # the likeliest action instead of a sampled one; for learned policies
    base: Result | None = None  # what a control starts from

    @property
    def acts(self) -> bool:
        """Whether it is a policy, which can grow hosts beside others."""
        return self.base is None and self.spec.kind != ORACLE


def check_specs(specs: Sequence[PolicySpec], config: EvaluationConfig) -> None:
    """Raise for anything that cannot be evaluated, before anything runs."""
    check_device(config.device)
    task = get_task(config.task)
    for number, spec in enumerate(specs):
        if spec in specs[:number]:
            raise BadValueError(f"policy {spec.text!r} is listed twice; list it once")
        if spec.base is not None:
            # The oracle's gains are measured on half of the images.
            if spec.base not in specs or spec.base.kind in (*CONTROLS, ORACLE):
                raise BadValueError(
                    f"{spec.text!r}: {spec.base.text!r} must be another policy of the list, no control and not the "
                    "oracle"
                )
        elif spec.kind == ORACLE:
            if config.isolation != "shadow":
                raise BadValueError(f"the oracle's seeds learn from shadow rows; omit it with {config.isolation!r}")
        else:
            for member in spec.members:
                make_policy(member, task, growth_table(head_preset(config.preset), task.slot_config), config.device)
        if spec.learned:
            check_same_recipe(spec.runs)
            if (preset := preset_of([spec.text])) != config.preset:
                raise BadValueError(f"{spec.text!r} was trained under preset {preset}; use --preset {preset}")
        check_same_search(spec.tuned_files(task))


def check_same_search(files: Sequence[Path]) -> None:
    """Raise unless these are files of different searches that had the same task, method and number of episodes.

    Files written by hand do not say how they were made: they have to be different files.
    """
    searches = [(file, search_of(file)) for file in files]
    for (first, one), (second, other) in combinations(searches, 2):
        if first.resolve() == second.resolve():
            raise BadValueError(f"{first} and {second} are one file, and so one search seed; name it once")
        if not one or not other:
            continue
        if one == other:
            raise BadValueError(
                f"{first} and {second} have the same search and search seed {one['rng_seed']}, so one is a copy of the "
                "other; name one of them"
            )
        for name in one:
            if name != "rng_seed" and one[name] != other[name]:
                raise BadValueError(
                    f"{first} and {second} are no seeds of one search: {name} is {one[name]!r} in the first and "
                    f"{other[name]!r} in the second; put a comma between them instead of +"
                )


def preset_of(specs: Iterable[str]) -> str:
    """The head preset of the learned policies among these; core if there are none. Raises if they differ."""
    runs = [run for spec in specs for run in base_of(spec).runs if is_policy(Path(run))]
    presets = {run: policy_preset(Path(run)) for run in runs}
    if len(set(presets.values())) > 1:
        raise BadValueError(f"policies of different head presets cannot be compared: {presets}; evaluate them apart")
    return next(iter(presets.values()), "core")


def learned_runs(specs: Iterable[PolicySpec]) -> list[Path]:
    """The run folders of learned policies, each once."""
    return list({Path(run).resolve(): Path(run) for spec in specs for run in spec.runs}.values())


FREE = ("seed", "start", "device", "threads", "data_dir", "alarms")  # may differ among runs of one configuration


def check_same_recipe(runs: Sequence[str]) -> None:
    """Raise unless these are different runs of one configuration, because claims count training seeds.

    Policy files do not say how they were made: they have to differ, and the rest is up to the user.
    """
    files = {run: policy_path(Path(run)) for run in runs if not is_run(Path(run))}
    for first, second in combinations(files, 2):
        if files[first].read_bytes() == files[second].read_bytes():
            raise BadValueError(f"{first} and {second} hold the same policy, and so one training seed; name it once")
    configs = [(run, read_config(Path(run))) for run in runs if run not in files]
    for (first, one), (second, other) in combinations(configs, 2):
        if Path(first).resolve() == Path(second).resolve():
            raise BadValueError(f"{first} and {second} are one folder, and so one training seed; name it once")
        recipe, its = _recipe(one), _recipe(other)
        for name in recipe | its:
            if recipe.get(name) != its.get(name):
                raise BadValueError(
                    f"{first} and {second} are no training seeds of one configuration: {name} is {recipe.get(name)!r} "
                    f"in the first and {its.get(name)!r} in the second; put a comma between them instead of +"
                )
        # The seed determines everything random; beside it, only the start of a run can differ.
        starts = [None if config.start is None else config.start.resolve() for config in (one, other)]
        if one.seed == other.seed and starts[0] == starts[1]:
            raise BadValueError(
                f"{first} and {second} have the same configuration and training seed {one.seed}, so one is a copy of "
                "the other; name one of them"
            )


def _recipe(config: TrainConfig) -> dict[str, object]:
    return dict(flatten({name: value for name, value in asdict(config).items() if name not in FREE}, "."))


def unfinished(runs: Sequence[Path]) -> list[str]:
    """A warning for each run that has fewer rounds than it was configured for."""
    progress = {
        run: (max(checkpoints_of(run).numbers(), default=0), read_config(run).rounds) for run in runs if is_run(run)
    }
    return [
        f"{run} has completed {done} of its {rounds} rounds: its figures are those of an unfinished run"
        for run, (done, rounds) in progress.items()
        if done < rounds
    ]
