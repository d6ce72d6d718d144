"""Parameters that the config.json of a hosted base ties: which tensors of the files they are.

transformers ties what config.json says only where the files hold one tensor of the set, or equal
ones. Where they hold others it warns and loads them all, which is another model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from pipeline.errors import BaseModelError
from pipeline.extensions.hosted.spec import HostedSpec
from pipeline.extensions.hosted.transformers_model import build_base


def stored_ties(spec: HostedSpec, stored: Iterable[str]) -> list[list[str]]:
    """The tensors of each set that is tied, where the files hold more than one of the set.

    Args:
        spec: the base.
        stored: the names of the tensors in its files.
    """
    with torch.device("meta"):
        model: Any = build_base(spec)
    source_of: dict[str, str] = model.get_expanded_tied_weights_keys(all_submodels=True)
    if not source_of:
        return []
    tied = {*source_of, *source_of.values()}
    sets: dict[str, list[str]] = defaultdict(list)
    for name, parameter in _parameter_names(model, stored).items():
        if parameter in tied:
            sets[source_of.get(parameter, parameter)].append(name)
    return [names for names in sets.values() if len(names) > 1]


def _parameter_names(model: Any, stored: Iterable[str]) -> dict[str, str]:
    """The name that transformers' loader gives to each stored tensor: that of a parameter."""
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    prefix = model.base_model_prefix
    parameters = model.state_dict()
    names: dict[str, str] = {}
    # In its order, and with its second try, as `convert_and_load_state_dict_in_model`.
    for name in sorted(stored):
        renamed, _ = rename_source_key(name, renamings, converters, prefix, parameters)
        if renamed not in parameters and name in parameters:
            renamed, _ = rename_source_key(name, [], [], prefix, parameters)
        names[name] = renamed
    return names


def check_loaded_ties(model: nn.Module, folder: object) -> None:
    """Checks that transformers tied what config.json says in the `model` that it loaded.

    Raises:
        BaseModelError: it loaded parameters of a set from tensors that differ.
    """
    loaded: Any = model
    for target, source in loaded.get_expanded_tied_weights_keys(all_submodels=True).items():
        if loaded.get_parameter_or_buffer(target) is not loaded.get_parameter_or_buffer(source):
            raise BaseModelError(f"{folder}: {untied_fault(target, source)}")


def untied_fault(first: str, second: str) -> str:
    """What is wrong where two tensors that are tied differ, and what to do."""
    return (
        f"config.json ties {first} and {second}, but the files hold other values for each, which "
        "transformers uses: set tie_word_embeddings to false in config.json"
    )
