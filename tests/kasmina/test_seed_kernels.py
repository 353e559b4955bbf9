"""The CUDA kernels that run whole stages of seeds, against the blueprints in float64 on the CPU."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from esper.kasmina.blueprints.registry import BlueprintRegistry
from esper.kasmina.stages import describe, fits
from esper.leyline import BLEND_STYLES
from esper.tolaria.banks import StackedWeights

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
MAIN_ROWS, SHADOW_ROWS, MEMBERS = 3, 2, 5
ROWS, OF_MEMBER = torch.tensor([1, 4, 0, 0]), torch.tensor([1, 3, 2, 2])
VALID, LEARNS = torch.tensor([True, True, True, False]), torch.tensor([True, False, True, False])
STRENGTH = torch.tensor([0.5, 1.0, 0.7, 0.0])
MULTIPLY = BLEND_STYLES.index("multiply")
ONES = torch.ones(8, dtype=torch.float64)
NAMES = BlueprintRegistry.names("image")
DTYPES = [torch.float32, torch.bfloat16]
LIMIT = 3e-5  # in float32
WORSE = 2.0  # how far bfloat16 may be from float64, relative to torch in bfloat16: a ReLU at 0 may open or not


class Case(NamedTuple):
    """A seed, what it acts on, and in which precision."""

    name: str
    width: int
    side: int
    batch: int
    multiplies: bool = False
    dtype: torch.dtype = torch.float32


class Outcome(NamedTuple):
    """Streams (R, B, C, H, W), their gradient, and that of the weights (M, P)."""

    out: Tensor
    to_h: Tensor
    to_weights: Tensor


class Setup(NamedTuple):
    """The tensors of a case, in float64 on the CPU."""

    seed: nn.Module
    weights: StackedWeights
    h: Tensor
    style: Tensor  # by member
    gradient: Tensor


def set_up(case: Case) -> Setup:
    """Weights away from zero; streams that are not centred."""
    generator = torch.Generator().manual_seed(case.width * case.side)
    seed = BlueprintRegistry.build("image", case.name, case.width, resolution=case.side, rng_seed=0).double()
    shapes = {f"seed.{name}": parameter.shape for name, parameter in seed.named_parameters()}
    weights = StackedWeights(MEMBERS, shapes, CPU, torch.float64)
    weights.matrix.copy_(torch.randn(weights.matrix.shape, generator=generator) / 2)
    shape = (MAIN_ROWS + SHADOW_ROWS, case.batch, case.width, case.side, case.side)
    h, gradient = (torch.randn(shape, generator=generator).to(case.dtype).double() for _ in range(2))
    style = torch.zeros(MEMBERS, dtype=torch.int64)
    if case.multiplies:
        style[[1, 3]] = MULTIPLY
    return Setup(seed, weights, h, style, gradient)


def expected(setup: Setup, dtype: torch.dtype = torch.float64) -> Outcome:
    """One entry after the other, by the blueprint itself."""
    matrix = setup.weights.matrix.clone().requires_grad_()
    h = setup.h.clone().to(dtype).requires_grad_()
    out, shapes = h.clone(), setup.weights.shapes
    for row, member, learns, strength in zip(ROWS[:3], OF_MEMBER, LEARNS, STRENGTH.to(dtype), strict=False):
        own = (matrix[member] if learns else matrix[member].detach()).to(dtype)
        parts = {
            name.removeprefix("seed."): own[columns].view(shapes[name])
            for name, columns in setup.weights.columns.items()
        }
        delta = functional_call(setup.seed, parts, (h[row],))
        effect = h[row] * delta.tanh() if setup.style[member] == MULTIPLY else delta
        out = out.index_add(0, row[None], strength * effect[None])
    (out * setup.gradient.to(dtype)).sum().backward()
    assert h.grad is not None
    assert matrix.grad is not None
    return Outcome(out.detach().double(), h.grad.double(), matrix.grad)


def by_kernels(case: Case, setup: Setup, valid: Tensor = VALID) -> Outcome:
    """All entries at once on CUDA."""
    from esper.kasmina.kernels.programs import Entries, Streams, act, take_back

    program = describe(setup.seed, setup.weights.columns)
    assert program is not None
    assert fits(program, case.side**2)

    def stored(x: Tensor) -> Streams:
        rows = x.to("cuda", case.dtype).permute(1, 3, 4, 0, 2)
        return Streams(*(part.contiguous() for part in rows.split([MAIN_ROWS, SHADOW_ROWS], 3)))

    def back(streams: Streams) -> Tensor:
        return torch.cat(streams.pair, 3).permute(3, 0, 4, 1, 2).cpu().double()

    streams, incoming = stored(setup.h), stored(setup.gradient)
    out, to_h = streams.copy(), incoming.copy()
    rows, members, strength, style = (tensor.cuda() for tensor in (ROWS, OF_MEMBER, STRENGTH, setup.style))
    entries = Entries(rows, members, strength, style, valid.cuda(), (LEARNS & valid).cuda(), case.multiplies)
    matrix = setup.weights.matrix.to("cuda", torch.float32)
    kept = act(program, streams, out, entries, matrix, keeps=True)
    to_weights = torch.zeros_like(matrix)
    take_back(program, kept, streams, incoming, to_h, entries, matrix, to_weights)
    silent = streams.copy()
    act(program, streams, silent, entries, matrix, keeps=False)
    rounding = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[case.dtype]  # the compiler fuses other products there
    torch.testing.assert_close(back(silent), back(out), rtol=rounding, atol=rounding, equal_nan=True)
    return Outcome(back(out), back(to_h), to_weights.cpu().double())


def assert_close(case: Case) -> None:
    """In float32 each number, relative to the largest; in bfloat16 their norm, relative to what torch itself has."""
    setup = set_up(case)
    found, wanted = by_kernels(case, setup), expected(setup)
    if case.dtype == torch.float32:
        for name, mine, reference in zip(Outcome._fields, found, wanted, strict=True):
            error = float((mine - reference).abs().max() / reference.abs().max())
            assert error < LIMIT, f"{name} differs by {error:.1e}"
        return
    rounded = expected(setup, case.dtype)
    for name, mine, reference, by_torch in zip(Outcome._fields, found, wanted, rounded, strict=True):
        error, usual = (float((values - reference).norm()) for values in (mine, by_torch))
        assert error < WORSE * usual, f"{name} is {error / usual:.1f} times as far from float64 as torch is"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_blueprint(name: str, dtype: torch.dtype) -> None:
    """Several samples to a tile, and several tiles to a sample."""
    assert_close(Case(name, 8, 4, 70, dtype=dtype))
    assert_close(Case(name, 32, 7, 5, dtype=dtype))
    assert_close(Case(name, 4, 17, 3, dtype=dtype))


@pytest.mark.parametrize("name", NAMES)
def test_awkward_sizes(name: str) -> None:
    """Widths that are no powers of two, odd sides, a single sample; few channels; several groups of a norm."""
    assert_close(Case(name, 12, 5, 1))
    assert_close(Case(name, 2, 3, 2))
    assert_close(Case(name, 48, 3, 6))


@pytest.mark.parametrize("name", ["norm", "conv_light", "bottleneck"])
def test_one_channel(name: str) -> None:
    """Where the blueprint allows it."""
    assert_close(Case(name, 1, 5, 4))


@pytest.mark.parametrize("name", NAMES)
def test_multiplies(name: str) -> None:
    """Members of both styles in one group, in tiles of both kinds."""
    assert_close(Case(name, 8, 4, 20, multiplies=True))
    assert_close(Case(name, 8, 17, 3, multiplies=True))


@pytest.mark.parametrize("name", NAMES)
def test_worth_of_a_newborn(name: str) -> None:
    """What a scale of zero would have as its gradient, row by row; in tiles of both kinds."""
    from esper.kasmina.kernels.programs import worth

    for side in (4, 17):
        seed, weights, h, _, gradient = set_up(Case(name, 8, side, 20))
        program = describe(seed, weights.columns)
        assert program is not None
        weights.write(
            0, {f"seed.{part}": value for part, value in seed.named_parameters()} | {"seed.scale.weight": ONES}
        )
        stream, arrived = (part.cuda().float().permute(1, 3, 4, 0, 2).contiguous() for part in (h, gradient))
        found = worth(program, stream, arrived, weights.matrix[:1].cuda().float()).cpu()
        parts = {name: value.detach() for name, value in seed.named_parameters()} | {"scale.weight": ONES}
        wanted = (functional_call(seed, parts, (h.flatten(0, 1),)).view(h.shape) * gradient).sum((1, 3, 4))
        assert float((found - wanted).abs().max()) < 3e-5 * float(wanted.abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_group_changes_nothing(name: str) -> None:
    """Padding alone: no effect, no gradient, and weights that are not finite do no harm."""
    case = Case(name, 8, 4, 5)
    setup = set_up(case)
    setup.weights.matrix[0] = torch.nan
    found = by_kernels(case, setup, torch.zeros(4, dtype=torch.bool))
    assert torch.equal(found.out, setup.h.float().double())
    assert torch.equal(found.to_h, setup.gradient.float().double())
    assert found.to_weights.eq(0).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_row_stays_alone(name: str) -> None:
    """NaN in one row shows there, also behind a ReLU, and nowhere else."""
    case = Case(name, 8, 4, 20)
    setup = set_up(case)
    whole = by_kernels(case, setup)
    setup.h[1, 3, 2, 1, 1] = torch.nan
    broken = by_kernels(case, setup)
    assert broken.out[1, 3].isnan().any()
    assert broken.to_weights[1].isnan().any(), "the governor sees it"
    others = [0, 2, 3, 4]
    assert torch.equal(broken.out[others], whole.out[others])
    assert torch.equal(broken.to_h[others], whole.to_h[others])
    assert torch.equal(broken.to_weights[[0, 2, 3, 4]], whole.to_weights[[0, 2, 3, 4]])


@pytest.mark.parametrize("name", NAMES)
def test_two_runs_are_equal_to_the_bit(name: str) -> None:
    """No atomics: sums have one order."""
    case = Case(name, 16, 8, 64, dtype=torch.bfloat16)
    setup = set_up(case)
    for first, second in zip(by_kernels(case, setup), by_kernels(case, setup), strict=True):
        assert torch.equal(first, second)
