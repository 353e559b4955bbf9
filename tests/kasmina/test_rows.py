"""R networks in one call are the R networks one by one: outputs, statistics and gradients."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from hosts import HOST_KINDS, HostKind, make_batch, make_host, shake
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

from esper.kasmina import BlueprintRegistry, CNNHost, Host
from esper.kasmina.blending import BlendGate
from esper.kasmina.layers import Conv2d, Embedding, Linear, Scale, SelfAttention, Statistics, max_pool, reset_parameters
from esper.kasmina.norms import BatchNorm2d, GroupNorm, LayerNorm
from esper.kasmina.row_layout import fold_rows, unfold_rows
from esper.leyline import TOPOLOGIES, Topology

ROWS = (2, 3, 5)
BATCH = 4
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
DTYPES = tuple(TOLERANCE)

Maker = Callable[[], nn.Module]


class Pool(nn.Module):
    """`max_pool` as a module."""

    def forward(self, x: Tensor) -> Tensor:
        return max_pool(x)


class Run(nn.Module):
    """A host, in a mode, that returns the statistics of its batch."""

    def __init__(self, host: Host, train: bool) -> None:
        super().__init__()
        self.host, self.mode = host, train

    def forward(self, x: Tensor) -> tuple[Tensor, Statistics]:
        return self.host.run(x, self.mode)


class Norm(nn.Module):
    """A BatchNorm in one mode."""

    def __init__(self, width: int, train: bool) -> None:
        super().__init__()
        self.norm, self.mode = BatchNorm2d(width), train

    def forward(self, x: Tensor) -> tuple[Tensor, Statistics]:
        return self.norm(x, self.mode)


def noise(shape: Sequence[int], dtype: torch.dtype, rng_seed: int = 0) -> Tensor:
    """Standard normal, the same in every dtype up to rounding."""
    generator = torch.Generator().manual_seed(rng_seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


def different(make: Maker, rows: int, dtype: torch.dtype) -> list[nn.Module]:
    """So many networks that share nothing but their architecture; no weight or buffer is at its special birth value."""
    modules = []
    for row in range(rows):
        module = make()
        reset_parameters(module, row)
        module.to(dtype)
        shake(module, 100 + row)
        for index, (name, buffer) in enumerate(module.named_buffers()):
            draw = noise(buffer.shape, dtype, 1000 * row + index)
            buffer.copy_((draw > 0).to(dtype) if name.endswith("mask") else draw.abs() + 0.5)
            if name.endswith("mask"):
                buffer[0] = 1  # something is left to see
        modules.append(module)
    return modules


class Outcome(NamedTuple):
    """What a call gives: [output, statistics …], and the gradients of a weighted sum of the output."""

    values: list[Tensor]
    gradients: list[Tensor]


def outcome(module: nn.Module, weights: dict[str, Tensor], x: Tensor, row: int | None = None) -> Outcome:
    """Call a module with these weights and buffers; gradients of its parameters and, where it has one, of x."""
    x = x.detach().requires_grad_(x.is_floating_point())
    result = functional_call(module, weights, (x,))
    output, statistics = result if isinstance(result, tuple) else (result, {})
    wanted = [weight for weight in [*weights.values(), x] if weight.requires_grad]
    # A factor for every position of the output, its own in every row.
    size = output.numel() if row is not None else output[0].numel()
    rows = range(output.shape[0]) if row is None else [row]
    weighting = torch.stack([noise((size,), output.dtype, 7 + index) for index in rows]).reshape(output.shape)
    gradients = torch.autograd.grad((output * weighting).sum(), wanted)
    return Outcome([output.detach(), *(statistics[name] for name in sorted(statistics))], list(gradients))


def stacked(modules: list[nn.Module]) -> dict[str, Tensor]:
    """Parameters and buffers of all modules, with a leading row axis."""
    parameters, buffers = stack_module_state(modules)
    return {**parameters, **buffers}


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def relative_error(result: Tensor, reference: Tensor) -> float:
    """max |difference| / max |reference|."""
    assert result.shape == reference.shape
    largest = reference.abs().max()
    assert largest > 0, "a reference of zeros shows nothing"
    return float((result - reference).abs().max() / largest)


def assert_rows_agree(modules: list[nn.Module], x: Tensor) -> None:
    """One call with stacked weights and x of shape (rows, batch, …) against one call per module."""
    weights = stacked(modules)
    dtype = next((weight.dtype for weight in weights.values()), x.dtype)
    rows = outcome(modules[0], weights, x)
    for row, module in enumerate(modules):
        alone = outcome(module, weights_of(module), x[row], row)
        for part in ("values", "gradients"):
            for index, (together, single) in enumerate(zip(getattr(rows, part), getattr(alone, part), strict=True)):
                error = relative_error(together[row], single)
                assert error <= TOLERANCE[dtype], f"row {row}, {part} {index}: relative error {error:.2e}"


LAYERS: dict[str, tuple[Maker, tuple[int, ...]]] = {
    "conv 1x1": (lambda: Conv2d(3, 6, 1), (3, 5, 5)),
    "conv 3x3": (lambda: Conv2d(3, 6, 3), (3, 5, 5)),
    "conv masked": (lambda: Conv2d(3, 6, 3, masked=True), (3, 5, 5)),
    "conv depthwise": (lambda: Conv2d(6, 6, 3, groups=6), (6, 5, 5)),
    "conv grouped": (lambda: Conv2d(6, 4, 3, groups=2), (6, 5, 5)),
    "linear of vectors": (lambda: Linear(6, 4), (6,)),
    "linear of tokens": (lambda: Linear(6, 4), (5, 6)),
    "linear without bias": (lambda: Linear(6, 4, bias=False), (5, 6)),
    "batch norm, train": (lambda: Norm(6, True), (6, 5, 5)),
    "batch norm, eval": (lambda: Norm(6, False), (6, 5, 5)),
    "group norm": (lambda: GroupNorm(2, 6), (6, 5, 5)),
    "layer norm of vectors": (lambda: LayerNorm(6), (6,)),
    "layer norm of tokens": (lambda: LayerNorm(6), (5, 6)),
    "self-attention": (lambda: SelfAttention(8, 2), (5, 8)),
    "scale of images": (lambda: Scale(6), (6, 5, 5)),
    "scale of tokens": (lambda: Scale(6), (5, 6)),
    "scale of vectors": (lambda: Scale(6), (6,)),
    "max pool": (Pool, (6, 5, 5)),
    "gate of images": (lambda: BlendGate(6, "image"), (6, 5, 5)),
    "gate of tokens": (lambda: BlendGate(6, "tokens"), (5, 6)),
    "gate of vectors": (lambda: BlendGate(6, "vector"), (6,)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str, rows: int, dtype: torch.dtype) -> None:
    make, shape = LAYERS[name]
    assert_rows_agree(different(make, rows, dtype), noise((rows, BATCH, *shape), dtype, rows))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_embedding(rows: int, dtype: torch.dtype) -> None:
    ids = torch.randint(9, (rows, BATCH, 5), generator=torch.Generator().manual_seed(rows))
    assert_rows_agree(different(lambda: Embedding(9, 6), rows, dtype), ids)


@pytest.mark.parametrize("rows", ROWS)
def test_images_in_folded_storage(rows: int) -> None:
    """How the rows lie in memory does not matter to the values."""
    x = unfold_rows(noise((BATCH, rows * 6, 5, 5), torch.float64), rows)
    assert not x.is_contiguous()
    for name in ("conv depthwise", "batch norm, train", "group norm", "scale of images", "max pool"):
        assert_rows_agree(different(LAYERS[name][0], rows, torch.float64), x)


def test_layers_see_that_rows_differ() -> None:
    """The comparison can fail: rows whose weights are swapped do not pass."""
    modules = different(LAYERS["conv 3x3"][0], 2, torch.float64)
    x = noise((2, BATCH, 3, 5, 5), torch.float64)
    swapped = functional_call(modules[0], {name: w.flip(0) for name, w in stacked(modules).items()}, (x,))
    assert (swapped[0] - modules[0](x[0])).abs().max() > 1e-3


# -- hosts ------------------------------------------------------------------------------------------------------------


def rows_of_batches(kind: HostKind, rows: int, dtype: torch.dtype) -> Tensor:
    return torch.stack([make_batch(kind, BATCH, dtype=dtype, rng_seed=row)[0] for row in range(rows)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", HOST_KINDS)
def test_host(kind: HostKind, train: bool, rows: int, dtype: torch.dtype) -> None:
    hosts = different(lambda: Run(make_host(kind), train), rows, dtype)
    assert_rows_agree(hosts, rows_of_batches(kind, rows, dtype))


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_masked_host(train: bool) -> None:
    """Hosts of one fleet may see different taps of their kernels."""

    def make() -> nn.Module:
        return Run(CNNHost((6, 8), 3, classes=5, resolution=8, masked=True), train)

    hosts = different(make, 3, torch.float64)
    assert_rows_agree(hosts, rows_of_batches("cnn", 3, torch.float64))


def test_host_writes_rows_of_statistics() -> None:
    """`forward` in training mode moves the stacked running statistics just as those of single networks."""
    hosts: list[nn.Module] = [make_host("cnn", dtype=torch.float64, rng_seed=row) for row in range(3)]
    x = rows_of_batches("cnn", 3, torch.float64)
    weights = stacked(hosts)
    functional_call(hosts[0], weights, (x,))
    for row, host in enumerate(hosts):
        host(x[row])
        for name, buffer in host.named_buffers():
            torch.testing.assert_close(weights[name][row], buffer, rtol=1e-12, atol=1e-12)
    assert not torch.equal(weights["segments.0.norm.running_mean"][0], torch.zeros(6, dtype=torch.float64))


# -- blueprints -------------------------------------------------------------------------------------------------------


def fitting(widths: Sequence[int]) -> list[tuple[Topology, str, int]]:
    return [
        (topology, name, width)
        for topology in TOPOLOGIES
        for name in BlueprintRegistry.names(topology)
        for width in widths
        if BlueprintRegistry.spec(topology, name).misfit(width, 5) is None
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("topology", "name", "width"), fitting((3, 8, 48)))
def test_blueprint(topology: Topology, name: str, width: int, dtype: torch.dtype) -> None:
    shape = {"image": (width, 5, 5), "tokens": (5, width), "vector": (width,)}[topology]
    for rows in ROWS if width == 8 else (3,):
        seeds = different(lambda: BlueprintRegistry.build(topology, name, width), rows, dtype)
        assert_rows_agree(seeds, noise((rows, BATCH, *shape), dtype, rows))


# -- storage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
def test_rows_between_layers_are_never_copied(rows: int) -> None:
    """What leaves an image layer folds back by a view, so the next layer reads the same memory (`test_products` has the
    small images)."""
    x = noise((rows, BATCH, 6, 18, 18), torch.float32)
    for name in ("conv 3x3", "conv depthwise", "batch norm, train", "batch norm, eval", "group norm", "max pool"):
        make, shape = LAYERS[name]
        modules = different(make, rows, torch.float32)
        result = functional_call(modules[0], stacked(modules), (x[:, :, : shape[0]],))
        y = result[0] if isinstance(result, tuple) else result
        folded = fold_rows(y)
        assert folded.shape == (BATCH, rows * y.shape[2], *y.shape[3:])
        assert folded.is_contiguous()
        assert folded.data_ptr() == y.data_ptr()
        again = unfold_rows(folded, rows)
        assert again.data_ptr() == y.data_ptr()
        assert torch.equal(again, y)


def test_elementwise_operations_keep_the_storage() -> None:
    """ReLU, sums and a blend of what left a row layer need no copy either."""
    y = unfold_rows(noise((BATCH, 3 * 6, 9, 9), torch.float32), 3)
    for h in (torch.relu(y), y + 0.5 * y, y * torch.ones(3, 1, 6, 1, 1)):
        assert fold_rows(h).data_ptr() == h.data_ptr()


def test_fold_copies_rows_that_are_stored_apart() -> None:
    """The view is not for free: rows that lie one behind the other have to be gathered once."""
    x = noise((3, BATCH, 6, 4, 4), torch.float32)
    folded = fold_rows(x)
    assert folded.data_ptr() != x.data_ptr()
    assert torch.equal(unfold_rows(folded, 3), x)
