"""How a seed's Δ joins the stream, by hand."""

import math

import pytest
import torch
from hosts import HOST_KINDS, HostKind, bring_to, make_batch, make_model, shake
from torch import Tensor

from esper.kasmina import SeedSlot, SeedState
from esper.kasmina.blending import GATE_BIAS, BlendGate, blend, straight_through
from esper.leyline import ACTIVE_STAGES, BLEND_STYLES, SeedStage, SlotSpec, Topology

H = [1.0, -2.0]
DELTA = [0.5, 4.0]


def vector(values: list[float]) -> Tensor:
    """One sample of a vector slot of width 2."""
    return torch.tensor([values], dtype=torch.float64)


def make_vector_gate(weight: list[float], bias: float) -> BlendGate:
    gate = BlendGate(2, "vector").double()
    assert gate.linear.bias is not None
    with torch.no_grad():
        gate.linear.weight.copy_(vector(weight))
        gate.linear.bias.fill_(bias)
    return gate


def test_add() -> None:
    # 1 + ½·½ = 1.25; −2 + ½·4 = 0
    assert blend(vector(H), vector(DELTA), 0.5, "add").tolist() == [[1.25, 0.0]]


def test_multiply() -> None:
    # tanh ½ = 0.4621171573: 1·(1 + 0.4621171573/2) = 1.2310585786
    # tanh 4 = 0.9993292997: −2·(1 + 0.9993292997/2) = −2.9993292997
    result = blend(vector(H), vector(DELTA), 0.5, "multiply")
    assert result.tolist()[0] == pytest.approx([1.2310585786, -2.9993292997], abs=1e-9)


def test_gate() -> None:
    # w·h + b = 1·1 + (−1)·(−2) + 0 = 3, σ(3) = 0.9525741268:
    # 1 + ½·0.9525741268·½ = 1.2381435317; −2 + ½·0.9525741268·4 = −0.0948517463
    result = blend(vector(H), vector(DELTA), 0.5, "gate", make_vector_gate([1.0, -1.0], 0.0))
    assert result.tolist()[0] == pytest.approx([1.2381435317, -0.0948517463], abs=1e-9)


def test_gate_at_birth_is_nearly_open_for_every_sample() -> None:
    # σ(2) = 0.8807970780, whatever h is
    gate = BlendGate(2, "vector").double()
    opened = gate(torch.tensor([H, [7.0, 7.0]], dtype=torch.float64))
    assert math.isclose(1 / (1 + math.exp(-GATE_BIAS)), 0.8807970780, abs_tol=1e-9)
    assert opened.flatten().tolist() == pytest.approx([0.8807970780] * 2, abs=1e-9)


@pytest.mark.parametrize(
    ("topology", "h", "shape"),
    [
        ("image", [[[[1.0, 3.0]], [[0.0, -4.0]]]], (1, 1, 1, 1)),  # a channel (1, 3), a channel (0, −4)
        ("tokens", [[[1.0, 0.0], [3.0, -4.0]]], (1, 1, 1)),  # the same as two tokens
        ("vector", [[2.0, -2.0]], (1, 1)),  # their means
    ],
)
def test_gate_sees_the_mean_over_pixels_or_tokens(topology: Topology, h: list[float], shape: tuple[int, ...]) -> None:
    # means (2, −2), w = (1, ½), b = 0: 2 − 1 = 1, σ(1) = 0.7310585786
    gate = BlendGate(2, topology).double()
    assert gate.linear.bias is not None
    with torch.no_grad():
        gate.linear.weight.copy_(vector([1.0, 0.5]))
        gate.linear.bias.zero_()
    opened = gate(torch.tensor(h, dtype=torch.float64))
    assert opened.shape == shape
    assert opened.item() == pytest.approx(0.7310585786, abs=1e-9)


