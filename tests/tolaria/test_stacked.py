"""Stacked optimisers: each member is stepped as `torch.optim` would step it alone."""

from pathlib import Path

import pytest
import torch
from fleets import AT_ONCE, assert_same, assert_same_env, batches_of, everything_of, task_of
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import torch_optimiser
from torch import Size, Tensor, nn

import esper
from esper.tolaria import HostFleet, OptimiserConfig, Symptom
from esper.tolaria.banks import MemberWeights, StackedOptimizer, StackedWeights, per_member
from esper.tolaria.batches import Samples
from esper.tolaria.passes import row_losses

SHAPES = {"kernel": Size((3, 2)), "bias": Size((3,)), "scale": Size(())}
MEMBERS = 4
CPU = torch.device("cpu")

CONFIGS = [
    OptimiserConfig(kind="sgd", rate=0.1),
    OptimiserConfig(kind="sgd", rate=0.1, momentum=0.0, weight_decay=0.0),
    OptimiserConfig(kind="adamw", rate=0.01, weight_decay=0.1),
    OptimiserConfig(kind="adamw", rate=0.01, weight_decay=0.0, clip_norm=0.1),
]
EACH_CONFIG = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.kind}-{config.clip_norm}")


def stacked_weights(dtype: torch.dtype = torch.float64) -> StackedWeights:
    """Four networks of three tensors."""
    weights = StackedWeights(MEMBERS, SHAPES, CPU, dtype)
    for member in range(MEMBERS):
        weights.write(member, {name: torch.randn(shape, dtype=dtype) for name, shape in SHAPES.items()})
    return weights


def set_gradient(weights: StackedWeights, gradient: Tensor) -> None:
    """From (M, P), as a backward pass would leave it."""
    for name, columns in weights.columns.items():
        weights.leaves[name].grad = gradient[:, columns].reshape(weights.leaves[name].shape).clone()


class Alone:
    """One member with a torch optimiser."""

    def __init__(self, config: OptimiserConfig, weights: StackedWeights, member: int, names: tuple[str, ...]) -> None:
        self.config = config
        self.tensors = {name: nn.Parameter(weights.leaves[name][member].detach().clone()) for name in names}
        self.optimiser = torch_optimiser(config, self.tensors.values())

    def step(self, weights: StackedWeights, gradient: Tensor, rate: float) -> None:
        """Clip and step."""
        for name, tensor in self.tensors.items():
            tensor.grad = gradient[weights.columns[name]].reshape(tensor.shape).clone()
        nn.utils.clip_grad_norm_(self.tensors.values(), self.config.clip_norm)
        self.optimiser.param_groups[0]["lr"] = rate
        self.optimiser.step()


def assert_equal(weights: StackedWeights, alone: list[Alone]) -> None:
    """Every tensor of every member."""
    for member, single in enumerate(alone):
        for name, tensor in single.tensors.items():
            assert torch.allclose(weights.leaves[name][member], tensor, rtol=1e-12, atol=1e-13), (member, name)


@EACH_CONFIG
def test_equals_torch(config: OptimiserConfig) -> None:
    """Twelve steps in float64, each member at a rate of its own, with gradients above and below the limit."""
    weights = stacked_weights()
    optimiser = StackedOptimizer(config, weights)
    alone = [Alone(config, weights, member, tuple(SHAPES)) for member in range(MEMBERS)]
    rates = config.rate * torch.tensor([1.0, 0.5, 2.0, 0.0], dtype=torch.float64)
    everyone = torch.ones(MEMBERS, dtype=torch.bool)
    for step in range(12):
        gradient = torch.randn_like(weights.matrix) * (2.0 if step % 2 else 0.02)
        set_gradient(weights, gradient)
        norms = optimiser.step(rates, everyone)
        assert torch.allclose(norms[0], gradient.norm(dim=1))
        for member, single in enumerate(alone):
            single.step(weights, gradient[member], float(rates[member]))
        assert_equal(weights, alone)


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(["sgd", "adamw"]),
    parts=st.lists(st.lists(st.booleans(), min_size=MEMBERS, max_size=MEMBERS), min_size=1, max_size=8),
    sizes=st.lists(st.sampled_from([0.0, 1e-9, 0.1, 30.0]), min_size=MEMBERS, max_size=MEMBERS),
    rng_seed=st.integers(0, 99),
)
def test_members_may_skip_steps(kind: str, parts: list[list[bool]], sizes: list[float], rng_seed: int) -> None:
    """Whoever takes part, in whatever pattern: momentum and step counts are each member's own."""
    torch.manual_seed(rng_seed)
    config = OptimiserConfig(kind="sgd" if kind == "sgd" else "adamw", rate=0.05, weight_decay=0.01)
    weights = stacked_weights()
    optimiser = StackedOptimizer(config, weights)
    alone = [Alone(config, weights, member, tuple(SHAPES)) for member in range(MEMBERS)]
    rates = torch.full((MEMBERS,), config.rate, dtype=torch.float64)
    for takes_part in parts:
        gradient = torch.randn_like(weights.matrix) * torch.tensor(sizes, dtype=torch.float64)[:, None]
        set_gradient(weights, gradient)
        optimiser.step(rates, torch.tensor(takes_part))
        for member, single in enumerate(alone):
            if takes_part[member]:
                single.step(weights, gradient[member], config.rate)
        assert_equal(weights, alone)
    assert optimiser.steps.tolist() == [sum(part[member] for part in parts) for member in range(MEMBERS)]


