"""Ranks for LoRA: the gradients behind them, the choice under a budget, and PEFT itself."""

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import MLP, digits, make
from torch import Tensor, nn
from torch.nn import functional as F

from esper.grower.linear_ranks import MOST, LayerProfile, LinearTap, allocate, profile_of
from esper.leyline import BadValueError

DATA = digits(400)
BATCHES = [tuple(part[at : at + 50] for part in DATA) for at in range(0, 400, 50)]


class Conv1D(nn.Module):
    """As in transformers: a linear layer with its weight as (in, out)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


LAYERS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 5), (4, 6)),
    "tokens": (lambda: nn.Linear(6, 5), (4, 3, 6)),
    "transposed": (lambda: Conv1D(6, 5), (4, 3, 6)),
    "convolution": (lambda: nn.Conv2d(3, 5, (3, 2), stride=2, padding=1, dilation=(1, 2)), (4, 3, 9, 9)),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_of_autograd(name: str, frozen: bool) -> None:
    """Of a layer that runs twice, also if it is frozen; the weight has no `grad` afterwards."""
    build, shape = LAYERS[name]
    layer = build()
    host = nn.ModuleDict({"layer": layer})
    first, second = torch.randn(shape), torch.randn(shape)
    (wanted,) = torch.autograd.grad(layer(first).square().sum() + layer(second).sin().sum(), layer.weight)
    layer.requires_grad_(not frozen)
    tap = LinearTap(host, "none.")
    with tap.watching() as calls:
        loss = layer(first).square_().sum() + layer(second).sin().sum()  # in place, as a ReLU may be
    outputs = [output for _, output in calls["layer"]]
    gradients = torch.autograd.grad(loss, outputs)
    tap.add(0, {"layer": [(x, g) for (x, _), g in zip(calls["layer"], gradients, strict=True)]})
    found = tap.sums["layer"][0]
    assert found is not None and layer.weight.grad is None
    assert torch.allclose(found, (wanted.T if name == "transposed" else wanted.flatten(1)), atol=1e-5)
    assert not layer._forward_hooks


def test_worth_is_the_gradient_of_b() -> None:
    """Without noise, all ranks together are worth the expected square of ∂L/∂B for one random row of A."""
    gradient = torch.randn(12, 3) @ torch.randn(3, 20)
    profile = profile_of("layer", gradient, gradient)
    assert profile.parameters == 32 and profile.agreement == pytest.approx(1)
    assert sum(profile.worths) == pytest.approx(float(gradient.square().sum()) / 60, rel=1e-5)
    assert profile.worths[2] > 1e4 * profile.worths[3] >= 0  # of rank three
    rows = (2 * torch.rand(100_000, 20) - 1) / 20**0.5  # LoRA's A
    measured = (rows @ gradient.T).square().sum(1).mean()
    assert sum(profile.worths) == pytest.approx(float(measured), rel=0.02)


def test_noise_is_worth_nothing() -> None:
    """Two halves that agree in one direction alone: only that one counts, however large the noise."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.outer(torch.randn(80, generator=generator), torch.randn(60, generator=generator)) / 4
    halves = [direction + torch.randn(80, 60, generator=generator) for _ in range(2)]
    worths = profile_of("layer", *halves).worths
    true, noisy = (torch.linalg.svdvals(each).square() / 180 for each in (direction, halves[0]))
    assert worths[0] == pytest.approx(float(true[0]), rel=0.3)
    assert worths[1] < 0.1 * float(noisy[1])


