"""Language host: a small GPT with pre-norm blocks, untied embeddings and slots between groups of layers."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina.host import Host, HostConfig, Segment
from esper.kasmina.layers import Embedding, LayerNorm, Linear, SelfAttention, Statistics
from esper.leyline import BadValueError, SlotSpec, slot_id


class TransformerLayer(nn.Module):
    """h + attention(norm(h)), then h + MLP(norm(h))."""

    __call__: Callable[..., Tensor]

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.mlp_norm = LayerNorm(width)
        self.up = Linear(width, 4 * width)
        self.down = Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.attention(self.attention_norm(h))
        return h + self.down(F.gelu(self.up(self.mlp_norm(h))))


class TokenEmbedding(nn.Module):
    """ids (…, T) → token plus position embedding (…, T, width)."""

    def __init__(self, vocab: int, block: int, width: int) -> None:
        super().__init__()
        self.block = block
        self.token = Embedding(vocab, width)
        self.position = Embedding(block, width)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[-1]
        if length > self.block:
            raise BadValueError(f"a sequence of {length} tokens is longer than the host's block of {self.block}")
        places = torch.arange(length, device=ids.device).expand(ids.shape)
        return self.token(ids) + self.position(places)


class LanguageHead(nn.Module):
    """Final norm, then a score per entry of the vocabulary. No bias: the softmax needs none."""

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.norm = LayerNorm(width)
        self.linear = Linear(width, vocab, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return self.linear(self.norm(h))


class TokenSegment(Segment):
    """A chain of layers without statistics."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        for layer in self.layers:
            h = layer(h)
        return h, {}


class GPTHost(Host):
    """Transformer layers in equal `groups` (default: of one layer each), with slots `r0c<k>` between the groups."""

    def __init__(
        self,
        layers: int = 4,
        width: int = 64,
        heads: int = 4,
        block: int = 64,
        vocab: int = 65,
        *,
        groups: int | None = None,
    ) -> None:
        groups = layers if groups is None else groups
        if min(layers, width, heads, block, vocab, groups) < 1:
            given = f"{layers=}, {width=}, {heads=}, {block=}, {vocab=}, {groups=}"
            raise BadValueError(f"GPTHost({given}): all must be positive")
        if width % heads:
            raise BadValueError(f"width {width} is not a multiple of heads {heads}")
        if layers % groups:
            raise BadValueError(f"layers {layers} cannot be cut into {groups} equal groups")
        size = layers // groups
        chains: list[list[nn.Module]] = [[TransformerLayer(width, heads) for _ in range(size)] for _ in range(groups)]
        chains[0].insert(0, TokenEmbedding(vocab, block, width))
        chains[-1].append(LanguageHead(width, vocab))
        slots = [
            SlotSpec(slot_id(0, index), width, "tokens", position=(index + 1) / groups, resolution=block)
            for index in range(groups - 1)
        ]
        super().__init__([TokenSegment(*chain) for chain in chains], slots)
        self._config: HostConfig = {
            "layers": layers,
            "width": width,
            "heads": heads,
            "block": block,
            "vocab": vocab,
            "groups": groups,
        }

    def config(self) -> HostConfig:
        return dict(self._config)


Host.KINDS["GPTHost"] = GPTHost
