"""Models of every family and method, trained a few steps, exported and compared with what
transformers loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pipeline.checkpoint.trained_model import TrainedModel
from pipeline.conversion import Purpose
from pipeline.conversion.formats import check_format, check_tp_size
from pipeline.conversion.request import Conversion
from pipeline.hf.load import load_hf_model
from pipeline.hf.write import Export, write_hf_folder
from pipeline.model.decoder import Decoder
from tests.bases import MIXTURES
from tests.conversion.checkpoints import (
    FFT,
    lora,
    save_many,
    scale,
    trained,
    training_decoder,
)
from tests.distributed import run_ranks
from tests.extensions.gate.gates import random_gate
from tests.files import change_json
from tests.tolerances import PARITY, assert_near
from tests.widened import balance_router, some_tokens

_BOTH = {"collaborative_modules": "both"}
OWN: dict[str, Any] = {"open_rows": {"min_count": 1}, "open_gains": True, "low_rank": 2}
METHODS: dict[str, dict[str, Any]] = {
    "scale": scale("route", **_BOTH),
    "merged": scale("adapt", **_BOTH, norm="base"),
    "fft": FFT,
    "freeze": {"name": "freeze", "frozen_layers": 2},
    "lora": {"name": "lora", "rank": 4, "alpha": 6},
    "llama_pro": {"name": "llama_pro", "added_layers": 3},
}
"""Each as the format that it can leave in, or by its name."""
MORE_METHODS: dict[str, dict[str, Any]] = {
    "preserve": scale("preserve", norm="base"),
    "preserve separate": scale("preserve"),
    "adapt": scale("adapt", **_BOTH),
    "adapt separate": scale("adapt"),
    "adapt norm base": scale("adapt", norm="base"),
    "route stories": scale("route", l_fp=2, router_threshold=0.9),
    "adapt stories": scale("adapt", **_BOTH, l_fp=2),
    "own preserve": scale("preserve", open_first_layer=1, norm="base", **OWN),
    "own adapt": scale("adapt", **_BOTH, **OWN),
    "own adapt from 0": scale("adapt", **_BOTH, l_fp=0, **OWN),
    "adapt from 0": scale("adapt", **_BOTH, l_fp=0),
    "own lora": lora(open_rows={"min_count": 1}, open_gains=True),
    "own merged": scale("adapt", **_BOTH, l_fp=0, norm="base", **OWN),
    "own preserve merged": scale("preserve", open_first_layer=0, norm="base", **OWN),
    "own matrices merged": scale("adapt", **_BOTH, norm="base", low_rank=2),
    "own lora from 1": lora(open_first_layer=1, open_gains=True, target_modules=["query", "down"]),
    "whole heads": METHODS["merged"]
    | {"expansion": {"hidden_size": 32, "intermediate_size": 8, "num_attention_heads": 4}},
    # 6 heads and 3 key/value heads on most bases, which no even number of ranks splits.
    "odd heads": METHODS["merged"]
    | {"expansion": {"hidden_size": 10, "intermediate_size": 9, "num_attention_heads": 2}},
    # Adapters on a part of GPT-NeoX's fused query, key and value.
    "lora query": METHODS["lora"] | {"target_modules": ["query"]},
    "lora key, value, down": METHODS["lora"] | {"target_modules": ["key", "value", "down"]},
    "lora query, value, output": METHODS["lora"] | {"target_modules": ["query", "value", "output"]},
}
NOT_MERGED = ("neox", "olmo", "gemma", "mixtral", "qwen3_moe", "qwen2_moe")
"""How the names of bases begin of which no ordinary wider model exists."""


class Models:
    """Trained models by the names of their base and their method; each is trained once a session."""

    def __init__(self, base: Callable, folder: Path) -> None:
        self._base, self._folder = base, folder
        self._made: dict[tuple[str, str], Path] = {}

    def train(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Trains those that are missing, in one process.

        Under ZeRO-1, whose steps take a tenth of ZeRO-3's: tests/checkpoint reads every stage.
        """
        wanted = [pair for pair in dict.fromkeys(pairs) if pair not in self._made]
        places = {pair: self._folder / str(len(self._made) + at) for at, pair in enumerate(wanted)}
        methods = METHODS | MORE_METHODS
        jobs = [
            (self._base(name).path, methods[key], place) for (name, key), place in places.items()
        ]
        if jobs:
            run_ranks(save_many, 1, jobs)
        self._made |= places

    def __call__(self, name: str, method: str) -> TrainedModel:
        self.train([(name, method)])
        return trained(self._base(name).path, self._made[name, method])


