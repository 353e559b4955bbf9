"""The weights of the policy's network: how they begin, and that all of them matter."""

import math
from dataclasses import replace

import pytest
import torch
from tamiyo.policies import NAMES, SHARP, SMALL, build, decide, layout, random_masks, slots
from torch import Tensor, nn

from esper.leyline import BadValueError, LifecycleOp, head_preset
from esper.tamiyo import (
    ActionHead,
    ActionTable,
    FactoredRecurrentActorCritic,
    NetworkConfig,
    discrete_table,
    growth_table,
    vector_layout,
)
from esper.tamiyo.encoder import Stretches
from esper.tamiyo.memory import FORGET_BIAS


@pytest.mark.requirement(66)
@pytest.mark.parametrize("name", NAMES)
def test_the_first_policy_is_nearly_uniform(name: str) -> None:
    """Every head is near uniform over the legal choices, and the heads' gain is a setting."""
    network = build(name, NetworkConfig())
    masks, flat = random_masks(network.table, 256), torch.randn(256, network.layout.size)
    found = decide(network, flat, masks, uniform=torch.rand(256, len(network.table)))
    assert found.entropies[found.decided].min() > 0.95
    sharp = build(name, NetworkConfig(head_gain=30.0))
    found = decide(sharp, flat, masks, actions=found.actions)
    assert found.entropies[found.decided].mean() < 0.95


@pytest.mark.requirement(66)
@pytest.mark.parametrize("name", NAMES)
def test_every_weight_learns(name: str) -> None:
    """Every weight, including the LSTM's, gets a gradient from random steps."""
    network = build(name, SHARP)
    table = network.table
    encoded = network.encode(torch.randn(512, network.layout.size))
    core, _ = network.step(encoded.trunk, (torch.randn(512, 16), torch.randn(512, 16)))
    found = network.decide(core, encoded, table.open_masks(512), 0.3, uniform=torch.rand(512, len(table)))
    ((found.log_probs + network.value(core, encoded).unsqueeze(1)) * torch.randn(512, 1)).sum().backward()
    # Of a single slot there is nothing to choose: what points at slots waits for a host with more.
    single = network.layout.slots == 1
    idle = {"slot_attention.weight", "heads.slot.weight", "heads.slot.bias"} if single else set()
    for part, weight in network.named_parameters():
        assert weight.grad is not None, part
        assert (weight.grad.abs().max() > 1e-2) == (part not in idle), part  # rounding alone gives up to 1e-5
        if part.startswith("choice_embeddings.") and not single:
            # After WAIT there is nobody to tell.
            silent = [LifecycleOp.WAIT] if part == "choice_embeddings.op.weight" else []
            assert (weight.grad.abs().amax(1) < 1e-3).nonzero().flatten().tolist() == silent


def test_the_last_choice_is_told_to_nobody() -> None:
    """No weights are kept for it, whatever its kind."""
    table = ActionTable((ActionHead("op", 2), ActionHead("slot", 3, "pointer", given="op")))
    names = FactoredRecurrentActorCritic(table, layout(3), SMALL).state_dict()
    assert [name for name in names if "choice_embeddings" in name] == ["choice_embeddings.op.weight"]


@pytest.mark.requirement(66)
def test_heads_begin_small_and_what_they_read_does_not() -> None:
    """Only the layer that computes the logits is scaled down; offers matter from the first step."""
    network = build("core3", replace(SMALL, head_gain=0.01))
    weights = dict(network.named_parameters())
    assert weights["heads.blueprint.score.weight"].norm().item() == pytest.approx(0.01, rel=1e-4)
    # Orthogonal columns of length √2 each; there are two.
    assert weights["heads.blueprint.columns.weight"].norm().item() == pytest.approx(
        math.sqrt(2) * math.sqrt(2), rel=1e-4
    )


