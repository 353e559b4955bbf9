"""A training loop of one's own that is killed, and goes on as if it had not been."""

import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina import (
    GateThresholds,
    GrowingOptimizer,
    LifecycleConfig,
    MorphogeneticModel,
    TrainingCheckpoints,
    attach,
)
from esper.kasmina.training_checkpoints import join_state, split_state
from esper.leyline import BadValueError, CheckpointError, SeedStage, StorageError
from esper.storage.files import folder_lock

STEPS = 13
SLOTS = {"0": 6, "2": 6, "4": 6}
CONFIG = LifecycleConfig(cooldown=4, thresholds=GateThresholds(min_training_steps=1))


class Loop:
    """Everything of a long run: a foreign host with running statistics and dropout, Adam, a schedule, a data order."""

    def __init__(self, rng_seed: int) -> None:
        torch.manual_seed(rng_seed)
        middle = [nn.Linear(6, 6), nn.BatchNorm1d(6)]
        net = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.3), *middle, nn.Tanh(), nn.Linear(6, 3))
        self.data = torch.randn(64, 5, generator=torch.Generator().manual_seed(1))
        self.model = attach(net, SLOTS, example=self.data[:4], config=CONFIG).train()
        self.optimizer = GrowingOptimizer(self.model, lambda p: torch.optim.AdamW(p, lr=0.02), clip_norm=1.0)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer.wrapped, [3, 7, 7], gamma=0.5)
        self.order = torch.Generator().manual_seed(rng_seed)
        self.parts: dict[str, Any] = {
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "order": self.order,
        }

    def step(self, number: int) -> None:
        """Train, tick, and decide for the next step."""
        chosen = torch.randperm(64, generator=self.order)[:16]
        inputs, targets = self.data[chosen], (self.data[chosen].sum(1) > 0).long()
        self.optimizer.zero_grad()
        torch.stack(list(self.model.losses(inputs, targets).values())).sum().backward()
        self.optimizer.step()
        self.schedule.step()
        self.model.tick()
        for slot_id, verb in PLAN.get(number, {}).items():
            getattr(self, verb)(slot_id)

    def germinate(self, slot_id: str) -> None:
        self.model.germinate_seed(slot_id, "mlp", style="gate", tempo=3)

    def advance(self, slot_id: str) -> None:
        self.model.advance(slot_id)

    def fossilize(self, slot_id: str) -> None:
        self.model.measure(self.data[:32], (self.data[:32].sum(1) > 0).long(), self.data[32:])
        self.model.fossilize(slot_id)

    def prune(self, slot_id: str) -> None:
        self.model.prune_seed(slot_id)

    def run(self, folder: Path, keep: int = 3) -> set[SeedStage]:
        """From wherever it is, to its end; the stages that were saved."""
        checkpoints, seen = TrainingCheckpoints(folder, keep=keep), set()
        for number in range(checkpoints.load(self.model, self.parts), STEPS):
            self.step(number)
            checkpoints.save(number + 1, self.model, self.parts)
            seen |= {slot.state.stage for slot in self.model.seed_slots.values()}
        return seen

    def everything(self) -> dict[str, Any]:
        """All that another loop must be equal in."""
        tensors: dict[str, Tensor] = {}
        states = {"optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict()}
        plain = split_state({**states, "model": self.model.state_dict()}, "all", tensors)
        tensors |= {"order": self.order.get_state(), "random": torch.get_rng_state()}
        seeds = {slot_id: repr(slot.state) for slot_id, slot in self.model.seed_slots.items()}
        return {
            "plain": json.dumps(plain),
            "seeds": seeds,
            **{name: tensor.detach().numpy().tobytes().hex() for name, tensor in tensors.items()},
        }


PLAN = {
    0: {"0": "germinate", "2": "germinate"},
    2: {"0": "advance", "2": "advance"},
    4: {"4": "germinate"},
    7: {"0": "fossilize", "2": "prune"},
}
"""After which step what is done: every stage is met at some checkpoint."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The run that nothing happens to, all its checkpoints kept, and what it ends with."""
    folder, loop = tmp_path_factory.mktemp("whole") / "run", Loop(0)
    assert loop.run(folder, keep=99) == set(SeedStage)
    return folder, loop.everything()


# -- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.invariant(9)
@pytest.mark.parametrize("step", range(1, STEPS))
def test_going_on_from_any_step(whole: tuple[Path, dict[str, Any]], tmp_path: Path, step: int) -> None:
    """With seeds in every stage, a fresh loop with other weights and random state continues bit for bit."""
    name = f"step-{step:05d}"
    shutil.copytree(whole[0] / name, tmp_path / "run" / name)
    loop = Loop(99)
    loop.run(tmp_path / "run")
    assert loop.everything() == whole[1]


KILLED = """
import json, os, random, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:4]
import torch
from kills import FileKill
from test_resume import Loop
torch.set_num_threads(1)
dice = random.Random(0)
for number in range(4):
    folder = Path(sys.argv[1]) / str(number)
    while True:
        child = os.fork()
        if not child:
            FileKill(folder, dice.randint(1, 250))
            loop = Loop(0)
            loop.run(folder)
            folder.with_suffix(".json").write_text(json.dumps(loop.everything()))
            os._exit(0)
        dice.random()
        if os.waitpid(child, 0)[1] == 0:
            break
        with folder.with_suffix(".kills").open("a") as file:
            file.write("killed\\n")
"""


@pytest.mark.slow
def test_killed_at_any_file_operation(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """SIGKILL, as often as it takes to get through: four runs, each ends as the one that was never killed."""
    folders = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2] / "benchmarks")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", KILLED, str(tmp_path), *folders]
    subprocess.run(command, env=environment, check=True, timeout=300)
    kills = [path.read_text().count("killed") for path in tmp_path.glob("*.kills")]
    assert sum(kills) >= 4
    ends = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert ends == [whole[1]] * 4