class Exports:
    """Folders of the scale format in fp32, by base, method and gate; each is written once a
    session,
    to be read only.

    A router's threshold is set so that some tokens take either path. `gate` is what `random_gate`
    takes.
    """

    def __init__(self, models: Models, folder: Path) -> None:
        self._models, self._folder = models, folder
        self._made: dict[str, tuple[Path, Decoder]] = {}

    def __call__(self, name: str, method: str, **gate: Any) -> tuple[Path, Decoder]:
        """The folder, and the training model itself."""
        key = f"{name} {method} {gate}"
        if key not in self._made:
            model, folder = self._models(name, method), self._folder / str(len(self._made))
            decoder = training_decoder(model)
            tokens = some_tokens(model.spec, 4, 24)
            if gate:
                decoder.gate = random_gate(decoder, tokens, **gate)
            exported(replace(model, gate=decoder.gate), "scale", folder)
            if model.plan is not None and model.plan.routed and not gate:
                balance_router(decoder, tokens)
                change_json(folder / "config.json", router_threshold=decoder.output.threshold)
            self._made[key] = folder, decoder
        return self._made[key]


def pairs(names: Iterable[str], methods: Iterable[str]) -> list[tuple[str, str]]:
    """Each family with each method that can leave as its name says."""
    found = [
        (name, method)
        for method in methods
        for name in names
        if name not in MIXTURES or method != "fft"
    ]
    return [
        (name, method)
        for name, method in found
        if method != "merged" or not name.startswith(NOT_MERGED)
    ]


def exported(
    model: TrainedModel, format: str, folder: Path, dtype: torch.dtype = torch.float32
) -> Path:
    folder.mkdir()
    write_hf_folder(folder, choose_export(model, format, dtype), model.base.path)
    return folder


def loaded_with_base(model: TrainedModel, folder: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model exported in a format of its own choice, and its base; both of the same class."""
    loaded, original = (
        load_hf_model(path) for path in (exported(model, "auto", folder), model.base.path)
    )
    assert type(loaded) is type(original) and not (folder / "modeling_scale.py").exists()
    return loaded, original


@torch.no_grad()
def assert_exported(model: TrainedModel, folder: Path, bound: float = PARITY) -> None:
    """The folder's logits are the training model's, within `bound` of the largest."""
    tokens = some_tokens(model.spec, 2, 16)
    expected = training_decoder(model).logits(tokens)
    assert expected.std() > 0.5
    found = load_hf_model(folder, torch.float32)(tokens).logits
    assert_near(found, expected, bound)


def choose_export(
    model: TrainedModel,
    format: str,
    dtype: torch.dtype,
    purpose: Purpose = "serving",
    tp_size: int = 1,
) -> Export:
    """The contents of a model's export, as `scale-cpt convert` chooses them."""
    chosen = check_format(model, format)
    check_tp_size(model, chosen, tp_size)
    asked = Conversion(
        model.checkpoint, model.base.path, Path(), format, purpose=purpose, tp_size=tp_size
    )
    asked = replace(asked, options=chosen.settled_options(asked, model))
    return chosen.contents(model, dtype, asked)


def check_vocabulary_keeps_its_size(model: Any, reason: str) -> None:
    """Asked for its own size, a loaded export stays as it is; another is refused for `reason`."""
    size = model.config.vocab_size
    embedding = model.get_input_embeddings()
    for asked in ((), (None,), (size,), (size - 1, size)):
        assert model.resize_token_embeddings(*asked) is embedding
    assert model.resize_token_embeddings(new_num_tokens=size, mean_resizing=False) is embedding
    for asked in ((size + 8,), (size - 1,), (None, size + 1)):
        with pytest.raises(ValueError, match=f"expected {size}, the present size, .*{reason}"):
            model.resize_token_embeddings(*asked)
    assert model.config.vocab_size == size and model.get_input_embeddings() is embedding