@EACH_CONFIG
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_member_that_is_not_finite_keeps_all_it_has(config: OptimiserConfig, bad: float) -> None:
    """Weights, momentum and step count; the others step as if it were not there."""
    weights, twin = stacked_weights(), stacked_weights()
    twin.matrix.copy_(weights.matrix)
    mine, other = StackedOptimizer(config, weights), StackedOptimizer(config, twin)
    rates, everyone = torch.full((MEMBERS,), 0.1, dtype=torch.float64), torch.ones(MEMBERS, dtype=torch.bool)
    gradient = torch.randn_like(weights.matrix)
    for which, optimiser in ((weights, mine), (twin, other)):
        set_gradient(which, gradient)
        optimiser.step(rates, everyone)
    before = weights.matrix[2].clone(), {name: state[2].clone() for name, state in mine.state.items()}
    spoiled = gradient.clone()
    spoiled[2, 1] = bad
    set_gradient(weights, spoiled)
    set_gradient(twin, gradient)
    norms = mine.step(rates, everyone)
    other.step(rates, everyone)
    assert not norms[0][2].isfinite()
    assert torch.equal(weights.matrix[2], before[0])
    assert all(torch.equal(state[2], before[1][name]) for name, state in mine.state.items())
    assert mine.steps.tolist() == [2, 2, 1, 2]
    others = [0, 1, 3]
    assert torch.equal(weights.matrix[others], twin.matrix[others])
    assert all(torch.equal(state[others], other.state[name][others]) for name, state in mine.state.items())


def test_clipping_is_per_member() -> None:
    """By hand, without momentum and decay: (3, 4) has norm 5 and is cut to 1, (0.3, 0.4) stays."""
    weights = StackedWeights(2, {"w": Size((2,))}, CPU, torch.float64)
    config = OptimiserConfig(kind="sgd", momentum=0.0, weight_decay=0.0, clip_norm=1.0)
    set_gradient(weights, torch.tensor([[3.0, 4.0], [0.3, 0.4]], dtype=torch.float64))
    norms = StackedOptimizer(config, weights).step(torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.bool))
    assert norms[0].tolist() == pytest.approx([5.0, 0.5])
    assert weights.matrix.tolist() == [pytest.approx([-0.6, -0.8], rel=1e-6), pytest.approx([-0.3, -0.4])]


def test_the_update_ratio() -> None:
    """By hand: weights (3, 4) moved by (−0.3, −0.4) at rate 1 is a tenth; a member that stays has 0."""
    weights = StackedWeights(2, {"w": Size((2,))}, CPU, torch.float64)
    for member in range(2):
        weights.write(member, {"w": torch.tensor([3.0, 4.0])})
    config = OptimiserConfig(kind="sgd", momentum=0.0, weight_decay=0.0, clip_norm=1.0)
    set_gradient(weights, torch.tensor([[0.3, 0.4], [0.3, 0.4]], dtype=torch.float64))
    norms = StackedOptimizer(config, weights).step(torch.ones(2, dtype=torch.float64), torch.tensor([True, False]))
    assert norms[1].tolist() == pytest.approx([0.1, 0.0])