def test_an_empty_folder_is_a_beginning(tmp_path: Path) -> None:
    """Nothing is changed, nothing is drawn."""
    loop = Loop(3)
    before = loop.everything()
    assert TrainingCheckpoints(tmp_path / "none").load(loop.model, loop.parts) == 0
    assert loop.everything() == before
    assert not (tmp_path / "none").exists()


def test_the_last_are_kept(tmp_path: Path) -> None:
    loop = Loop(0)
    loop.run(tmp_path / "run", keep=2)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-00012", "step-00013"]
    alone = MorphogeneticModel.load(tmp_path / "run" / "step-00013" / "model", Loop(1).model)
    assert torch.equal(alone.eval()(loop.data), loop.model.eval()(loop.data))


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["model/model.json", "model/weights.safetensors", "training/training.json"])
def test_a_damaged_checkpoint_is_passed_over(whole: tuple[Path, dict[str, Any]], tmp_path: Path, file: str) -> None:
    """It is named and set aside; the one before it brings the same end."""
    for name in ("step-00008", "step-00009"):
        shutil.copytree(whole[0] / name, tmp_path / "run" / name)
    path = tmp_path / "run" / "step-00009" / file
    path.write_bytes(path.read_bytes()[:-7])
    loop = Loop(5)
    with pytest.warns(RuntimeWarning, match=r"step-00009 is not used: .*kept as refused-step-00009; .*step-00008"):
        loop.run(tmp_path / "run")
    assert loop.everything() == whole[1]


