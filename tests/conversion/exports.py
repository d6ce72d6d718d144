"""Models of every family and method, trained a few steps, exported and compared with what transformers loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from pipeline.conversion.formats import choose_export
from pipeline.conversion.hf_folder import load_exported, load_hf_model, write_hf_folder
from pipeline.conversion.trained_model import TrainedModel
from tests.conversion.checkpoints import FFT, save_many, scale, trained, training_decoder
from tests.distributed import run_ranks
from tests.tolerances import assert_near, rounding_of
from tests.widened import some_tokens

METHODS = {
    "scale": scale("route", collaborative_modules="both"),
    "stock": scale("adapt", collaborative_modules="both", norm="base"),
    "fft": FFT,
    "freeze": {"name": "freeze", "frozen_layers": 2},
    "lora": {"name": "lora", "rank": 4, "alpha": 6},
    "llama_pro": {"name": "llama_pro", "added_layers": 3},
}
NOT_STOCK = {
    "neox": "LayerNorm takes one mean",
    "olmo": "one mean square over all heads",
    "gemma": "multiplies its embedding",
}
"""Why no ordinary wider model of a family exists, by the beginning of the base's name."""
Models = Callable[[str, str], TrainedModel]


def train_models(base: Callable, folder: Path, wanted: dict[tuple[str, str], dict]) -> Models:
    """A trained model by family and method, all saved by one process.

    Under ZeRO-1, whose steps take a tenth of ZeRO-3's: tests/checkpoint reads every stage.
    """
    places = {pair: folder / "-".join(pair).replace(" ", "_") for pair in wanted}
    run_ranks(save_many, 1, [(base(name).path, method, places[name, key]) for (name, key), method in wanted.items()])
    return lambda name, key: trained(base(name).path, places[name, key])


def pairs(names: Iterable[str], methods: Iterable[str]) -> list[tuple[str, str]]:
    """Each family with each method that can leave as its name says."""
    found = [(name, method) for method in methods for name in names]
    return [(name, method) for name, method in found if method != "stock" or not name.startswith(tuple(NOT_STOCK))]


def exported(model: TrainedModel, format: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    folder.mkdir()
    write_hf_folder(folder, choose_export(model, format, dtype), model.base.path)
    return folder


def loaded_with_base(model: TrainedModel, folder: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model exported in a format of its own choice, and its base; both of the same class."""
    loaded, original = (load_hf_model(path) for path in (exported(model, "auto", folder), model.base.path))
    assert type(loaded) is type(original) and not (folder / "modeling_scale.py").exists()
    return loaded, original


@torch.no_grad()
def assert_exported(model: TrainedModel, folder: Path, bound: float | None = None) -> None:
    """The folder's logits are the training model's, within `bound`: by default the rounding in fp32."""
    tokens = some_tokens(model.spec, 2, 16)
    expected = training_decoder(model).logits(tokens)
    assert expected.std() > 0.5
    found = load_exported(folder, model.base.path, torch.float32)(tokens).logits
    assert_near(found, expected, rounding_of(model.spec) if bound is None else bound)
