"""`esper train --config FILE`: any setting from a TOML file, checked, below the flags."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import tyro
from simic.training.tiny import tiny_task

from esper.cli.train import TrainCommand
from esper.leyline import BadValueError, DataError
from esper.simic.training.config import TrainConfig, read_settings
from esper.simic.training.runners import make_runner
from esper.simic.training.trainer import Trainer
from esper.tolaria import get_task


def settings(folder: Path, text: str, *flags: str) -> TrainConfig:
    """The settings of a command line with a file."""
    (folder / "run.toml").write_text(text)
    return tyro.cli(TrainCommand, args=["--config", str(folder / "run.toml"), *flags]).settings()


def test_fields_at_every_depth(tmp_path: Path) -> None:
    """Top-level, nested, nested twice, paths, lists and None; everything else keeps its default."""
    text = """
        rounds = 40
        start = "runs/first"
        [ppo]
        epochs = 8
        target_kl = "none"
        [ppo.network]
        hidden = 32
        first_bias = [1, 0, 0, 0, 0, 0.5]
        [reward]
        rho = 3
        [alarms]
        kl_spike = 0.3
    """
    default = TrainConfig()
    network = replace(default.ppo.network, hidden=32, first_bias=(1.0, 0.0, 0.0, 0.0, 0.0, 0.5))
    wanted = replace(
        default,
        rounds=40,
        start=Path("runs/first"),
        ppo=replace(default.ppo, epochs=8, target_kl=None, network=network),
        reward=replace(default.reward, rho=3.0),
        alarms=replace(default.alarms, kl_spike=0.3),
    )
    assert settings(tmp_path, text) == wanted
    assert settings(tmp_path, "") == default


@pytest.mark.requirement(36)
def test_the_batch_size_reaches_the_minibatches(tmp_path: Path) -> None:
    """On every task of the run; the default is each task's own."""
    fleet = make_runner(settings(tmp_path, "batch = 24\nhosts = 4"), "digits_blind").fleet
    assert (fleet.task.batch, len(fleet.batches.minibatch(0, 3).targets)) == (24, 24)
    for name in ("digits_blind", tiny_task().name):
        fleet = make_runner(TrainConfig(task=name, hosts=4), name).fleet
        assert len(fleet.batches.minibatch(0, 3).targets) == get_task(name).batch
    with pytest.raises(DataError, match="fewer than a batch of 5000"):
        Trainer(settings(tmp_path, "batch = 5000\nhosts = 4"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_flag_wins_over_the_file(tmp_path: Path) -> None:
    """Even a flag with the default value; other values of the file stay."""
    text = "rounds = 7\nsensing = false\n[ppo]\nepochs = 3\nrate = 0.5\n"
    config = settings(tmp_path, text, "--rounds", "40", "--sensing", "--ppo.epochs", "8")
    assert config == replace(TrainConfig(), ppo=replace(TrainConfig().ppo, rate=0.5))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("round = 3", r"run\.toml: settings has unknown keys \['round'\].*'rounds'"),
        ("[ppo]\nepoch = 3", r"run\.toml: settings\.ppo has unknown keys \['epoch'\].*'epochs'"),
        ("[pppo]\nepochs = 3", r"run\.toml: settings has unknown keys \['pppo'\]"),
        ("[ppo]\nepochs = '8'", r"run\.toml: settings\.ppo\.epochs is '8'; allowed: int"),
        ("[ppo]\nepochs = true", r"run\.toml: settings\.ppo\.epochs is True; allowed: int"),
        ("ppo = 3", r"run\.toml: settings\.ppo is 3"),
        ("data_dir = 3", r"run\.toml: settings\.data_dir is 3"),
        ("rounds = 'none'", r"run\.toml: settings\.rounds is None; allowed: int"),
        ("batch = 0", r"run\.toml: settings: batch 0 is not an integer of 1 or more"),
        ("batch = 1.5", r"run\.toml: settings\.batch is 1\.5"),
        ("rounds = 0", r"run\.toml: settings: rounds 0 is not an integer of 1 or more"),
        ("[ppo]\nepochs = 0", r"run\.toml: settings\.ppo: epochs 0 is not"),
        ("rounds = ", r"run\.toml cannot be read as TOML"),
    ],
)
def test_mistakes_name_the_key_and_the_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadValueError, match=message):
        settings(tmp_path, text)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match=r"nothing\.toml cannot be read as TOML: .*No such file"):
        read_settings(tmp_path / "nothing.toml")


def test_help_is_short(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 36 flags and 100 lines on a terminal of 80 columns; rare settings are the file's."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        tyro.cli(TrainCommand, args=["--help"])
    text = capsys.readouterr().out
    assert 20 < len(set(re.findall(r"--[a-z][a-z.-]+", text))) <= 36
    assert len(text.splitlines()) <= 100
