"""Evaluation: columns, several tasks and seeds, kinds of hosts, signatures of final evaluations, workers."""

import json
import math
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from esper.cli import main
from esper.kasmina import CNNHost
from esper.leyline import BadValueError, EsperError, UnknownNameError, rent
from esper.simic.evaluation import workers
from esper.simic.evaluation.arena import AT_ONCE, Arena
from esper.simic.evaluation.comparison import EvaluationReport, by_kind, right_slot, run_comparisons
from esper.simic.evaluation.final_log import sign_final
from esper.simic.evaluation.policies import Contender, EvaluationConfig, PolicySpec
from esper.simic.evaluation.results import Fossil, Result
from esper.simic.evaluation.workers import call_in_worker, host_seeds, make_jobs, run_contenders, run_job
from esper.simic.training.config import TrainConfig
from esper.simic.training.trainer import Trainer
from esper.tamiyo.policies import Plan
from esper.tolaria import TaskRegistry, get_task

NAME, VARIED = "blind_smallest", "varied_smallest"


@pytest.fixture(autouse=True, scope="module")
def tasks() -> None:
    """Two tasks of eight short steps, just enough to commit a seed; one with hosts of several kinds."""
    for name, like in ((NAME, "digits_blind"), (VARIED, "digits_varied")):
        if name not in TaskRegistry.names():
            small = {"steps": 8, "batches_per_step": 1, "batch": 16, "calibration_size": 32, "validation_size": 60}
            TaskRegistry.register(replace(get_task(like), name=name, **small))  # type: ignore[arg-type]  # by name


