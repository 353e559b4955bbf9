"""Ways in which plain models leave Python, and the models that people own."""

import io
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning
from torch.nn import functional as F

FORMATS = ("script", "trace", "export", "onnx")
Run = Callable[[Tensor], Tensor]


def through(way: str, network: nn.Module, example: Tensor, folder: Path) -> Run:
    """The network as one of FORMATS, written and read again, with a dynamic batch size."""
    dynamic = ({0: torch.export.Dim.DYNAMIC},)
    with warnings.catch_warnings():
        # torch.jit is deprecated, and torch.onnx uses what torch itself deprecates.
        warnings.filterwarnings("ignore", "`torch.jit.*` is deprecated", DeprecationWarning)
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
        # Group norms of torch, and a language model's check of its length, look at shapes.
        warnings.filterwarnings("ignore", category=TracerWarning)
        if way in ("script", "trace"):
            compiled = torch.jit.script(network) if way == "script" else torch.jit.trace(network, (example,))
            file = io.BytesIO()
            torch.jit.save(compiled, file)
            file.seek(0)
            loaded: Run = torch.jit.load(file)
            return loaded
        if way == "export":
            torch.export.save(torch.export.export(network, (example,), dynamic_shapes=dynamic), folder / "model.pt2")
            program: Run = torch.export.load(folder / "model.pt2").module()
            return program
        program_of_onnx = torch.onnx.export(network, (example,), dynamo=True, dynamic_shapes=dynamic, verbose=False)
        assert program_of_onnx is not None
        program_of_onnx.save(folder / "model.onnx")
    return run_onnx(folder / "model.onnx")


def run_onnx(path: Path) -> Run:
    """A model in onnxruntime on the CPU."""
    from onnxruntime import InferenceSession

    session = InferenceSession(path, providers=["CPUExecutionProvider"])
    (only,) = session.get_inputs()
    return lambda x: torch.from_numpy(session.run(None, {only.name: x.numpy()})[0])


def check(way: str, network: nn.Module, inputs: Callable[[int], Tensor], folder: Path) -> None:
    """Written with a batch of 4, it computes the same for 2, 4 and 7."""
    network.eval()
    exported = through(way, network, inputs(4), folder)
    with torch.no_grad():
        for count in (2, 4, 7):
            torch.testing.assert_close(exported(inputs(count)), network(inputs(count)), rtol=1e-5, atol=1e-5)


class Attention(nn.Module):
    """Causal self-attention with an optional mask and options that nobody uses here."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0, causal: bool = True) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (scale * self.qkv(x)).view(batch, length, self.heads, -1).transpose(1, 2).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return out


class Layer(nn.Module):
    """A transformer layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, 2)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), causal=True)
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class OwnGPT(nn.Module):
    """A language model as people write it."""

    VOCAB, LENGTH = 11, 6

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.VOCAB, width)
        self.position = nn.Parameter(torch.randn(self.LENGTH, width))
        self.layers = nn.ModuleList([Layer(width), Layer(width)])
        self.head = nn.Linear(width, self.VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(x)
        return scores


class OwnMLP(nn.Module):
    """Two hidden layers with functional activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.relu(self.second(F.relu(self.first(x)))))
        return out


def ids(count: int) -> Tensor:
    """Sequences for OwnGPT."""
    shape = (count, OwnGPT.LENGTH)
    return torch.randint(0, OwnGPT.VOCAB, shape, generator=torch.Generator().manual_seed(count))


def vectors(count: int) -> Tensor:
    """Inputs for OwnMLP."""
    return torch.randn(count, 12, generator=torch.Generator().manual_seed(count))
