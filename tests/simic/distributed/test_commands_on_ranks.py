"""`esper evaluate`, `esper tune` and teaching on several ranks: what one process writes, to the last digit."""

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import Ended, run_ranks
from simic.training.tiny import QUICK, quick_config

from esper.cli import main
from esper.simic.evaluation import workers
from esper.simic.evaluation.results import Result
from esper.simic.evaluation.workers import Job, run_job
from esper.simic.offline.records import Records

FOUR = pytest.param(4, marks=pytest.mark.slow)


def read(path: Path) -> dict[str, Any]:
    """A JSON file without its provenance, which names the machine."""
    content: dict[str, Any] = json.loads(path.read_text())
    content.pop("provenance", None)
    return content


def recorded(folder: Path) -> list[tuple[int, str, bytes]]:
    """All episodes of a folder: host, policy, and what happened."""
    records = Records.open(folder)
    episodes = records.episodes()
    return sorted(
        (seed, records.policies[policy], row.numpy().tobytes())
        for seed, policy, row in zip(
            episodes.host_seed.tolist(), episodes.policy.tolist(), episodes.observations, strict=True
        )
    )


@pytest.mark.parametrize("ranks", [2, FOUR])
def test_an_evaluation_is_the_same(
    ranks: int, quick_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learned policy, a rule and a yardstick that starts from the results of another; records too.

    Each rank has a share of the policies' hosts and of the yardstick's."""
    quick_config()
    policies = f"{quick_run},wait,random-commit,static:random-commit"
    command = ["evaluate", "--task", QUICK, "--policies", policies, "--hosts", str(8 * ranks)]

    def evaluate(name: str) -> None:
        main([*command, "--json", str(tmp_path / f"{name}.json"), "--record", str(tmp_path / name)])

    def evaluate_and_count(rank: int) -> None:
        hosts: list[int] = []

        def counted(job: Job) -> list[Result]:
            hosts.append(len(job.hosts))
            return run_job(job)

        monkeypatch.setattr(workers, "run_job", counted)
        evaluate("several")
        assert hosts == [8, 8]

    evaluate("one")
    ended = run_ranks(evaluate_and_count, ranks, tmp_path)
    assert [rank.code for rank in ended] == [0] * ranks, ended
    assert read(tmp_path / "several.json") == read(tmp_path / "one.json")
    assert recorded(tmp_path / "several") == recorded(tmp_path / "one")
    assert "objective" in ended[0].output
    assert not any(rank.output for rank in ended[1:])


@pytest.mark.parametrize("policy", ["run", "schedule:plan.json", "nonsense"])
def test_a_rank_without_a_policy(policy: str, quick_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is in a folder that holds none of them. What rank 0 lacks too is an unknown policy."""
    quick_config()
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    (tmp_path / "first" / "run").symlink_to(quick_run)
    (tmp_path / "first" / "plan.json").write_text('{"seeds": []}')

    def evaluate(rank: int) -> None:
        monkeypatch.chdir(tmp_path / ("first", "second")[rank])
        main(["evaluate", "--task", QUICK, "--policies", f"wait,{policy}", "--hosts", "4"])

    first, second = run_ranks(evaluate, 2, tmp_path)
    assert (first.code, second) == (2, (2, "")), first.output
    if policy == "nonsense":
        assert first.output.startswith("esper: unknown policy 'nonsense'; ")
    else:
        file = policy.removeprefix("schedule:")
        assert first.output.startswith(f"esper: rank 1: {file} was not found, but each rank reads the policies; ")


@pytest.mark.parametrize("ranks", [2, FOUR])
@pytest.mark.parametrize("kind", ["schedule", pytest.param("heuristic", marks=pytest.mark.slow)])
def test_a_search_is_the_same(kind: str, ranks: int, tmp_path: Path) -> None:
    """The file, and the records of all episodes."""
    quick_config()
    command = ["tune", "--task", QUICK, "--kind", kind, "--episodes", "24"]

    def tune(name: str) -> None:
        main([*command, "--out", str(tmp_path / f"{name}.json"), "--record", str(tmp_path / name)])

    tune("one")
    ended = run_ranks(lambda rank: tune("several"), ranks, tmp_path)
    assert [rank.code for rank in ended] == [0] * ranks, ended
    assert read(tmp_path / "several.json") == read(tmp_path / "one.json")
    assert recorded(tmp_path / "several") == recorded(tmp_path / "one")
    assert not any(rank.output for rank in ended[1:])


def test_training_with_shares_by_rank(tmp_path: Path) -> None:
    """Rank 1 plays two of three groups. What is no list of numbers is refused by name."""
    quick_config()
    command = [
        "train",
        "--task",
        QUICK,
        "--hosts",
        "6",
        "--members",
        "1",
        "--rounds",
        "1",
        "--out",
        str(tmp_path / "run"),
    ]

    def train(shares: str) -> list[Ended]:
        return run_ranks(lambda rank: main([*command, "--hosts-by-rank", shares]), 2, tmp_path)

    refused = train("2,four")
    assert [rank.code for rank in refused] == [2, 2], refused
    assert "--hosts-by-rank '2,four': give whole numbers separated by commas" in refused[0].output
    ended = train("2,4")
    assert [rank.code for rank in ended] == [0, 0], ended
    assert f"1 of 1 rounds are in {tmp_path / 'run'}" in ended[0].output.replace("\n", "")
