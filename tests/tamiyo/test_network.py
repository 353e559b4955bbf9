"""What the policy's network computes; collecting and learning compute the same."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from syncs import no_sync
from tamiyo.policies import NAMES, SHARP, SMALL, build, decide, layout, random_masks, slots
from torch import Tensor, nn

from esper.leyline import HEAD_NAMES, HEADS, BadValueError, Head, HeadPreset, LifecycleOp, UnknownNameError
from esper.tamiyo import ActionTable, FactoredRecurrentActorCritic, NetworkConfig, growth_table
from esper.tamiyo.encoder import Stretches
from esper.tamiyo.memory import LstmMemory, MemoryKind
from esper.tamiyo.network import Decision

LAST_DRAW = 1 - 2**-24
"""The largest float32 below 1."""
ALIVE = torch.arange(7).unsqueeze(1) < torch.tensor([7, 5, 5, 2])
"""(time, sequences) of four sequences of unequal length."""
STRETCHES = {
    # 2 steps of all, 3 of the first three, 2 of the first alone.
    "full": Stretches(((4, 2), (3, 3), (1, 2)), None),
    "padded": Stretches(((4, 7),), torch.arange(28).view(7, 4)[ALIVE]),
    # 4 steps of all, of which the last sequence needs 2; then 3 of the first three.
    "both": Stretches(
        ((4, 4), (3, 3)),
        torch.tensor([4 * t + s if t < 4 else 16 + 3 * (t - 4) + s for t, s in ALIVE.nonzero().tolist()]),
    ),
}


def columns_of(decision: Decision) -> dict[str, Tensor]:
    """The fields with a row per env, by name."""
    return {name: value for name, value in decision._asdict().items() if isinstance(value, Tensor)}


def legal_actions(table: ActionTable, masks: dict[str, Tensor], env: int) -> set[tuple[int, ...]]:
    """All actions that an env may take, by trying each."""
    found = set()
    for action in product(*(range(head.size) for head in table.heads)):
        chosen = dict(zip(table.names, action, strict=True))
        for head in table.heads:
            mask = masks[head.name][env]
            mask = mask if head.given is None else mask[chosen[head.given]]
            used = head.matters is None or head.matters[action[0]]
            if not (mask[chosen[head.name]] if used else chosen[head.name] == head.placeholder):
                break
        else:
            found.add(action)
    return found


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stretches", STRETCHES.values(), ids=STRETCHES)
@pytest.mark.parametrize("name", NAMES)
def test_steps_equal_the_unrolled_sequence(name: str, stretches: Stretches) -> None:
    """From a memory that is not empty, with sequences that end at different times."""
    network = build(name)
    flat = torch.randn(7, 4, network.layout.size)
    hidden_state = torch.randn(4, 16), torch.randn(4, 16)
    state, cores = hidden_state, []
    for now in flat:
        core, state = network.step(network.encode(now).trunk, state)
        cores.append(core)
    unrolled = network.unroll(network.encode(flat[ALIVE]).trunk, stretches, hidden_state)
    assert torch.allclose(unrolled, torch.stack(cores)[ALIVE], atol=1e-5)
    assert not torch.allclose(cores[1], network.step(network.encode(flat[1]).trunk, hidden_state)[0], atol=1e-2)


def test_without_recurrence_memory_has_no_say() -> None:
    """Neither in a step nor in a sequence; both still agree."""
    network = build("core3", NetworkConfig(encoder=16, hidden=16, head=16, recurrent=False))
    trunk = network.encode(torch.randn(7, 4, network.layout.size)[ALIVE]).trunk
    first, second = ((torch.randn(len(trunk), 16), torch.randn(len(trunk), 16)) for _ in range(2))
    core, _ = network.step(trunk, first)
    assert torch.equal(core, network.step(trunk, second)[0])
    for stretches in STRETCHES.values():
        assert torch.allclose(network.unroll(trunk, stretches, first), core, atol=1e-6)


@pytest.mark.parametrize("stretches", STRETCHES.values(), ids=STRETCHES)
@pytest.mark.parametrize(("memory", "layers"), [("lstm", 2), ("lstm", 3), ("window", 1), ("off", 1)])
def test_every_memory_unrolls_what_it_steps(memory: MemoryKind, layers: int, stretches: Stretches) -> None:
    """From a state that is not empty. The state has the size that the settings say."""
    network = build("vector", NetworkConfig(16, 1, 16, 16, memory=memory, memory_layers=layers))
    flat = torch.randn(7, 4, 5)
    size = network.config.state_size
    hidden_state = torch.randn(4, size), torch.randn(4, size)
    state, cores = hidden_state, []
    for now in flat:
        core, state = network.step(network.encode(now).trunk, state)
        cores.append(core)
    assert {part.shape for part in (*state, *network.initial_state(4))} == {(4, size)}
    unrolled = network.unroll(network.encode(flat[ALIVE]).trunk, stretches, hidden_state)
    assert torch.allclose(unrolled, torch.stack(cores)[ALIVE], atol=1e-5)
    again = network.step(network.encode(flat[1]).trunk, hidden_state)[0]
    assert torch.equal(cores[1], again) is (memory == "off")


def test_an_lstm_of_two_layers_is_torch_s_own() -> None:
    """The upper layer reads the lower one; all forget gates start open."""
    memory = LstmMemory(3, 4, 2)
    memory.reset_memory()
    assert [memory.get_parameter(f"bias_ih_l{layer}").tolist() for layer in (0, 1)] == [
        [0.0] * 4 + [1.0] * 4 + [0.0] * 8
    ] * 2
    block, state = torch.randn(5, 2, 3), (torch.randn(2, 8), torch.randn(2, 8))
    before, cells = (part.view(2, 2, 4).transpose(0, 1).contiguous() for part in state)
    expected, (hidden, cell) = nn.LSTM.forward(memory, block, (before, cells))
    found, following = memory.unroll(block, state)
    assert torch.equal(found, expected)
    assert torch.equal(following[0], torch.cat([*hidden], 1)) and torch.equal(following[1], torch.cat([*cell], 1))


def test_memory_settings_are_checked() -> None:
    with pytest.raises(BadValueError, match="memory_layers 0 is not an integer of 1 or more"):
        NetworkConfig(memory_layers=0)
    with pytest.raises(BadValueError, match="memory_layers 2 with memory 'off'; only an LSTM has layers"):
        NetworkConfig(memory="off", memory_layers=2)
    with pytest.raises(UnknownNameError, match="'gru'; allowed: lstm, window, off"):
        NetworkConfig(memory="gru")  # type: ignore[arg-type]  # wrong on purpose


# -- one decision after the other -------------------------------------------------------------------------------------


@pytest.mark.invariant(8)
@pytest.mark.parametrize("epsilon", [0.0, 0.05])
@pytest.mark.parametrize("name", NAMES)
def test_log_probs_are_those_of_collection(name: str, epsilon: float) -> None:
    """Every head agrees, placeholders included, with random conditional masks and a hidden state."""
    network = build(name, SHARP)
    table, hidden_state = network.table, network.initial_state(4)
    flat = torch.randn(7, 4, network.layout.size)
    masks = [random_masks(table, 4) for _ in flat]
    collected = []
    for now, allowed in zip(flat, masks, strict=True):
        encoded = network.encode(now)
        core, hidden_state = network.step(encoded.trunk, hidden_state)
        collected.append(network.decide(core, encoded, allowed, epsilon, uniform=torch.rand(4, len(table))))
    encoded = network.encode(flat[ALIVE])
    core = network.unroll(encoded.trunk, STRETCHES["both"], network.initial_state(4))
    packed = {name: torch.stack([allowed[name] for allowed in masks])[ALIVE] for name in table.names}
    actions = torch.stack([decision.actions for decision in collected])[ALIVE]
    learnt = network.decide(core, encoded, packed, epsilon, actions=actions)
    for field, values in columns_of(learnt).items():
        before = torch.stack([columns_of(step)[field] for step in collected])[ALIVE]
        assert torch.allclose(values, before, atol=1e-5), field
    assert torch.equal(learnt.causal, table.relevance[actions[:, 0]])
    assert (learnt.log_probs[~learnt.causal] == 0).all()
    assert (learnt.log_probs[learnt.decided] < 0).all()
    placeholders = torch.tensor([head.placeholder for head in table.heads]).expand_as(actions)
    assert torch.equal(actions[~learnt.causal], placeholders[~learnt.causal])


POLICIES = {name: build(name, SHARP) for name in ("core1", "core3", "full3")}


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(POLICIES)), st.integers(0, 2**32 - 1), st.floats(0.05, 1), st.sampled_from([0.0, 0.1]))
def test_drawn_actions_are_legal(name: str, rng_seed: int, share: float, epsilon: float) -> None:
    """Under random conditional masks, by any draw, the first and the last; and so are the likeliest ones."""
    torch.manual_seed(rng_seed)
    network, table = POLICIES[name], POLICIES[name].table
    masks, flat = random_masks(table, 16, share), torch.randn(16, network.layout.size)
    draws = torch.rand(16, len(table))
    draws[draws < 0.2], draws[draws > 0.8] = 0.0, LAST_DRAW
    for uniform in (draws, None):
        found = decide(network, flat, masks, epsilon=epsilon, uniform=uniform)
        assert (found.choices > 0).all()
        for env, action in enumerate(found.actions.tolist()):
            for place, head in enumerate(table.heads):
                mask = masks[head.name][env]
                mask = mask if head.given is None else mask[action[table.index(head.given)]]
                used = bool(found.causal[env, place])
                assert mask[action[place]] if used else action[place] == head.placeholder
                assert not used or found.choices[env, place] == mask.sum()


def test_forced_where_one_action_is_legal() -> None:
    """Whatever is drawn: by counting all joint actions of a host with two slots."""
    network = build("core2", SHARP)
    masks = random_masks(network.table, 200, 0.25)
    found = decide(network, torch.randn(200, network.layout.size), masks, uniform=torch.rand(200, 3))
    legal = [legal_actions(network.table, masks, env) for env in range(200)]
    forced = ~found.decided.any(-1)
    assert forced.tolist() == [len(actions) == 1 for actions in legal]
    assert 20 < forced.sum() < 180
    assert all(tuple(action) in actions for action, actions in zip(found.actions.tolist(), legal, strict=True))


def test_joint_probabilities_sum_to_one() -> None:
    """Over all legal joint actions of an env: the log-prob of an action is the sum over its heads."""
    network = build("core2", SHARP)
    masks = random_masks(network.table, 20)
    for env in range(20):
        actions = torch.tensor(sorted(legal_actions(network.table, masks, env)))
        same = {name: mask[env].expand(len(actions), *mask.shape[1:]) for name, mask in masks.items()}
        flat = torch.randn(1, network.layout.size).expand(len(actions), -1)
        found = decide(network, flat, same, epsilon=0.05, actions=actions)
        assert found.log_probs.sum(-1).exp().sum().item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.requirement(65)
def test_empty_masks_show_without_a_look_at_the_device() -> None:
    """Empty masks count 0 choices where the action uses the head. Any read on the meta device would raise."""
    network = build("core3")
    masks = network.table.open_masks(2)
    masks["blueprint"][0] = False
    actions = torch.tensor([[LifecycleOp.GERMINATE, 1, 0], [LifecycleOp.PRUNE, 1, 0]])
    flat = torch.randn(2, network.layout.size)
    assert decide(network, flat, masks, actions=actions).choices[0, 2] == 0
    masks["blueprint"][:] = False
    assert (decide(network, flat, masks, actions=actions).choices[1] > 0).all()
    nowhere = network.to("meta")
    masks = network.table.open_masks(2, "meta")
    found = decide(nowhere, flat.to("meta"), masks, epsilon=0.1, uniform=torch.rand(2, 3, device="meta"))
    assert tuple(found.log_probs.shape) == (2, 3)


@pytest.mark.requirement(65)
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # says that it does not see all of them
def test_no_step_waits_for_the_device() -> None:
    """Encoding, stepping, deciding and valuing never synchronise."""
    network = build("full3").to("cuda")
    flat, hidden_state = torch.randn(8, network.layout.size, device="cuda"), network.initial_state(8)
    masks, uniform = network.table.open_masks(8, "cuda"), torch.rand(8, len(HEADS), device="cuda")
    with no_sync():
        encoded = network.encode(flat)
        core, hidden_state = network.step(encoded.trunk, hidden_state)
        actions = network.decide(core, encoded, masks, 0.05, uniform=uniform).actions
        core = network.unroll(encoded.trunk, Stretches(((8, 1),), None), hidden_state)
        found = network.decide(core, encoded, masks, 0.05, actions=actions)
        (found.log_probs.sum() + network.value(core, encoded).sum()).backward()


@pytest.mark.requirement(50)
def test_a_new_head_in_the_table_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new head gets weights, log-probs and entropies; masks without it are refused."""
    old = build("full3")
    monkeypatch.setattr("esper.leyline.actions.HEADS", (*HEADS, Head("depth", (1, 2), (LifecycleOp.GERMINATE,))))
    preset = HeadPreset("deep", (*HEAD_NAMES, "depth"), tuple(LifecycleOp))
    network = FactoredRecurrentActorCritic(growth_table(preset, slots(3)), layout(3), SMALL)
    assert {name for name in network.state_dict() if "depth" in name} == {"heads.depth.weight", "heads.depth.bias"}
    assert "choice_embeddings.alpha_curve.weight" in network.state_dict()  # no longer the last head
    flat = torch.randn(4, network.layout.size)
    actions = torch.zeros(4, 9, dtype=torch.long)
    actions[:2, 0] = LifecycleOp.GERMINATE
    found = decide(network, flat, actions=actions)
    assert found.log_probs[:, -1].tolist() == pytest.approx([-0.693, -0.693, 0, 0], abs=0.02)
    assert found.decided[:, -1].tolist() == [True, True, False, False]
    assert found.entropies.shape == (4, 9)
    with pytest.raises(BadValueError, match=r"the table has .*'depth'"):
        decide(network, flat, old.table.open_masks(4))


