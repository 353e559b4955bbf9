"""Agents on disk: what comes back, and what is refused."""

import gc
import hashlib
import json
import pickle
import shutil
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rounds import collect, gap, make_agent, weights_of
from torch import Tensor

from esper.leyline import CheckpointError
from esper.simic.agent import PPOAgent, checkpoint, load_agent, save_agent
from esper.simic.agent.checkpoint import AGENT, agent_tensors, restore_tensors
from esper.storage.stored import read_stored, write_stored

Json = dict[str, Any]  # Any: parsed JSON
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Note:
    """Something to keep beside an agent."""

    text: str


def trained(kind: str = "core") -> PPOAgent:
    """An agent behind two updates, with statistics of observations."""
    agent = make_agent(kind, seed=4, tasks=2, epochs=2, minibatches=2)
    tasks = torch.tensor([0, 1] * 4)
    for seed in range(2):
        agent.observations.update(torch.randn(16, agent.layout.size) * 3 + 1)
        agent.update(collect(agent, seed=seed, tasks=tasks))
    return agent


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an agent, not to be changed."""
    folder = tmp_path_factory.mktemp("template") / "agent"
    save_agent(trained(), folder)
    return folder


@pytest.fixture
def saved(template: Path, tmp_path: Path) -> Path:
    """A folder with an agent."""
    return Path(shutil.copytree(template, tmp_path / "agent"))


def same(first: Tensors, second: Tensors) -> bool:
    """Bit for bit."""
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


# -- what comes back --------------------------------------------------------------------------------------------------


@pytest.mark.requirement(82)
@pytest.mark.parametrize("kind", ["vector", "core", "full"])
def test_a_loaded_agent_goes_on_as_if_it_had_never_stopped(kind: str, tmp_path: Path) -> None:
    """Actions, draws, updates, statistics, schedules and counters are equal bit for bit."""
    agent = trained(kind)
    agent.observations.freeze()
    agent.failures = 1
    save_agent(agent, tmp_path / "agent")
    other, _ = load_agent(tmp_path / "agent")
    assert same(agent_tensors(agent), agent_tensors(other))
    assert (other.updates, other.failures, other.total_updates) == (2, 1, 10)
    assert other.observations.frozen
    assert (other.table, other.layout, other.config) == (agent.table, agent.layout, agent.config)
    for seed in (7, 8):
        rounds = [collect(each, seed=seed, tasks=torch.tensor([1, 0] * 4)) for each in (agent, other)]
        assert torch.equal(rounds[0].actions, rounds[1].actions)
        assert torch.equal(rounds[0].log_probs, rounds[1].log_probs)
        assert agent.update(rounds[0]) == other.update(rounds[1])
        assert agent.epsilon == other.epsilon
    assert same(agent_tensors(agent), agent_tensors(other))


@pytest.mark.requirement(82)
def test_an_agent_that_has_learnt_nothing_yet(tmp_path: Path) -> None:
    """An agent without Adam moments loads and starts like the original."""
    agent = make_agent("core")
    save_agent(agent, tmp_path / "agent")
    other, _ = load_agent(tmp_path / "agent", device=torch.device("cpu"))
    for each in (agent, other):
        each.update(collect(each))
    assert same(agent_tensors(agent), agent_tensors(other))


@pytest.mark.requirement(82)
def test_saving_changes_nothing(tmp_path: Path) -> None:
    """Saving does not change the agent and writes two files, neither of them a pickle."""
    agent = trained()
    before = {name: value.clone() for name, value in agent_tensors(agent).items()}
    save_agent(agent, tmp_path / "agent")
    assert same(before, agent_tensors(agent))
    assert {path.name for path in (tmp_path / "agent").iterdir()} == {"agent.json", "agent.safetensors"}


@pytest.mark.requirement(82)
def test_what_is_kept_beside_an_agent(tmp_path: Path) -> None:
    """Extra dataclasses are stored and loaded on request; a missing one is an error."""
    save_agent(make_agent("core"), tmp_path / "agent", {"note": Note("spring")})
    _, extras = load_agent(tmp_path / "agent", {"note": Note})
    assert extras == {"note": Note("spring")}
    assert load_agent(tmp_path / "agent")[1] == {}
    with pytest.raises(CheckpointError, match=r"lacks \['other'\]; it holds \['agent', 'note'\]"):
        load_agent(tmp_path / "agent", {"note": Note, "other": Note})


@pytest.mark.requirement(26)
def test_nothing_that_was_read_stays_in_memory(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent holds its own copies, and the tensors that were read are freed."""
    alive: list[weakref.ref[Tensor]] = []

    def watched(folder: Path, kind: Any) -> tuple[Json, Tensors]:
        content, tensors = read_stored(folder, kind)
        alive.extend(weakref.ref(tensor) for tensor in tensors.values())
        return content, tensors

    monkeypatch.setattr(checkpoint, "read_stored", watched)
    agent, _ = load_agent(saved)
    gc.collect()
    assert len(alive) == len(agent_tensors(agent))
    assert [reference for reference in alive if reference() is not None] == []


