"""Searches of schedule and heuristic: what they may spend, what they find, where they look, what they leave behind."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from simic.training.tiny import NAME, make_runner, purpose_of, tiny_task
from torch import Tensor

from esper.cli import main
from esper.leyline import BadValueError, StorageError, UnknownNameError, derive_seed, head_preset
from esper.leyline.records import encode
from esper.simic.evaluation import arena as arena_module
from esper.simic.evaluation.arena import AT_ONCE, Arena, PolicyPlayer
from esper.simic.evaluation.policies import PolicySpec, make_policy
from esper.simic.evaluation.workers import run_here
from esper.simic.evaluation.yardsticks import extensions
from esper.simic.training.episode import EpisodeRunner, play_episode
from esper.simic.training.hosts import host_seed
from esper.simic.tuning import (
    SEARCH_METHODS,
    Search,
    SearchMethod,
    Trials,
    Tuned,
    search_heuristic,
    search_schedule,
    tune,
    write_tuned,
)
from esper.storage import files
from esper.tamiyo import Policy, growth_table
from esper.tamiyo.policies import (
    HeuristicConfig,
    HeuristicTamiyo,
    Plan,
    PlannedSeed,
    SchedulePolicy,
    WaitPolicy,
    shipped,
)
from esper.tolaria import HostFleet, Task, get_task

DIGITS = get_task("digits_blind")
BUDGETS = (16, 17, 23, 60, 137, 480, 1000)


class Fake:
    """Objectives without episodes: a candidate's worth, the host's own luck, and a little noise of the pair."""

    def __init__(self, worth: Callable[..., float], noise: float = 1.0) -> None:
        self.worth, self.noise = worth, noise
        self.episodes = 0

    def __call__(self, lineups: Sequence[Sequence[object]], hosts: Sequence[int]) -> list[list[float]]:
        self.episodes += sum(map(len, lineups))
        return [
            [self.worth(one) + 10 * _luck(host) + self.noise * _luck(repr(one), host) for one in lineup]
            for lineup, host in zip(lineups, hosts, strict=True)
        ]


def _luck(*place: int | str) -> float:
    """In [−1, 1)."""
    return derive_seed("luck", *place) / 2**62 - 1


def plan_parameters(plan: Plan, task: Task) -> int:
    """Parameters that a plan grows."""
    sizes = {
        (slot.slot_id, offer.name): offer.parameters for slot in task.slot_config.slots for offer in slot.blueprints
    }
    return sum(sizes[seed.slot, seed.blueprint] for seed in plan.seeds)


def planted(values: dict[tuple[str, str, int], float]) -> Callable[[Plan], float]:
    """Each seed is worth what is said, or −1."""
    return lambda plan: sum(values.get((seed.slot, seed.blueprint, seed.germinate_at), -1.0) for seed in plan.seeds)


# -- what a search may spend ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", ["model", "halving", "heuristic"])
@pytest.mark.parametrize("pays", [True, False])
def test_the_budget_is_kept_and_stated_to_the_episode(budget: int, kind: Any, pays: bool) -> None:
    """What was run is what is stated, is what the log adds up to; and no more is left than cannot be shared."""
    fake = Fake(lambda _: 0.0 if not pays else 1.0, noise=3.0)
    if kind != "heuristic":
        fake = Fake(lambda plan: len(plan.seeds) if pays else -len(plan.seeds), noise=3.0)
        plans = Search[Plan](fake, budget, 0)
        search_schedule(plans, DIGITS, kind)
        used, log = plans.used, plans.log
    else:
        configs = Search[HeuristicConfig](fake, budget, 0)
        search_heuristic(configs, DIGITS)
        used, log = configs.used, configs.log
    assert used == fake.episodes == sum(len(trial.hosts) for trial in log)
    assert budget - 4 < used <= budget


def test_a_budget_too_small_to_compare_anything_is_refused() -> None:
    with pytest.raises(BadValueError, match="episodes 15 is not an integer of 16 or more"):
        Search[Plan](Fake(lambda _: 0.0), 15, 0)


def test_a_search_never_runs_what_it_cannot_pay() -> None:
    search = Search[Plan](Fake(lambda _: 0.0), 16, 0)
    search.used = 15
    with pytest.raises(BadValueError, match="1 of 16 episodes are left for 2 finalists"):
        search.decide([Plan(), extensions(Plan(), DIGITS)[0]])
    assert len(search.halve("rest", extensions(Plan(), DIGITS), 100)) == 1
    assert search.used == 16


# -- what it finds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rng_seed", range(3))
@pytest.mark.parametrize(("method", "budget"), [("model", 480), ("model", 2000), ("halving", 480), ("halving", 2000)])
def test_the_planted_plan_is_found(rng_seed: int, method: SearchMethod, budget: int) -> None:
    """Two seeds pay, a third does not: both are found, in the order in which they pay, and no other."""
    worth = planted({("r1c1", "conv_small", 5): 8.0, ("r1c0", "norm", 0): 5.0, ("r1c0", "depthwise", 0): 4.0})
    search = Search[Plan](Fake(worth), budget, rng_seed)
    plan, mean = search_schedule(search, DIGITS, method)
    assert plan == Plan((PlannedSeed("r1c1", "conv_small", 5), PlannedSeed("r1c0", "norm", 0)))
    finals = [trial for trial in search.log if trial.stage == "final"]
    assert mean == next(trial.objective for trial in finals if trial.candidate == encode(plan))


@pytest.mark.parametrize("method", SEARCH_METHODS)
def test_where_nothing_pays_the_plan_is_to_wait(method: SearchMethod) -> None:
    """Luck of the hosts alone must not make a plan."""
    search = Search[Plan](lambda lineups, hosts: [[-0.5] * len(lineup) for lineup in lineups], 480, 0)
    assert search_schedule(search, DIGITS, method) == (Plan(), 0.0)


def test_no_third_seed_is_looked_for_where_a_second_does_not_pay() -> None:
    """What it would have cost goes to the finalists, the best two of one seed."""
    worth = planted({("r1c1", "conv_small", 5): 8.0, ("r1c0", "norm", 0): 6.0})
    search = Search[Plan](Fake(lambda plan: worth(plan) if len(plan.seeds) == 1 else -9.0), 480, 0)
    search_schedule(search, DIGITS, "halving")
    assert {trial.stage for trial in search.log} == {"one seed", "2 seeds", "final"}
    finals = [trial for trial in search.log if trial.stage == "final"]
    assert [trial.candidate["seeds"][0]["blueprint"] for trial in finals] == ["conv_small", "norm"]
    assert len(finals[0].hosts) > 70


@pytest.mark.parametrize("method", SEARCH_METHODS)
def test_finalists_meet_on_hosts_that_none_of_them_was_picked_on(method: SearchMethod) -> None:
    search = Search[Plan](Fake(planted({("r1c0", "norm", 0): 5.0})), 480, 0)
    search_schedule(search, DIGITS, method)
    finals = [set(trial.hosts) for trial in search.log if trial.stage == "final"]
    earlier = {host for trial in search.log if trial.stage != "final" for host in trial.hosts}
    assert len(finals) >= 2
    assert all(hosts == finals[0] for hosts in finals)
    assert not finals[0] & earlier


def test_halves_go_on_and_see_more_hosts() -> None:
    """In each rung at most half of the candidates: the best by what all of them had shown until then."""
    search = Search[Plan](Fake(planted({}), noise=5.0), 480, 0)
    plans = extensions(Plan(), DIGITS)
    alive = search.halve("one seed", plans, 240)
    by_code = {repr(encode(plan)): plan for plan in plans}
    rungs: dict[tuple[int, ...], list[Plan]] = {}
    for trial in search.log:
        rungs.setdefault(trial.hosts, []).append(by_code[repr(trial.candidate)])
    members, hosts = list(rungs.values()), list(rungs)
    assert len(members) >= 4
    assert members[0] == plans
    assert [host for rung in hosts for host in rung] == list(range(sum(map(len, hosts))))
    for rung, (earlier, later) in enumerate(pairwise([*members, alive])):
        seen = [host for some in hosts[: rung + 1] for host in some]
        best = sorted(earlier, key=lambda plan: -sum(search.objectives[plan][host] for host in seen))
        assert later == best[: len(later)]
        assert len(later) <= -(-len(earlier) // 2) or later is alive


def test_thresholds_that_are_better_than_the_default_are_found() -> None:
    def worth(config: HeuristicConfig) -> float:
        return -abs(config.least_audition - 5) - 2 * abs(config.patience - 4) - 3 * (config.choice != "worth")

    search = Search[HeuristicConfig](Fake(worth, noise=0.5), 480, 0)
    best, _ = search_heuristic(search, DIGITS)
    assert worth(best) > worth(HeuristicConfig()) + 6
    stages: dict[str, list[str]] = {}
    for trial in search.log:
        stages.setdefault(trial.stage, []).append(repr(trial.candidate))
    assert repr(encode(HeuristicConfig())) in stages["final"], "also where it is far from the best"
    assert len(set(stages["final"]) & set(stages["random"])) == 3, "the default and the best two"
    assert len(set(stages["final"]) & set(stages["near the best"])) == 1


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_default_is_always_a_candidate(budget: int) -> None:
    """And it wins where nothing is better."""
    search = Search[HeuristicConfig](Fake(lambda one: 20.0 * (one == HeuristicConfig())), budget, 0)
    assert search_heuristic(search, DIGITS)[0] == HeuristicConfig()
    default = encode(HeuristicConfig())
    assert {trial.stage for trial in search.log if trial.candidate == default} == {"random", "final"}


@pytest.mark.parametrize("kind", ["model", "halving", "heuristic"])
def test_everything_random_follows_from_the_seed(kind: Any) -> None:
    def log(rng_seed: int) -> list[object]:
        fake = Fake(lambda _: 0.0)
        if kind != "heuristic":
            plans = Search[Plan](fake, 60, rng_seed)  # too few for all plans: some are drawn
            return [search_schedule(plans, DIGITS, kind), plans.log]
        configs = Search[HeuristicConfig](fake, 60, rng_seed)
        return [search_heuristic(configs, DIGITS), configs.log]

    assert log(3) == log(3)
    assert log(3) != log(4)


@pytest.mark.parametrize("name", ["digits_blind", "digits_varied", "cifar_impaired"])
def test_plans_fit_the_parameter_budget(name: str) -> None:
    """From the start, alone and together; and every way to grow one seed within it is there."""
    task = get_task(name)
    plans = extensions(Plan(), task)
    offers = [
        (slot.slot_id, offer.name, when)
        for slot in task.slot_config.slots
        for offer in slot.blueprints
        for when in (0, task.steps // 4, task.steps // 2)
        if offer.parameters <= task.parameter_budget
    ]
    assert [(s.slot, s.blueprint, s.germinate_at) for plan in plans for s in plan.seeds] == offers
    largest = max(plans, key=lambda plan: plan_parameters(plan, task))
    longer = extensions(largest, task)
    assert all(plan_parameters(plan, task) <= task.parameter_budget for plan in longer)
    assert all(plan.seeds[:1] == largest.seeds and plan.seeds[1].slot != largest.seeds[0].slot for plan in longer)


# -- episodes ---------------------------------------------------------------------------------------------------------


def few_plans(task: Task) -> list[Plan]:
    return [plan for plan in extensions(Plan(), task) if plan.seeds[0].blueprint == "depthwise"][:3]


def few_configs() -> list[HeuristicConfig]:
    eager = HeuristicConfig(
        patience=0, plateau=50.0, germinate_left=6, errors=0.0, least_audition=-50.0, prune_below=-90.0
    )
    return [eager, HeuristicConfig(), replace(eager, choice="per_cost", at_once=1)]


def alone(runner: EpisodeRunner, policy: Policy, seeds: list[int]) -> list[float]:
    """Objectives of hosts that have nobody beside them but their control."""
    player = PolicyPlayer(runner, policy, seeds)
    result = play_episode(runner, player.act, player.on_step)
    assert result.hardened_accuracy is not None
    assert result.hardened_control is not None
    gains, added = result.hardened_accuracy - result.hardened_control, result.fossil_parameters.tolist()
    host = runner.fleet.task.host_parameters
    return [gain - 2 * math.log2(1 + count / host) for gain, count in zip(gains.tolist(), added, strict=True)]


@pytest.mark.parametrize("kind", ["schedule", "heuristic"])
@pytest.mark.default_cases("schedule")
def test_candidates_side_by_side_do_what_they_do_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However they are packed: here three hosts in a fleet of two groups, some of it filled up."""
    task = tiny_task()
    table = growth_table(head_preset("core"), task.slot_config)
    counted: list[int] = []
    monkeypatch.setitem(AT_ONCE, "cpu", 8)
    hosts = [4, 5, 9]
    seeds = [host_seed("tuning", 1, number) for number in hosts]
    policies: list[Policy]

    def advance(amount: int, words: str = "") -> None:
        counted.append(amount)

    if kind == "schedule":
        plans = few_plans(task)
        found = Trials(NAME, "schedule", "core", 1)(run_here, 1, advance, [plans] * 3, hosts)
        policies = [SchedulePolicy(table, task.slot_config, plan) for plan in plans]
    else:
        configs = few_configs()
        found = Trials(NAME, "heuristic", "core", 1)(run_here, 1, advance, [configs] * 3, hosts)
        policies = [HeuristicTamiyo(table, task.slot_config, config) for config in configs]
    assert len({value for row in found for value in row}) > len(policies), "they do different things"
    runner = make_runner(3, 1)
    for policy, objectives in zip(policies, zip(*found, strict=True), strict=True):
        assert list(objectives) == pytest.approx(alone(runner, policy, seeds), abs=1e-5)
    assert sum(counted) == len(policies) * len(hosts)


