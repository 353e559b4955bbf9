"""The measured gains that `esper tasks` prints."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from esper.kasmina import BlueprintRegistry
from esper.tolaria import TaskRegistry, gains, get_task
from esper.tolaria.gains import GAINS_FILE, Gain, HostGains, published_gains

PUBLISHED = list(json.loads(GAINS_FILE.read_text())) if GAINS_FILE.exists() else []


def cell(slot: str, blueprint: str, parameters: int, gain: float) -> dict[str, str | int | float]:
    """A cell as the benchmark writes it."""
    return {"slot": slot, "blueprint": blueprint, "parameters": parameters, "gain": gain, "deviation": 0.5}


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of gains for this test alone."""
    path = tmp_path / "task_gains.json"
    monkeypatch.setattr(gains, "GAINS_FILE", path)
    gains.published_gains.cache_clear()
    yield path
    gains.published_gains.cache_clear()


def test_parse(own_file: Path) -> None:
    """A task with two kinds of hosts; keys that are for people only do not matter."""
    hosts = {
        "none": {"host_accuracy": 90.0, "repeats": 4, "cells": [cell("r1c0", "norm", 12, -1.0)]},
        "blind": {
            "host_accuracy": 40.0,
            "repeats": 3,
            "cells": [
                cell("r1c0", "norm", 12, -8.0),
                cell("r1c0", "depthwise", 64, 37.0),
                cell("r1c1", "norm", 24, 1.0),
            ],
        },
    }
    own_file.write_text(json.dumps({"digits": {"machine": {"cpu": "?"}, "hosts": hosts}}))
    sound, blind = published_gains("digits")
    assert sound == HostGains("none", 90.0, 4, (Gain("r1c0", "norm", 12, -1.0, 0.5),))
    assert (blind.defect, blind.host_accuracy, blind.repeats, len(blind.gains)) == ("blind", 40.0, 3, 3)
    assert blind.best("r1c0") == Gain("r1c0", "depthwise", 64, 37.0, 0.5)
    assert blind.best("r1c1").points == 1.0
    assert published_gains("digits_blind") == ()


def test_nothing_published(own_file: Path) -> None:
    """Without a file there are no gains, and no error."""
    assert not own_file.exists()
    assert published_gains("digits") == ()


def test_published_tasks_exist() -> None:
    """Something is published, and all of it is of registered tasks."""
    assert PUBLISHED
    assert set(PUBLISHED) <= set(TaskRegistry.names())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_cells(name: str) -> None:
    """Each kind of host and every slot with all of its offers, under the registry's own parameter counts."""
    task = get_task(name)
    kinds = published_gains(name)
    assert sorted(kind.defect for kind in kinds) == sorted(task.defects)
    for kind in kinds:
        assert task.chance_accuracy / 2 < kind.host_accuracy < 100
        assert kind.repeats >= 2
        offered = {
            (slot.slot_id, offer.name): offer.parameters for slot in task.slot_config.slots for offer in slot.blueprints
        }
        assert {(gain.slot_id, gain.blueprint): gain.parameters for gain in kind.gains} == offered
        for gain in kind.gains:
            slot = task.slot_config[gain.slot_id]
            seed = BlueprintRegistry.build(slot.topology, gain.blueprint, slot.width)
            assert gain.parameters == sum(parameter.numel() for parameter in seed.parameters())
            assert 0 <= kind.host_accuracy + gain.points <= 100
            assert gain.deviation >= 0
        assert {kind.best(slot_id).slot_id for slot_id in task.slot_ids} == set(task.slot_ids)
