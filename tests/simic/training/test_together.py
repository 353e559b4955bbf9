"""Learners that share their fleets: each does what it would have done alone, to the bit, however it was stopped."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from simic.training.smallest import config, contents, results
from simic.training.tiny import quick_config

from esper.cli.entry import main
from esper.cli.train import parse_seeds
from esper.karn import read_run
from esper.leyline import BadValueError
from esper.simic.teaching import teach, teach_shared
from esper.simic.training import together
from esper.simic.training.config import TeachConfig, TrainConfig, taught_config
from esper.simic.training.together import Learner, conduct, is_together, read_together, train_together
from esper.simic.training.trainer import Trainer
from esper.tolaria import HostFleet, get_task
from esper.tolaria.shares import FleetShare, SharedFleet

SEEDS = (0, 3)


def deterministic(run: Path) -> dict[str, object]:
    """All files of a run but the metrics, which state times, and the sessions, which state moments. Checkpoints state a
    digest of the metrics."""
    files: dict[str, object] = {}
    for name, content in contents(run).items():
        if name.endswith("agent.json"):
            parts = json.loads(content)
            del parts["checksum"], parts["progress"]["metrics"]
            files[name] = parts
        elif name.endswith(".safetensors"):
            begin = 8 + int.from_bytes(content[:8], "little")
            files[name] = json.loads(content[8:begin]), content[begin:]  # the order of a header's entries varies
        elif name not in ("metrics.jsonl", "sessions.jsonl"):
            files[name] = content
    return files


def assert_as_alone(run: Path, alone: Path) -> None:
    """Equal to the bit."""
    assert results(run) == results(alone)
    assert deterministic(run) == deterministic(alone)


@pytest.fixture(scope="module")
def busy() -> TrainConfig:
    """Several groups per learner, which germinate and commit in most episodes, and are recorded."""
    return quick_config(2)


@pytest.fixture(scope="module")
def alone(busy: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run per seed, each for itself."""
    folder = tmp_path_factory.mktemp("alone")
    for seed in SEEDS:
        own = folder / f"seed{seed}"
        Trainer(replace(busy, seed=seed), own, record=folder / f"record{seed}").run(progress=False)
    return folder


def test_each_run_is_what_it_would_have_been_alone(busy: TrainConfig, alone: Path, tmp_path: Path) -> None:
    """Checkpoints, events, metrics and records."""
    both = tmp_path / "both"
    trainers = train_together(busy, both, SEEDS, record=tmp_path / "record", progress=False)
    assert [trainer.config.seed for trainer in trainers] == list(SEEDS)
    for seed in SEEDS:
        assert_as_alone(both / f"seed{seed}", alone / f"seed{seed}")
        assert deterministic(tmp_path / "record" / f"seed{seed}") == deterministic(alone / f"record{seed}")
    assert results(both / "seed0")[1] != results(both / "seed3")[1]
    assert read_run(both / "seed0").commits, "nothing was committed"


class Stop:
    """Interrupts the main thread in a call of the shared fleet."""

    def __init__(self, name: str, number: int, error: BaseException) -> None:
        self.name, self.left, self.error = name, number, error

    def carry_out(self, original: Callable[..., object], shared: SharedFleet, name: str, arguments: object) -> object:
        self.left -= name == self.name
        if not self.left:
            raise self.error
        return original(shared, name, arguments)


def stop(monkeypatch: pytest.MonkeyPatch, name: str, number: int, error: BaseException) -> None:
    """Let the nth call of this name fail."""
    original, stopper = SharedFleet.carry_out, Stop(name, number, error)
    monkeypatch.setattr(SharedFleet, "carry_out", lambda *given: stopper.carry_out(original, *given))


