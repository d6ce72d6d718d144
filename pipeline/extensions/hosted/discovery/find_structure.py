"""Finds the structure of a hosted base: its layers, their mixers and FFNs, and what each reads.

The structure is found on a tiny copy by experiments. Then its names are looked up in the real
model, built without memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from pipeline.errors import faults_of_library
from pipeline.extensions.hosted.discovery.document_separation import find_separation
from pipeline.extensions.hosted.discovery.layers import find_layers
from pipeline.extensions.hosted.discovery.tiny_copy import build_tiny_copy
from pipeline.extensions.hosted.structure import HostedStructure, UnsupportedStructureError
from pipeline.extensions.hosted.transformers_model import model_class_of


def find_structure(config: PretrainedConfig) -> HostedStructure:
    """The structure of the model that transformers builds from `config`, found on its tiny copy.

    Raises:
        UnsupportedStructureError: it cannot be hosted; the message says why, with the figure.
    """
    with _one_thread(), torch.random.fork_rng(devices=[]):
        tiny = build_tiny_copy(config)
        found = find_layers(tiny)
        documents = find_separation(tiny)
    names = {module: name for name, module in tiny.named_modules()}
    output = tiny.get_output_embeddings()
    if output is None:
        raise UnsupportedStructureError(
            f"{type(tiny).__name__}: transformers does not say which module computes its logits"
        )
    own_config = model_class_of(config)[1]
    structure = HostedStructure(
        model_type=config.model_type,
        model_class=type(tiny).__name__,
        hidden_size=own_config.get_text_config().hidden_size,
        layer_list=found.layer_list,
        layers=found.layers,
        embedding=names[tiny.get_input_embeddings()],
        output=names[output],
        documents=documents,
        last_norms=found.last_norms,
        has_one_stream=found.has_one_stream,
    )
    check_names(structure, tiny, build_without_memory(config))
    return structure


@contextmanager
def _one_thread() -> Iterator[None]:
    """Within the block torch uses one thread: on tiny tensors several would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def build_without_memory(config: PretrainedConfig) -> PreTrainedModel:
    """The real model on the meta device.

    Raises:
        UnsupportedStructureError: transformers refuses the configuration.
    """
    model_class, own_config = model_class_of(config)
    what = f"model_type {config.model_type!r}: transformers cannot build it"
    with faults_of_library(what, UnsupportedStructureError), torch.device("meta"):
        return model_class(own_config)


def check_names(structure: HostedStructure, tiny: nn.Module, model: nn.Module) -> None:
    """Checks that the real model has the tiny copy's decoder: the same modules of the same classes.

    Numbers of experts may differ.

    Raises:
        UnsupportedStructureError: it has others.
    """
    expected = _module_classes(tiny.get_submodule(structure.layer_list))
    try:
        found = _module_classes(model.get_submodule(structure.layer_list))
    except AttributeError:
        found = {}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise UnsupportedStructureError(
                f"{structure.model_class}: {structure.layer_list}.{name} is "
                f"{found.get(name, 'absent')} in the model, and {expected.get(name, 'absent')} in "
                "the small one on which its structure was found"
            )


def _module_classes(layers: nn.Module) -> dict[str, str]:
    """The class of each module by its name, with one name for all experts of a list."""
    classes: dict[str, str] = {}
    for name, module in layers.named_modules():
        layer, _, within = name.partition(".")
        within = re.sub(r"\.\d+(?=\.|$)", ".*", within)
        classes[f"{layer}.{within}"] = type(module).__name__
    return classes