@pytest.mark.invariant(1)
@pytest.mark.parametrize("style", BLEND_STYLES)
def test_identity_at_alpha_zero(style: str) -> None:
    """At alpha 0 the formulas return the host's stream bit for bit, whatever Δ is."""
    h, delta = torch.randn(2, 3, 2), 100 * torch.randn(2, 3, 2)
    gate = BlendGate(2, "tokens") if style == "gate" else None
    assert torch.equal(blend(h, delta, 0.0, style, gate), h)
    assert torch.equal(blend(h, delta, torch.zeros(()), style, gate), h)


def test_alpha_may_differ_by_row() -> None:
    """A tensor that broadcasts: ½ for the first row, 0 for the second."""
    h, delta = torch.ones(2, 3, 4), torch.full((2, 3, 4), 2.0)
    result = blend(h, delta, torch.tensor([0.5, 0.0]).reshape(2, 1, 1), "add")
    assert torch.equal(result[0], torch.full((3, 4), 2.0))
    assert torch.equal(result[1], torch.ones(3, 4))


@pytest.mark.parametrize("style", BLEND_STYLES)
def test_only_the_gate_style_has_a_gate(style: str) -> None:
    slot = SeedSlot(SlotSpec("r0c0", 4, "vector", position=0.5))
    slot.plant(SeedState("r0c0", SeedStage.GERMINATED, "norm", style), 0, like=torch.ones(1))
    assert (slot.gate is not None) == (style == "gate")


def test_straight_through() -> None:
    """The value of h, the gradient of both: y = h² + 3Δ contributes 3 to Δ and nothing through its detached h."""
    h = vector(H).requires_grad_()
    delta = vector(DELTA).requires_grad_()
    passed = straight_through(h, h.detach().square() + 3 * delta)
    assert torch.equal(passed, h)
    (gradient_h, gradient_delta) = torch.autograd.grad((passed * vector([1.0, 10.0])).sum(), [h, delta])
    assert gradient_h.tolist() == [[1.0, 10.0]]
    assert gradient_delta.tolist() == [[3.0, 30.0]]


# -- conductance ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", BLEND_STYLES)
@pytest.mark.parametrize("kind", HOST_KINDS)
def test_conductance_zero_silences(kind: HostKind, style: str) -> None:
    """In a slot that does not conduct a seed does nothing, in no stage, and learns nothing; other slots conduct."""
    x, targets = make_batch(kind)
    for stage in (SeedStage.TRAINING, SeedStage.HOLDING):
        model = make_model(kind, 2)
        first, second = model.seed_slots
        for slot_id in (first, second):
            bring_to(model, slot_id, stage, (x, targets), style=style)
            shake(model.seed_slots[slot_id], 1)
        model.host.get_buffer("conductance")[0] = 0

        losses = model.losses(x, targets)
        sum(losses.values(), torch.zeros(())).backward()
        gradients = {
            slot_id: [float(p.grad.abs().sum()) for p in model.seed_parameters(slot_id) if p.grad is not None]
            for slot_id in (first, second)
        }
        assert not any(gradients[first])
        assert any(gradients[second])
        if stage is SeedStage.TRAINING:
            assert torch.equal(losses[first], losses["main"])
            assert not torch.equal(losses[second], losses["main"])
        else:
            assert stage in ACTIVE_STAGES
            main = model.body(x, True)[0]
            model.seed_slots[first].alpha.zero_()
            assert torch.equal(model.body(x, True)[0], main)
            model.seed_slots[second].alpha.zero_()
            assert not torch.equal(model.body(x, True)[0], main)


def test_conductance_scales_the_effect() -> None:
    """At ½ a seed at alpha 1 acts like one at alpha ½ (exact: both are powers of two)."""
    x, targets = make_batch("mlp")
    model = make_model("mlp", 1)
    bring_to(model, "r0c0", SeedStage.HOLDING, (x, targets))
    shake(model.seed_slots["r0c0"], 1)
    model.host.get_buffer("conductance")[0] = 0.5
    conducted = model(x)
    model.host.get_buffer("conductance")[0] = 1
    assert not torch.equal(model(x), conducted)
    model.seed_slots["r0c0"].alpha.fill_(0.5)
    assert torch.equal(model(x), conducted)