@pytest.mark.requirement(29)
def test_forget_gates_begin_open() -> None:
    """The second of torch's four slices is 1 over both biases together; all others start at 0."""
    lstm = build("vector").memory
    total = torch.as_tensor(lstm.bias_ih_l0) + torch.as_tensor(lstm.bias_hh_l0)
    assert total.tolist() == [0.0] * 16 + [FORGET_BIAS] * 16 + [0.0] * 32
    assert FORGET_BIAS == 1.0


@pytest.mark.requirement(27)
@pytest.mark.parametrize("name", NAMES)
def test_no_norm_around_the_memory(name: str) -> None:
    """There is no norm layer, so inputs ten times larger enter the core about ten times larger."""
    network = build(name, replace(SMALL, encoder_layers=2))
    assert [part for part, module in network.named_modules() if "norm" in type(module).__name__.lower()] == []
    seen = torch.randn(64, network.layout.size)
    weak, strong = network.encode(seen).trunk, network.encode(10 * seen).trunk
    assert bool(((strong.norm(dim=-1) / weak.norm(dim=-1)).median() - 10).abs() < 2)


@pytest.mark.requirement(27)
@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_the_magnitude_of_the_memory_reaches_actor_and_critic(name: str) -> None:
    """What the LSTM puts out ten times as strongly is ten times as strong before both ReLUs, in a step as in a
    sequence. Biases begin at 0; the critic's own columns are 0 here."""
    network = build(name)
    encoded = network.encode(torch.randn(8, network.layout.size))
    encoded = encoded._replace(critic=torch.zeros_like(encoded.critic))
    memory = torch.randn(8, 16), torch.randn(8, 16)
    core, after = network.step(encoded.trunk, memory)
    assert torch.equal(core, after[0])
    unrolled = network.unroll(encoded.trunk, Stretches(((8, 1),), None), memory)
    torch.testing.assert_close(unrolled, core, rtol=1e-4, atol=1e-5)
    seen: dict[str, list[Tensor]] = {"actor": [], "critic.0": []}
    for part, outputs in seen.items():
        network.get_submodule(part).register_forward_hook(lambda _, __, output, kept=outputs: kept.append(output))
    for strength in (1, 10):
        network.decide(strength * core, encoded, network.table.open_masks(8), 0.0)
        network.value(strength * core, encoded)
    for weak, strong in seen.values():
        assert float(weak.abs().max()) > 0.01
        torch.testing.assert_close(strong, 10 * weak, rtol=1e-4, atol=1e-5)


@pytest.mark.requirement(67)
@pytest.mark.parametrize("name", ["vector", "full3"])
def test_every_width_is_the_one_that_was_set(name: str) -> None:
    """Encoder 8, LSTM 32, actor and critic 12: no layer has another width."""
    network = build(name, NetworkConfig(encoder=8, encoder_layers=2, hidden=32, head=12))
    seen = network.layout
    shapes = {part: tuple(weight.shape) for part, weight in network.named_parameters() if weight.dim() == 2}
    pooled = 3 * 8 if seen.slots else 0
    expected = {
        "trunk.0.weight": (8, len(seen.host) + pooled),
        "trunk.2.weight": (8, 8),
        "memory.weight_ih_l0": (4 * 32, 8),
        "memory.weight_hh_l0": (4 * 32, 32),
        "actor.weight": (12, 32),
        "critic.0.weight": (12, 32 + len(seen.critic)),
        "critic_out.weight": (1, 12),
    }
    if seen.slots:
        expected |= {
            "slot_encoder.0.weight": (8, len(seen.slot) + 2 * len(seen.offer)),
            "slot_encoder.2.weight": (8, 8),
            "slot_attention.weight": (1, 8),
            "slot_projection.weight": (12, 8),
            "heads.slot.weight": (8, 12),
            "heads.blueprint.names.weight": (seen.blueprints, 12),
            "heads.blueprint.columns.weight": (12, len(seen.offer)),
            "heads.blueprint.score.weight": (1, 12),
        }
    linear = [head for head in network.table.heads if head.kind == "linear"]
    expected |= {f"heads.{head.name}.weight": (head.size, 12) for head in linear}
    expected |= {f"choice_embeddings.{head.name}.weight": (head.size, 12) for head in linear[:-1]}
    assert shapes == expected


