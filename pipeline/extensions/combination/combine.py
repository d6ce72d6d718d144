"""One base with several expansions: a folder that is made of the exports of runs on that base.

It holds the base once, and of each expansion, in `expansions/NAME`, what its export has beside the
base.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData

from pipeline import log
from pipeline.checkpoint.manifest import MANIFEST_FILE
from pipeline.config.method import title_of
from pipeline.config.sources import CHECKPOINTS, RUN_FILE
from pipeline.conversion.convert import HF_FOLDER
from pipeline.conversion.model_card import licence_of, markdown_table
from pipeline.conversion.probe_texts import windows_of
from pipeline.data.tokenizer.extension.vocabulary import EXPORTED as EXTENDED
from pipeline.data.tokenizer.extension.vocabulary import join_extensions, read_vocabulary
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import ConversionError
from pipeline.files.folders import holds, published_folder
from pipeline.files.hashes import file_hash
from pipeline.files.json_files import read_object, write_json
from pipeline.files.publishing import write_text
from pipeline.files.reading import read_inside
from pipeline.gating.folder import GATE_FOLDER, GATE_RECORD
from pipeline.hf.base_card import CARD, base_named_in, card_of
from pipeline.hf.base_files import copy_base_files
from pipeline.hf.folder_kinds import COMBINATION, EXPORT
from pipeline.hf.load import load_hf_model
from pipeline.hf.probe_texts import PROBE_TEXTS
from pipeline.hf.remote_code.configuration_difference import DifferenceConfig
from pipeline.hf.remote_code.configuration_scale import NEEDED, ScaleConfig
from pipeline.hf.remote_code.configuration_scale_combined import NAME, CombinedConfig
from pipeline.hf.remote_code.configuration_scale_hosted import HostedScaleConfig
from pipeline.hf.remote_code.modeling_scale_combined import (
    EXPANSIONS,
    NEW_ROWS,
    CombinedForCausalLM,
    is_of_base,
)
from pipeline.hf.served_tokenizer import check_export
from pipeline.hf.write import PlannedTensor, code_files, copy_code, stored_tensors, write_tensors
from pipeline.run_folder.checkpoint_names import named_checkpoint, step_in

EMBEDDING = "embedding.base.weight"
OUTPUT = "output.base"
# The tensors of an export with an extended vocabulary whose last rows are of new tokens, and the
# names that these rows have beside the base's.
_NEW_ROWS = {EMBEDDING: NEW_ROWS[0], OUTPUT: NEW_ROWS[1]}
# The entries of a ScaleConfig without an expansion. The numbers of heads are not among them:
# `base_entries` subtracts the added heads from all heads.
_NO_EXPANSION: dict[str, Any] = {
    "expansion_hidden_size": 0,
    "expansion_intermediate_size": 0,
    "expansion_num_attention_heads": 0,
    "expansion_num_key_value_heads": 0,
    "collaborative_modules": [],
    "norm_statistics": "separate",
    "base_vocab_size": None,
    "gate_layer": None,
}
_logger = log.get_logger(__name__)


@dataclass(frozen=True)
class ExpansionExport:
    """A gated export of one expansion, with its base, in the format scale."""

    folder: Path
    config: Mapping[str, Any]
    record: Mapping[str, Any]

    @property
    def dtype(self) -> torch.dtype:
        """The type of all weights but the gate's."""
        dtype: torch.dtype = getattr(torch, self.config["dtype"])
        return dtype

    @property
    def base_rows(self) -> int:
        """How many tokens the base has; the ids of new tokens follow them."""
        return int(self.config["base_vocab_size"])

    @property
    def new_tokens(self) -> int:
        """How many tokens the vocabulary has beside the base's."""
        return int(self.config["vocab_size"]) - self.base_rows

    @property
    def base_tokenizer(self) -> str:
        """The fingerprint of its base's tokenizer, which its own may extend."""
        if self.new_tokens:
            return read_vocabulary(self.folder, EXTENDED).base_tokenizer
        return load_tokenizer(self.folder).fingerprint

    @cached_property
    def base(self) -> dict[str, PlannedTensor]:
        """The base's tensors by name, without the rows of new tokens.

        An output that is tied to the embedding is listed too.
        """
        own: dict[str, PlannedTensor] = {}
        for name, tensor in stored_tensors(self.folder).items():
            if is_of_base(name):
                own[name] = tensor
        if OUTPUT not in own:
            own = {OUTPUT: replace(own[EMBEDDING], name=OUTPUT)} | own
        for name in _NEW_ROWS:
            own[name] = _rows(own[name], 0, self.base_rows)
        return own

    @property
    def gate(self) -> dict[str, PlannedTensor]:
        """The tensors of its gate, by name."""
        return {one.name: one for one in self.expansion if one.name.startswith("token_gate.")}

    @cached_property
    def expansion(self) -> list[PlannedTensor]:
        """All other tensors; rows of new tokens have names of their own."""
        stored = stored_tensors(self.folder)
        tensors = [tensor for name, tensor in stored.items() if not is_of_base(name)]
        if self.new_tokens:
            for name, written in _NEW_ROWS.items():
                rows = _rows(stored[name], self.base_rows, stored[name].shape[0])
                tensors.append(replace(rows, name=written))
        return tensors


