"""`esper offline`: records of policies, and policy files from them that evaluate like any other."""

import shutil
from pathlib import Path

import pytest
import torch
from simic.offline.made_up import HEADER, episodes, header
from simic.training.tiny import QUICK, purpose_of, quick_config

from esper.cli import main
from esper.simic.agent.policy import read_policy
from esper.simic.evaluation.arena import AT_ONCE
from esper.simic.offline.episodes import RecordHeader
from esper.simic.offline.records import Records, RecordWriter
from esper.simic.offline.selection import select_transitions, softmax_by_group
from esper.simic.offline.shards import record_files
from esper.simic.rewards import RewardConfig


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in an empty folder, and no line is wrapped."""
    quick_config()
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)


def record(out: str = "records", *more: str) -> None:
    main(["offline", "record", "--task", QUICK, "--out", out, "--episodes", "3", *more])


def failure(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that fails."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_record(capsys: pytest.CaptureFixture[str]) -> None:
    """Every policy once on every host, all of them of the range for records; again the same, another seed others."""
    record()
    assert "3 episodes each of random, heuristic are in records" in capsys.readouterr().out
    records = Records.open("records")
    played = records.episodes()
    names = [records.policies[number] for number in played.policy.tolist()]
    hosts = played.host_seed.tolist()
    assert sorted(zip(names, hosts, strict=True)) == sorted((n, h) for n in ("random", "heuristic") for h in set(hosts))
    assert len(set(hosts)) == 3
    assert {purpose_of(host) for host in hosts} == {"recording"}
    assert records.header.preset == "core"
    record("again")
    record("other", "--seed", "1", "--policies", "random-commit", "--preset", "commit")
    same, other = Records.open("again"), Records.open("other")
    assert torch.equal(same.episodes().actions, played.actions)
    assert not set(other.episodes().host_seed.tolist()) & set(hosts)
    assert (other.policies, other.header.preset) == (("random-commit",), "commit")


def test_record_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """More hosts than a fleet holds are played in parts, and the last part is filled up. Records are the same."""
    record("whole", "--policies", "random")
    monkeypatch.setitem(AT_ONCE, "cpu", 4)
    record("parts", "--policies", "random")
    assert len(record_files(Path("parts"))) == 2
    whole, parts = (Records.open(name).episodes() for name in ("whole", "parts"))
    assert torch.equal(whole.host_seed, parts.host_seed)
    assert torch.equal(whole.actions, parts.actions)


def test_what_cannot_be_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    """Into a folder that holds something, yardsticks, unknown policies and tasks; flags that do not exist."""
    Path("full").mkdir()
    Path("full/notes.txt").write_text("mine")
    command = ["offline", "record", "--task", QUICK, "--episodes", "2", "--out"]
    assert "full is not an empty folder; choose another" in failure([*command, "full"], capsys)
    assert "'oracle' is a yardstick" in failure([*command, "a", "--policies", "oracle"], capsys)
    assert "'random' is listed twice" in failure([*command, "a", "--policies", "random,random"], capsys)
    assert "unknown policy 'rndom'" in failure([*command, "a", "--policies", "rndom"], capsys)
    assert "episodes 0 is not an integer of 1" in failure([*command, "a", "--episodes", "0"], capsys)
    assert not Path("a").exists()
    with pytest.raises(SystemExit, match="2"):
        main([*command, "a", "--colour", "red"])
    assert "colour" in capsys.readouterr().err


LEARNERS = {
    "imitate": ["--epochs", "2", "--held-out", "0.34"],
    "iql": ["--epochs", "2", "--policy-epochs", "2", "--rho", "4", "--expectile", "0.7", "--temperature", "0.2"],
}


@pytest.mark.parametrize("learner", LEARNERS)
@pytest.mark.parametrize("memory", ["window", "lstm"])
def test_learn_and_evaluate(learner: str, memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    """From records to a policy file that `evaluate` loads; the same seed gives the same file."""
    record()
    for name in ("a", "b"):
        command = ["offline", learner, "records", "--out", f"{name}.safetensors", "--memory", memory]
        main([*command, *LEARNERS[learner]])
    printed = capsys.readouterr().out
    assert f"6 episodes on {QUICK}: 3 of random, 3 of heuristic" in printed
    assert "agrees with what it learnt from: joint " in printed
    assert ("on held-out hosts: joint" in printed) == (learner == "imitate")
    assert ("losses of the values: V " in printed) == (learner == "iql")
    one, other = (read_policy(Path(f"{name}.safetensors")) for name in "ab")
    assert one[1] == "core"
    assert one[0].config.network.memory == memory
    pairs = zip(one[0].network.parameters(), other[0].network.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    main(["evaluate", "--task", QUICK, "--policies", "a.safetensors,wait", "--hosts", "2"])
    assert "a.safetensors" in capsys.readouterr().out


def test_only_some_policies(capsys: pytest.CaptureFixture[str]) -> None:
    record()
    main(["offline", "imitate", "records", "--out", "h.safetensors", "--policies", "heuristic", "--epochs", "1"])
    assert f"3 episodes on {QUICK}: 3 of heuristic\n" in capsys.readouterr().out


def write(folder: str, like: RecordHeader = HEADER) -> None:
    """Made-up records of the policies `learned` and `random`."""
    with RecordWriter(Path(folder), like) as writer:
        writer.append(episodes(4, HEADER))


def test_records_that_cannot_be_learnt_from(capsys: pytest.CaptureFixture[str]) -> None:
    """Each error names the file and the remedy, and no policy is written."""
    write("one")
    (path,) = record_files(Path("one"))
    command = ["offline", "imitate", "--out", "p.safetensors"]
    write("task", header(task="another"))
    line = failure([*command, "one", "task"], capsys)
    assert "task/00000.safetensors and one/00000.safetensors are of tasks 'another' and 'made_up'" in line
    assert "--task" in line
    assert "unknown recorded task 'thrd'" in failure([*command, "one", "task", "--task", "thrd"], capsys)
    write("preset", header(preset="full"))
    line = failure([*command, "one", "preset"], capsys)
    assert "preset/00000.safetensors and one/00000.safetensors have head presets 'full' and 'core'" in line
    assert "unknown recorded policy 'rndom'" in failure([*command, "one", "--policies", "rndom"], capsys)
    write("nobody", header(policies=("learned", "random", "wait")))
    line = failure([*command, "nobody", "--policies", "wait"], capsys)
    assert "nobody name the policy 'wait' but hold no episode of it; omit it" in line
    Path("cut").mkdir()
    Path("cut/a.safetensors").write_bytes(path.read_bytes()[:-100])
    line = failure([*command, "cut"], capsys)
    assert "cut/a.safetensors" in line
    shutil.copytree("one", "newer")
    newer = Path("newer/00000.safetensors")
    newer.write_bytes(newer.read_bytes().replace(b'"version":"2"', b'"version":"9"', 1))
    line = failure([*command, "newer"], capsys)
    assert "newer/00000.safetensors" in line
    assert "version" in line
    assert "nothing to open; name at least one record file or folder" in failure(command, capsys)
    assert not Path("p.safetensors").exists()
    Path("p.safetensors").write_text("")
    assert "p.safetensors exists" in failure([*command, "one"], capsys)


def test_weights_by_hand() -> None:
    """Two hosts. Objectives 3 and 1 at β = 2 on the first: odds e : 1, so e / (1 + e) = 0.731. One episode on the
    second counts as much as the whole first host. Large numbers do not overflow."""
    weights = softmax_by_group(torch.tensor([3.0, 7.0, 1.0]) / 2, torch.tensor([5, 9, 5]))
    assert weights.tolist() == pytest.approx([0.7311, 1.0, 0.2689], abs=1e-4)
    huge = softmax_by_group(torch.tensor([1000.0, 1001.0, -1000.0]), torch.zeros(3, dtype=torch.long))
    assert huge.tolist() == pytest.approx([0.2689, 0.7311, 0.0], abs=1e-4)


def test_weights_of_a_selection() -> None:
    """By objective: every host counts 1 in all, and the better of two episodes counts more, at any rent."""
    record()
    for rho in (0.0, 50.0):
        chosen = select_transitions([Path("records")], reward=RewardConfig(rho=rho), weighting="objective", beta=0.5)
        whole = Records.open("records").episodes()
        objectives = whole.objective(rho)
        for host in whole.host_seed.unique():
            rows = (whole.host_seed == host).nonzero().squeeze(1)
            first, second = chosen.data.weights[rows, 0].tolist()
            assert first + second == pytest.approx(1)
            assert (first > second) == bool(objectives[rows[0]] > objectives[rows[1]])
