"""Adaptation of networks and in settings that users have: a pretrained ResNet, Llama, two ranks, a compiler."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from frozen import VALIDATION, adapt, frozen_cnn, learning, outputs, train_epoch
from loops import loader
from torch import Tensor, nn
from torch.nn import functional as F

from esper.grower import Grower
from esper.grower.container import CHILD

pytestmark = pytest.mark.slow


def assert_round_trip(
    model: nn.Module, fresh: nn.Module, grower: Grower, inputs: Any, folder: Path, tolerance: float = 1e-5
) -> None:
    """Saved, loaded into a fresh copy, merged there, and merged here: the same outputs, and the names of the base."""

    @torch.no_grad()
    def scores(net: nn.Module) -> Tensor:
        output = net.eval()(inputs)
        return cast(Tensor, getattr(output, "logits", output))

    names = list(fresh.state_dict())
    for parameter in getattr(model, CHILD).parameters():
        nn.init.normal_(parameter, std=0.02)  # all parts matter
    expected = scores(model)
    assert not torch.allclose(scores(fresh), expected, atol=1e-2)
    grower.save(folder)
    adapter = Grower.load_adapter(fresh, folder)
    assert torch.equal(scores(fresh), expected)
    limit = tolerance * float(expected.abs().max())
    assert float((scores(adapter.merge()) - expected).abs().max()) <= limit
    assert float((scores(grower.merge(keep=list(getattr(model, CHILD).live()))) - expected).abs().max()) <= limit
    assert list(model.state_dict()) == list(fresh.state_dict()) == names


def test_a_pretrained_resnet(tmp_path: Path, script_of: Any) -> None:
    """ResNet-20 with its real weights, in float32."""
    folder = Path(os.environ.get("ESPER_DATA", "data"))
    cases = script_of("adaptation_cases")
    if not (folder / cases.WEIGHTS).is_file():
        pytest.skip("no pretrained ResNet-20 in the folder of ESPER_DATA")
    model = cases.pretrained(folder).requires_grad_(False)
    model.linear.requires_grad_(True)
    optimizer = learning(model)
    grower = Grower(model, optimizer, budget=10_000, steps=8)
    x, y = torch.randn(16, 3, 32, 32), torch.arange(16) % 10
    for _ in range(3):
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        grower.step([(x, y)])
    kinds = {type(slot.seed).__name__ for slot in getattr(model, CHILD).live().values()}
    assert kinds == {"Affine", "LowRankUpdate"}
    assert_round_trip(model, cases.pretrained(folder), grower, torch.randn(8, 3, 32, 32), tmp_path / "adapter")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_llama(tmp_path: Path) -> None:
    """The classes of transformers: norms of their own, tied embeddings, outputs that are no tensors."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )

    def build() -> nn.Module:
        torch.manual_seed(0)
        return cast(nn.Module, transformers.LlamaForCausalLM(config)).requires_grad_(False)

    def losses(output: Any, batch: Any) -> Tensor:  # Any: as the Grower's
        return F.cross_entropy(output.logits.flatten(0, 1), batch[1].flatten(), reduction="none")

    model = build()
    model.get_submodule("model.norm").requires_grad_(True)
    optimizer = learning(model)
    grower = Grower(model, optimizer, budget=4000, steps=8, loss=losses)
    tokens = torch.randint(0, 64, (4, 9))
    batch = tokens[:, :-1], tokens[:, 1:]
    for _ in range(3):
        model.train()
        optimizer.zero_grad()
        losses(model(batch[0]), batch).mean().backward()
        optimizer.step()
        grower.step([batch])
    live = getattr(model, CHILD).live()
    assert len([slot for slot in live.values() if slot.state.blueprint == "scale"]) == 6
    assert len([slot for slot in live.values() if str(slot.state.blueprint).startswith("lora_linear")]) > 6
    assert_round_trip(model, build(), grower, batch[0], tmp_path / "adapter")


def test_two_ranks(tmp_path: Path) -> None:
    """Statistics, seeds and weights are equal on both, without the help of DDP's own broadcast of buffers."""
    folder = Path(__file__).parent
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(31500 + os.getpid() % 2000),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(folder), str(folder.parents[1] / "src")]),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(folder / "two_frozen_ranks.py")],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, (out, err) in enumerate([each.communicate(timeout=300) for each in ranks]):
        assert f"rank {rank} equal" in out, err[-3000:]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model() -> None:
    """Statistics do not drift, seeds are born and learn, and the merged model computes the same."""
    torch._dynamo.reset()
    model = frozen_cnn()
    optimizer = learning(model)
    grower = Grower(model, optimizer, budget=400, steps=8)
    model.eval()
    model(VALIDATION[0][:2])
    compiled = cast(nn.Module, torch.compile(model, backend="eager"))
    own = {name: buffer.clone() for name, buffer in model.named_buffers() if "running" in name}
    for epoch in range(4):
        train_epoch(compiled, optimizer, epoch)
        if epoch == 0:
            assert all(torch.equal(model.get_buffer(name), buffer) for name, buffer in own.items())
        grower.step(loader(VALIDATION))
    live = getattr(model, CHILD).live()
    assert len(live) == 4 and all(bool(p.any()) for slot in live.values() for p in slot.parameters())
    before = outputs(model)
    grower.merge(keep=list(live))
    assert torch.allclose(outputs(model), before, atol=1e-5)


def test_bfloat16(tmp_path: Path) -> None:
    """Seeds have the dtype of the stream; saving, loading and merging keep what rounding allows."""
    model = frozen_cnn().to(torch.bfloat16)
    optimizer = learning(model)
    grower = Grower(model, optimizer, budget=400, steps=8)
    images, labels = VALIDATION[0].to(torch.bfloat16), VALIDATION[1]
    for _ in range(3):
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(images[:64]), labels[:64]).backward()
        optimizer.step()
        grower.step([(images, labels)])
    grower.save(tmp_path / "adapter")
    other = frozen_cnn().to(torch.bfloat16)
    adapter = Grower.load_adapter(other, tmp_path / "adapter")
    assert torch.equal(outputs(other, images), outputs(model, images))
    merged = outputs(adapter.merge(), images)
    assert float((merged - outputs(model, images)).abs().max()) < 0.05 * float(merged.abs().max())


def test_averages_are_merged_too() -> None:
    """An averaged copy ends with its own seeds folded in."""
    model, optimizer = frozen_cnn(), None
    optimizer = learning(model)
    grower = Grower(model, optimizer, budget=400, steps=8)
    average = torch.optim.swa_utils.AveragedModel(model)
    for epoch in range(4):
        train_epoch(model, optimizer, epoch)
        grower.step(loader(VALIDATION))
        average.update_parameters(model)
    before = outputs(average.module)
    grower.merge(keep=list(getattr(model, CHILD).live()))
    assert list(average.module.state_dict()) == list(frozen_cnn().state_dict())
    assert torch.allclose(outputs(average.module), before, atol=1e-5)


def test_it_is_worth_it() -> None:
    """Adapted, the network reads negatives better by far than with its head alone."""
    scores = {}
    for budget in (400, 400):
        policy = "wait" if "head" not in scores else "heuristic"
        model, _, records = adapt(steps=12, budget=budget, policy=policy)
        scores["head" if policy == "wait" else "adapted"] = records[-1].accuracy or 0.0
        assert model is not None
    assert scores["adapted"] > scores["head"] + 15
