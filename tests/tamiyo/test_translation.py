"""A policy on hosts with other slots and blueprints than those it was made for."""

from dataclasses import replace

import pytest
import torch
from tamiyo.views import GERMINATE, NAMES, SLOTS, WAIT, quiet
from torch import Tensor

from esper.leyline import BadValueError, SlotConfig, head_preset
from esper.tamiyo import FactoredRecurrentActorCritic, NetworkConfig, growth_layout, growth_masks, growth_table
from esper.tamiyo.signals import TrainingSignals
from esper.tamiyo.translation import Translation, adapt

PRESET = head_preset("core")
WIDER = ("attention", "lora", "norm", "conv")  # another order, and one more
HERE = growth_table(PRESET, SLOTS)


def scene(n: int = 5) -> TrainingSignals:
    """Hosts that differ; some blueprints fit, and the first slot is occupied."""
    torch.manual_seed(0)
    signals = quiet(n)
    shape = signals.offers.worth.shape
    offers = signals.offers._replace(worth=torch.rand(shape), cost=torch.rand(shape), fits=torch.rand(shape) < 0.7)
    blueprint = signals.slots.blueprint.clone()
    blueprint[:, 0] = NAMES.index("conv")
    slots = signals.slots._replace(rms=torch.rand(n, len(SLOTS)), blueprint=blueprint)
    return signals._replace(offers=offers, slots=slots)


def features_by_name(translation: Translation, signals: TrainingSignals) -> dict[tuple[str, str], Tensor]:
    """Columns of slots and offers (n, slots) by blueprint and column."""
    layout = translation.layout
    _, slots, offers, _ = layout.split(translation.features(signals))
    found = {("grows", name): slots[..., layout.slot.index(f"blueprint.{name}")] for name in layout.vocabulary}
    for index, name in enumerate(layout.vocabulary):
        found |= {(name, column): offers[..., index, place] for place, column in enumerate(layout.offer)}
    return found


def test_blueprints_match_by_name() -> None:
    """Each column shows what it does for the host's own policy; a blueprint that is not offered never fits."""
    signals = scene()
    own = features_by_name(Translation(SLOTS, growth_layout(SLOTS)), signals)
    wider = features_by_name(Translation(SLOTS, growth_layout(SLOTS, vocabulary=WIDER)), signals)
    assert all(torch.equal(wider[key], value) for key, value in own.items())
    assert not any(wider["lora", column].any() for column in ("worth", "cost", "fits"))


def test_masks_and_actions_go_both_ways() -> None:
    """Every action that is legal for the policy is legal for the host, and names the same blueprint."""
    signals = scene()
    masks = growth_masks(signals, HERE, PRESET.ops)
    translation = Translation(SLOTS, growth_layout(SLOTS, vocabulary=WIDER))
    table = growth_table(PRESET, SLOTS, WIDER)
    theirs = translation.masks(masks)
    table.check_masks(theirs, 5)
    assert torch.equal(theirs["op"], masks["op"]), "it knows all blueprints of the host"
    for env in range(5):
        for slot in range(3):
            legal = [NAMES[index] for index in masks["blueprint"][env, slot].nonzero().flatten()]
            known = [WIDER[index] for index in theirs["blueprint"][env, slot].nonzero().flatten()]
            assert set(known) == set(legal)
    actions = torch.tensor([[GERMINATE, 1, WIDER.index(name)] for name in NAMES])
    assert translation.actions(actions, table)[:, 2].tolist() == [0, 1, 2]
    waiting = torch.tensor([[WAIT, 0, WIDER.index("lora")]])
    assert translation.actions(waiting, table).tolist() == [[WAIT, 0, 0]], "an unused head may hold anything"


def test_a_policy_that_knows_fewer_blueprints_waits_where_none_fits() -> None:
    """Germinating is legal only in slots that offer something it knows."""
    signals = scene()
    fits = torch.zeros_like(signals.offers.fits)
    fits[0, 1, NAMES.index("norm")] = fits[1, 1, NAMES.index("conv")] = True
    signals = signals._replace(offers=signals.offers._replace(fits=fits))
    masks = Translation(SLOTS, growth_layout(SLOTS, vocabulary=("norm",))).masks(
        growth_masks(signals, HERE, PRESET.ops)
    )
    assert masks["op"][:, GERMINATE].tolist() == [True, False, False, False, False]
    assert masks["op"][:, WAIT].all()


def test_padding_changes_no_decision() -> None:
    """A network for five slots sees three and two of padding as a network for three sees them."""
    layout = growth_layout(SLOTS)
    table, wide_layout = adapt(HERE, layout, 5)
    network = FactoredRecurrentActorCritic(HERE, layout, NetworkConfig(head_gain=1.0))
    wide = FactoredRecurrentActorCritic(table, wide_layout, NetworkConfig(head_gain=1.0))
    wide.load_state_dict(network.state_dict())
    signals = scene()
    masks = growth_masks(signals, HERE, PRESET.ops)
    decisions = []
    for each, translation in ((network, Translation(SLOTS, layout)), (wide, Translation(SLOTS, wide_layout))):
        encoded = each.encode(translation.features(signals))
        core, _ = each.step(encoded.trunk, each.initial_state(5))
        decisions.append(each.decide(core, encoded, translation.masks(masks), 0.0, uniform=torch.full((5, 3), 0.5)))
    one, other = decisions
    assert torch.equal(one.actions, other.actions)
    torch.testing.assert_close(one.log_probs, other.log_probs, rtol=1e-5, atol=1e-6)


def test_only_present_slots_count() -> None:
    """Three of five slots: their columns count, those of the padding do not."""
    _, layout = adapt(HERE, growth_layout(SLOTS), 5)
    flat = Translation(SLOTS, layout).features(scene())
    _, slots, offers, _ = layout.split(layout.counted(flat).float())
    assert slots[..., 0].sum(-1).tolist() == offers[..., 0, 0].sum(-1).tolist() == [3.0] * 5
    _, slots, offers, _ = layout.split(flat)
    assert not slots[:, 3:].any(), "padding has neither a stage nor a blueprint"
    assert not offers[:, 3:].any()


def test_hosts_that_do_not_fit() -> None:
    """More slots than the policy was adapted to, or no blueprint in common."""
    layout = growth_layout(SLOTS)
    with pytest.raises(BadValueError, match="the host has 3 slots, the layout 2"):
        Translation(SLOTS, replace(layout, slots=2))
    with pytest.raises(BadValueError, match="knows the blueprints mlp, but the slots offer norm, conv, attention"):
        Translation(SLOTS, growth_layout(SLOTS, vocabulary=("mlp",)))
    one = SlotConfig(SLOTS.slots[:1])
    assert Translation(one, layout).missing == 2
