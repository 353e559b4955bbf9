"""Slots in foreign networks: attaching them, and a model that is still an ordinary module."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from foreign import CASES, Case, images, same, stages, wake
from foreign import case as case
from torch import Tensor, nn

from esper.kasmina import GrowingOptimizer, MorphogeneticModel, attach
from esper.kasmina.slot import Isolation
from esper.leyline import BadValueError, GateRefusedError, HostMismatchError, UnknownNameError


def hook_count(module: nn.Module) -> int:
    return sum(len(part._forward_hooks) for part in module.modules())


# -- attaching --------------------------------------------------------------------------------------------------------


def test_a_probe_learns_what_passes_and_changes_nothing() -> None:
    host = CASES["resnet"].host().train()
    before, stream = copy.deepcopy(host.state_dict()), torch.get_rng_state()
    model = attach(host, {"layer2": 16, "head": 4, "layer1": 8}, example=images()[0])
    specs = [slot.spec for slot in model.seed_slots.values()]
    result = [(s.slot_id, s.topology, s.width, s.resolution) for s in specs]
    assert result == [("layer1", "image", 8, 8), ("layer2", "image", 16, 4), ("head", "vector", 4, None)]
    assert 0 < specs[0].position < specs[1].position < specs[2].position == 1
    assert same(before, host.state_dict()) and torch.equal(stream, torch.get_rng_state())
    assert all(part.training for part in host.modules()) and hook_count(host) == 3


def test_without_an_example_the_first_forward_is_the_probe(case: Case) -> None:
    model = attach(case.host(), case.slots)
    with pytest.raises(GateRefusedError, match=r"run one forward pass, or pass example="):
        model.germinate_seed(case.first, case.blueprint)
    assert "not probed" in repr(model)
    model(case.data()[0])
    assert [s.spec for s in model.seed_slots.values()] == [s.spec for s in case.model().seed_slots.values()]
    model.germinate_seed(case.first, case.blueprint)


class Awkward(nn.Module):
    """Submodules that cannot have a slot."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(4, 4, batch_first=True)
        self.twice = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)
        self.flat = nn.Flatten(0)
        self.deep = nn.Unflatten(0, (1, 1, -1))
        self.values = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.recurrent(x)
        h = self.values(self.twice(self.twice(h)))
        return self.flat(h).sum() + self.deep(h).sum()  # type: ignore[no-any-return]  # modules return Any


@pytest.mark.parametrize(
    ("slots", "error", "message"),
    [
        ({"recurent": 4}, UnknownNameError, r"'recurent'; allowed: recurrent"),
        ({"twice": 0}, BadValueError, r"'twice': width 0 is not an integer of 1 or more"),
        ({"twice": True}, BadValueError, r"width True"),
        ({}, BadValueError, r"at least one slot"),
        ({"values": 4}, BadValueError, r"'values' cannot have a slot under this name"),
        ({"recurrent": 4}, HostMismatchError, r"'recurrent' returns tuple; a slot needs one tensor"),
        ({"twice": 4}, HostMismatchError, r"'twice' ran 2 times"),
        ({"unused": 4}, HostMismatchError, r"'unused' ran 0 times"),
        ({"flat": 4}, HostMismatchError, r"'flat' returns a tensor of shape \(24,\)"),
        ({"deep": 4}, HostMismatchError, r"'deep' returns a tensor of shape \(1, 1, 2, 3, 4\)"),
    ],
)
def test_what_cannot_be_attached_is_refused_and_nothing_is_left_behind(
    slots: dict[str, int], error: type[Exception], message: str
) -> None:
    host = Awkward()
    with pytest.raises(error, match=message):
        attach(host, slots, example=torch.randn(2, 3, 4))
    assert hook_count(host) == 0


def test_a_width_that_differs_is_refused() -> None:
    host = CASES["resnet"].host()
    with pytest.raises(HostMismatchError, match=r"declared with width 9, but image of width 8 pass there"):
        attach(host, {"layer1": 9}, example=images()[0])
    assert hook_count(host) == 0
    model = attach(host, {"layer1": 9})
    with pytest.raises(HostMismatchError, match=r"width 9"):
        model(images()[0])


