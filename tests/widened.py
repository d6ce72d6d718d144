"""Widened models for tests: built as a run builds them, small, and shaken where zeros would hide
faults."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.config.method import (
    Freeze,
    FullFineTuning,
    Initialisers,
    LlamaPro,
    Lora,
    Method,
    ScaleMethod,
)
from pipeline.methods.build_model import quantize_base
from pipeline.methods.registry import method_for
from pipeline.model.attention import Documents
from pipeline.model.base_folder import BaseFolder
from pipeline.model.causal_decoder import ActivationCheckpointing
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import is_base, load_base
from pipeline.model.hidden_states import HiddenStates
from pipeline.model.initial_expansion import initial_expansion
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.parameters import full_shape_of, named_trained_parameters, partition_of
from pipeline.parallel.quantized import QuantizedPrecision
from pipeline.parallel.sharding import split
from pipeline.parallel.topology import SINGLE, TensorParallel

SEED = 7


def scale_settings(variant: str, **changes: Any) -> ScaleMethod:
    """Settings that fit every model of `bases.CONFIGS`; `l_fp` is 1 if the variant needs it."""
    settings: dict[str, Any] = {"name": "scale", "variant": variant}
    settings["expansion"] = {"hidden_size": 12, "intermediate_size": 8, "num_attention_heads": 4}
    if variant != "preserve":
        settings["l_fp"] = 1
    settings.update(changes)
    return ScaleMethod.model_validate(settings)


METHODS: dict[str, Method] = {
    "preserve": scale_settings("preserve"),
    "adapt": scale_settings("adapt", collaborative_modules="both"),
    "route": scale_settings("route", collaborative_modules="both"),
    "fft": FullFineTuning(name="fft"),
    "freeze": Freeze(name="freeze", frozen_layers=1),
    "lora": Lora(name="lora", rank=2, alpha=4),
    "llama_pro": LlamaPro(name="llama_pro", added_layers=1),
}
"""One setting of every method and variant."""


@torch.no_grad()
def widened(
    base: BaseFolder,
    settings: ScaleMethod | Lora,
    *,
    tp: TensorParallel = SINGLE,
    activation_checkpointing: ActivationCheckpointing = "none",
    noise: float = 0.0,
    precision: QuantizedPrecision | None = None,
) -> Decoder:
    """`base` widened, at its initial expansion plus `noise` (a standard deviation) on all that
    trains.

    Where the method has own rows, every other token has one.
    """
    own_tokens: tuple[int, ...] | None = None
    if settings.open_rows is not None:
        own_tokens = tuple(range(0, base.spec.vocab_size, 2))
    method = method_for(settings, Path("unread"), SEED, own_tokens)
    model = method.build(base.spec, tp, activation_checkpointing)
    if precision is not None:
        quantize_base(model, precision)
    load_base(model, base, tp)
    parameters = dict(model.named_parameters())
    names = {name for name in parameters if not is_base(name)}
    initialisers = Initialisers()
    if isinstance(settings, ScaleMethod):
        initialisers = settings.initialisers
    for name, full in initial_expansion(model, names, base.read, initialisers, SEED):
        parameter = parameters[name]
        parameter.copy_(split(full, partition_of(parameter), tp.rank, tp.size))
    shake(model, noise)
    return model


def started(
    base: BaseFolder,
    settings: Method,
    tp: TensorParallel = SINGLE,
    precision: QuantizedPrecision | None = None,
) -> Decoder:
    """`base` before the first step of any method but SCALE, which needs a folder."""
    method = method_for(settings, Path("unread"), SEED)
    model = method.build(base.spec, tp, "none")
    if precision is not None:
        quantize_base(model, precision)
    method.load(model, base, tp)
    return model


def unwidened(base: BaseFolder, tp: TensorParallel = SINGLE) -> Decoder:
    """The base alone; all of it trains."""
    model = Decoder(base.spec, tp=tp)
    load_base(model, base, tp)
    return model


@torch.no_grad()
def shake(model: Decoder, noise: float) -> None:
    """Adds the same noise to every trained parameter, however the model is split."""
    for name, parameter in named_trained_parameters(model):
        # Seeded by name and drawn for the whole parameter: neither the order of parameters nor the
        # number of tensor-parallel ranks changes it.
        generator = torch.Generator().manual_seed(zlib.crc32(f"0:{name}".encode()))
        full = noise * torch.randn(full_shape_of(parameter), generator=generator)
        parameter.add_(split(full, partition_of(parameter), model.tp.rank, model.tp.size))


def balance_router(model: Decoder, tokens: Tensor) -> None:
    """Sets the router's threshold so that some of `tokens` take either path, and none stands at the
    threshold."""
    with torch.no_grad():
        hidden = model.hidden_states(tokens)
        assert hidden.preserved_x is not None
        z_a = F.linear(hidden.x, model.output.base)
        z_p = F.linear(hidden.preserved_x, model.output.base)
        cosines = F.cosine_similarity(z_p, z_a).sort().values
        # In the middle half of the cosines, so that each path has at least a quarter of the tokens;
        # and amid the widest gap there, so that rounding moves no token to the other path.
        middle = cosines[len(cosines) // 4 : -len(cosines) // 4]
        widest = int(middle.diff().argmax())
        model.output.threshold = float(middle[widest : widest + 2].mean())


def soft_capped(spec: DecoderSpec, z: Tensor) -> Tensor:
    """Logits from the output projection's products."""
    softcap = spec.output_softcap
    if softcap is None:
        return z
    return torch.tanh(z / softcap) * softcap