# -- who sees what ----------------------------------------------------------------------------------------------------


def test_the_actor_never_sees_the_critics_columns() -> None:
    """They change the value and not one bit of the decision."""
    network = build("full3", SHARP)
    flat, uniform = torch.randn(32, network.layout.size), torch.rand(32, len(HEADS))
    other = flat.clone()
    network.layout.split(other)[3].normal_(std=10)
    again = columns_of(decide(network, other, uniform=uniform))
    for field, values in columns_of(decide(network, flat, uniform=uniform)).items():
        assert torch.equal(values, again[field]), field
    encoded, changed = network.encode(flat), network.encode(other)
    core = network.step(encoded.trunk, network.initial_state(32))[0]
    assert (network.value(core, encoded) - network.value(core, changed)).abs().min() > 1e-3


def test_the_same_weights_serve_any_number_of_slots() -> None:
    """A host of three equal slots is to the op like one with that slot alone; each slot has a third of the chance."""
    one, three = build("core1", SHARP), build("core3", SHARP)
    three.load_state_dict(one.state_dict())
    flat = torch.randn(5, one.layout.size)
    host, slot, offers, critic = one.layout.split(flat)
    tripled = torch.cat([host, slot.repeat(1, 3, 1).flatten(1), offers.repeat(1, 3, 1, 1).flatten(1), critic], -1)
    actions = torch.tensor([[LifecycleOp.GERMINATE, 0, 2]] * 5)
    alone, among = (decide(network, x, actions=actions) for network, x in ((one, flat), (three, tripled)))
    thirds = torch.tensor([0.0, 3.0, 0.0]).log().nan_to_num(neginf=0.0)
    assert torch.allclose(alone.log_probs, among.log_probs + thirds, atol=1e-5)