def test_fleets_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many candidates and hosts; and every pair is run."""
    shapes: list[int] = []
    built = HostFleet.__init__

    def note(self: HostFleet, task: Task, n: int, *args: object, **kwargs: object) -> None:
        shapes.append(n)
        built(self, task, n, *args, **kwargs)  # type: ignore[arg-type]  # passed on

    monkeypatch.setattr(HostFleet, "__init__", note)
    monkeypatch.setattr(arena_module, "play_episode", lambda runner, act, on_step: None)
    monkeypatch.setattr(EpisodeRunner, "begin", lambda self, seeds: setattr(self, "seeds", seeds))
    arena, running = Arena(tiny_task(), head_preset("core")), list[Sequence[int]]()

    def wait(runner: EpisodeRunner, lineups: Sequence[Sequence[int]]) -> Policy:
        running[:] = lineups
        return WaitPolicy(runner.table)

    def pairs(runner: EpisodeRunner, _: object) -> Tensor:
        seeds: list[int] = runner.seeds  # type: ignore[attr-defined]  # noted above
        return torch.tensor([[seed, one] for seed, lineup in zip(seeds, running, strict=True) for one in lineup])

    most = AT_ONCE["cpu"]
    for candidates, hosts in ((1, 1), (1, 70), (70, 1), (5, 23), (most - 1, 2), (most, 2), (130, 3)):
        lineups = [range(host, host + candidates) for host in range(hosts)]
        table = arena.run(wait, lineups, range(hosts), pairs)
        assert table.tolist() == [[[host, one] for one in lineup] for host, lineup in enumerate(lineups)]
    assert max(shapes) <= most


# -- the command and its files ----------------------------------------------------------------------------------------


def test_the_command_searches_on_tuning_hosts_and_leaves_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """End to end: only hosts of the tuning range are grown, and the file is a policy with its search."""
    grown: set[int] = set()
    reset = HostFleet.reset

    def note(self: HostFleet, seeds: Sequence[int]) -> None:
        grown.update(seeds)
        reset(self, seeds)

    monkeypatch.setattr(HostFleet, "reset", note)
    task, out = tiny_task(), tmp_path / "found.json"
    command = ["tune", "--task", NAME, "--kind", "heuristic", "--episodes", "16", "--seed", "5", "--out", str(out)]
    main(command)
    assert f"of 16 episodes on {NAME}" in " ".join(capsys.readouterr().out.split())
    found = json.loads(out.read_text())
    search = found["search"]
    assert (found["format"], found["kind"], found["task"]) == (1, "heuristic", NAME)
    assert (search["budget"], search["rng_seed"]) == (16, 5)
    assert search["used"] == sum(len(trial["hosts"]) for trial in search["log"])
    hosts = {host for trial in search["log"] for host in trial["hosts"]}
    assert grown == {host_seed("tuning", 5, number) for number in hosts}
    assert {purpose_of(seed) for seed in grown} == {"tuning"}
    table = growth_table(head_preset("core"), task.slot_config)
    policy = make_policy(PolicySpec.parse(f"heuristic:{out}"), task, table)
    assert isinstance(policy, HeuristicTamiyo)
    assert encode(policy.config) == found["heuristic"]
    before = out.read_text()
    with pytest.raises(SystemExit, match="2"):
        main(command)
    assert "exists" in capsys.readouterr().err
    assert out.read_text() == before


PLAN = Plan((PlannedSeed("r1c0", "depthwise", 5), PlannedSeed("r1c2", "norm", 0, 4)))


def found(best: Plan | HeuristicConfig = PLAN) -> Tuned:
    kind = "schedule" if isinstance(best, Plan) else "heuristic"
    return Tuned(kind, "digits_blind", best, 1.5, 16, 16, 0, ())  # type: ignore[arg-type]  # one of two literals


def policy_of(spec: str) -> Policy:
    return make_policy(PolicySpec.parse(spec), DIGITS, growth_table(head_preset("core"), DIGITS.slot_config))


def schedule_of(spec: str) -> Plan | Sequence[Plan]:
    policy = policy_of(spec)
    assert isinstance(policy, SchedulePolicy)
    return policy.plan


def heuristic_of(spec: str) -> HeuristicConfig:
    policy = policy_of(spec)
    assert isinstance(policy, HeuristicTamiyo)
    return policy.config


def test_tuned_files_come_back_as_they_were(tmp_path: Path) -> None:
    config = HeuristicConfig(patience=4, plateau=0.1 + 0.2, choice="per_cost")
    write_tuned(tmp_path / "plan.json", found())
    write_tuned(tmp_path / "rules.json", found(config))
    assert schedule_of(f"schedule:{tmp_path / 'plan.json'}") == PLAN
    assert heuristic_of(f"heuristic:{tmp_path / 'rules.json'}") == config
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "rules.json"]


def test_files_written_by_hand_are_read_too(tmp_path: Path) -> None:
    config = HeuristicConfig(patience=1)
    for name, value in (("plan", PLAN), ("rules", config)):
        (tmp_path / name).write_text(json.dumps(encode(value)))
    assert schedule_of(f"schedule:{tmp_path / 'plan'}") == PLAN
    assert heuristic_of(f"heuristic:{tmp_path / 'rules'}") == config


def test_files_that_do_not_fit_are_refused_with_the_reason(tmp_path: Path) -> None:
    plan, rules, other = tmp_path / "plan.json", tmp_path / "rules.json", tmp_path / "other.json"
    write_tuned(plan, found())
    write_tuned(rules, found(HeuristicConfig()))
    with pytest.raises(
        BadValueError, match=r"holds a tuned schedule, not a heuristic; pass it as schedule:.*plan\.json"
    ):
        policy_of(f"heuristic:{plan}")
    with pytest.raises(BadValueError, match="holds a tuned heuristic, not a schedule"):
        policy_of(f"schedule:{rules}")
    other.write_text(json.dumps({**found().to_json(), "format": 2}))
    with pytest.raises(BadValueError, match="format 2; this version of Esper reads format 1"):
        policy_of(f"schedule:{other}")
    other.write_text(json.dumps({"format": 1, "kind": "schedule"}))
    with pytest.raises(BadValueError, match="lacks 'plan'"):
        policy_of(f"schedule:{other}")
    other.write_bytes(b"\xff{")
    with pytest.raises(BadValueError, match="cannot be read as JSON"):
        policy_of(f"schedule:{other}")
    with pytest.raises(BadValueError, match="cannot be read as JSON"):
        policy_of(f"schedule:{tmp_path / 'nothing'}")


def test_a_bare_schedule_is_the_shipped_one_and_a_bare_heuristic_the_untuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path)
    with pytest.raises(BadValueError, match=r"no tuned schedule for task 'digits_blind' is shipped; .*esper tune"):
        policy_of("schedule")
    write_tuned(tmp_path / "schedule-digits_blind.json", found())
    write_tuned(tmp_path / "heuristic-digits_blind.json", found(HeuristicConfig(patience=5)))
    assert schedule_of("schedule") == schedule_of("schedule:shipped") == PLAN
    assert heuristic_of("heuristic") == HeuristicConfig()
    assert heuristic_of("heuristic:shipped").patience == 5


def test_every_shipped_file_can_be_used() -> None:
    """Those that are there: of a task that exists, and fit for it."""
    for path in sorted(shipped.SHIPPED.glob("*.json")):
        kind, _, name = path.stem.partition("-")
        task = get_task(name)
        make_policy(PolicySpec.parse(f"{kind}:shipped"), task, growth_table(head_preset("core"), task.slot_config))
    assert (shipped.SHIPPED / "README.md").is_file(), "the folder is where it is looked for"


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(files, "sync_to_disk", full)
    with pytest.raises(StorageError, match="no space left"):
        write_tuned(tmp_path / "plan.json", found())
    assert not list(tmp_path.iterdir())
    with pytest.raises(BadValueError, match="there is no folder"):
        write_tuned(tmp_path / "nowhere" / "plan.json", found())


def test_bad_names() -> None:
    with pytest.raises(UnknownNameError, match="kind of search 'plan'; allowed: schedule, heuristic, told"):
        tune("digits_blind", "plan")  # type: ignore[arg-type]  # the mistake
    with pytest.raises(UnknownNameError, match="search 'random'; allowed: model, halving"):
        tune("digits_blind", "schedule", search="random")  # type: ignore[arg-type]  # the mistake
    with pytest.raises(UnknownNameError, match="task 'digit'"):
        tune("digit", "schedule")
    with pytest.raises(BadValueError, match="`esper evaluate` runs it"):
        policy_of("oracle")