@EACH_CONFIG
def test_tensors_that_only_some_members_have(config: OptimiserConfig) -> None:
    """A gate's: without it, neither norm nor decay know of it."""
    weights = stacked_weights()
    optimiser = StackedOptimizer(config, weights)
    used = torch.ones_like(weights.matrix, dtype=torch.bool)
    used[1, weights.columns["bias"]] = False
    alone = [
        Alone(config, weights, member, tuple(SHAPES) if member != 1 else ("kernel", "scale"))
        for member in range(MEMBERS)
    ]
    bias = weights.leaves["bias"][1].detach().clone()
    rates = torch.full((MEMBERS,), config.rate, dtype=torch.float64)
    for _ in range(3):
        gradient = torch.randn_like(weights.matrix)
        gradient[1, weights.columns["bias"]] = torch.nan  # whatever padding leaves there
        set_gradient(weights, gradient)
        optimiser.step(rates, torch.ones(MEMBERS, dtype=torch.bool), used)
        for member, single in enumerate(alone):
            single.step(weights, gradient[member], config.rate)
        assert_equal(weights, alone)
    assert torch.equal(weights.leaves["bias"][1], bias)


@EACH_CONFIG
def test_a_cleared_member_starts_anew(config: OptimiserConfig) -> None:
    """As a fresh optimiser would; the others keep what they have."""
    weights = stacked_weights()
    optimiser = StackedOptimizer(config, weights)
    alone = [Alone(config, weights, member, tuple(SHAPES)) for member in range(MEMBERS)]
    rates = torch.full((MEMBERS,), config.rate, dtype=torch.float64)
    for step in range(6):
        if step == 3:
            optimiser.clear(1)
            alone[1] = Alone(config, weights, 1, tuple(SHAPES))
        gradient = torch.randn_like(weights.matrix)
        set_gradient(weights, gradient)
        optimiser.step(rates, torch.ones(MEMBERS, dtype=torch.bool))
        for member, single in enumerate(alone):
            single.step(weights, gradient[member], config.rate)
    assert_equal(weights, alone)


@pytest.mark.gpu
def test_the_kernel_steps_as_torch_does() -> None:
    """Members that skip steps, lack tensors, are newborn or not finite; more parameters than a tile of the kernel."""
    shapes = {"large": Size((70, 70)), "small": Size((9,))}
    config = OptimiserConfig(kind="sgd", rate=0.1)
    generator = torch.Generator().manual_seed(5)
    start, *gradients = torch.randn(4, MEMBERS + 1, 4909, generator=generator)
    gradients[1][2, 7] = torch.nan
    part, newborn = torch.tensor([True, True, True, False, True]), torch.tensor([False, True, False, False, True])
    used = torch.rand(start.shape, generator=generator) < 0.7
    used[2, 7] = True
    outcomes = []
    for device in ("cpu", "cuda"):
        weights = MemberWeights(MEMBERS + 1, shapes, torch.device(device), torch.float32)
        weights.matrix.copy_(start)
        optimiser = StackedOptimizer(config, weights)
        for gradient in gradients:
            weights.whole.grad = gradient.to(device)
            rates, warm = torch.full((MEMBERS + 1,), 0.1, device=device), torch.tensor(0.3, device=device)
            takes_part, has, young = (mask.to(device) for mask in (part, used, newborn))
            results = optimiser.step(rates, takes_part, has, newborn=young, warm=warm)
            state = (weights.matrix, optimiser.state["momentum"], optimiser.steps)
            outcomes.append([tensor.cpu().clone() for tensor in (*results, *state)])
    for found, wanted in zip(outcomes[3:], outcomes[:3], strict=True):
        for mine, its in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_backward_pass_that_did_not_come_by_is_zero() -> None:
    """A bank that no row has used still decays where it takes part, as torch does with zero gradients."""
    weights = stacked_weights()
    assert not weights.gradient().any()
    set_gradient(weights, torch.ones_like(weights.matrix))
    assert bool((weights.gradient() == 1).all())
    weights.zero_grad()
    assert not weights.gradient().any()


def test_leaves_are_views_of_the_matrix() -> None:
    """Written once, seen under every name."""
    weights = stacked_weights()
    weights.matrix[2] = 7
    assert all(bool((leaf[2] == 7).all()) for leaf in weights.leaves.values())
    assert all(leaf.is_leaf and leaf.requires_grad for leaf in weights.leaves.values())
    assert weights.matrix.shape == (MEMBERS, 10)
    assert len(weights) == MEMBERS