# -- compiled ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """torch.compile with a backend that takes no time; lists the modes asked for."""
    modes: list[str] = []
    real = torch.compile

    def compile_(call: Callable[..., Any], *, mode: str, dynamic: bool) -> Callable[..., Any]:
        modes.append(mode)
        return real(call, backend="eager", dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", compile_)
    return modes


@pytest.mark.requirement(49, 51)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, in passing
def test_a_compiled_agent_is_saved_and_loaded(quick_compiler: list[str], tmp_path: Path) -> None:
    """Weights keep the network's names; the compile mode is stored or overridden on load."""
    agent = make_agent("vector", compile="max-autotune-no-cudagraphs", epochs=1, minibatches=1)
    agent.update(collect(agent))
    save_agent(agent, tmp_path / "agent")
    assert set(read_stored(tmp_path / "agent", AGENT)[1]) == set(agent_tensors(agent))
    assert {name.removeprefix("network.") for name in agent_tensors(agent)} >= set(weights_of(agent))
    again, _ = load_agent(tmp_path / "agent")
    assert again.compile_mode == again.config.compile == "max-autotune-no-cudagraphs"
    assert quick_compiler == ["max-autotune-no-cudagraphs"] * 4
    eager, _ = load_agent(tmp_path / "agent", compile_mode="off")
    assert eager.compile_mode == eager.config.compile == "off"
    assert len(quick_compiler) == 4
    for each in (agent, again, eager):
        each.update(collect(each, seed=5))
    assert gap(weights_of(agent), weights_of(again)) == gap(weights_of(agent), weights_of(eager)) == 0
    save_agent(eager, tmp_path / "agent")
    assert load_agent(tmp_path / "agent")[0].compile_mode == "off"
    with pytest.raises(CheckpointError, match="'reduce-overhead'"):
        load_agent(tmp_path / "agent", compile_mode="reduce-overhead")  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.requirement(51)
def test_the_mode_in_force_is_what_is_saved(quick_compiler: list[str], tmp_path: Path) -> None:
    """Not the one that was configured, when the compiler was given up on the way."""
    agent = make_agent("vector", compile="default")
    agent.compile("off")
    assert agent.config.compile == "default"
    save_agent(agent, tmp_path / "agent")
    quick_compiler.clear()
    assert load_agent(tmp_path / "agent")[0].compile_mode == "off"
    assert quick_compiler == []


# -- what is refused --------------------------------------------------------------------------------------------------


def rewrite(folder: Path, change: Callable[[Json, Tensors], None]) -> None:
    """Change what is stored, with checksums to match."""
    content, tensors = read_stored(folder, AGENT)
    change(content, tensors)
    write_stored(folder, AGENT, content, tensors)


def put(name: str, value: Tensor) -> Callable[[Json, Tensors], None]:
    """Replace or add a tensor."""
    return lambda content, tensors: tensors.__setitem__(name, value)


def drop(name: str) -> Callable[[Json, Tensors], None]:
    """Remove a tensor."""
    return lambda content, tensors: tensors.__delitem__(name)


def state(**values: object) -> Callable[[Json, Tensors], None]:
    """Replace or add entries of the agent's record."""
    return lambda content, tensors: content["agent"].update(values)


WEIGHT, MOMENT = "network.critic_out.weight", "adam.exp_avg.critic_out.weight"
WRONG: dict[str, tuple[Callable[[Json, Tensors], None], str]] = {
    "a tensor is missing": (drop(WEIGHT), f"missing .*{WEIGHT}"),
    "a moment is missing": (drop(MOMENT), f"missing .*{MOMENT}"),
    "an unknown tensor": (put("network.surprise", torch.zeros(1)), "unknown tensors .*network.surprise"),
    "a weight of another shape": (put(WEIGHT, torch.zeros(1, 3)), rf"{WEIGHT}' is \(\(1, 3\), .*needs \(\(1, 16\)"),
    "a weight of another type": (put(WEIGHT, torch.zeros(1, 16).double()), "float64.*needs.*float32"),
    "a weight that is not finite": (put(WEIGHT, torch.full((1, 16), torch.nan)), f"{WEIGHT}' has numbers"),
    "a moment of another shape": (put(MOMENT, torch.zeros(16)), rf"{MOMENT}' is \(\(16,\)"),
    "a step count of another shape": (put("adam.step.critic_out.weight", torch.zeros(2)), r"adam\.step.*\(2,\)"),
    "statistics of other columns": (put("observations.mean", torch.zeros(3).double()), r"observations\.mean"),
    "statistics that are not finite": (put("returns.var", torch.full((2,), torch.inf).double()), r"returns\.var"),
    "a generator of another kind": (put("generator", torch.zeros(3, dtype=torch.uint8)), "generator"),
    "a generator in another state": (put("generator", torch.zeros(5056, dtype=torch.uint8)), "state"),
    "a count below 0": (state(updates=-1), "updates -1"),
    "a count that is none": (state(failures=1.5), r"failures is 1\.5"),
    "an unknown key": (state(surprise=1), "surprise"),
    "other tasks": (state(tasks=3), r"returns\.\w+'"),
}


@pytest.mark.requirement(82)
@pytest.mark.invariant(15)
@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused(case: str, saved: Path) -> None:
    """The error says what is wrong, even if all checksums are right."""
    change, message = WRONG[case]
    rewrite(saved, change)
    with pytest.raises(CheckpointError, match=message):
        load_agent(saved)


@pytest.mark.requirement(82)
def test_nothing_is_half_loaded(saved: Path) -> None:
    """An agent that refuses tensors stays as it was."""
    agent = make_agent("core", tasks=2)
    before = {name: value.clone() for name, value in agent_tensors(agent).items()}
    for case, (change, _) in WRONG.items():
        content, tensors = read_stored(saved, AGENT)
        change(content, tensors)
        if not same(tensors, read_stored(saved, AGENT)[1]):
            with pytest.raises((CheckpointError, RuntimeError)):
                restore_tensors(agent, tensors, case)
            assert same(before, agent_tensors(agent)), case
    restore_tensors(agent, read_stored(saved, AGENT)[1], "sound")
    assert not same(before, agent_tensors(agent))


@pytest.mark.requirement(68)
@pytest.mark.invariant(15)
@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_other_versions_are_refused(version: object, saved: Path) -> None:
    """The error names the version that can be read."""
    path = saved / "agent.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": version}))
    with pytest.raises(CheckpointError, match=f"version is {version!r}.*reads version 1"):
        load_agent(saved)


