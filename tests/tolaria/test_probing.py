"""Sensing at slots: equal to what a seed would feel, and without a trace."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from esper.kasmina import BlueprintRegistry, Host
from esper.kasmina.layers import Scale
from esper.leyline import derive_seed
from esper.tolaria import HostFleet, get_task
from esper.tolaria.measurement import Prober, worths_of
from esper.tolaria.passes import row_losses


def make_fleet(name: str = "digits_varied", n: int = 6) -> HostFleet:
    """A small fleet after a little training."""
    fleet = HostFleet(replace(get_task(name), batches_per_step=2, batch=16), n)
    fleet.train_step()
    fleet.tick()
    return fleet


def test_leaves_no_trace() -> None:
    """No weight, buffer or gradient is touched, and probing twice says the same."""
    fleet = make_fleet()
    prober = Prober(fleet)
    before = [fleet.host.weights.matrix.clone(), *(buffer.clone() for buffer in fleet.host.buffers.values())]
    first, second = prober(), prober()
    after = [fleet.host.weights.matrix, *fleet.host.buffers.values()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_shapes_and_ranges() -> None:
    fleet = make_fleet()
    found = Prober(fleet)()
    slots, blueprints = len(fleet.slots), len(fleet.task.slot_config.blueprint_names)
    assert found.offers.shape == (6, slots, blueprints)
    for values in (found.rms, found.rank, found.gradient):
        assert values.shape == (6, slots)
    assert bool(found.rms.gt(0).all())
    assert bool(found.rank.gt(0).all() & found.rank.le(1).all())
    torch.testing.assert_close(found.gradient.sum(1), torch.ones(6))
    torch.testing.assert_close(found.offers.flatten(1).amax(1), torch.ones(6))


def test_nothing_is_offered_where_the_host_lets_nothing_through() -> None:
    """A first slot that is cut off has worth exactly 0; its other slots do not."""
    fleet = make_fleet(n=12)
    cut = fleet.host.buffers["conductance"][:12, fleet.places["r1c0"]] == 0
    assert bool(cut.any()) and not bool(cut.all()), "the seeds draw both kinds of host"
    offers = Prober(fleet)().offers
    assert float(offers[cut, 0].abs().max()) == 0
    assert float(offers[~cut, 0].amax(1).min()) > 0
    assert float(offers[cut, 1].amax(1).min()) > 0


@pytest.mark.parametrize("blueprint", ["depthwise", "norm", "conv_light"])
def test_worth_is_the_gradient_of_a_newborns_scale(blueprint: str) -> None:
    """Against autograd through a single network with the seed in its slot at alpha 1."""
    fleet = make_fleet("digits_blind", 3)
    inputs, targets = fleet.draw(fleet.step_index * fleet.task.batches_per_step)
    slot_id = "r1c1"
    slot = fleet.slots[slot_id]
    norms = []
    for env in range(3):
        host = fleet.extract(env).host
        assert isinstance(host, Host)
        rng_seed = derive_seed("probe", slot_id, blueprint)
        seed = BlueprintRegistry.build(
            slot.topology, blueprint, slot.width, resolution=slot.resolution, rng_seed=rng_seed
        )
        scale = next(part for part in seed.modules() if isinstance(part, Scale))
        h = inputs[env]
        for index, segment in enumerate(host.segments):
            h, _ = segment(h, True)
            if index == host.slot_index(slot_id):
                with torch.no_grad():
                    nn.init.ones_(scale.weight)
                inside = seed(h)
                born = torch.zeros(slot.width, requires_grad=True)
                h = h + born[:, None, None] * inside
        loss = row_losses(h[None], targets[env : env + 1]).sum()
        (gradient,) = torch.autograd.grad(loss, born)
        norms.append(float(gradient.norm()))
    # Offers are relative to each env's largest; this is what they are before that.
    done = fleet.host.run(fleet.update_plan().main, inputs, train=True, tapped=fleet.places.values())
    stream = done.taps[fleet.places[slot_id]]
    (g,) = torch.autograd.grad(row_losses(done.output, targets).sum(), [stream])
    seed, conductance = Prober(fleet).newborns[slot_id, blueprint], fleet.host.buffers["conductance"]
    raw = worths_of([None, seed], stream.detach(), g, conductance[:, fleet.places[slot_id]])[:3]
    assert raw[:, 0].tolist() == [0.0] * 3
    assert raw[:, 1].tolist() == pytest.approx(norms, rel=1e-3)


@pytest.mark.gpu
def test_cuda_senses_what_the_cpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 without TF32; blueprints by kernels that run whole stages."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    task = replace(get_task("digits_varied"), batches_per_step=2, batch=16)
    here, there = (Prober(HostFleet(task, 6, device))() for device in ("cpu", "cuda"))
    for found, wanted in zip(there, here, strict=True):
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-3, atol=1e-4)