def test_permuted_slots_have_permuted_chances() -> None:
    """Which slot stands where makes no difference to any of them, nor to the op."""
    network = build("core3", SHARP)
    order = torch.tensor([2, 0, 1])
    host, slot, offers, critic = network.layout.split(torch.randn(1, network.layout.size))
    permuted = torch.cat([host, slot[:, order].flatten(1), offers[:, order].flatten(1), critic], -1)
    flat = torch.cat([host, slot.flatten(1), offers.flatten(1), critic], -1)
    actions = torch.tensor([[LifecycleOp.GERMINATE, place, 1] for place in range(3)])
    before, after = (decide(network, x.expand(3, -1), actions=actions).log_probs for x in (flat, permuted))
    assert torch.allclose(before[order], after, atol=1e-5)
    assert before[:, 1].exp().sum().item() == pytest.approx(1.0)
    assert before[:, 1].std() > 0.05


def test_blueprints_are_compared_by_the_offers_of_the_chosen_slot() -> None:
    """Two offers change places (their mean and maximum stay): only the blueprint notices, and only in that slot."""
    network = build("core3", SHARP)
    flat = torch.randn(16, network.layout.size)
    swapped = flat.clone()
    _, _, offers, _ = network.layout.split(swapped)
    offers[:, 1] = offers[:, 1, [1, 0, 2]]
    for slot, notices in ((1, True), (2, False)):
        actions = torch.tensor([[LifecycleOp.GERMINATE, slot, 0]] * 16)
        change = (
            decide(network, flat, actions=actions).log_probs - decide(network, swapped, actions=actions).log_probs
        ).abs()
        assert change[:, :2].max() < 1e-5
        assert (change[:, 2].mean() > 1e-2) == notices


def test_what_the_state_means_may_depend_on_the_op() -> None:
    """From one state to another the odds of two curves change, and not alike for both ops that ramp."""
    network = build("full3", SHARP)
    nn.init.normal_(network.get_parameter("choice_embeddings.op.weight"))
    host, slot, offers, critic = network.layout.split(torch.randn(8, network.layout.size))
    flat = torch.cat(
        [host, slot[:1].expand(8, -1, -1).flatten(1), offers[:1].expand(8, -1, -1, -1).flatten(1), critic], -1
    )
    odds = []
    for op in (LifecycleOp.SET_ALPHA_TARGET, LifecycleOp.PRUNE):
        first, second = torch.zeros(2, 8, len(HEADS), dtype=torch.long)
        first[:, 0], second[:, 0], second[:, -1] = op, op, 1
        odds.append(
            (decide(network, flat, actions=first).log_probs - decide(network, flat, actions=second).log_probs)[:, -1]
        )
    change = [logits - logits[0] for logits in odds]
    assert (change[0] - change[1])[1:].abs().mean() > 1e-2