def test_large_layers_are_decomposed_by_a_sketch() -> None:
    """The leading directions are the same."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(600, 10, generator=generator) @ torch.randn(10, 90, generator=generator)
    profile = profile_of("layer", gradient, gradient)
    assert len(profile.worths) == MOST
    exact = torch.linalg.svdvals(gradient)[:10].square() / 270
    assert profile.worths[:10] == pytest.approx(exact.tolist(), rel=1e-3)


PROFILES = [
    LayerProfile("a", 10, (9.0, 4.0, 1.0), 1.0),
    LayerProfile("b", 30, (18.0, 15.0, 0.0), 1.0),
    LayerProfile("blocks.a", 20, (2.0, 1.0), 1.0),
]


@pytest.mark.parametrize("budget", [10, 40, 70, 80, 90, 110, 130])
def test_ranks_are_worth_most(budget: int) -> None:
    """Of all choices within a budget that is used up, none is worth more."""
    ranks = allocate(PROFILES, budget)
    spent = sum(ranks.get(each.name, 0) * each.parameters for each in PROFILES)
    value = sum(sum(each.worths[: ranks.get(each.name, 0)]) for each in PROFILES)
    assert spent == min(budget, 130)
    for other in itertools.product(range(4), range(3), range(3)):
        cost = sum(rank * each.parameters for rank, each in zip(other, PROFILES, strict=True))
        if cost <= budget:
            assert sum(sum(each.worths[:rank]) for rank, each in zip(other, PROFILES, strict=True)) <= value
    assert allocate(PROFILES, 60) == {"a": 3, "b": 1}  # a second rank of b no longer fits


def test_choices_of_the_user() -> None:
    """A limit per layer, layers by endings or by a pattern, and the longest name first, as PEFT reads them in order."""
    assert allocate(PROFILES, 1000) == {"blocks.a": 2, "a": 3, "b": 2}
    assert list(allocate(PROFILES, 1000)) == ["blocks.a", "a", "b"]
    assert allocate(PROFILES, 1000, max_rank=1) == {"blocks.a": 1, "a": 1, "b": 1}
    assert allocate(PROFILES, 1000, modules=["a"]) == {"blocks.a": 2, "a": 3}
    assert allocate(PROFILES, 1000, modules=r"blocks\..*") == {"blocks.a": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 9}, "budget 9 is too small: the cheapest rank has 10 parameters"),
        ({"budget": 0}, "budget 0 is not an integer of 1 or more"),
        ({"budget": 50, "max_rank": 65}, "max_rank 65 is above 64"),
        ({"budget": 50, "modules": ["q"]}, r"no layer that ran is among target_modules \['q'\]; measured were: a, b"),
    ],
)
def test_bad_choices(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadValueError, match=message):
        allocate(PROFILES, **options)


def test_noise_alone_earns_no_rank() -> None:
    """Then there is no pattern, and the error says what helps."""
    with pytest.raises(BadValueError, match=r"no layer earns a rank.*minibatches="):
        allocate([LayerProfile("a", 10, (0.0, 0.0), -0.2)], 50)


def test_which_layers_have_ranks() -> None:
    """The head has none, nor seeds; without gradients there is nothing to choose from."""
    model: Any
    model, _, grower = make(model=MLP())
    suggestions = grower.suggest(BATCHES, 0, minibatches=4)
    assert [each.name for each in suggestions.profiles] == ["first", "second"]
    assert suggestions.cost.gradients == 2 * 4 * sum(
        each.weight.numel() for each in (model.first, model.second, model.head)
    )
    assert set(suggestions.rank_pattern(1_000)) <= {"first", "second"}
    with pytest.raises(BadValueError, match="call suggest\\(\\) with ranks=True"):
        grower.suggest(BATCHES, 0, minibatches=4, ranks=False).rank_pattern(1_000)


@pytest.mark.slow
def test_peft_takes_the_pattern() -> None:
    """Ranks and parameters of the adapters are what was asked for, and the gradient of B is what it was worth."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model, _, grower = make(model=MLP())
    twice = [BATCHES[0], BATCHES[0], BATCHES[0], BATCHES[0]]  # no noise between halves
    suggestions = grower.suggest(twice, 0, minibatches=4)
    ranks = suggestions.rank_pattern(400)
    grower.finish()
    rounds = []
    for seed in range(200):
        torch.manual_seed(seed)
        twin = MLP()
        twin.load_state_dict(model.state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's own
            config = peft.LoraConfig(rank_pattern=ranks, target_modules=list(ranks), lora_alpha=8, r=8)
            adapted = peft.get_peft_model(twin, config)
        if not seed:
            sizes = {name: layer.r["default"] for name, layer in twin.named_modules() if hasattr(layer, "lora_A")}
            assert sizes == ranks and len(ranks) == 2
            spent = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
            costs = {each.name: each.parameters for each in suggestions.profiles}
            assert spent == sum(rank * costs[name] for name, rank in ranks.items()) <= 400
        F.cross_entropy(adapted(BATCHES[0][0]), BATCHES[0][1]).backward()
        layers: dict[str, Any] = {name: twin.get_submodule(name) for name in ranks}
        scales = {name: 8 / rank for name, rank in ranks.items()}
        rounds.append(
            [
                float((layer.lora_B["default"].weight.grad / scales[name]).square().sum()) / ranks[name]
                for name, layer in layers.items()
            ]
        )
    expected = {each.name: sum(each.worths) / 4 for each in suggestions.profiles}  # sums of two minibatches each
    measured = torch.tensor(rounds).mean(0).tolist()
    assert measured == pytest.approx([expected[name] for name in ranks], rel=0.15)


@pytest.mark.slow
def test_peft_reads_transformers() -> None:
    """A GPT-2 with its `Conv1D`, by names that PEFT finds again."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    from esper.grower import Grower

    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    batches = [{"input_ids": torch.randint(40, (4, 16))} for _ in range(4)]

    def loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
        targets = batch["input_ids"][:, 1:]
        return F.cross_entropy(output.logits[:, :-1].transpose(1, 2), targets, reduction="none").mean(1)

    grower = Grower(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), budget=1_000, loss=loss, slots=["transformer.h.0.mlp"]
    )
    suggestions = grower.suggest(batches, 0, minibatches=4)
    names = [each.name for each in suggestions.profiles]
    assert len(names) == 8 and "transformer.h.1.attn.c_attn" in names and "lm_head" not in names
    ranks = suggestions.rank_pattern(2_000, target_modules=["c_attn", "c_fc"])
    grower.finish()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own, about fan_in_fan_out
        adapted = peft.get_peft_model(model, peft.LoraConfig(rank_pattern=ranks, target_modules=list(ranks)))
    found = {
        name.removeprefix("base_model.model."): layer.r["default"]
        for name, layer in adapted.named_modules()
        if hasattr(layer, "lora_A")
    }
    assert found == ranks
