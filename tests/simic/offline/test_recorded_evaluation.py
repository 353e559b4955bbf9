"""`esper evaluate --record`: every policy on every host, once, also if it was interrupted."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from simic.training.tiny import QUICK, make_runner, quick_config

from esper.cli import main
from esper.leyline import BadValueError
from esper.simic.agent import PPOAgent
from esper.simic.agent.policy import LearnedPolicy
from esper.simic.evaluation import workers
from esper.simic.evaluation.arena import AT_ONCE, PolicyPlayer, SideBySide
from esper.simic.evaluation.comparison import EvaluationReport, run_comparisons
from esper.simic.evaluation.policies import EvaluationConfig
from esper.simic.evaluation.results import Result
from esper.simic.evaluation.workers import Job, host_seeds, run_job
from esper.simic.offline.records import Records
from esper.simic.offline.shards import record_files
from esper.simic.training.collect import action_draws
from esper.simic.training.config import growth_ppo
from esper.simic.training.episode import play_episode
from esper.simic.training.hosts import host_seed
from esper.simic.training.tape import EpisodeTape
from esper.tamiyo.policies import RandomPolicy

POLICIES = ["random", "random-commit", "wait"]


@pytest.fixture(autouse=True)
def small_fleets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts of three policies at a time: the third job of five hosts is filled up."""
    monkeypatch.setitem(AT_ONCE, "cpu", 8)


def config(*, final: bool = False) -> EvaluationConfig:
    """Five hosts of the quick task."""
    quick_config()
    return EvaluationConfig(QUICK, 5, 7, final=final)


def compare(folder: Path | None = None, policies: list[str] | None = None, **settings: object) -> EvaluationReport:
    return run_comparisons([QUICK], policies or POLICIES, config(), progress=False, record=folder, **settings)  # type: ignore[arg-type]  # by name


def pairs(records: Records) -> list[tuple[str, int]]:
    """Policy and host of every episode."""
    episodes, seeds = records.episodes(), host_seeds(config())
    numbers = zip(episodes.policy.tolist(), episodes.host_seed.tolist(), strict=True)
    return sorted((records.policies[policy], seeds.index(seed)) for policy, seed in numbers)


ALL = sorted((name, host) for name in POLICIES for host in range(5))


def test_recording_changes_nothing(tmp_path: Path) -> None:
    """Results are equal to the bit, objectives of the records are those of the results; yardsticks have no records."""
    policies = [*POLICIES, "retrained:random-commit"]
    plain, recorded = compare(None, policies), compare(tmp_path / "records", policies)
    assert plain.to_json() == recorded.to_json()
    records = Records.open(tmp_path / "records")
    assert pairs(records) == ALL, "neither controls nor what was filled up"
    episodes, seeds = records.episodes(), host_seeds(config())
    values = episodes.objective(2.0).tolist()
    found = {
        (records.policies[policy], seeds.index(seed)): value
        for policy, seed, value in zip(episodes.policy.tolist(), episodes.host_seed.tolist(), values, strict=True)
    }
    for name in POLICIES:
        (result,) = recorded.tasks[QUICK].policies[name]
        assert [found[name, host] for host in range(5)] == pytest.approx(result.objective, abs=1e-4)
    assert len(set(found.values())) > 5
    assert not episodes.log_probs.any(), "rules have none"
    assert set(episodes.round.tolist()) == {-1}
    assert not episodes.epsilon.any()


class StoppedError(Exception):
    """Stands for a kill."""


