"""The yardstick `told`: a plan per kind of host, searched on hosts of that kind and replayed by kind."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from simic.training.tiny import NAME, purpose_of, tiny_task

from esper.cli import main
from esper.leyline import BadValueError, head_preset
from esper.leyline.records import encode
from esper.simic.evaluation.comparison import run_comparisons
from esper.simic.evaluation.policies import EvaluationConfig, PolicySpec, make_policy
from esper.simic.evaluation.workers import host_seeds
from esper.simic.offline.records import Records
from esper.simic.training.hosts import host_seed
from esper.simic.tuning import Trials, tune
from esper.tamiyo import growth_table
from esper.tamiyo.policies import Plan, PlannedSeed, ToldPolicy, shipped
from esper.tolaria import HostFleet, Task, TaskRegistry, get_task

VARIED = "told_smallest"
PLANS = {
    "blind": Plan((PlannedSeed("r1c0", "depthwise", 0),)),
    "none": Plan(),
    "blind_first_slot_cut": Plan((PlannedSeed("r1c1", "depthwise", 0),)),
}


@pytest.fixture(autouse=True)
def varied() -> Task:
    """A task of short episodes whose hosts are of three kinds."""
    if VARIED not in TaskRegistry.names():
        small = {"steps": 8, "batches_per_step": 1, "batch": 16, "calibration_size": 32, "validation_size": 60}
        TaskRegistry.register(replace(get_task("digits_varied"), name=VARIED, **small))  # type: ignore[arg-type]
    return get_task(VARIED)


def write(path: Path, plans: dict[str, Plan]) -> Path:
    path.write_text(json.dumps(encode(plans)))
    return path


def test_each_host_gets_the_plan_of_its_kind(tmp_path: Path) -> None:
    """Nothing else: hosts that need nothing stay as they are, the others grow where their plan says."""
    path = write(tmp_path / "told.json", PLANS)
    config = EvaluationConfig(VARIED, 9, 7)
    found = run_comparisons([VARIED], [f"told:{path}", "wait"], config, progress=False).tasks[VARIED]
    (result,) = found.policies[f"told:{path}"]
    kinds = [get_task(VARIED).defect_of(seed) for seed in host_seeds(config)]
    assert set(kinds) == set(PLANS), "hosts of every kind"
    grown = [[f"{seed.slot}/{seed.blueprint}" for seed in PLANS[kind].seeds] for kind in kinds]
    assert result.commits == grown


def test_a_plan_for_all_kinds_is_a_schedule(tmp_path: Path) -> None:
    """On a task with one kind, too; the kinds that a task lacks are ignored."""
    told = write(tmp_path / "told.json", {"none": PLANS["blind"], "blind": Plan()})
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(encode(PLANS["blind"])))
    tiny_task()
    config = EvaluationConfig(NAME, 3, 7)
    found = run_comparisons([NAME], [f"told:{told}", f"schedule:{plan}"], config, progress=False).tasks[NAME]
    assert found.policies[f"told:{told}"] == found.policies[f"schedule:{plan}"]
    assert found.share_of_told(f"schedule:{plan}") in (1.0, None)


def test_a_share_of_told(tmp_path: Path) -> None:
    """By hand: told has a mean of 4, the other 3; the first told counts, whatever file it has."""
    path = write(tmp_path / "told.json", PLANS)
    config = EvaluationConfig(VARIED, 2, 7)
    found = run_comparisons([VARIED], [f"told:{path}", "wait"], config, progress=False).tasks[VARIED]
    (result,) = found.policies[f"told:{path}"]
    results = {name: [replace(result, objective=values)] for name, values in (
        ("wait", [2.0, 4.0]), (f"told:{path}", [3.0, 5.0]), ("told", [30.0, 50.0]),
    )}  # fmt: skip
    shown = replace(found, policies=results)
    assert shown.share_of_told("wait") == pytest.approx(0.75)
    assert shown.share_of_oracle("wait") is None
    content = shown.to_json()["policies"]
    assert (content["wait"]["share_of_told"], content["wait"]["share_of_oracle"]) == (pytest.approx(0.75), None)
    assert replace(found, policies={"wait": results["wait"]}).share_of_told("wait") is None


def test_hosts_of_one_kind(varied: Task) -> None:
    """Numbered among themselves: together they are the tuning range in its order."""
    trials = Trials(VARIED, "told", "core", 3)
    everyone = trials.seeds(range(60))
    assert everyone == [host_seed("tuning", 3, number) for number in range(60)]
    for kind in varied.defects:
        alike = [seed for seed in everyone if varied.defect_of(seed) == kind]
        assert replace(trials, defect=kind).seeds(range(len(alike))) == alike
        assert replace(trials, defect=kind).seeds([4, 2]) == [alike[4], alike[2]]


def test_the_command_searches_each_kind_on_its_own_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], varied: Task
) -> None:
    """End to end: hosts of the tuning range, 16 episodes for each kind, a plan for each, and a policy that loads."""
    grown: list[set[str]] = []
    reset = HostFleet.reset

    def note(self: HostFleet, seeds: Sequence[int]) -> None:
        assert {purpose_of(seed) for seed in seeds} == {"tuning"}
        grown.append({varied.defect_of(seed) for seed in seeds})
        reset(self, seeds)

    monkeypatch.setattr(HostFleet, "reset", note)
    out = tmp_path / "told.json"
    main(["tune", "--task", VARIED, "--kind", "told", "--episodes", "16", "--seed", "2", "--out", str(out)])
    printed = " ".join(capsys.readouterr().out.split())
    assert f"48 of 48 episodes on {VARIED}: blind hosts: " in printed
    assert f"told:{out}" in printed.replace(" ", "")
    assert all(len(kinds) == 1 for kinds in grown), "no fleet mixes kinds"
    found = json.loads(out.read_text())
    assert (found["format"], found["kind"], list(found["plans"])) == (1, "told", list(varied.defects))
    assert (found["search"]["method"], found["search"]["budget"], found["search"]["used"]) == ("model", 48, 48)
    assert {trial["stage"].split(": ")[0] for trial in found["search"]["log"]} == set(varied.defects)
    table = growth_table(head_preset("core"), varied.slot_config)
    policy = make_policy(PolicySpec.parse(f"told:{out}"), varied, table)
    assert isinstance(policy, ToldPolicy)
    assert {kind: encode(plan) for kind, plan in policy.plans.items()} == found["plans"]


@pytest.mark.slow
def test_records_change_nothing(tmp_path: Path) -> None:
    """The same plans; every episode is recorded once."""
    plain, recorded = (
        tune(VARIED, "told", 16, progress=False, record=record) for record in (None, tmp_path / "records")
    )
    assert plain == recorded
    assert len(Records.open(tmp_path / "records")) == recorded.used == 48


def test_files_that_do_not_fit_are_refused_with_the_reason(tmp_path: Path, varied: Task) -> None:
    table = growth_table(head_preset("core"), varied.slot_config)

    def load(path: Path) -> object:
        return make_policy(PolicySpec.parse(f"told:{path}"), varied, table)

    lacking = write(tmp_path / "lacking.json", {"blind": Plan(), "none": Plan()})
    with pytest.raises(BadValueError, match="plans for blind, none but none for hosts of kind 'blind_first_slot_cut'"):
        load(lacking)
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(BadValueError, match="write an object of plans by kind of host: blind, none, "):
        load(tmp_path / "list.json")
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"format": 1, "kind": "schedule", "plan": {"seeds": []}}))
    with pytest.raises(BadValueError, match="holds a tuned schedule, not a told"):
        load(plan)


def test_a_bare_told_is_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, varied: Task) -> None:
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path)
    table = growth_table(head_preset("core"), varied.slot_config)
    with pytest.raises(BadValueError, match=f"no tuned told for task '{VARIED}' is shipped; .*--kind told"):
        make_policy(PolicySpec.parse("told"), varied, table)
    write(tmp_path / f"told-{VARIED}.json", PLANS)
    for name in ("told", "told:shipped"):
        policy = make_policy(PolicySpec.parse(name), varied, table)
        assert isinstance(policy, ToldPolicy)
        assert policy.plans == PLANS
