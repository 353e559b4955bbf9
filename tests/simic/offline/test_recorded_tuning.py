"""`esper tune --record`: every candidate on every host, once, and the table of a search."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from simic.offline.made_up import HEADER, episodes
from simic.training.tiny import NAME, tiny_task

from esper.cli import main
from esper.leyline import BadValueError
from esper.leyline.progress import ignore
from esper.leyline.records import encode
from esper.simic.evaluation.arena import AT_ONCE
from esper.simic.evaluation.workers import run_here
from esper.simic.evaluation.yardsticks import extensions
from esper.simic.offline.plan_table import plan_table
from esper.simic.offline.records import Records, RecordWriter
from esper.simic.training.hosts import host_seed
from esper.simic.tuning import Trials, tune
from esper.tamiyo.policies import HeuristicConfig, Plan


def some_plans(count: int) -> list[Plan]:
    """Plans of one depthwise seed."""
    return [plan for plan in extensions(Plan(), tiny_task()) if plan.seeds[0].blueprint == "depthwise"][:count]


@pytest.mark.parametrize("workers", [1, 4])
def test_every_pair_once(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fleets that are partly filled up, and in shares of four workers: the table is what the trials returned."""
    monkeypatch.setitem(AT_ONCE, "cpu", 8)
    plans, hosts = some_plans(3), [4, 5, 9, 11, 12]
    trials = replace(Trials(NAME, "schedule", "core", 1), record=tmp_path)
    objectives = trials(run_here, workers, ignore, [plans] * 5, hosts)
    records = Records.open(tmp_path)
    assert len(records) == 15
    assert {json.loads(name)["seeds"][0]["slot"] for name in records.policies} == {plan.seeds[0].slot for plan in plans}
    table = plan_table(records)
    assert sorted(table.host_seeds) == sorted(host_seed("tuning", 1, host) for host in hosts)
    assert len(table.plans) == 3
    for plan, row in zip(plans, zip(*objectives, strict=True), strict=True):
        found = table.objectives[table.plans.index(plan)]
        for host, value in zip(hosts, row, strict=True):
            column = table.host_seeds.index(host_seed("tuning", 1, host))
            assert float(found[column]) == pytest.approx(value, abs=1e-4)
    assert len({round(value, 3) for row in objectives for value in row}) > 3


def test_hosts_with_plans_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other plans on every host, in shares of four workers: each plan does there what it does among all of them."""
    monkeypatch.setitem(AT_ONCE, "cpu", 8)
    plans, hosts = some_plans(3), [4, 5, 9]
    whole = Trials(NAME, "schedule", "core", 1)(run_here, 1, ignore, [plans] * 3, hosts)
    places = [(0, 1), (1, 2), (2, 0)]
    lineups = [[plans[place] for place in pair] for pair in places]
    objectives = Trials(NAME, "schedule", "core", 1, record=tmp_path)(run_here, 4, ignore, lineups, hosts)
    for pair, all_plans, own in zip(places, whole, objectives, strict=True):
        assert own == pytest.approx([all_plans[place] for place in pair], abs=1e-5)
    table = plan_table(Records.open(tmp_path))
    for host, lineup, own in zip(hosts, lineups, objectives, strict=True):
        column = table.objectives[:, table.host_seeds.index(host_seed("tuning", 1, host))]
        assert [float(column[table.plans.index(plan)]) for plan in lineup] == pytest.approx(own, abs=1e-4)
        assert int(column.isfinite().sum()) == 2


def test_what_is_recorded_is_not_played_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process reads the same objectives, to the bit, and plays the blocks alone whose episodes are missing."""
    monkeypatch.setitem(AT_ONCE, "cpu", 8)
    plans, hosts = some_plans(3), [4, 5, 9]
    trials = replace(Trials(NAME, "schedule", "core", 1), record=tmp_path)
    objectives = trials(run_here, 1, ignore, [plans] * 3, hosts)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(files) == 2, "two hosts with their controls fit into a fleet of eight"
    missing = min(files)
    missing.unlink()
    assert trials(run_here, 1, ignore, [plans] * 3, hosts) == objectives
    assert {path for path in tmp_path.iterdir() if path.stat().st_mtime_ns != files[path]} == {missing}
    monkeypatch.setattr("esper.simic.evaluation.arena.play_episode", lambda *_: pytest.fail("it is recorded"))
    assert trials(run_here, 1, ignore, [plans] * 3, hosts) == objectives