def test_all_are_damaged(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    shutil.copytree(whole[0] / "step-00003", tmp_path / "run" / "step-00003")
    (tmp_path / "run" / "step-00003" / "training" / "training.safetensors").unlink()
    loop = Loop(5)
    before = loop.everything()
    with pytest.raises(CheckpointError, match=r"none of the checkpoints .*step-00003.*cannot be read"):
        TrainingCheckpoints(tmp_path / "run").load(loop.model, loop.parts)
    assert loop.everything() == before


def test_other_parts_are_refused(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Before anything is changed."""
    shutil.copytree(whole[0] / "step-00003", tmp_path / "run" / "step-00003")
    loop = Loop(5)
    before = loop.everything()
    with pytest.raises(CheckpointError, match=r"parts \['optimizer', 'order', 'schedule'\], not \['optimizer'\]"):
        TrainingCheckpoints(tmp_path / "run").load(loop.model, {"optimizer": loop.optimizer})
    assert loop.everything() == before


def test_a_copy_is_no_other_step(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    shutil.copytree(whole[0] / "step-00003", tmp_path / "run" / "step-00004")
    loop = Loop(5)
    with pytest.raises(CheckpointError, match="holds the checkpoint of step 3: it was copied or renamed"):
        TrainingCheckpoints(tmp_path / "run").load(loop.model, loop.parts)


def test_other_conditions_are_told(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(whole[0] / "step-00003", tmp_path / "run" / "step-00003")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "ABACUS")
    loop = Loop(5)
    with pytest.warns(RuntimeWarning, match=r"not bit for bit: cpu \S+ → ABACUS"):
        assert TrainingCheckpoints(tmp_path / "run").load(loop.model, loop.parts) == 3


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    """A place that cannot be written, a state that cannot, a number that is none; what was there stays."""
    loop, checkpoints = Loop(0), TrainingCheckpoints(tmp_path / "run")
    checkpoints.save(1, loop.model, loop.parts)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="step-00001 cannot be written"):
        TrainingCheckpoints(tmp_path / "file" / "run").save(1, loop.model, loop.parts)
    loop.schedule.verdict = object()  # type: ignore[attr-defined]  # on purpose
    with pytest.raises(CheckpointError, match="parts/schedule/verdict is a object; a checkpoint holds tensors"):
        checkpoints.save(2, loop.model, loop.parts)
    with pytest.raises(BadValueError, match="step 0"):
        checkpoints.save(0, loop.model, loop.parts)
    with pytest.raises(BadValueError, match="keep 0"):
        TrainingCheckpoints(tmp_path / "run", keep=0)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00001"]


def test_a_step_below_the_newest_is_refused(tmp_path: Path) -> None:
    """Before anything is written: it would be the first to be removed. The newest itself is replaced."""
    loop, checkpoints = Loop(0), TrainingCheckpoints(tmp_path / "run", keep=3)
    for step in (10, 11, 12, 12):
        checkpoints.save(step, loop.model, loop.parts)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    for step in (1, 11):
        with pytest.raises(BadValueError, match=rf"step {step} is below step 12, .*; continue from that one, remove"):
            checkpoints.save(step, loop.model, loop.parts)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-00010", "step-00011", "step-00012"]
    loop.step(0)
    checkpoints.save(12, loop.model, loop.parts)
    other = Loop(1)
    assert checkpoints.load(other.model, other.parts) == 12
    assert other.everything() == loop.everything()


def test_one_process_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first `save` on; several objects of that process may, one after the other. Nothing is left of a lock."""
    loop, folder = Loop(0), tmp_path / "run"
    folder.mkdir()
    one, other = TrainingCheckpoints(folder), TrainingCheckpoints(folder)
    with folder_lock(folder), pytest.raises(BadValueError, match="run is being written by another process"):
        one.save(1, loop.model, loop.parts)
    assert list(folder.iterdir()) == []
    one.save(1, loop.model, loop.parts)
    other.save(2, loop.model, loop.parts)
    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: -1)
        with pytest.raises(BadValueError, match="by another process"):
            other.save(3, loop.model, loop.parts)
    del one
    with pytest.raises(BadValueError, match="by another process"), folder_lock(folder):
        pass
    del other
    with folder_lock(folder):
        assert sorted(path.name for path in folder.iterdir()) == ["step-00001", "step-00002"]


# -- states -----------------------------------------------------------------------------------------------------------


def test_states_come_back_as_they_were() -> None:
    """Types of containers and keys included: JSON alone would make lists of tuples and words of numbers."""
    state = {
        "state": {0: {"step": torch.tensor(3.0), "buffer": None}, 1: {}},
        "groups": [{"betas": (0.9, 0.999), "lr": 1e-3, "on": True, "best": -math.inf}],
        "milestones": Counter({3: 1, 7: 2}),
        "words": "é",
        "random": random.Random(3).getstate(),
    }
    tensors: dict[str, Tensor] = {}
    plain = json.loads(json.dumps(split_state(state, "x", tensors), allow_nan=False))
    again = join_state(plain, tensors)
    assert repr(again) == repr(state)
    assert list(tensors) == ["x/state/0/step"]


def test_keys_with_a_slash() -> None:
    state, tensors = {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}}, dict[str, Tensor]()
    assert repr(join_state(split_state(state, "x", tensors), tensors)) == repr(state)
    assert len(tensors) == 2


@pytest.mark.parametrize("state", [{1.5: 0}, {"f": len}, {"x": {None: 1}}])
def test_states_that_would_not_come_back(state: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^x"):
        split_state(state, "x", {})
