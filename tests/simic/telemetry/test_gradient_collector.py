"""Gradients by module."""

import math

import pytest
import torch
from torch import Tensor

from esper.leyline import head_preset
from esper.simic.telemetry import collect_gradients, gradients_of, measure_gradients
from esper.simic.telemetry.measurements import GradientFigures, module_of
from esper.tamiyo import FactoredRecurrentActorCritic, growth_table
from esper.tamiyo.features import growth_layout
from esper.tolaria import get_task


def naive(tensors: list[Tensor]) -> GradientFigures:
    """Entry by entry, in Python."""
    entries = [value for tensor in tensors for value in tensor.double().flatten().tolist()]
    finite = [value for value in entries if math.isfinite(value)]
    return GradientFigures(
        norm=math.sqrt(math.fsum(value * value for value in finite)),
        largest=max(abs(value) for value in finite),
        nan=sum(math.isnan(value) for value in entries),
        inf=sum(math.isinf(value) for value in entries),
        zero_share=sum(value == 0 for value in entries) / len(entries),
        size=len(entries),
    )


def assert_close(found: GradientFigures | None, expected: GradientFigures) -> None:
    """Norms to rounding, counts exactly."""
    assert found is not None
    assert found.norm == pytest.approx(expected.norm, rel=1e-12)
    assert (found.largest, found.nan, found.inf) == (expected.largest, expected.nan, expected.inf)
    assert (found.zero_share, found.size) == (expected.zero_share, expected.size)


@pytest.mark.requirement(6)
@pytest.mark.parametrize("rng_seed", range(5))
def test_equals_a_naive_loop(rng_seed: int) -> None:
    """The report matches, with NaN, infinities and zeros injected at random."""
    generator = torch.Generator().manual_seed(rng_seed)
    named = {}
    for name in ("heads.op.weight", "heads.op.bias", "heads.slot.weight", "lstm.weight", "critic.weight"):
        values = torch.randn((7, 11), generator=generator)
        dice = torch.rand((7, 11), generator=generator)
        values[dice < 0.05], values[dice > 0.97] = torch.nan, torch.inf
        values[(dice > 0.4) & (dice < 0.5)] = 0.0
        named[name] = values
    report = collect_gradients(named)
    groups = {
        "heads.op": ["heads.op.weight", "heads.op.bias"],
        "heads.slot": ["heads.slot.weight"],
        "lstm": ["lstm.weight"],
        "critic": ["critic.weight"],
    }
    assert list(report.modules) == list(groups)
    for module, names in groups.items():
        assert_close(report.modules[module], naive([named[name] for name in names]))
    assert_close(report.total, naive(list(named.values())))
    assert report.unmeasured == ()


def test_faults_are_found_in_their_module() -> None:
    """One infinity, one module."""
    report = collect_gradients({"lstm.weight": torch.ones(3), "critic.weight": torch.tensor([1.0, -torch.inf])})
    assert report.not_finite == ("critic",)
    assert report.total is not None
    assert report.total.inf == 1


@pytest.mark.requirement(6)
def test_negative_infinity_is_an_infinity() -> None:
    """It is counted, and hides neither the norm nor the largest entry of the rest."""
    values = torch.tensor([3.0, -torch.inf, 0.0, -4.0, torch.inf, torch.nan, -torch.inf])
    report = collect_gradients({"lstm.weight": values})
    assert report.modules["lstm"] == GradientFigures(norm=5.0, largest=4.0, nan=1, inf=3, zero_share=1 / 7, size=7)


def test_no_gradient_is_not_zero() -> None:
    """What was not measured is None; where part of a module was measured, that part is reported."""
    report = collect_gradients({"lstm.weight": None, "critic.weight": torch.zeros(4), "critic.bias": None})
    assert report.modules["lstm"] is None
    assert report.modules["critic"] == GradientFigures(0.0, 0.0, 0, 0, 1.0, 4)
    assert report.unmeasured == ("lstm.weight", "critic.bias")
    nothing = collect_gradients({"lstm.weight": None})
    assert nothing.total is None
    assert collect_gradients({}).modules == {}


@pytest.mark.requirement(44)
def test_gradients_on_two_devices() -> None:
    """Gradients on the meta device have no values and stay unmeasured; the others are measured."""
    meta = torch.ones(5, device="meta")
    report = collect_gradients({"lstm.a": torch.tensor([3.0, 4.0]), "lstm.b": meta, "critic.weight": meta})
    assert report.modules["lstm"] == GradientFigures(5.0, 4.0, 0, 0, 0.0, 2)
    assert report.modules["critic"] is None
    assert report.unmeasured == ("lstm.b", "critic.weight")