def plain_logits(model: Decoder, hidden: HiddenStates) -> Tensor:
    """All logits at once, [N, V + new], of one matrix for each stream, differentiated by autograd."""
    out = model.output
    width = model.spec.widths.hidden_size
    base: Tensor = out.base
    expansion: Tensor | None = out.expansion
    if out.new_rows is not None:
        # A new token's row: its weights on the base's stream, then those on the expansion's.
        base = torch.cat([base, out.new_rows[:, :width]])
        if expansion is not None:
            expansion = torch.cat([expansion, out.new_rows[:, width:]])

    z = F.linear(hidden.x, base)
    x_up = hidden.x_up
    if hidden.preserved_x is not None:
        z_p = F.linear(hidden.preserved_x, base)
        # The router (Eq. 5) compares the logits of the base's vocabulary, not of new tokens.
        base_vocab_size = len(out.base)
        cosine = F.cosine_similarity(z_p[:, :base_vocab_size], z[:, :base_vocab_size])
        preserved = (cosine > out.threshold).unsqueeze(1)
        assert 0 < preserved.sum() < len(preserved), "the router sends all tokens one way"
        z = torch.where(preserved, (z_p + z) / 2, z)
        x_up = torch.where(preserved, hidden.preserved_x_up, x_up)
    if x_up is not None:
        z = z + F.linear(x_up, expansion)
    return soft_capped(model.spec, z)


def two_documents(tokens: Tensor) -> tuple[Tensor, Documents]:
    """Positions and documents: the second document begins within a rank's positions, a place
    further in each row."""
    places = torch.arange(tokens.shape[1]).expand_as(tokens)
    starts = 10 + torch.arange(len(tokens)).unsqueeze(1)
    second = places >= starts
    return torch.where(second, places - starts, places), Documents.of(second.long())


def packed(*rows: Sequence[int]) -> tuple[Tensor, Documents]:
    """Positions [B, S], and documents: each row consists of documents of such lengths."""
    positions = []
    ids = []
    for lengths in rows:
        row_positions: list[int] = []
        row_ids: list[int] = []
        for document, length in enumerate(lengths):
            row_positions += range(length)
            row_ids += [document] * length
        positions.append(row_positions)
        ids.append(row_ids)
    return torch.tensor(positions), Documents.of(torch.tensor(ids))


def some_tokens(spec: DecoderSpec, *shape: int, seed: int = 0) -> Tensor:
    """Random tokens of a vocabulary."""
    return torch.randint(0, spec.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def some_batch(spec: DecoderSpec, *shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random tokens and targets, a few of them not to be predicted."""
    tokens = some_tokens(spec, *shape, seed=seed)
    targets = some_tokens(spec, *shape, seed=seed + 1)
    targets[..., 3] = -100  # `ignore_index` of PyTorch's cross entropy
    return tokens, targets


def trained_gradients(model: Decoder) -> dict[str, Tensor]:
    """The gradient of everything that trains."""
    gradients: dict[str, Tensor] = {}
    missing: list[str] = []
    for name, parameter in named_trained_parameters(model):
        if parameter.grad is None:
            missing.append(name)
        else:
            gradients[name] = parameter.grad
    assert not missing, f"no gradient: {missing}"
    return gradients


@contextmanager
def kept_for_backward() -> Iterator[dict[int, Tensor]]:
    """Collects what autograd keeps for the backward pass: one tensor for each storage, by its
    address."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


class Watched(TorchDispatchMode):
    """While entered, shows `look` each operation of torch, with the tensors that it takes and those
    that it makes."""

    def __init__(self, look: Callable[[Any, list[Tensor], list[Tensor]], object]) -> None:
        super().__init__()
        self.look = look

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        self.look(operation, tensors((args, kwargs)), tensors(result))
        return result


def tensors(tree: Any) -> list[Tensor]:
    """The tensors anywhere in nested tuples, lists and dictionaries."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
