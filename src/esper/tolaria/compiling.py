"""Compiles the CUDA kernels of a fleet before it needs them."""

import sys
from dataclasses import replace

import torch

from esper.tolaria.banks import bucket
from esper.tolaria.fleet import HostFleet
from esper.tolaria.measurement import Prober


def compile_kernels(fleet: HostFleet) -> None:
    """Compile what this fleet may need, on all cores at once; else each kernel is compiled when it is first needed.
    On the CPU there is nothing to compile."""
    if fleet.device.type != "cuda":
        return
    from esper.kasmina.kernels.launching import compiling_ahead  # only CUDA builds include triton

    # In other threads the backward pass would not know that nothing is to run.
    with compiling_ahead(), torch.autograd.set_multithreading_enabled(False):
        rehearse(fleet)


def rehearse(fleet: HostFleet) -> None:
    """Grow every blueprint in every slot of a small fleet of the same kind; train, validate and probe it once."""
    hosts = bucket(max(len(slot.blueprints) for slot in fleet.slots.values()))
    task = replace(fleet.task, budget=sys.maxsize)
    twin = HostFleet(
        task,
        hosts,
        fleet.device,
        seeds=[0] * hosts,
        batches=fleet.batches,
        dtype=fleet.dtype,
        compute=fleet.compute,
        isolation=fleet.isolation,
        graphs=False,
    )
    for slot_id, slot in twin.slots.items():
        for env, offer in enumerate(slot.blueprints):
            twin.germinate(env, slot_id, offer.name)
            twin.advance(env, slot_id)
    twin.train_minibatch(twin.draw(0), task.optimiser.rate)
    twin.validate()
    Prober(twin)()
