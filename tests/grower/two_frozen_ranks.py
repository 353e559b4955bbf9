"""One rank of the adaptation of a frozen model with DistributedDataParallel; compares itself with the other."""

import torch
import torch.distributed as dist
from frozen import TRAIN, VALIDATION, frozen_cnn, learning
from loops import loader
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from esper.grower import Grower


def main() -> None:
    """Rank 0 chooses statistics and places; weights, seeds and statistics stay equal to the bit."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = frozen_cnn()
    optimizer = learning(net)
    model = DistributedDataParallel(net, broadcast_buffers=False)
    grower = Grower(model, optimizer, budget=400, steps=8)
    lines = []
    for epoch in range(4):
        model.train()
        for batch in torch.randperm(400, generator=torch.Generator().manual_seed(epoch)).split(80):
            mine = batch[rank::2]
            optimizer.zero_grad()
            F.cross_entropy(model(TRAIN[0][mine]), TRAIN[1][mine]).backward()
            optimizer.step()
        part = slice(100 * rank, 100 + 100 * rank)  # each rank has other validation data; rank 0's counts
        lines.append(str(grower.step(loader((VALIDATION[0][part], VALIDATION[1][part])))))
    assert "norm statistics" in lines[0] and "germinated" in lines[1], lines
    mine = torch.cat([t.detach().float().flatten() for t in (*net.parameters(), *net.buffers())])
    theirs = mine.clone()
    dist.broadcast(theirs, src=0)
    assert torch.equal(mine, theirs)
    print(f"rank {rank} equal", lines[-1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
