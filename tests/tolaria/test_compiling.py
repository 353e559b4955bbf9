"""Kernels of seeds are compiled before the seeds grow."""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from fleets import SGD, make_fleet, note, shake, task_of

from esper.kasmina import lifecycle
from esper.tolaria.compiling import compile_kernels

SEEDS = ("stage_", "kernel_gradient", "squeeze_", "sum_splits")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are compiled, or fetched from the cache, in a test."""
    knobs = pytest.importorskip("triton.knobs")
    names: list[str] = []

    def remember(*, fn: Any, **_: object) -> None:
        names.append(fn.name.rsplit(".", 1)[-1])

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", remember)
    return names


@pytest.mark.gpu
def test_afterwards_seeds_need_no_other_kernel(compiled: list[str]) -> None:
    """Training with shadow rows, validation and probe."""
    from esper.tolaria.measurement import Prober

    task = replace(task_of("cnn", SGD), budget=sys.maxsize)
    fleet = make_fleet(task, 12, device=torch.device("cuda"), grown=False)
    fleet.graphs = None
    compile_kernels(fleet)
    assert any(name.startswith(SEEDS) for name in compiled)
    compiled.clear()
    for slot_id, slot in fleet.slots.items():
        for env, offer in enumerate(slot.blueprints):
            fleet.germinate(env, slot_id, offer.name)
            fleet.advance(env, slot_id)
            if env % 2:
                note(fleet, env, slot_id, lambda state: lifecycle.record_gradient(state, 1.0))
                fleet.advance(env, slot_id)
    shake(fleet)
    fleet.train_minibatch(fleet.draw(0), 0.01)
    fleet.validate()
    Prober(fleet)()
    assert [name for name in compiled if name.startswith(SEEDS)] == []


def test_on_the_cpu_nothing_is_compiled() -> None:
    """It needs no triton there."""
    compile_kernels(make_fleet(task_of("cnn"), 2, grown=False))