def _rows(tensor: PlannedTensor, first: int, stop: int) -> PlannedTensor:
    """The rows of a tensor from `first` on and before `stop`."""

    def make() -> torch.Tensor:
        return tensor.make()[first:stop]

    return replace(tensor, shape=(stop - first, *tensor.shape[1:]), make=make)


def base_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a CombinedConfig without expansions, for the base of a model with the
    ScaleConfig `config`.
    """
    left_out = ("architectures", "auto_map", "model_type", "transformers_version", "expansions")
    entries: dict[str, Any] = {}
    for key, value in config.items():
        if key not in left_out and not key.startswith(("gate_", "own_")):
            entries[key] = value
    for heads in ("num_attention_heads", "num_key_value_heads"):
        entries[heads] -= entries[f"expansion_{heads}"]
    entries |= _NO_EXPANSION
    entries["l_fp"] = entries["num_hidden_layers"]
    entries["vocab_size"] = config.get("base_vocab_size") or config["vocab_size"]
    return entries


def open_export(path: Path) -> ExpansionExport:
    """The export in a folder, or of the run in it.

    Raises:
        ConversionError: it is no export that can be combined, or the run has changed since it was
            exported; says why.
        CheckpointError: the run's `latest` names no checkpoint.
    """
    if not path.is_dir():
        found = "found a file" if path.exists() else "no such folder"
        raise ConversionError(f"{path}: {found}; expected the folder of a run or of an export")
    is_run = (path / RUN_FILE).exists()
    folder = path / HF_FOLDER if is_run else path
    if not holds(EXPORT, folder):
        if is_run:
            raise ConversionError(
                f"{folder}: holds no export; convert the run first: scale-cpt convert {path}"
            )
        raise ConversionError(
            f"{folder}: holds no run and no export; expected the folder of a run that is "
            "converted (scale-cpt convert), or of its export"
        )
    config = read_object(folder / "config.json", ConversionError, "convert the run again")
    fault = _unsupported_reason(config)
    if fault is not None:
        raise ConversionError(f"{folder}: cannot be combined: {fault}")
    record = read_object(folder / EXPORT.record, ConversionError)
    if is_run:
        _check_is_newest(path, folder, record)
    return ExpansionExport(folder, config, record)


def _check_is_newest(run: Path, export: Path, record: Mapping[str, Any]) -> None:
    """Compares what a run's export was made from with the run's newest checkpoint and its gate.

    What the run no longer has, such as checkpoints that were removed, is not compared.

    Raises:
        ConversionError: the run has another checkpoint or another gate now.
        CheckpointError: the run's `latest` names no checkpoint.
    """
    again = f"convert it again: scale-cpt convert {run}"
    checkpoint = named_checkpoint(run / CHECKPOINTS)
    if checkpoint is not None and (checkpoint / MANIFEST_FILE).exists():
        step = step_in(checkpoint.name)
        exported = record["position"]["step"]
        if step != exported:
            raise ConversionError(
                f"{export}: exported from step {exported}, the run is at {step}; {again}"
            )
        if file_hash(checkpoint / MANIFEST_FILE) != record["checkpoint_manifest"]:
            raise ConversionError(
                f"{export}: exported from another checkpoint of step {exported} than {checkpoint}; "
                f"{again}"
            )
    gate = run / GATE_FOLDER / GATE_RECORD
    if gate.exists() and file_hash(gate) != record["gate"]:
        raise ConversionError(f"{export}: exported with another gate than {gate.parent}; {again}")


def _unsupported_reason(config: Mapping[str, Any]) -> str | None:
    """Why an export with this config.json cannot be combined; None if it can."""
    if config.get("model_type") == DifferenceConfig.model_type:
        return (
            "a base and a difference of all its parameters are two models of the base's class, "
            "which a combination does not run; serve the export alone"
        )
    if config.get("model_type") == HostedScaleConfig.model_type:
        return (
            "its base runs by transformers' own code, which a combination does not; serve the "
            "export alone"
        )
    if config.get("model_type") != ScaleConfig.model_type:
        return "it is no export in the format scale; convert the run again with --format scale"
    if config.get("gate_layer") is None:
        return (
            "it has no gate, which would say where it applies; fit one (scale-cpt gate), and "
            "convert the run again"
        )
    if config.get("routed"):
        return "a Route model computes two paths by itself; train Preserve or Adapt"
    if any(rotary["context"] is not None for rotary in config.get("rotary", ())):
        return "its rotary frequencies change with the text's length"
    return None


def combine(folder: Path, runs: Mapping[str, Path]) -> None:
    """Writes a folder that holds the base once, and the expansion of each of `runs`.

    The folder appears, in place of an earlier combination, when each expansion has been verified.

    Args:
        folder: the folder to write.
        runs: by the name that the expansion gets, the folder of its run or export.

    Raises:
        ConversionError: an export cannot be combined, or is of another base; a name has other
            characters than a name may have; what was written computes something else than the
            export.
        OutputError: `folder` holds something else.
    """
    for name in runs:
        if not NAME.fullmatch(name):
            raise ConversionError(f"{name}: expected a name of ASCII letters, digits, - or _")
    exports: dict[str, ExpansionExport] = {}
    for name, path in runs.items():
        _logger.info("%s: reading %s", name, path)
        export = open_export(path)
        for other, earlier in exports.items():
            if earlier.folder.resolve() == export.folder.resolve():
                raise ConversionError(f"{path}: {other} and {name} are one run; name each run once")
        exports[name] = export
    first = next(iter(exports.values()))
    with published_folder(folder, COMBINATION) as partial:
        # The output of an extended vocabulary is not its embedding; that of its base may be.
        tied = torch.equal(first.base[EMBEDDING].make(), first.base[OUTPUT].make())
        base = base_entries(first.config) | {"tie_word_embeddings": tied}
        tensors = dict(first.base)
        if tied:
            del tensors[OUTPUT]
        write_tensors(partial, list(tensors.values()), first.dtype)
        for name, export in exports.items():
            _logger.info("%s: comparing its base, writing its expansion", name)
            _check_base(first, export)
            (partial / EXPANSIONS / name).mkdir(parents=True)
            write_tensors(partial / EXPANSIONS / name, export.expansion, export.dtype)
            _copy_tokenizer(export.folder, partial / EXPANSIONS / name)
        _write_model(partial, folder.resolve().name, base, exports)
        for name, export in exports.items():
            _logger.info("%s: verifying that the folder computes what its export does", name)
            _verify(partial, name, export)
    _logger.info("%s: verified %s", folder, ", ".join(runs))
    for names in _equal_gates(exports):
        _logger.warning("%s: %s", folder, _on_equal_gates(names))


def _equal_gates(exports: Mapping[str, ExpansionExport]) -> list[list[str]]:
    """The names of expansions whose gates decide alike for all text, sorted, each group once."""
    groups: list[list[str]] = []
    for name in sorted(exports):
        for group in groups:
            if _have_equal_gates(exports[group[0]], exports[name]):
                group.append(name)
                break
        else:
            groups.append([name])
    return [group for group in groups if len(group) > 1]


def _have_equal_gates(one: ExpansionExport, other: ExpansionExport) -> bool:
    """Whether two gates, with their settings, are the same to the bit."""
    for key in one.config.keys() | other.config.keys():
        if key.startswith("gate_") and one.config.get(key) != other.config.get(key):
            return False
    if one.gate.keys() != other.gate.keys():
        return False
    return all(torch.equal(one.gate[key].make(), other.gate[key].make()) for key in one.gate)


def _on_equal_gates(names: Sequence[str]) -> str:
    """What a user should know of expansions whose gates are equal."""
    return (
        f"{', '.join(names[:-1])} and {names[-1]} have equal gates: where all of them are active, "
        f"{names[0]} is used alone, as the first by name; choose with `active`, or fit the gates "
        "on different texts"
    )


def _copy_tokenizer(source: Path, folder: Path) -> None:
    """Copies tokenizer, terms and settings, and the record of an extended vocabulary."""
    copy_base_files(folder, source, source)
    if (source / EXTENDED).exists():
        (folder / EXTENDED).write_bytes(read_inside(source, EXTENDED, ConversionError))


def _check_base(first: ExpansionExport, export: ExpansionExport) -> None:
    """Compares the bases of two exports to the bit; ids of special tokens may differ.

    Raises:
        ConversionError: they differ.
    """
    expected = base_entries(first.config)
    for key, value in base_entries(export.config).items():
        # An extended vocabulary unties an output, whose values are compared below.
        may_differ = key == "tie_word_embeddings" or key.endswith("_token_id")
        if expected.get(key) == value or may_differ:
            continue
        advice = "combine expansions of one base"
        if key == "dtype":
            advice = "convert the run again with --dtype"
        raise ConversionError(
            f"{export.folder}: its base has {key} {value}, that of {first.folder} "
            f"{expected.get(key)}: {advice}"
        )
    if export.base_tokenizer != first.base_tokenizer:
        raise ConversionError(
            f"{export.folder}: its base's tokenizer differs from that of {first.folder}: combine "
            "expansions of one base"
        )
    if export is first:
        return
    for name, tensor in export.base.items():
        if name not in first.base or not torch.equal(first.base[name].make(), tensor.make()):
            raise ConversionError(
                f"{export.folder}: {name} differs from that of {first.folder}: combine expansions "
                "of one base"
            )


def _write_model(
    folder: Path, title: str, base: Mapping[str, Any], exports: Mapping[str, ExpansionExport]
) -> None:
    """Writes what is shared beside the base's weights: config.json, code, tokenizer, model card.

    The card calls the folder `title`, as `folder` is renamed when it is verified.
    """
    copy_code(folder, code_files(CombinedForCausalLM))
    # The tokenizer is that of an expansion, joined with others that have new tokens, in the order
    # of the model's ids.
    names = sorted(name for name, export in exports.items() if export.new_tokens)
    if not names:
        names = list(exports)[:1]
    _copy_tokenizer(folder / EXPANSIONS / names[0], folder)
    for name in names[1:]:
        join_extensions(folder, folder / EXPANSIONS / name)
    write_text(folder / CARD, _card(folder, title, exports))
    write_json(folder / COMBINATION.record, {"format": COMBINATION.format})
    expansions: dict[str, Any] = {}
    for name, export in exports.items():
        expansions[name] = {**export.config, "tie_word_embeddings": False}
    config = {
        **base,
        "architectures": [CombinedForCausalLM.__name__],
        "auto_map": {
            "AutoConfig": "configuration_scale_combined.CombinedConfig",
            "AutoModelForCausalLM": "modeling_scale_combined.CombinedForCausalLM",
        },
        "model_type": CombinedConfig.model_type,
        "transformers_version": NEEDED,
        "expansions": expansions,
    }
    write_json(folder / "config.json", dict(sorted(config.items())))
    check_export(folder, load_tokenizer(folder), advice="convert the runs again")


def _front_matter(folder: Path, exports: Mapping[str, ExpansionExport]) -> ModelCardData:
    """What the hub reads of the card: base and licence are those that the exports' cards name.

    The first card that names one is taken: all exports are of one base.
    """
    base: str | None = None
    licence: dict[str, Any] = {}
    for export in exports.values():
        card = card_of(export.folder)
        base = base or base_named_in(card)
        licence = licence or licence_of(folder, card)
    return ModelCardData(
        base_model=base,
        # None without a name: there is no base on the hub to be related to.
        base_model_relation=base and "finetune",
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["continual-pretraining", "scale-cpt"],
        **licence,
    )


def _card(folder: Path, title: str, exports: Mapping[str, ExpansionExport]) -> str:
    """The model card of the folder `title`, which is written as `folder`: base and licence, how to
    load it, and a row for each expansion.
    """
    front_matter = _front_matter(folder, exports)
    base = "One base"
    if front_matter.base_model:
        base = f"`{front_matter.base_model}`"
    rows = []
    for name, export in exports.items():
        settings = export.record["method"]
        method = title_of(settings.get("variant") or settings["name"])
        parameters = sum(prod(tensor.shape) for tensor in export.expansion)
        tokens_seen = export.record["position"]["tokens_seen"]
        rows.append((name, method, parameters, export.new_tokens, tokens_seen))
    names = list(exports)
    on_gates = ""
    for equal in _equal_gates(exports):
        on_gates += f"\nOf the expansions, {_on_equal_gates(equal)}.\n"
    return f"""---
{front_matter.to_yaml()}
---

