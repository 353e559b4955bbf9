"""What an update says about itself."""

from dataclasses import fields
from types import NoneType, UnionType
from typing import get_args, get_origin, get_type_hints

import pytest
import torch
from rounds import Operations, collect, make_agent, only, withheld
from torch import Tensor

from esper.leyline import LifecycleOp
from esper.simic.agent import HeadMetrics, PPOUpdateMetrics, compute_gae, metrics
from esper.simic.agent.metrics import MinibatchRecord
from esper.simic.agent.minibatch import PreparedRound


def assert_truthful(record: PPOUpdateMetrics | HeadMetrics) -> None:
    """Every field holds exactly the type that it declares."""
    for name, hint in get_type_hints(type(record)).items():
        allowed = get_args(hint) if isinstance(hint, UnionType) else (get_origin(hint) or hint,)
        assert type(getattr(record, name)) in allowed, (name, getattr(record, name))


@pytest.mark.requirement(31, 69)
@pytest.mark.parametrize("kind", ["vector", "core", "full"])
def test_metrics_are_what_they_declare(kind: str) -> None:
    """Types hold at run time, and every existing number has one flat name."""
    agent = make_agent(kind)
    metrics = agent.update(collect(agent))
    assert_truthful(metrics)
    expected = {f"ppo/{field.name}" for field in fields(PPOUpdateMetrics)} - {"ppo/heads"}
    assert tuple(metrics.heads) == agent.table.names
    for name, head in metrics.heads.items():
        assert_truthful(head)
        expected |= {f"ppo/{name}/{f.name}" for f in fields(HeadMetrics) if getattr(head, f.name) is not None}
    flat = metrics.flat()
    assert set(flat) == expected
    assert all(type(value) is float and value == value and abs(value) < 1e9 for value in flat.values())
    assert {"ppo/advantage_mean", "ppo/advantage_std_after", f"ppo/{agent.table.names[0]}/entropy"} <= set(flat)


@pytest.mark.requirement(69)
def test_what_does_not_exist_is_left_out() -> None:
    """A head without a decision has no entropy, instead of an entropy of 0."""
    agent = make_agent("core")
    metrics = agent.update(collect(agent, narrow=only("op", LifecycleOp.WAIT, LifecycleOp.PRUNE)))
    missing = {name for name in ("entropy", "kl", "clip_fraction") if f"ppo/blueprint/{name}" not in metrics.flat()}
    assert missing == {"entropy", "kl", "clip_fraction"}
    assert type(metrics.heads["blueprint"].entropy) is NoneType
    assert metrics.flat()["ppo/blueprint/learnable_fraction"] == 0


@pytest.mark.requirement(31)
def test_advantages_before_and_after() -> None:
    """The moments cover the steps that decided something, by hand."""
    agent = make_agent("vector")
    buffer = collect(agent)
    choices = torch.stack([buffer.masks[name].sum(-1) for name in agent.table.names], -1)
    forced = (choices == 1).all(-1)
    advantages, returns = compute_gae(
        buffer.rewards, buffer.values, buffer.ends, buffer.bootstraps, forced, buffer.lengths, gamma=0.99, lam=0.95
    )
    deciding, valid = advantages[buffer.valid & ~forced], buffer.valid
    metrics = agent.update(buffer)
    assert metrics.advantage_mean == pytest.approx(float(deciding.mean()), abs=1e-5)
    assert metrics.advantage_std == pytest.approx(float(deciding.std(correction=0)), abs=1e-5)
    assert (metrics.advantage_mean_after, metrics.advantage_std_after) == pytest.approx((0, 1), abs=1e-5)
    assert not metrics.advantage_floored
    assert metrics.return_mean == pytest.approx(float(returns[valid].mean()), abs=1e-5)
    assert metrics.return_std == pytest.approx(float(returns[valid].std(correction=0)), abs=1e-5)
    assert metrics.value_mean == pytest.approx(float(buffer.values[valid].mean()), abs=1e-5)
    left = (returns - buffer.values)[valid].var(correction=0) / returns[valid].var(correction=0)
    assert metrics.explained_variance == pytest.approx(float(1 - left), abs=1e-5)
    assert metrics.forced_fraction == pytest.approx(float(forced[valid].float().mean()))
    assert metrics.steps == int(valid.sum())


@pytest.mark.requirement(31)
def test_the_floor_is_flagged() -> None:
    """Advantages that vary less than the floor are divided by it."""
    agent = make_agent("core", tasks=2, advantage_floor=(1e-3, 100.0))
    assert not agent.update(collect(agent)).advantage_floored, "the floor is that of a task without a step"
    agent = make_agent("core", advantage_floor=100.0)
    metrics = agent.update(collect(agent))
    assert metrics.advantage_floored
    assert metrics.advantage_std_after == pytest.approx(metrics.advantage_std / 100, rel=1e-4)