@pytest.mark.requirement(67)
@pytest.mark.parametrize(
    "config",
    [
        NetworkConfig(hidden=16),
        NetworkConfig(encoder=16),
        NetworkConfig(encoder_layers=3),
        NetworkConfig(4, 1, 4, 4),
        NetworkConfig(encoder=8, hidden=32, head=12),
    ],
)
def test_widths_and_depth_are_settings(config: NetworkConfig) -> None:
    """Every part of the network follows the configured widths and depth."""
    network = build("full3", config)
    found = decide(network, torch.randn(4, network.layout.size), uniform=torch.rand(4, 8))
    assert found.log_probs.isfinite().all()
    assert network.step(torch.randn(4, config.encoder), network.initial_state(4))[0].shape == (4, config.hidden)
    assert len([part for part in network.trunk if isinstance(part, nn.Linear)]) == config.encoder_layers


@pytest.mark.requirement(67)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("encoder", 3),
        ("hidden", 0),
        ("head", 3),
        ("head", 16.0),
        ("encoder_layers", 0),
        ("head_gain", 0.0),
        ("head_gain", math.inf),
        ("first_bias", (0.0, math.nan)),
    ],
)
def test_settings_that_make_no_sense_are_refused(field: str, value: object) -> None:
    """Widths and depths below their minimum are refused."""
    with pytest.raises(BadValueError, match=field):
        NetworkConfig(**{field: value})  # type: ignore[arg-type]  # the point of the test


def test_first_bias() -> None:
    """2.5 on WAIT: odds of e^2.5 = 12.2 to each of five other ops, so a chance of 12.2 / 17.2 = 0.709."""
    network = build("core3", replace(SMALL, first_bias=(2.5, 0, 0, 0, 0, 0)))
    wait = torch.zeros(64, 3, dtype=torch.long)
    found = decide(network, torch.randn(64, network.layout.size), actions=wait)
    assert found.log_probs[:, 0].exp().mean().item() == pytest.approx(0.709, abs=0.01)


def test_tables_and_layouts_must_fit() -> None:
    """At construction: slots, blueprints, and the bias of the first head."""
    core = growth_table(head_preset("core"), slots(3))
    with pytest.raises(BadValueError, match="'slot' chooses among 3 slots; the layout has 2"):
        FactoredRecurrentActorCritic(core, layout(2))
    with pytest.raises(BadValueError, match="'blueprint' chooses among 3 blueprints; the layout has 4"):
        FactoredRecurrentActorCritic(core, replace(layout(3), blueprints=4))
    with pytest.raises(BadValueError, match="2 entries for the 3 choices of head 'action0'"):
        FactoredRecurrentActorCritic(discrete_table((3,)), vector_layout(2), NetworkConfig(first_bias=(0.0, 1.0)))
    pointer = ActionTable((ActionHead("slot", 3, "pointer"),))
    with pytest.raises(BadValueError, match=r"'slot' \(pointer\)"):
        FactoredRecurrentActorCritic(pointer, layout(3), NetworkConfig(first_bias=(0.0, 1.0, 0.0)))


@pytest.mark.invariant(13)
def test_weights_follow_from_the_seed() -> None:
    """Equal seeds give equal weights, and different seeds different ones."""
    networks = []
    for rng_seed in (1, 1, 2):
        torch.manual_seed(rng_seed)
        networks.append(build("full3").state_dict())
    first, again, other = networks
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["actor.weight"], other["actor.weight"])


def test_nothing_but_weights_is_saved() -> None:
    """The table's relevance comes with the table; it is no part of a checkpoint."""
    network = build("core3")
    assert set(network.state_dict()) == {name for name, _ in network.named_parameters()}