@pytest.mark.slow
def test_the_table_of_a_search(tmp_path: Path) -> None:
    """Means of its rows are those of the log; recording changed nothing of the search."""
    tiny_task()
    plain, recorded = (
        tune(NAME, "schedule", 24, 3, progress=False, record=record) for record in (None, tmp_path / "records")
    )
    assert plain == recorded
    records = Records.open(tmp_path / "records")
    assert len(records) == recorded.used
    table = plan_table(records)
    names = [encode(plan) for plan in table.plans]
    for trial in recorded.log:
        seeds = [host_seed("tuning", 3, host) for host in trial.hosts]
        row = table.objectives[names.index(trial.candidate)]
        values = [float(row[table.host_seeds.index(seed)]) for seed in seeds]
        assert sum(values) / len(values) == pytest.approx(trial.objective, abs=1e-4)
    assert int(table.objectives.isfinite().sum()) == recorded.used, "what was not tried is NaN"
    assert int(table.objectives.isnan().sum()) > 0


def test_a_table_by_hand(tmp_path: Path) -> None:
    """Two plans on two hosts, one pair missing: final gain less ρ · log2(1 + fossils / host)."""
    plans = [*some_plans(1), Plan()]
    header = replace(HEADER, policies=tuple(json.dumps(encode(plan)) for plan in plans))
    made = episodes(3, header)
    made = made._replace(
        policy=made.policy.new_tensor([0, 1, 0]),
        host_seed=made.host_seed.new_tensor([7, 7, 5]),
        host_parameters=made.gain.new_tensor([390.0, 390.0, 390.0]),
        final_gain=made.final_gain.new_tensor([10.0, 1.0, 4.0]),
        fossil_parameters=made.gain.new_tensor([[0.0] * 3 + [390.0], [0.0] * 4, [0.0] * 3 + [3 * 390.0]]),
    )
    with RecordWriter(tmp_path, header) as writer:
        writer.append(made)
    plans_found, hosts, objectives = plan_table(Records.open(tmp_path), rho=3.0)
    assert hosts == [5, 7]
    assert sorted(plans_found, key=len_of) == sorted(plans, key=len_of)
    grown, wait = objectives[plans_found.index(plans[0])].tolist(), objectives[plans_found.index(Plan())].tolist()
    assert grown == [4.0 - 6.0, 10.0 - 3.0]
    assert math.isnan(wait[0])
    assert wait[1] == 1.0


def len_of(plan: Plan) -> int:
    return len(plan.seeds)


def test_what_is_no_plan(tmp_path: Path) -> None:
    """A search of thresholds is recorded too, but it has no plans."""
    tiny_task()
    trials = replace(Trials(NAME, "heuristic", "core", 1), record=tmp_path)
    trials(run_here, 1, ignore, [[HeuristicConfig()]], [0])
    records = Records.open(tmp_path)
    assert json.loads(records.policies[0]) == encode(HeuristicConfig())
    with pytest.raises(BadValueError, match=r"policy '\{.*patience.*is no plan .*open records of `esper tune`"):
        plan_table(records)


def test_a_folder_with_records_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the search."""
    with RecordWriter(tmp_path / "records", HEADER) as writer:
        writer.append(episodes(1))
    command = ["tune", "--task", NAME, "--episodes", "16", "--out", str(tmp_path / "plan.json")]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--record", str(tmp_path / "records")])
    assert ended.value.code == 2
    assert "already holds records; choose another folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["records"]