# {title}

{base} with {len(rows)} expansions. Each was trained alone on the frozen base. Where no gate opens,
the model is its base. The terms of use are those of the base, and of the texts that each expansion
was trained on.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "{title}"  # this repository, or a folder with its files
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
text = tokenizer("Once upon a time", return_tensors="pt")

model.set_active(["{names[0]}"])  # from now on; []: the base
active = model.allowed([["{names[-1]}"]])  # for this batch: a list of names for each of its texts
model.generate(**text, active=active, max_new_tokens=50)
```

A gate tells its texts from what the base wrote, not from those of other expansions. Where domains
look alike, as Korean statutes and Korean film reviews, choose the expansion with `active`.
{on_gates}
{markdown_table(("expansion", "method", "parameters", "new tokens", "trained on tokens"), rows)}
"""


@torch.no_grad()
def _verify(folder: Path, name: str, export: ExpansionExport) -> None:
    """Compares the logits of an expansion of `folder`, alone beside its base, with those of its
    export.

    Raises:
        ConversionError: they differ in a bit.
    """
    alone = load_hf_model(export.folder)
    model = CombinedForCausalLM.from_pretrained(folder, active=[name], dtype=export.dtype)
    own = model.new_tokens[model.names.index(name)]
    longest = int(export.config["max_position_embeddings"])
    for window in windows_of(PROBE_TEXTS.values(), export.folder, longest):
        tokens = window.unsqueeze(0)
        expected = alone(tokens, use_cache=False).logits
        columns = torch.arange(expected.shape[-1])
        # Its new tokens may have other ids here, and those of other expansions come before or
        # behind.
        columns[export.base_rows :] += own.start - export.base_rows
        found = model(columns[tokens], use_cache=False).logits[..., columns]
        if not torch.equal(found, expected):
            difference = float((found - expected).abs().max())
            raise ConversionError(
                f"{export.folder}: {name} beside its base differs by {difference:.3g} in a logit; "
                "not kept"
            )