def test_attach_comes_once_and_before_compiling() -> None:
    host = CASES["resnet"].host()
    with pytest.raises(UnknownNameError, match="isolation 'none'; allowed: shadow, straight_through"):
        attach(host, {"layer1": 8}, isolation="none")  # type: ignore[arg-type]  # the mistake under test
    attach(host, {"layer1": 8})
    with pytest.raises(BadValueError, match="has a slot already"):
        attach(host, {"layer2": 16})
    with pytest.raises(BadValueError, match="attach first, then compile"):
        compiled = CASES["resnet"].host()
        compiled.compile(backend="eager")
        attach(compiled, {"layer1": 8})
    with pytest.raises(BadValueError, match="no parameters"):
        attach(nn.Sequential(nn.ReLU()), {"0": 8})


def test_any_arguments_reach_the_host() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, factor: float, *, train: float = 0.0) -> Tensor:
            result: Tensor = self.linear(x) * factor + train
            return result

    model = attach(Scaled(), {"linear": 4})
    x = torch.randn(2, 4)
    expected = model.host(x, 2.0, train=3.0)
    assert torch.equal(model(x, 2.0, train=3.0), expected)
    assert torch.equal(model(x=x, factor=2.0, train=3.0), expected)


# -- an ordinary module -----------------------------------------------------------------------------------------------


def grown(case: Case, isolation: Isolation = "shadow") -> MorphogeneticModel:
    """With a fossil in the first slot and a TRAINING seed in the second."""
    model = case.model(isolation)
    list(stages(model, case.first, case.blueprint, case.data()))
    model.germinate_seed(case.second, case.blueprint)
    model.advance(case.second)
    wake(model, case.second)
    return model


def test_a_copy_has_slots_and_hooks_of_its_own(case: Case) -> None:
    model = grown(case).eval()
    optimiser = GrowingOptimizer(model, lambda p: torch.optim.SGD(p, lr=0.1))
    x = case.data()[0]
    before = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), before)
        hooks = [hook for part in twin.modules() for hook in part._forward_hooks.values()]
        assert [getattr(hook, "__self__", None) for hook in hooks] == list(twin.seed_slots.values())
        nn.init.constant_(next(twin.seed_parameters(case.first)), 1.0)
        twin.prune_seed(case.second)
        assert not torch.equal(twin(x), before) and torch.equal(model(x), before)
    assert len(optimiser.wrapped.param_groups) == 3


def test_dtype_and_state_dict(case: Case) -> None:
    model, twin = grown(case).double().eval(), grown(case).double().eval()
    data = case.data()[0]
    x = data.double() if data.is_floating_point() else data
    for parameter in twin.parameters():
        nn.init.constant_(parameter, 0.1)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(x), model(x)) and model(x).dtype == torch.float64
    model.prune_seed(case.second)
    while model.reports()[1].cooldown:
        model.tick()
    model.germinate_seed(case.second, case.blueprint)
    assert all(p.dtype == torch.float64 for p in model.seed_parameters())


def test_a_checkpoint_restores_an_attached_host(case: Case, tmp_path: Path) -> None:
    model = grown(case).eval()
    model.save(tmp_path / "saved")
    torch.manual_seed(99)
    fresh = attach(case.make(), case.slots, example=case.data()[0])
    loaded = MorphogeneticModel.load(tmp_path / "saved", fresh).eval()
    assert torch.equal(loaded(case.data()[0]), model(case.data()[0]))
    assert loaded.reports() == model.reports()
    losses = [m.losses(*case.data())[case.second].item() for m in (model, loaded)]
    assert losses[0] == losses[1]


def test_a_channels_last_host_grows_a_norm() -> None:
    """The shadow row detaches the stream, and torch's group norm would crash in its backward pass without a copy."""
    host = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 196, 4))
    x = torch.randn(4, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    model = attach(host, {"1": 8}, example=x)
    model.germinate_seed("1", "norm")
    model.advance("1")
    losses = model.losses(x, torch.arange(4))
    sum(losses.values(), torch.zeros(())).backward()
    seed = model.seed_slots["1"]
    assert all(parameter.grad is not None for parameter in seed.parameters())