@pytest.fixture(scope="module")
def trained(tasks: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs of one round, a and b."""
    folder = tmp_path_factory.mktemp("trained")
    for seed, name in enumerate("ab"):
        config = TrainConfig(task=NAME, rounds=1, hosts=2, members=1, seed=seed, preset="core")
        Trainer(config, folder / name).run(progress=False)
    return folder


@pytest.fixture
def runs(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Copies of them in the working directory, as one policy of two training seeds."""
    for name in "ab":
        shutil.copytree(trained / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return "a+b"


def compare(specs: list[str], task: str = NAME, hosts: int = 2, **changes: object) -> EvaluationReport:
    names = task.split(",")
    config = replace(EvaluationConfig(names[0], hosts, 7), **changes)  # type: ignore[arg-type]  # by name
    return run_comparisons(names, specs, config, progress=False)


def contender(config: EvaluationConfig, spec: str, *, greedy: bool = False, base: Result | None = None) -> Contender:
    return Contender(config, PolicySpec.parse(spec), greedy, base)


# -- columns ----------------------------------------------------------------------------------------------------------


def test_columns_of_one_policy() -> None:
    """The objective is gain minus rent, at ρ = 2, 1 and 4; the cost is the sum over passes; all is in the JSON."""
    task = get_task(NAME)
    found = compare(["random-commit", "wait"], hosts=5).tasks[NAME]
    (result,) = found.policies["random-commit"]
    assert any(result.added_params), "something was committed"
    for host in range(5):
        gain = result.accuracy[host] - result.control_accuracy[host]
        doublings = math.log2(1 + result.added_params[host] / task.host_parameters)
        scored = (result.objective[host], result.objective_at["1"][host], result.objective_at["4"][host])
        assert scored == pytest.approx((gain - 2 * doublings, gain - doublings, gain - 4 * doublings))
        assert result.cost[host] == pytest.approx(sum(part[host] for part in result.work.values()))
        assert bool(result.fossils[host]) == bool(result.added_params[host])
    content = json.loads(json.dumps(found.to_json(), allow_nan=False))
    figures = content["policies"]["random-commit"]
    assert (content["task"], content["hosts"], content["seed"], content["final"]) == (NAME, 5, 7, False)
    for name in ("objective", "accuracy", "control_accuracy", "added_params", "cost"):
        assert figures[name] == pytest.approx(getattr(result, name))
    assert sum(figures["cost_by_pass"].values()) == pytest.approx(sum(result.cost) / 5)
    (seed,) = figures["by_seed"]
    assert seed["commits"] == result.commits
    assert sum(figures["commits"].values()) == pytest.approx(sum(map(len, result.commits)) / 5)
    assert content["policies"]["wait"]["objective"] == [0.0] * 5
    assert content["policies"]["wait"]["cost_by_pass"]["training"] == pytest.approx(1.0)


def test_several_training_seeds_are_merged(runs: str) -> None:
    """Each seed under `by_seed`, means over seeds above it: also of the control, also of commits."""
    found = compare([runs, "wait"], hosts=3).tasks[NAME]
    left = Result([1.0, 2.0], [50.0, 51.0], [49.0, 48.0], [0, 64], [[], [Fossil("r1c0", "depthwise")]], {}, {})
    right = replace(left, objective=[3.0, 4.0], control_accuracy=[47.0, 48.0], fossils=[[], []])
    figures = replace(found, policies={"a+b": [left, right]}).to_json()["policies"]["a+b"]
    assert figures["objective"] == [2.0, 3.0]
    assert figures["control_accuracy"] == [48.0, 48.0]
    assert figures["commits"] == {"r1c0/depthwise": 0.25}
    assert [seed["commits"] for seed in figures["by_seed"]] == [[[], ["r1c0/depthwise"]], [[], []]]
    assert [seed["control_accuracy"] for seed in figures["by_seed"]] == [[49.0, 48.0], [47.0, 48.0]]
    assert len(found.policies[runs]) == 2
    (one,) = found.claims
    assert (one.policy, one.against, one.difference.seeds, one.enough_seeds) == (runs, "wait", 2, False)


def test_greedy_is_a_column_of_its_own(runs: str) -> None:
    """One more pass for learned policies alone; the figures of record are those of sampled actions, as without it."""
    config = EvaluationConfig(NAME, 3, 7)
    without = run_comparisons([NAME], ["a", "wait"], config, progress=False).tasks[NAME]
    found = run_comparisons([NAME], ["a", "wait"], config, greedy=True, progress=False).tasks[NAME]
    assert found.policies == without.policies
    assert list(found.greedy) == ["a"]
    assert not without.greedy
    assert found.greedy["a"] != found.policies["a"]
    content = found.to_json()["policies"]
    assert content["a"]["greedy"]["objective"] == found.greedy["a"][0].objective
    assert content["wait"]["greedy"] is None


# -- controls, oracle -------------------------------------------------------------------------------------------------


def test_controls_follow_the_policy_they_name(runs: str) -> None:
    """One result per training seed; against the same controls; paired with it seed by seed."""
    found = compare([runs, "random-commit", f"retrained:{runs}", "static:random-commit"]).tasks[NAME]
    grown, again = found.policies[runs], found.policies[f"retrained:{runs}"]
    assert [result.fossils for result in again] == [result.fossils for result in grown]
    assert [result.control_accuracy for result in again] == [result.control_accuracy for result in grown]
    assert len(found.policies["static:random-commit"]) == 1
    assert [claim.against for claim in found.claims] == [
        "random-commit", f"retrained:{runs}", "static:random-commit",
    ]  # fmt: skip


def test_the_oracle_is_what_others_are_a_share_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hosts are those of the evaluation; its numbers go through unchanged."""
    asked = []

    def oracle(arena: object, seeds: list[int]) -> tuple[Result, list[Plan]]:
        asked.append(list(seeds))
        fossils = [[Fossil("r1c0", "depthwise")], []]
        return Result.scored(get_task(NAME), seeds, [44.0, 40.0], [40.0, 40.0], [390, 0], fossils), [Plan(), Plan()]

    monkeypatch.setattr(workers, "run_oracle", oracle)
    found = compare(["random-commit", "oracle"]).tasks[NAME]
    assert asked == [host_seeds(EvaluationConfig(NAME, 2, 7))]
    (result,) = found.policies["oracle"]
    assert result.objective == pytest.approx([4.0 - 2.0, 0.0]), "390 parameters double the host"
    assert result.commits == [["r1c0/depthwise"], []]
    mean = sum(found.policies["random-commit"][0].objective) / 2
    assert found.share_of_oracle("random-commit") == pytest.approx(mean / 1.0)
    content = found.to_json()["policies"]
    assert content["oracle"]["share_of_oracle"] == 1.0
    assert content["oracle"]["cost"] == []
    assert replace(found, policies={"wait": [result]}).share_of_oracle("wait") is None, "without an oracle"


# -- several tasks ----------------------------------------------------------------------------------------------------


def test_several_tasks_and_their_mean() -> None:
    """A comparison each, as if alone; per training seed the mean over tasks of the mean over hosts."""
    found = compare(["random-commit", "wait"], f"{NAME},{VARIED}", hosts=3)
    assert found.tasks[VARIED].policies == compare(["random-commit", "wait"], VARIED, hosts=3).tasks[VARIED].policies
    objectives = [found.tasks[task].policies["random-commit"][0].objective for task in (NAME, VARIED)]
    mean = sum(sum(row) / 3 for row in objectives) / 2
    assert found.objectives()["random-commit"] == pytest.approx([mean])
    assert found.claims[0].difference.mean == pytest.approx(mean)
    content = found.to_json()
    assert list(content["tasks"]) == [NAME, VARIED]
    assert content["mean"]["policies"]["random-commit"]["by_seed"] == pytest.approx([mean])
    assert content["mean"]["differences"][0]["difference"]["mean"] == pytest.approx(mean)


# -- kinds of hosts ---------------------------------------------------------------------------------------------------


def test_the_kind_of_a_host_is_what_is_wrong_with_it() -> None:
    """As `make_host` builds it: kernels that see shapes or not, a first slot that conducts or not."""
    task = get_task("digits_varied")
    seen = set()
    for seed in host_seeds(EvaluationConfig("digits_varied", 24, 7)):
        host = task.make_host(seed)
        assert isinstance(host, CNNHost)
        mask = host.segments[0].conv.mask  # type: ignore[union-attr]  # a convolution
        assert isinstance(mask, torch.Tensor)
        conducts = float(host.conductance[host.slot_index("r1c0")])
        kind = "none" if mask.sum() > 1 else "blind" if conducts else "blind_first_slot_cut"
        assert task.defect_of(seed) == kind
        seen.add(kind)
    assert seen == set(task.defects)


def test_the_right_slot_is_where_gains_were_measured() -> None:
    """By the published figures: the first on blind hosts, the second where that is cut, none where nothing helps."""
    task = get_task("digits_varied")
    assert [right_slot(task, kind) for kind in task.defects] == ["r1c0", None, "r1c1"]
    assert right_slot(replace(task, budget=100), "blind_first_slot_cut") is None, "the good seed has 160 parameters"
    assert right_slot(get_task(NAME), "none") is None, "nothing was measured"


def test_figures_by_kind() -> None:
    """By hand: two seeds on one blind host each; a sound one that grew 10 % and got nothing for it."""
    task = get_task("digits_varied")
    seeds = host_seeds(EvaluationConfig("digits_varied", 24, 7))
    blind = next(seed for seed in seeds if task.defect_of(seed) == "blind")
    sound = next(seed for seed in seeds if task.defect_of(seed) == "none")
    first, second = Fossil("r1c0", "depthwise"), Fossil("r1c1", "depthwise")
    tenth = task.host_parameters // 10
    small, large = (rent(float(added), task.host_parameters) for added in (64, tenth))
    one = Result([31 - small, -large], [70.0, 98.0], [39.0, 98.0], [64, tenth], [[first, second], [second]])
    two = Result([29 - small, 1.0], [68.0, 99.0], [39.0, 98.0], [64, 0], [[first], []])
    found = by_kind(task, [blind, sound], [one, two])
    assert list(found) == ["blind", "none"], "in the order of the task, and only kinds that are there"
    assert found["blind"].hosts == 1
    assert found["blind"].objective == pytest.approx(30 - small)
    assert found["blind"].gain == pytest.approx(30.0), "(31 + 29) / 2, before rent"
    assert found["blind"].slots == pytest.approx({"r1c0": 2 / 3, "r1c1": 1 / 3, "r1c2": 0.0})
    assert found["blind"].commits == 1.5
    assert found["blind"].right_slot == "r1c0"
    assert found["blind"].right_slot_share == pytest.approx(2 / 3)
    assert found["none"].added_share == pytest.approx(0.05, rel=0.02)
    assert found["none"].gain == pytest.approx(0.5)
    assert (found["none"].right_slot, found["none"].right_slot_share) == (None, None)
    (nothing,) = by_kind(task, [blind], [Result([0.0], [39.0], [39.0], [0], [[]])]).values()
    assert (nothing.slots, nothing.right_slot_share) == ({}, None)


# -- final evaluations ------------------------------------------------------------------------------------------------


def signatures(run: str) -> list[dict[str, object]]:
    path = Path(run) / "final.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_final_evaluation_is_signed_and_a_second_one_warned_of(runs: str) -> None:
    """Into every run that takes part; other evaluations sign nothing."""
    compare(["a"])
    assert signatures("a") == signatures("b") == []
    first = compare([runs, "wait"], final=True)
    assert first.warnings == []
    (entry,) = signatures("a")
    assert (entry["task"], entry["hosts"], entry["seed"], entry["policies"]) == (NAME, 2, 7, [runs, "wait"])
    assert "git" in entry
    second = compare(["b"], final=True)
    (warning,) = second.warnings
    assert "b has been in a final evaluation once" in warning
    assert str(entry["when"]) in warning
    assert second.tasks[NAME].to_json()["warnings"] == [warning]
    assert (len(signatures("a")), len(signatures("b"))) == (1, 2)
    assert second.tasks[NAME].policies["b"][0] == first.tasks[NAME].policies[runs][1]


def test_signed_before_anything_runs(runs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a fleet exists; and a folder that cannot be signed stops all, signing none."""

    def stop(*_: object, **__: object) -> None:
        raise EsperError("test images are about to be read")

    monkeypatch.setattr(Arena, "__init__", stop)
    with pytest.raises(EsperError, match="about to be read"):
        compare([runs], final=True)
    assert len(signatures("a")) == 1
    (Path("b") / "final.jsonl").unlink()
    (Path("b") / "final.jsonl").mkdir()
    with pytest.raises(BadValueError, match=r"b/final\.jsonl"):
        compare([runs], final=True)
    assert len(signatures("a")) == 1
    with pytest.raises(UnknownNameError, match="nonsense"):
        compare(["a", "nonsense"], final=True)
    assert len(signatures("a")) == 1, "a mistake is no look at the test images"


def test_the_count_of_signatures_is_told(tmp_path: Path) -> None:
    entry = {"when": "then", "task": "t", "hosts": 2, "seed": 1}
    assert sign_final([tmp_path], entry) == []
    assert "once at then (t, 2 hosts, seed 1)" in sign_final([tmp_path], {**entry, "when": "later"})[0]
    assert "2 times, first at then" in sign_final([tmp_path], entry)[0]


# -- workers ----------------------------------------------------------------------------------------------------------


def test_a_job_travels(runs: str) -> None:
    """To another process and back: plain values, and the same result there as here."""
    config = EvaluationConfig(NAME, 2, 7)
    contenders = [contender(config, "a"), contender(config, "random-commit")]
    sent = [pickle.loads(pickle.dumps(job)) for job in make_jobs(dict(enumerate(contenders)))]
    (there,) = [pickle.loads(pickle.dumps(call_in_worker(run_job, job))) for job in sent]
    assert there == run_contenders(contenders)
    (job,) = make_jobs({0: contender(config, "nonsense")})
    with pytest.raises(BadValueError, match="unknown policy 'nonsense'"):
        call_in_worker(run_job, job)


def test_policies_side_by_side_find_what_each_finds_alone(runs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, cost and fossils included: what a policy sees, remembers and draws is its own envs' alone."""
    config = EvaluationConfig(NAME, 3, 7)
    contenders = [contender(config, spec) for spec in ("random-commit", "a", "heuristic", "b")]
    contenders.append(contender(config, "a", greedy=True))
    together = run_contenders(contenders)
    alone = [run_contenders([one])[0] for one in contenders]
    monkeypatch.setattr(workers, "MOST_POLICIES", 2)
    monkeypatch.setitem(AT_ONCE, "cpu", 6)
    in_parts = run_contenders(contenders)
    assert together == alone == in_parts == run_contenders(contenders, workers=3)
    assert len({tuple(result.cost) for result in alone}) > 3, "they do different things"


def test_jobs_cover_every_contender_on_every_host_once() -> None:
    """Policies share jobs, fifteen at most, so that a fleet holds several hosts; the oracle has few hosts per job."""
    configs = [EvaluationConfig(name, 40, 7) for name in (NAME, VARIED)]
    base = Result([0.0], [0.0], [0.0], [0], [[]])
    contenders = [contender(config, f"r{number}") for config in configs for number in range(17)]
    contenders += [contender(configs[0], "oracle"), contender(configs[1], "static:r0", base=base)]
    made = make_jobs(dict(enumerate(contenders)))
    covered = [(index, host) for job in made for index in job.indices for host in job.hosts]
    assert sorted(covered) == [(index, host) for index in range(len(contenders)) for host in range(40)]
    for job in made:
        assert job.contenders == tuple(contenders[index] for index in job.indices)
        assert len({one.config for one in job.contenders}) == 1
        assert len(job.hosts) * (len(job.indices) + 1) <= 64 or len(job.indices) == 1
        assert all(one.acts for one in job.contenders) or len(job.contenders) == 1
    assert {len(job.indices) for job in made} == {9, 8, 1}
    assert [len(job.hosts) for job in made if job.contenders[0].spec.kind == "oracle"] == [14, 14, 12]


@pytest.mark.parametrize(
    ("specs", "hosts", "processes", "expected"),
    [
        ("wait,random,heuristic", 64, 1, [16] * 4),  # 16 hosts of 4 envs fill a fleet of 64
        ("wait,random,heuristic", 64, 3, [11] * 5 + [9]),
        ("wait,random,heuristic", 64, 8, [8] * 8),
        ("wait,random,heuristic", 64, 1000, [2] * 32),  # of at least 8 envs
        ("wait,random,heuristic", 3, 8, [3]),
        ("wait", 2, 2, [2]),
        ("oracle", 40, 1, [14, 14, 12]),
        ("oracle", 40, 8, [5] * 8),
        ("oracle", 4, 8, [1] * 4),  # each has an env per plan
    ],
)
def test_all_processes_have_work(specs: str, hosts: int, processes: int, expected: list[int]) -> None:
    """Hosts per job, by hand. One process has as few jobs as possible."""
    config = EvaluationConfig("digits_blind", hosts, 7)
    contenders = [contender(config, spec) for spec in specs.split(",")]
    made = make_jobs(dict(enumerate(contenders)), processes)
    assert [len(job.hosts) for job in made] == expected
    assert {job.places for job in made} == {expected[0]}


@pytest.mark.slow
def test_workers_find_what_one_process_finds(tmp_path: Path) -> None:
    """Real processes, on a real task: they know no other."""
    files = [tmp_path / f"{number}.json" for number in (1, 2)]
    for number, file in enumerate(files, 1):
        policies = "random-commit,wait,static:random-commit"
        main(["evaluate", "--task", "digits_blind", "--policies", policies, "--hosts", "2", "--workers", str(number),
              "--json", str(file)])  # fmt: skip
    one, two = (json.loads(file.read_text()) for file in files)
    assert one["policies"] == two["policies"]
    assert one["differences"] == two["differences"]


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_tables_json_and_picture(
    runs: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tasks, one with kinds of hosts; every column; what it was made with."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    policies = "a,random-commit,wait,retrained:random-commit"
    main(["evaluate", "--task", f"{NAME},{VARIED}", "--policies", policies, "--hosts", "2", "--greedy",
          "--json", "all.json", "--picture", "all.svg"])  # fmt: skip
    printed = capsys.readouterr().out
    for words in (f"{NAME}, 2 hosts, validation images", f"{VARIED} by kind of host", "Mean over tasks", "at ρ=4",
                  "greedy", "cost", "a − retrained:random-commit: ", "bootstrap", "a report, not a claim"):  # fmt: skip
        assert words in printed
    assert "superior" not in printed
    assert "not worse by" not in printed
    content = json.loads(Path("all.json").read_text())
    made = content["provenance"]
    assert made["torch"] == torch.__version__
    assert made["command"].startswith(f"esper evaluate --task {NAME},{VARIED} --policies {policies} --hosts 2")
    assert "--greedy" in made["command"]
    assert "--json" not in made["command"], "where it lies is nobody's business"
    assert made["machine"]["cores"] >= 1
    kinds = content["tasks"][VARIED]["policies"]["random-commit"]["by_kind"]
    assert sum(kind["hosts"] for kind in kinds.values()) == 2
    assert content["tasks"][NAME]["policies"]["random-commit"]["by_kind"] == {}
    picture = Path("all.svg").read_text()
    assert picture.count("added parameters") == 2
    assert "retrained:random-commit" in picture


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", f"{NAME},nonsense"], "unknown task 'nonsense'"),
        (["--task", f"{NAME},{NAME}"], "must be different ones"),
        (["--policies", "wait,nonsense"], "unknown policy 'nonsense'"),
        (["--policies", "wait,wait"], "policy 'wait' is listed twice"),
        (["--policies", ""], "policy '' has an empty name; allowed: wait"),
        (["--policies", "wait,"], "policy '' has an empty name"),
        (["--policies", "+,wait"], "policy '+' has an empty name"),
        (["--policies", "wait:late"], "wait takes no file; omit ':late'"),
        (["--policies", "wait,static:random"], "'random' must be another policy of the list"),
        (["--policies", "wait,static:wait,static:static:wait"], "no control"),
        (["--policies", "oracle,static:oracle"], "not the oracle"),
        (["--policies", "oracle", "--isolation", "straight_through"], "learn from shadow rows"),
        (["--preset", "half"], "'half'"),
        (["--hosts", "1"], "one host has no interval"),
        (["--margin", "0"], "margin 0.0 is not a finite number above 0"),
        (["--workers", "0"], "workers"),
        (["--picture", "all.jpg"], "must end in .png or .svg"),
        (["--picture", "nowhere/all.svg"], "there is no folder nowhere"),
        (["--json", "."], ". cannot be written: it is no file"),
        (["--json", f"{'long' * 70}.json"], "cannot be written: File name too long"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    defaults = [] if "--task" in arguments else ["--task", NAME]
    with pytest.raises(SystemExit) as stopped:
        main(["evaluate", *defaults, *arguments])
    printed = capsys.readouterr()
    assert stopped.value.code == 2
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""
    assert list(tmp_path.iterdir()) == []