def test_per_member() -> None:
    """(M,) against (M, …)."""
    assert per_member(torch.arange(3), torch.zeros(3, 2, 5)).shape == (3, 1, 1)


@pytest.mark.requirement(18)
def test_no_loss_scaling() -> None:
    """No code scales a loss, so no scaler can be shared or called in the wrong order."""
    source = Path(next(iter(esper.__path__)))
    found = [path.name for path in source.rglob("*.py") if "GradScaler" in path.read_text(encoding="utf-8")]
    assert found == []


def test_members_are_taken_and_learn_where_they_are_to() -> None:
    """By name and contiguous, in the dtype that is asked for; a gradient comes back for those that learn alone."""
    weights = MemberWeights(MEMBERS, SHAPES, CPU, torch.float64)
    weights.matrix.copy_(torch.arange(weights.matrix.numel()).view_as(weights.matrix))
    members, learns = torch.tensor([2, 0, 2, 3]), torch.tensor([True, False, False, True])
    taken = weights.take(members, learns, torch.float32)
    for name, part in taken.items():
        assert part.is_contiguous()
        assert part.dtype == torch.float32
        assert torch.equal(part.double(), weights.leaves[name][members])
    assert weights.gradient().eq(0).all(), "nothing came by yet"
    (2 * taken["kernel"].sum() + taken["scale"].sum()).backward()
    row = torch.zeros(weights.matrix.shape[1], dtype=torch.float64)
    row[weights.columns["kernel"]], row[weights.columns["scale"]] = 2, 1
    expected = torch.stack([0 * row, 0 * row, row, row])
    assert torch.equal(weights.gradient(), expected)
    weights.zero_grad()
    assert weights.gradient().eq(0).all()


# -- losses are not scaled --------------------------------------------------------------------------------------------

HALF_FLEET_ENVS = 4


def half_precision_fleet() -> HostFleet:
    """Hosts with weights in float32 whose products are in bfloat16, where a loss would be scaled if one were."""
    task = task_of("cnn")
    return HostFleet(task, HALF_FLEET_ENVS, batches=batches_of(task), compute=torch.bfloat16, config=AT_ONCE)


@pytest.mark.requirement(18)
def test_gradients_are_those_of_the_loss_itself() -> None:
    """No factor is left in gradients or in the norms that clipping and telemetry see."""
    fleet = half_precision_fleet()
    samples = fleet.draw(0)
    done = fleet.host.run(fleet.update_plan().main, samples.inputs, train=True)
    leaves = list(fleet.host.weights.leaves.values())
    plain = torch.autograd.grad(row_losses(done.output, samples.targets).sum(), leaves, allow_unused=True)
    rows = len(fleet.host.weights)
    wanted = torch.cat([part.reshape(rows, -1) for part in plain if part is not None], 1)
    fleet.train_minibatch(samples, 0.0)
    used = [leaf for leaf, part in zip(leaves, plain, strict=True) if part is not None]
    found = torch.cat([leaf.grad.reshape(rows, -1) for leaf in used if leaf.grad is not None], 1)
    assert torch.equal(found, wanted)
    assert float(wanted.norm()) > 0


@pytest.mark.requirement(18)
def test_an_overflow_is_its_hosts_own() -> None:
    """The host that overflows skips its step; the others neither skip theirs nor change their scale."""
    fleet, twin = half_precision_fleet(), half_precision_fleet()
    before = everything_of(fleet, 1)
    for index in range(3):
        inputs, targets = fleet.draw(index)
        spoiled = inputs.clone()
        spoiled[1] = torch.finfo(torch.bfloat16).max
        fleet.train_minibatch(Samples(spoiled if index == 0 else inputs, targets), 0.05)
        twin.train_minibatch(Samples(inputs, targets), 0.05)
        if index == 0:
            assert_same(everything_of(fleet, 1), before)
        for env in (0, 2, 3):
            assert_same_env(fleet, twin, env)
    (panic,) = fleet.governor.verdicts()
    assert (panic.env, Symptom.NOT_FINITE in panic.symptoms) == (1, True)
    assert not torch.equal(everything_of(fleet, 1)["host"], before["host"]), "its later minibatches were sound"
