"""Started again by torchrun, the same command continues the folder that it made, and no other."""

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from ranks import Ended, run_ranks
from simic.training.smallest import contents, results
from simic.training.tiny import quick_config
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from esper.leyline import BadValueError
from esper.simic.distributed import open_world, world
from esper.simic.training.collect import RoundCollector
from esper.simic.training.config import TrainConfig
from esper.simic.training.follower import Follower
from esper.simic.training.run_folder import RunFolder
from esper.simic.training.trainer import Trainer
from esper.storage.logs import read_lines


def name(torchrun: str) -> str:
    """Of a torchrun: its folder of logs."""
    return f"/tmp/{torchrun}/none_x1y2"


def told(torchrun: str, attempt: int) -> dict[str, str]:
    """Variables that it sets for its ranks."""
    return {
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_ERROR_FILE": f"{name(torchrun)}/attempt_{attempt}/0/error.json",
    }


def train(config: TrainConfig, folder: Path) -> None:
    """On the rank of this process."""
    warnings.simplefilter("ignore", RuntimeWarning)  # of a run without checkpoints
    with open_world() as ours:
        if ours.rank:
            Follower(ours, config).run()
        else:
            Trainer(config, folder, world=ours).run(progress=False)


def start(config: TrainConfig, folder: Path, *torchruns: str, attempt: int = 0) -> Ended:
    """Train on a rank of each torchrun; how rank 0 ended. All of them end alike."""

    def work(rank: int) -> None:
        os.environ.update(told(torchruns[rank], attempt))
        train(config, folder)

    first, *others = run_ranks(work, len(torchruns), folder.parent)
    assert {rank.code for rank in others} <= {first.code}
    return first


def test_a_rank_that_fails_or_dies_in_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 says whose error it is. Started again, the same command ends as if nothing had happened."""
    config, collect = quick_config(2), RoundCollector.collect
    Trainer(config, tmp_path / "whole").run(progress=False)

    def fail(rank: int, die: bool) -> None:
        def collect_or_fail(self: RoundCollector, round_index: int) -> object:
            if rank and round_index == 1:
                if die:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise BadValueError("the disk of this rank is on fire")
            return collect(self, round_index)

        with monkeypatch.context() as patch:
            patch.setattr(RoundCollector, "collect", collect_or_fail)
            train(config, tmp_path / "run")

    first, second = run_ranks(lambda rank: fail(rank, die=False), 2, tmp_path, **told("torchrun", 0))
    assert (first.code, second.code) == (2, 2)
    assert first.output == "esper: rank 1: the disk of this rank is on fire\n"
    first, second = run_ranks(lambda rank: fail(rank, die=True), 2, tmp_path, **told("torchrun", 1))
    assert (first.code, second.code) == (2, -signal.SIGKILL)
    assert "the connection to another rank broke" in first.output
    again = start(config, tmp_path / "run", "torchrun", attempt=2)
    assert again.code == 0, again.output
    assert results(tmp_path / "run") == results(tmp_path / "whole")
    remarks = [remark for line in read_lines(tmp_path / "run" / "sessions.jsonl") for remark in line.get("remarks", ())]
    assert remarks == ["the run continues on 1 rank, it had 2"]


def test_a_restart_before_the_first_checkpoint(tmp_path: Path) -> None:
    """The folder that the killed processes made is continued."""
    config = quick_config(1)
    RunFolder.create(tmp_path / "run", config, launchers=[name("torchrun")]).__exit__(None)
    again = start(config, tmp_path / "run", "torchrun", "torchrun", attempt=1)
    assert again.code == 0, again.output


@pytest.mark.default_cases("torchrun-finished", "alone-begun")
@pytest.mark.parametrize("rounds", [0, 1], ids=["begun", "finished"])
@pytest.mark.parametrize("maker", [("earlier", "earlier"), ()], ids=["torchrun", "alone"])
def test_the_folder_of_another_launch_is_in_use(maker: tuple[str, ...], rounds: int, tmp_path: Path) -> None:
    """With equal settings: in the first attempt, after a restart, and without torchrun."""
    config, run = quick_config(1), tmp_path / "run"
    if rounds and maker:
        assert start(config, run, *maker).code == 0
    elif rounds:
        Trainer(config, run).run(progress=False)
    else:
        RunFolder.create(run, config, launchers=set(map(name, maker))).__exit__(None)
    before = contents(run)
    (alone,) = run_ranks(lambda _: train(config, run), 1, tmp_path)
    attempts = [start(config, run, "torchrun", "torchrun", attempt=attempt) for attempt in range(2)]
    for refused in (alone, *attempts):
        assert (refused.code, "is in use" in refused.output) == (2, True), refused.output
    assert contents(run) == before


def test_machines_that_leave_and_join(tmp_path: Path) -> None:
    """One torchrun that was there when the folder was made is enough, whichever has rank 0."""
    config, run = quick_config(1), tmp_path / "run"
    RunFolder.create(run, config, launchers=[name("one"), name("two")]).__exit__(None)
    for torchruns in (["joined", "one"], ["two"], ["two", "joined"]):
        continued = start(config, run, *torchruns)
        assert continued.code == 0, continued.output
    assert start(config, run, "joined", "other").code == 2


def test_what_torch_calls_the_error_file(tmp_path: Path) -> None:
    """torchrun's own code: one name for all attempts and ranks, another one for a second torchrun."""

    def launchers(logs: DefaultLogsSpecs, attempt: int) -> list[frozenset[str]]:
        environments = {rank: {"TORCHELASTIC_RESTART_COUNT": str(attempt)} for rank in range(2)}
        logs.reify(environments)
        return [world._launchers_of(environment) for environment in environments.values()]

    first, second = (DefaultLogsSpecs(log_dir=str(tmp_path)) for _ in range(2))
    one, *same = [names for attempt in range(2) for names in launchers(first, attempt)]
    assert len(one) == 1 and same == [one] * 3
    assert one.isdisjoint(launchers(second, 0)[0])
    assert launchers(DefaultLogsSpecs(log_dir=os.devnull), 0) == [frozenset()] * 2


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    """A rank is killed in the first attempt, and the second one continues. A second torchrun is refused."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal, sys\n"
        "from esper.cli import main\n"
        "from esper.simic.training.collect import RoundCollector\n"
        "collect = RoundCollector.collect\n"
        "def killed(self, round_index):\n"
        "    if os.environ['RANK'] == '1' and round_index == 1:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return collect(self, round_index)\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    RoundCollector.collect = killed\n"
        "main(sys.argv[1:])\n"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command = [*launcher, str(script), "train", "--hosts", "4", "--members", "1", "--rounds", "2", "--out", "run"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

    def run() -> "subprocess.CompletedProcess[str]":
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)

    first = run()
    assert first.returncode == 0 and "2 of 2 rounds are in run" in first.stdout, first.stderr
    assert [line["kind"] for line in read_lines(tmp_path / "run" / "sessions.jsonl") if "machine" in line] == [
        "begun",
        "resumed",
    ]
    second = run()
    assert second.returncode != 0 and second.stderr.count("is in use") == 2, second.stderr