def test_stopped_and_resumed(
    busy: TrainConfig, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in the second round stops both learners; they continue from their last complete rounds. One of them had
    lost a checkpoint and lags behind."""
    both = tmp_path / "both"
    stop(monkeypatch, "train_step", 15, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        train_together(busy, both, SEEDS, record=tmp_path / "record", progress=False)
    assert capsys.readouterr().out.count("stopped after round 1; continue with --resume") == 2
    monkeypatch.undo()
    Trainer(replace(busy, seed=3), both / "seed3", resume=True, record=tmp_path / "record" / "seed3").run(
        progress=False
    )
    assert is_together(both)
    own, seeds = read_together(both)
    assert seeds == SEEDS
    train_together(own, both, seeds, record=tmp_path / "record", progress=False)
    for seed in SEEDS:
        assert_as_alone(both / f"seed{seed}", alone / f"seed{seed}")
        assert deterministic(tmp_path / "record" / f"seed{seed}") == deterministic(alone / f"record{seed}")


def test_an_error_of_the_fleet_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run notes it, and can be resumed."""
    stop(monkeypatch, "validate", 4, RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        train_together(config(rounds=1), tmp_path / "both", SEEDS, progress=False)
    for seed in SEEDS:
        assert "RuntimeError: broken" in (tmp_path / "both" / f"seed{seed}" / "sessions.jsonl").read_text()
    monkeypatch.undo()
    with pytest.warns(RuntimeWarning, match="no checkpoint yet"):
        trainers = train_together(config(rounds=1), tmp_path / "both", SEEDS, progress=False)
    assert [trainer.round for trainer in trainers] == [1, 1]


def test_an_error_of_one_learner_stops_the_other(tmp_path: Path) -> None:
    """And is what the caller gets."""
    asked = []

    def fails(learner: Learner) -> None:
        raise BadValueError("mine")

    def waits(learner: Learner) -> None:
        try:
            learner.fleet(None, 1)  # type: ignore[arg-type]  # nobody makes it
        except KeyboardInterrupt:
            asked.append("stopped")
            raise

    with pytest.raises(BadValueError, match="mine"):
        conduct([waits, fails])
    assert asked == ["stopped"]


def test_taught_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches share fleets too: records, reports and runs are those of seeds that were taught alone."""
    quick_config()  # registers its task
    made: list[Sequence[int]] = []
    original = SharedFleet.__init__

    def noted(shared: SharedFleet, fleet: HostFleet, sizes: Sequence[int]) -> None:
        made.append(sizes)
        original(shared, fleet, sizes)

    monkeypatch.setattr(SharedFleet, "__init__", noted)
    settings = taught_config(32)
    small = replace(settings.ppo, network=replace(settings.ppo.network, encoder=8, hidden=8, head=8))
    search = TeachConfig(32, betas=(0.1,), pooling=(0.0,), sharpness=(1.0,), epochs=1, folds=2)
    settings = replace(settings, task="digits_quick", rounds=1, hosts=4, members=3, ppo=small, teach=search)
    for seed in SEEDS:
        own = replace(settings, seed=seed)
        begin = partial(teach, own, progress=False)
        Trainer(own, tmp_path / f"alone{seed}", begin=begin).run(progress=False)
    assert not made
    both = tmp_path / "both"
    train_together(
        settings, both, SEEDS, make_begin=lambda own, learner: teach_shared(own, learner, len(SEEDS)), progress=False
    )
    assert [len(sizes) for sizes in made].count(2) >= 2, "a fleet of the rounds, and one of the searches"
    for seed in SEEDS:
        assert (both / f"seed{seed}" / "teaching" / "report.json").is_file()
        assert_as_alone(both / f"seed{seed}", tmp_path / f"alone{seed}")


def test_what_cannot_begin(tmp_path: Path) -> None:
    """Leaves nothing behind; the same seed twice, a folder in use, runs of which none has begun."""
    with pytest.raises(BadValueError, match=r"seeds \[1, 1\] must be different"):
        train_together(config(), tmp_path / "run", [1, 1])
    with pytest.raises(BadValueError, match="3 hosts cannot be divided"):
        train_together(config(hosts=3), tmp_path / "run", SEEDS)
    assert not (tmp_path / "run").exists()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").write_text("")
    with pytest.raises(BadValueError, match="is in use"):
        train_together(config(), tmp_path / "used", SEEDS)
    (tmp_path / "used" / together.SEEDS).write_text('{"seeds": [1]}')
    with pytest.raises(BadValueError, match=r"none of the runs in .* has begun"):
        read_together(tmp_path / "used")
    (tmp_path / "used" / together.SEEDS).write_text('{"seeds": ["a"]}')
    with pytest.raises(BadValueError, match=r"seeds.json is damaged"):
        read_together(tmp_path / "used")


def test_a_share_has_what_runners_use_of_a_fleet() -> None:
    """Every public member of a share is one of a fleet, under the same name."""
    own = {name for name in vars(FleetShare) if not name.startswith("_")}
    fleet = set(dir(HostFleet)) | set(vars(HostFleet(get_task("digits_blind"), 2)))
    assert own <= fleet


def test_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seeds are numbers or a range; --resume finds all of them."""
    config()  # registers its task
    monkeypatch.chdir(tmp_path)
    main(["train", "--task", "digits_smallest", "--rounds", "1", "--hosts", "2", "--members", "1", "--seeds", "1..2"])
    assert "1 rounds of 2 seeds are in runs/train" in capsys.readouterr().out
    main(["train", "--resume", "runs/train"])
    assert {path.name for path in (tmp_path / "runs" / "train").iterdir()} == {"seeds.json", "seed1", "seed2"}
    assert parse_seeds("0,1,7") == [0, 1, 7]
    for wrong in ("", "a", "3..1", "1,,2"):
        with pytest.raises(BadValueError, match="names no seeds"):
            parse_seeds(wrong)
    with pytest.raises(SystemExit):
        main(["train", "--seeds", "0..1", "--workers", "2"])
    assert "omit --workers" in capsys.readouterr().err
