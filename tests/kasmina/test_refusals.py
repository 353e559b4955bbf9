"""Refused edits: the error names the value, and nothing changes."""

from functools import partial

import pytest
import torch
from hosts import bring_to, make_batch, make_model
from promises import refused

from esper.kasmina import CNNHost, GPTHost, LifecycleConfig, MorphogeneticModel
from esper.leyline import BadValueError, GateRefusedError, SeedStage, SlotOccupiedError, StageError, UnknownNameError


@pytest.mark.invariant(5)
def test_bad_input_is_named_and_changes_nothing() -> None:
    """Unknown names and values out of range are refused."""
    model = make_model("cnn")
    bring_to(model, "r0c0", SeedStage.HOLDING, make_batch("cnn"))
    bring_to(model, "r1c0", SeedStage.FOSSILIZED, make_batch("cnn"))
    free, held, fossil = "r0c1", "r0c0", "r1c0"
    refused(model, UnknownNameError, "'conv_huge'.*conv_heavy", lambda: model.germinate_seed(free, "conv_huge"))
    refused(model, UnknownNameError, "'lora'", lambda: model.germinate_seed(free, "lora"))
    refused(model, UnknownNameError, "'r9c9'.*r0c0", lambda: model.germinate_seed("r9c9", "norm"))
    refused(model, UnknownNameError, "'r9c9'", lambda: model.advance("r9c9"))
    refused(model, UnknownNameError, "'r9c9'", lambda: model.prune_seed("r9c9"))
    refused(model, UnknownNameError, "'mix'.*multiply", lambda: model.germinate_seed(free, "norm", style="mix"))
    refused(model, BadValueError, "tempo -1", lambda: model.germinate_seed(free, "norm", tempo=-1))
    for target in (0.0, -0.5, 1.5, float("nan")):
        sow = partial(model.germinate_seed, free, "norm", alpha_target=target)
        refused(model, BadValueError, "alpha_target", sow)
        refused(model, BadValueError, "alpha target", partial(model.set_alpha_target, held, target))
    refused(model, BadValueError, "-1", lambda: model.set_alpha_target(held, 0.5, steps=-1))
    refused(model, UnknownNameError, "'zigzag'.*cosine", lambda: model.set_alpha_target(held, 0.5, curve="zigzag"))
    refused(model, BadValueError, "-1", lambda: model.prune_seed(held, steps=-1))
    refused(model, UnknownNameError, "'zigzag'", lambda: model.prune_seed(held, steps=2, curve="zigzag"))
    refused(model, SlotOccupiedError, "holds a 'norm' seed", lambda: model.germinate_seed(held, "norm"))
    refused(model, StageError, "fossil is permanent", lambda: model.prune_seed(fossil))
    refused(model, StageError, "fossil is permanent", lambda: model.advance(fossil))
    refused(model, StageError, "FOSSILIZED", lambda: model.set_alpha_target(fossil, 0.5))
    refused(model, StageError, "germinate a seed first", lambda: model.advance(free))
    refused(model, StageError, "cannot fossilise from DORMANT", lambda: model.fossilize(free))


@pytest.mark.invariant(5)
def test_stages_cannot_be_jumped() -> None:
    """Gates refuse until their conditions are met, and name those that are not."""
    model = make_model("mlp", 1, config=LifecycleConfig())
    model.germinate_seed("r0c0", "norm", tempo=3)
    refused(model, StageError, "GERMINATED; only a HOLDING seed can", lambda: model.fossilize("r0c0"))
    refused(model, StageError, "no alpha to set in GERMINATED", lambda: model.set_alpha_target("r0c0", 0.5))
    model.advance("r0c0")
    refused(model, GateRefusedError, "0 steps in TRAINING, 2 are needed; its gra", lambda: model.advance("r0c0"))
    refused(model, GateRefusedError, "it may be pruned after 2", lambda: model.prune_seed("r0c0"))
    model.tick()
    model.tick()
    model.observe_gradients({"r0c0": float("inf")})
    refused(model, GateRefusedError, "gradient was not finite", lambda: model.advance("r0c0"))
    model.observe_gradients({"r0c0": 1.0})
    model.advance("r0c0")
    refused(model, GateRefusedError, r"alpha 0\.333 is on its way to 1\.000", lambda: model.advance("r0c0"))
    refused(model, StageError, "on a ramp", lambda: model.prune_seed("r0c0"))
    for _ in range(3):
        model.tick()
    refused(model, GateRefusedError, "0 steps in HOLDING.*contribution was not", lambda: model.fossilize("r0c0"))
    model.prune_seed("r0c0", steps=2)
    refused(model, StageError, "is being pruned", lambda: model.advance("r0c0"))
    model.tick()
    refused(model, SlotOccupiedError, "rests for 3 more ticks", lambda: model.germinate_seed("r0c0", "norm"))
    refused(model, StageError, "3 ticks are left", lambda: model.advance("r0c0"))
    refused(model, StageError, "no seed in it", lambda: model.prune_seed("r0c0"))


@pytest.mark.invariant(5)
def test_blueprints_below_their_minimum() -> None:
    """Hosts that are too narrow, too small or not a multiple are refused."""
    narrow = MorphogeneticModel(CNNHost((1, 3), 3, classes=4, resolution=4))
    refused(
        narrow,
        GateRefusedError,
        "width 1 is below its minimum of 2",
        lambda: narrow.germinate_seed("r0c0", "conv_heavy"),
    )
    refused(narrow, GateRefusedError, "gives its norm 3 values of 4", lambda: narrow.germinate_seed("r1c1", "norm"))
    odd = MorphogeneticModel(GPTHost(2, 6, 2, block=4, vocab=5))
    refused(odd, GateRefusedError, "width 6 is not a multiple of 4", lambda: odd.germinate_seed("r0c0", "attention"))
    short = MorphogeneticModel(GPTHost(2, 8, 2, block=1, vocab=5))
    refused(
        short,
        GateRefusedError,
        "resolution 1 is below its minimum of 2",
        lambda: short.germinate_seed("r0c0", "attention"),
    )


@pytest.mark.invariant(5)
def test_budget() -> None:
    """No seed may exceed the budget; pruning returns its parameters to it."""
    # A norm seed has 3·width parameters: 24 of width 8, 18 of width 6.
    model = make_model("mlp", 2, budget=24 + 17)
    model.germinate_seed("r0c0", "norm")
    refused(
        model,
        GateRefusedError,
        "costs 18 parameters, 17 of the budget are left",
        lambda: model.germinate_seed("r0c1", "norm"),
    )
    model.prune_seed("r0c0")
    model.germinate_seed("r0c1", "norm")
    assert model.grown_parameter_count == 18


@pytest.mark.invariant(5)
def test_budget_pays_for_the_gate_too() -> None:
    """A seed of 24 parameters also needs 8 + 1 for its gate."""
    model = make_model("mlp", 1, budget=24)
    refused(model, GateRefusedError, "33 parameters", lambda: model.germinate_seed("r0c0", "norm", style="gate"))


@pytest.mark.invariant(5)
def test_germination_leaves_the_random_stream_alone() -> None:
    """A successful germination draws nothing from the host's random stream either."""
    model = make_model("cnn")
    stream = torch.get_rng_state()
    for slot_id in model.seed_slots:
        model.germinate_seed(slot_id, "conv_light", style="gate")
    assert torch.equal(stream, torch.get_rng_state())
