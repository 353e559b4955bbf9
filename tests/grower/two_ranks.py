"""One rank of a training with DistributedDataParallel and gloo; compares itself with the other."""

import os
import sys

import torch
import torch.distributed as dist
from loops import BlindCNN, digits, loader, plan, spoil
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from esper.grower import Grower
from esper.grower.container import CHILD


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, epoch: int, accumulate: bool) -> None:
    """Each rank has its own half of every minibatch."""
    images, labels = digits(200)
    model.train()
    for number, batch in enumerate(torch.randperm(200, generator=torch.Generator().manual_seed(epoch)).split(40)):
        mine = batch[rank::2]
        syncs = not accumulate or number % 2 == 1
        if number % 2 == 0 or not accumulate:
            optimizer.zero_grad()
        assert isinstance(model, DistributedDataParallel)
        with torch.enable_grad() if syncs else model.no_sync():
            F.cross_entropy(model(images[mine]), labels[mine]).backward()
        if syncs:
            optimizer.step()


def check_equal(mine: torch.Tensor) -> None:
    """Compare with rank 0."""
    theirs = mine.clone()
    dist.broadcast(theirs, src=0)
    assert torch.equal(mine, theirs), float((mine - theirs).abs().max())


def main(wrapped_first: bool, accumulate: bool) -> None:
    """Grow on rank 0's decision; all ranks stay equal to the bit."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = BlindCNN()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    policy = plan((1, "stage1", "conv_light"), (2, "stage2", "bottleneck"))
    model: nn.Module = DistributedDataParallel(net) if wrapped_first else net
    grower = Grower(model, optimizer, budget=5000, steps=8, policy=policy, rng_seed=7, folder=sys.argv[3])
    if not wrapped_first:
        model = DistributedDataParallel(net)
    images, labels = digits(300)
    lines = []
    for epoch in range(4):
        train(model, optimizer, rank, epoch, accumulate)
        part = slice(200 + 50 * rank, 250 + 50 * rank)  # each rank has other validation data; rank 0's counts
        lines.append(str(grower.step(loader((images[part], labels[part])))))
    assert sum("germinated" in line for line in lines) == 2, lines
    assert len(list(getattr(net, CHILD).parameters())) > 0
    # Batch statistics are each rank's own; DDP copies those of rank 0 before the next pass.
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    momenta = torch.cat([optimizer.state[p]["momentum_buffer"].flatten() for p in net.parameters()])
    check_equal(weights)
    check_equal(momenta)
    told: list[list[str]] = [[], []]
    dist.all_gather_object(told, lines)
    assert told[0] == told[1] == lines
    if not wrapped_first:
        model = DistributedDataParallel(net)  # as a resumed process does; it must not wait for seeds that die
    spoil(net, float("nan"))
    assert "restored step 4 and pruned bottleneck behind stage2" in str(grower.step(loader((images, labels))))
    rest = torch.cat([p.detach().flatten() for p in net.parameters()])
    assert torch.equal(rest, weights[: len(rest)])  # the seed was the last
    train(model, optimizer, rank, 4, accumulate)
    check_equal(torch.cat([p.detach().flatten() for p in net.parameters()]))
    finished = grower.finish(keep=["stage1"])
    assert not hasattr(net, "_ddp_params_and_buffers_to_ignore")
    train(model, optimizer, rank, 5, accumulate)
    check_equal(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert finished is model if wrapped_first else finished is net
    print(f"rank {rank} equal", lines[-1])
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1] == "wrapped", sys.argv[2] == "accumulate")