@pytest.mark.requirement(44)
@pytest.mark.gpu
def test_gradients_on_cpu_and_cuda() -> None:
    """A module split between devices is reported as one module."""
    named: dict[str, Tensor | None] = {"lstm.a": torch.tensor([3.0, 0.0]), "lstm.b": torch.tensor([-4.0, 0.0]).cuda()}
    report = collect_gradients(named)
    assert report.modules["lstm"] == GradientFigures(5.0, 4.0, 0, 0, 0.5, 4)


@pytest.mark.requirement(6)
@pytest.mark.gpu
def test_one_copy_on_cuda() -> None:
    """The CUDA driver counts one copy."""
    named: dict[str, Tensor | None] = {f"layer{index}.weight": torch.randn(64, device="cuda") for index in range(8)}
    collect_gradients(named)
    with torch.profiler.profile(acc_events=True) as profiler:
        collect_gradients(named)
    copies = [event for event in profiler.events() if "Memcpy DtoH" in event.name]
    assert len(copies) == 1


@pytest.mark.requirement(6)
def test_a_compiled_caller_is_not_broken() -> None:
    """Measuring becomes part of the caller's graph, without a break."""

    def step(weight: Tensor) -> dict[tuple[str, str], Tensor]:
        return measure_gradients({"lstm.weight": weight * 2, "critic.weight": weight - 1})

    values = torch.tensor([1.0, torch.nan, 0.0, 2.0])
    compiled = torch.compile(step, fullgraph=True, backend="eager")(values)
    assert {place: figures.tolist() for place, figures in compiled.items()} == {
        place: figures.tolist() for place, figures in step(values).items()
    }
    assert compiled["lstm", "cpu"].tolist() == [20.0, 4.0, 1.0, 0.0, 1.0, 4.0]


@pytest.mark.requirement(6)
def test_reading_is_excluded_from_compilation() -> None:
    """A compiled caller runs the read eagerly and gets the report."""
    seen = []

    def step(weight: Tensor) -> Tensor:
        seen.append(collect_gradients({"lstm.weight": weight}))
        return weight * 2

    result = torch.compile(step, backend="eager")(torch.tensor([3.0, 4.0]))
    assert result.tolist() == [6.0, 8.0]
    assert seen[0].modules["lstm"] == GradientFigures(5.0, 4.0, 0, 0, 0.0, 2)


@pytest.mark.requirement(73)
def test_a_caller_that_must_be_one_graph_is_refused() -> None:
    """Dynamo names the exclusion as the reason, rather than something inside the function."""

    def step(weight: Tensor) -> Tensor:
        collect_gradients({"lstm.weight": weight})
        return weight * 2

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.compiler\.disable"):
        torch.compile(step, fullgraph=True, backend="eager")(torch.ones(2))


def test_a_real_policy() -> None:
    """The growth policy, heads by themselves; of half its squared weights, the gradient is the weight."""
    task = get_task("digits_blind")
    table = growth_table(head_preset("core"), task.slot_config)
    network = FactoredRecurrentActorCritic(table, growth_layout(task.slot_config))
    loss = torch.stack([weight.square().sum() / 2 for weight in network.parameters()]).sum()
    torch.autograd.backward(loss)
    report = collect_gradients(gradients_of(network))
    assert {"heads.op", "heads.slot", "heads.blueprint", "critic"} <= set(report.modules)
    assert report.unmeasured == ()
    assert report.total is not None
    assert report.total.norm == pytest.approx(float(2 * loss.detach()) ** 0.5, rel=1e-5)
    assert report.total.size == sum(weight.numel() for weight in network.parameters())


def test_large_gradients_do_not_overflow() -> None:
    """Squares of 1e30 do not fit into float32."""
    report = collect_gradients({"lstm.weight": torch.full((4,), 1e30)})
    assert report.total is not None
    assert report.total.norm == pytest.approx(2e30)


@pytest.mark.parametrize(
    ("name", "module"), [("heads.op.weight", "heads.op"), ("heads.op", "heads"), ("lstm.weight_ih", "lstm"), ("x", "x")]
)
def test_module_of(name: str, module: str) -> None:
    """Names of parameters to names of modules."""
    assert module_of(name) == module
