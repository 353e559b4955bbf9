"""Foreign networks that are compiled: they grow as they do without."""

from typing import Any

import pytest
import torch
from foreign import Case, gradients, images, prune_life, stages
from foreign import case as case
from hosts import AT_ONCE
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from esper.kasmina import CNNHost, GrowingOptimizer, MorphogeneticModel, attach, row_layout
from esper.kasmina.slot import ISOLATIONS, Isolation
from esper.leyline import SeedStage


def check_compiled_equals_eager(case: Case, isolation: Isolation, backend: Any, rtol: float, atol: float) -> None:
    """Walk every stage with a compiled model; Any: a backend's name or the backend itself."""
    model = case.model(isolation)
    model.compile(backend=backend, fullgraph=True)
    data = case.data()

    def run() -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        result = {"eval": model.eval()(data[0]).detach()}
        # Compiled dropout draws other masks than eager dropout, so gradients are compared without it.
        losses = model.losses(*data)
        sum(losses.values(), torch.zeros(())).backward()
        result |= {f"loss {name}": loss.detach() for name, loss in losses.items()}
        return result | gradients(model)

    walks = [stages(model, case.first, case.blueprint, data), prune_life(model, case.second, case.blueprint)]
    for walk in walks:
        for stage in walk:
            compiled = run()
            with torch.compiler.set_stance("force_eager"):
                eager = run()
            assert compiled.keys() == eager.keys()
            for name, value in eager.items():
                close = torch.allclose(compiled[name], value, rtol=rtol, atol=atol)
                assert close, f"{stage.name}, {name}: off by {(compiled[name] - value).abs().max():.2g}"


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.default_cases("transformer-shadow")
def test_a_compiled_model_equals_the_eager_one_in_every_stage(case: Case, isolation: Isolation) -> None:
    torch.compiler.reset()
    check_compiled_equals_eager(case, isolation, "eager", rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor imports parts of torch that torch deprecates
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_compiled_model_equals_the_eager_one_under_each_backend(
    case: Case, isolation: Isolation, backend: str
) -> None:
    torch.compiler.reset()
    check_compiled_equals_eager(case, isolation, backend, rtol=1e-3, atol=1e-5)


@pytest.mark.default_cases("resnet")
def test_alpha_alone_never_recompiles(case: Case) -> None:
    torch.compiler.reset()
    backend = CompileCounterWithBackend("eager")
    model = case.model().eval()
    model.compile(backend=backend, fullgraph=True)
    x, targets = case.data()
    counts: dict[str, int] = {}
    seen: set[float] = set()
    for stage in stages(model, case.first, case.blueprint, (x, targets)):
        model(x)
        counts[stage.name] = backend.frame_count
        seen.add(model.reports()[0].alpha)
    # One graph while the seed is silent, one while it acts at whatever alpha.
    assert counts == dict.fromkeys(["DORMANT", "GERMINATED", "TRAINING"], 1) | dict.fromkeys(
        ["BLENDING", "HOLDING", "FOSSILIZED"], 2
    )
    assert len(seen) == 4


@pytest.mark.default_cases("resnet")
def test_losses_of_a_compiled_model_train_it(case: Case) -> None:
    torch.compiler.reset()
    trained = []
    for compiled in (False, True):
        model = case.model(config=None).train()
        if compiled:
            model.compile(backend="aot_eager")
        optimiser = GrowingOptimizer(model, lambda p: torch.optim.SGD(p, lr=0.1))
        model.germinate_seed(case.first, case.blueprint)
        torch.manual_seed(2)
        for _ in range(4):
            optimiser.zero_grad()
            sum(model.losses(*case.data()).values(), torch.zeros(())).backward()
            optimiser.step()
            model.tick()
        model.advance(case.first)
        trained.append(model.state_dict())
    for name, value in trained[0].items():
        torch.testing.assert_close(trained[1][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.default_cases("transformer")
def test_torch_compile_serves_the_forward_pass(case: Case) -> None:
    torch.compiler.reset()
    model = attach(case.host(), case.slots).eval()
    compiled: Any = torch.compile(model, backend="eager")  # Any: torch types it as a function, it is a module
    x, targets = case.data()
    for _ in range(2):  # the first call probes
        torch.testing.assert_close(compiled(x), model(x), rtol=0.0, atol=0.0)
    model.germinate_seed(case.first, case.blueprint)
    model.advance(case.first)
    assert compiled.losses(x, targets).keys() == {"main", case.first}


@pytest.mark.slow
def test_built_in_hosts_compile_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit by torch's own functions; products for tiny images are not compiled, and round otherwise."""
    monkeypatch.setattr(row_layout, "SMALL", 0)
    torch.compiler.reset()
    model = MorphogeneticModel(CNNHost((4, 8), resolution=8, classes=4), config=AT_ONCE).eval()
    model.compile(backend="eager", fullgraph=True)
    data = images()
    for stage in stages(model, "r0c1", "conv_light", data):
        compiled = model.losses(*data)
        with torch.compiler.set_stance("force_eager"):
            eager = model.losses(*data)
        assert compiled.keys() == eager.keys() and (len(eager) == 2) == (stage is SeedStage.TRAINING)
        assert all(torch.equal(compiled[name], eager[name]) for name in eager), stage


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_shadow_sees_the_masks_of_the_compiled_main_row(case: Case) -> None:
    torch.compiler.reset()
    model = case.model().train()
    model.compile()
    model.germinate_seed(case.second, case.blueprint)
    model.advance(case.second)
    losses = model.losses(*case.data())
    torch.testing.assert_close(losses["main"], losses[case.second])
    stream = torch.get_rng_state()
    model.body.shadow(case.second, case.data()[0], train=True)
    assert torch.equal(stream, torch.get_rng_state())