@pytest.mark.requirement(31)
def test_tasks_without_a_step_do_not_count() -> None:
    """A task without steps enters no moment and sets no floor flag."""
    plain, several = make_agent("core"), make_agent("core", tasks=3)
    first = plain.update(collect(plain))
    second = several.update(collect(several, tasks=torch.full((8,), 2)))
    assert second == first


@pytest.mark.requirement(32)
def test_norm_before_clipping_and_the_factor() -> None:
    """The norm before clipping and the clip factor are both logged."""
    agent = make_agent("core", clip_norm=1e-3, epochs=1, minibatches=1)
    metrics = agent.update(collect(agent))
    assert metrics.pre_clip_grad_norm > 0.1
    assert metrics.clip_factor == pytest.approx(1e-3 / metrics.pre_clip_grad_norm, rel=1e-4)
    norm = sum(float(w.grad.square().sum()) for w in agent.network.parameters() if w.grad is not None) ** 0.5
    assert norm == pytest.approx(1e-3, rel=1e-3)
    agent = make_agent("core", clip_norm=1e6)
    assert agent.update(collect(agent)).clip_factor == 1


@pytest.mark.requirement(77)
def test_head_norms_are_those_of_their_own_weights() -> None:
    """Each head's gradient norm covers that head's weights alone."""
    agent = make_agent("core", clip_norm=1e6, epochs=1, minibatches=1)
    metrics = agent.update(collect(agent))
    for name, head in agent.network.heads.items():
        own = torch.cat([weight.grad.flatten() for weight in head.parameters() if weight.grad is not None])
        assert metrics.heads[name].grad_norm == pytest.approx(float(own.norm()), rel=1e-5)
    assert metrics.pre_clip_grad_norm > max(head.grad_norm for head in metrics.heads.values())


@pytest.mark.requirement(12)
def test_kl_and_joint_ratio() -> None:
    """The heads' KL adds up to that of the joint action, per step that decided anything."""
    agent = make_agent("full", epochs=2, minibatches=1, rate=0.01, target_kl=None)
    metrics = agent.update(collect(agent))
    deciding = 1 - metrics.forced_fraction
    total = sum((head.kl or 0.0) * head.learnable_fraction for head in metrics.heads.values()) / deciding
    assert metrics.approx_kl / 2 == pytest.approx(total, rel=1e-4)  # a mean over two minibatches; the first shows 0
    assert metrics.max_kl == metrics.approx_kl > 0
    assert metrics.joint_ratio_min < 1 < metrics.joint_ratio_max


@pytest.mark.requirement(83)
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("kind", ["vector", "core"])
def test_an_update_reads_the_device_once_per_epoch_and_twice_more(
    kind: str, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the row cuts, the stop decision per epoch and the metrics, and nothing else."""
    agent = make_agent(kind, epochs=epochs, pieces=2, target_kl=None)
    agent.update(collect(agent))
    buffer = collect(agent)
    transfers, reads = [0], [-1]
    move, read = Tensor.cpu, metrics._read

    def moved(self: Tensor) -> Tensor:
        transfers[0] += 1
        return move(self)

    def read_all(
        prepared: PreparedRound, records: list[MinibatchRecord], clip: float
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        figures = read(prepared, records, clip)
        reads[0] = operations.reads
        return figures

    monkeypatch.setattr(Tensor, "cpu", moved)
    monkeypatch.setattr(metrics, "_read", read_all)
    with Operations() as operations:
        agent.update(buffer)
    print(f"{kind}, {epochs} epochs: {transfers[0]} transfers, {reads[0]} reads")
    assert transfers[0] + reads[0] == epochs + 2


@pytest.mark.requirement(74)
def test_coefficients_are_plain_numbers() -> None:
    """Computing the coefficients needs no call to torch."""
    agent = make_agent("core")
    with Operations() as operations:
        config, progress = agent.config, agent.progress
        found = [config.entropy_at(progress), config.rate_at(progress), config.clip_at(progress), agent.epsilon]
    assert operations.seen == []
    assert [type(value) for value in found] == [float] * 4


@pytest.mark.requirement(69)
@pytest.mark.parametrize(("minibatches", "pieces"), [(4, 1), (2, 2), (1, 3)])
def test_metrics_do_not_depend_on_how_a_round_is_cut(minibatches: int, pieces: int) -> None:
    """Losses, entropies and spreads are means over the round, however it is divided."""

    def figures(minibatches: int, pieces: int) -> dict[str, float]:
        agent = make_agent("core", minibatches=minibatches, pieces=pieces)
        with withheld(agent):
            flat = agent.update(collect(agent)).flat()
        names = ("policy_loss", "value_loss", "entropy", "logit_spread", *(f"{h}/entropy" for h in agent.table.names))
        return {name: flat[f"ppo/{name}"] for name in names}

    whole = figures(1, 1)
    assert 0 < whole["entropy"] < 1
    assert figures(minibatches, pieces) == pytest.approx(whole, abs=1e-5)