def stop_after(jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill an evaluation when some jobs were played, before the last result is kept."""
    done: list[Job] = []

    def run(job: Job) -> list[Result]:
        results = run_job(job)
        done.append(job)
        if len(done) == jobs:
            raise StoppedError
        return results

    monkeypatch.setattr(workers, "run_job", run)


def test_an_interrupted_evaluation_records_everything_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second job was recorded and its result not kept: it is played again, the first is not."""
    keep, folder = tmp_path / "keep", tmp_path / "records"
    with monkeypatch.context() as patched, pytest.raises(StoppedError):
        stop_after(2, patched)
        compare(folder, keep=keep)
    assert pairs(Records.open(folder)) == [pair for pair in ALL if pair[1] < 4]
    before = {path: path.stat().st_mtime_ns for path in record_files(folder)}
    whole = compare(folder, keep=keep)
    assert whole.to_json() == compare().to_json()
    assert pairs(Records.open(folder)) == ALL
    untouched = [path for path in before if path.stat().st_mtime_ns == before[path]]
    assert len(untouched) == 3, "a file per policy of the first job"


def test_kept_results_without_records_are_played_again(tmp_path: Path) -> None:
    """Otherwise their episodes would be missing."""
    compare(keep=tmp_path / "keep")
    compare(tmp_path / "records", keep=tmp_path / "keep")
    assert pairs(Records.open(tmp_path / "records")) == ALL


def test_what_cannot_be_recorded(tmp_path: Path) -> None:
    """Into records of another evaluation; in blocks of hosts that overlap; on test images."""
    folder, keep = tmp_path / "records", tmp_path / "keep"
    compare(folder, ["random"], keep=keep)
    with pytest.raises(BadValueError, match=r"--record .*records already holds records; choose another folder"):
        compare(folder)
    shutil.rmtree(keep)
    with pytest.raises(BadValueError, match=r"has hosts 0 to 2 of a policy in one file, this evaluation 0 to 1; list"):
        compare(folder, keep=keep)
    with pytest.raises(BadValueError, match=r"--final scores on test images, .*; omit --record"):
        run_comparisons([QUICK], ["wait"], config(final=True), progress=False, record=tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("greedy", [False, True])
def test_log_probs_of_learned_policies(greedy: bool) -> None:
    """Beside a rule, they are those that the policy gives the actions, replayed from what was recorded; a greedy policy
    leaves nothing to chance, so its are 0."""
    runner = make_runner(2, 2)
    agent = PPOAgent(runner.table, runner.layout, replace(growth_ppo(), steps=12), rng_seed=3)
    policy = SideBySide([LearnedPolicy(agent, runner.slots, greedy=greedy), RandomPolicy(runner.table)])
    tape, seeds = EpisodeTape(runner), [host_seed("evaluation", 7, host) for host in range(2)]
    draws = action_draws(7, "evaluation", [(0, env) for env in range(4)], 12, len(runner.table))
    player = PolicyPlayer(runner, policy, seeds, draws, tape=tape)
    play_episode(runner, player.act, player.on_step)
    learned, rule = (tape.episodes(rows, [0, 0], seeds) for rows in ([0, 2], [1, 3]))
    assert not rule.log_probs.any()
    if greedy:
        assert not learned.log_probs.any()
        return
    network, hidden_state = agent.network, agent.network.initial_state(2)
    for step in range(12):
        encoded = network.encode(agent.normalise(learned.observations[:, step]))
        core, hidden_state = network.step(encoded.trunk, hidden_state)
        masks = {name: mask[:, step] for name, mask in learned.masks.items()}
        with torch.no_grad():
            decision = network.decide(core, encoded, masks, 0.0, actions=learned.actions[:, step])
        torch.testing.assert_close(learned.log_probs[:, step], decision.log_probs, rtol=1e-4, atol=1e-5)
    assert float(learned.log_probs.min()) < -0.1


def test_the_command(quick_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learned policy, sampled and greedy, under the names of the command; the JSON does not tell of the folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(quick_run, "a")
    command = ["evaluate", "--task", QUICK, "--policies", "a,wait", "--hosts", "2", "--greedy", "--json", "all.json"]
    main([*command, "--record", "records"])
    records = Records.open("records")
    assert set(records.policies) == {"a", "a (greedy)", "wait"}
    assert len(records) == 6
    assert "record" not in json.loads(Path("all.json").read_text())["provenance"]["command"]


@pytest.mark.slow
def test_workers_share_a_folder(tmp_path: Path) -> None:
    """Two processes write the files that one would have written."""
    four = EvaluationConfig("digits_blind", 4, 7)
    for workers_used in (1, 2):
        folder = tmp_path / str(workers_used)
        run_comparisons(
            ["digits_blind"], ["random-commit", "wait"], four, workers=workers_used, progress=False, record=folder
        )
    names = [[path.name for path in record_files(tmp_path / folder)] for folder in "12"]
    assert names[0] == names[1]
    one, two = (Records.open(tmp_path / folder).episodes() for folder in "12")
    assert torch.equal(one.host_seed, two.host_seed)
    assert torch.equal(one.actions, two.actions)