@pytest.mark.requirement(68)
def test_foreign_folders_are_refused(saved: Path, tmp_path: Path) -> None:
    """Missing, empty and unrelated folders are refused."""
    (tmp_path / "empty").mkdir()
    for folder in ("nowhere", "empty"):
        with pytest.raises(CheckpointError, match=r"a folder with agent\.json and agent\.safetensors"):
            load_agent(tmp_path / folder)
    path = saved / "agent.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": "esper-model"}))
    with pytest.raises(CheckpointError, match="format is 'esper-model'; allowed: 'esper-agent'"):
        load_agent(saved)


class Trap:
    """Leaves a mark when it is unpickled."""

    sprung: list[str] = []  # noqa: RUF012

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return partial(Trap.sprung.append), ("unpickled",)


@pytest.mark.requirement(82)
def test_pickles_are_refused(saved: Path) -> None:
    """Even with the right digest, a pickle is never executed."""
    raw = pickle.dumps({"network.critic_out.weight": Trap()})
    (saved / "agent.safetensors").write_bytes(raw)
    path = saved / "agent.json"
    document = json.loads(path.read_text())
    document["weights"] = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    document.pop("checksum")
    plain = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    path.write_text(json.dumps(document | {"checksum": hashlib.sha256(plain).hexdigest()}))
    with pytest.raises(CheckpointError, match="no safetensors file"):
        load_agent(saved)
    assert Trap.sprung == []
