"""One base with several expansions: a folder to which trained and exported expansions are added, and removed again.

The folder holds the base once, and of each expansion, in `expansions/NAME`, what its export has beside the base. It is
replaced as a whole; files of the base and of expansions that stay are linked into the new one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from pipeline import log
from pipeline.config.sources import RUN_FILE
from pipeline.conversion.convert import EXPORT, HF_FOLDER, RECORD
from pipeline.conversion.hf_folder import (
    PlannedTensor,
    code_files,
    copy_base_files,
    load_hf_model,
    stored_tensors,
    write_tensors,
)
from pipeline.conversion.publish import CARD, markdown_table
from pipeline.conversion.remote_code.configuration_scale import NEEDED, ScaleConfig
from pipeline.conversion.remote_code.configuration_scale_combined import NAME, CombinedConfig
from pipeline.conversion.remote_code.modeling_scale_combined import (
    EXPANSIONS,
    NEW_ROWS,
    CombinedForCausalLM,
    is_of_base,
)
from pipeline.conversion.verify import BUILT_IN, windows_of
from pipeline.data.tokenizer import load_tokenizer
from pipeline.data.vocabulary import EXPORTED as EXTENDED
from pipeline.data.vocabulary import join_extensions, read_vocabulary
from pipeline.errors import ConversionError, faults_of_library
from pipeline.files import (
    FolderKind,
    check_replaceable,
    finish_replacement,
    holds,
    path_inside,
    published_folder,
    read_inside,
    read_object,
    write_json,
    write_text,
)
from pipeline.run_folder.lock import RunLock

COMBINATION = FolderKind("a combination", "combination.json", "scale-cpt combination 1")
EXPANSION = "expansion.json"
"""The record of an expansion, in its folder."""
EMBEDDING, OUTPUT = "embedding.base.weight", "output.base"
_WITH_NEW_ROWS = dict(zip((EMBEDDING, OUTPUT), NEW_ROWS, strict=True))
# A ScaleConfig without an expansion. Heads are the base's: what is left of all.
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
class Export:
    """A gated export of one expansion, with its base, in the format scale."""

    folder: Path
    config: Mapping[str, Any]
    record: Mapping[str, Any]

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights, but for its gate's."""
        dtype: torch.dtype = getattr(torch, self.config["dtype"])
        return dtype

    @property
    def base_rows(self) -> int:
        """How many tokens the base has; those of an extended vocabulary follow."""
        return int(self.config["base_vocab_size"])

    @property
    def new_rows(self) -> int:
        """How many it has not."""
        return int(self.config["vocab_size"]) - self.base_rows

    @cached_property
    def base(self) -> dict[str, PlannedTensor]:
        """The base's tensors by name, without rows of new tokens; its output too where that is its embedding."""
        own = {name: tensor for name, tensor in stored_tensors(self.folder).items() if is_of_base(name)}
        own = {OUTPUT: replace(own[EMBEDDING], name=OUTPUT)} | own
        return own | {name: _rows(own[name], slice(self.base_rows)) for name in _WITH_NEW_ROWS}

    def expansion(self) -> list[PlannedTensor]:
        """All other tensors; rows of new tokens have names of their own."""
        stored = stored_tensors(self.folder)
        tensors = [tensor for name, tensor in stored.items() if not is_of_base(name)]
        if self.new_rows:
            new = slice(self.base_rows, None)
            tensors += [replace(_rows(stored[name], new), name=written) for name, written in _WITH_NEW_ROWS.items()]
        return tensors


def _rows(tensor: PlannedTensor, rows: slice) -> PlannedTensor:
    count, *rest = tensor.shape
    return replace(tensor, shape=(len(range(count)[rows]), *rest), make=lambda: tensor.make()[rows])


def base_entries(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a CombinedConfig without expansions, for the base of a model with the ScaleConfig `config`."""
    left = ("architectures", "auto_map", "model_type", "transformers_version", "expansions")
    entries = {key: value for key, value in config.items() if not key.startswith("gate_") and key not in left}
    for heads in ("num_attention_heads", "num_key_value_heads"):
        entries[heads] -= entries[f"expansion_{heads}"]
    vocab_size = config.get("base_vocab_size") or config["vocab_size"]
    return entries | _NO_EXPANSION | {"l_fp": entries["num_hidden_layers"], "vocab_size": vocab_size}


def open_export(path: Path) -> Export:
    """The export in a folder, or of the run in it.

    Raises:
        ConversionError: it is no export that can be combined; says why.
    """
    folder = path / HF_FOLDER if (path / RUN_FILE).exists() else path
    if not holds(EXPORT, folder):
        raise ConversionError(f"{folder}: holds no export; convert the run first: scale-cpt convert")
    config = read_object(folder / "config.json", ConversionError, "convert the run again")
    fault = None
    if config.get("model_type") != ScaleConfig.model_type:
        fault = "it is no export in the format scale; convert the run again with --format scale"
    elif config.get("gate_layer") is None:
        fault = "it has no gate, which would say where it applies; fit one (scale-cpt gate), and convert the run again"
    elif config.get("routed"):
        fault = "a Route model computes two paths by itself; train Preserve or Adapt"
    elif any(rotary["context"] is not None for rotary in config.get("rotary", ())):
        fault = "its rotary frequencies change with the text's length"
    if fault is not None:
        raise ConversionError(f"{folder}: cannot be combined: {fault}")
    return Export(folder, config, read_object(folder / RECORD, ConversionError))


def combine(folder: Path, added: Mapping[str, Path], removed: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Adds exports by their names to the combination in `folder`, which may be new, and removes others.

    The folder is replaced when everything that is added has been verified. Returns the records of its expansions.

    Raises:
        ConversionError: an export cannot be combined, or is of another base; a name is taken or is not there; what was
            written computes something else than the export.
        OutputError: `folder` holds something else.
        FolderTakenError: another process is changing it.
    """
    exports = {name: open_export(path) for name, path in added.items()}
    real = Path(os.path.realpath(folder))
    with RunLock(real.parent, f"{real.name}.combine"):  # beside the folder, which is replaced
        records = _changed(folder, exports, removed)
    _logger.info("%s: added %s; removed %s", folder, ", ".join(added) or "nothing", ", ".join(removed) or "nothing")
    return records


def _changed(folder: Path, exports: Mapping[str, Export], removed: Collection[str]) -> dict[str, dict[str, Any]]:
    """As `combine`, where no other process changes the folder."""
    finish_replacement(folder)
    exists = holds(COMBINATION, folder)
    if not exists:
        check_replaceable(folder, COMBINATION)
    before = read_object(folder / "config.json", ConversionError) if exists else {}
    records = expansions_in(folder) if exists or not exports else {}
    for name in removed:
        if name not in records:
            raise ConversionError(f"--remove {name}: {folder} has no such expansion, but {', '.join(records)}")
    kept = {name: record for name, record in records.items() if name not in removed}
    for name in exports:
        if name in kept:
            raise ConversionError(f"--add {name}: is taken: remove it, or choose another")
        if not NAME.fullmatch(name):
            raise ConversionError(f"--add {name}: expected ASCII letters, digits, - or _")
    if not kept and not exports:
        raise ConversionError(f"--remove: {folder} would hold no expansion; remove the folder instead")
    with published_folder(folder, COMBINATION) as partial:
        if exists:
            of_kept = (file for name in kept for file in (folder / EXPANSIONS / name).rglob("*") if file.is_file())
            for file in (*folder.glob("*.safetensors*"), *of_kept):
                _link(folder, partial, str(file.relative_to(folder)))
            base = base_entries(before)
        else:
            first = next(iter(exports.values()))
            # The output of an extended vocabulary is not its embedding; that of its base may be.
            tied = torch.equal(first.base[EMBEDDING].make(), first.base[OUTPUT].make())
            base = base_entries(first.config) | {"tie_word_embeddings": tied}
            tensors = [tensor for name, tensor in first.base.items() if name != OUTPUT or not tied]
            write_tensors(partial, tensors, first.dtype)
        entries = {name: before["expansions"][name] for name in kept}
        for name, export in exports.items():
            if exists or export is not first:
                _check_base(partial, base, export)
            kept[name] = _write_expansion(partial / EXPANSIONS / name, export)
            entries[name] = {**export.config, "tie_word_embeddings": False}
        _check_tokenizers(partial, kept)
        config = _write_model(partial, base, entries, kept)
        for name, export in exports.items():
            _verify(partial, config, name, export)
    return kept


def expansions_in(folder: Path) -> dict[str, dict[str, Any]]:
    """The records of the expansions of a combination, by name.

    Raises:
        ConversionError: `folder` holds none, or a damaged one.
    """
    if not holds(COMBINATION, folder):
        raise ConversionError(f"{folder}: holds no combination; name what to add: --add NAME=RUN")
    config = CombinedConfig(**read_object(folder / "config.json", ConversionError))
    with faults_of_library(f"{folder / 'config.json'}: damaged", ConversionError):
        names = config.names()
    return {name: read_object(folder / EXPANSIONS / name / EXPANSION, ConversionError) for name in names}


def _link(folder: Path, target: Path, name: str) -> None:
    """Puts the file `name` of `folder` into `target` too; copies it where a file cannot be in both."""
    source = path_inside(folder, name, ConversionError)
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target / name)
    except OSError:
        shutil.copy2(source, target / name)


def _write_expansion(folder: Path, export: Export) -> dict[str, Any]:
    """Writes what the export has beside its base; returns its record."""
    folder.mkdir(parents=True)
    tensors = export.expansion()
    write_tensors(folder, tensors, export.dtype)
    _copy_tokenizer(export.folder, folder)
    record = {
        **{key: export.record[key] for key in ("method", "position", "checkpoint_manifest")},
        "parameters": sum(prod(tensor.shape) for tensor in tensors),
        "new_tokens": export.new_rows,
        "tokenizer": load_tokenizer(export.folder).fingerprint,
    }
    write_json(folder / EXPANSION, record)
    return record


def _check_tokenizers(folder: Path, records: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ConversionError unless all have, or extend, one tokenizer."""
    of_base = {
        name: read_vocabulary(folder / EXPANSIONS / name, EXTENDED).base_tokenizer
        if record["new_tokens"]
        else record["tokenizer"]
        for name, record in records.items()
    }
    first = next(iter(of_base))
    for name, tokenizer in of_base.items():
        if tokenizer != of_base[first]:
            raise ConversionError(f"{name} and {first} have different tokenizers; combine expansions of one base")


def _copy_tokenizer(source: Path, folder: Path) -> None:
    """Copies tokenizer, terms and settings, and the record of an extended vocabulary."""
    copy_base_files(folder, source, source)
    if (source / EXTENDED).exists():
        (folder / EXTENDED).write_bytes(read_inside(source, EXTENDED, ConversionError))


def _check_base(folder: Path, base: Mapping[str, Any], export: Export) -> None:
    """Raises ConversionError if the export's base is not the folder's to the last bit. Special tokens may differ."""
    for key, value in base_entries(export.config).items():
        if base.get(key) != value and key != "tie_word_embeddings" and not key.endswith("_token_id"):
            advice = "convert the run again with --dtype" if key == "dtype" else "combine expansions of one base"
            raise ConversionError(f"{export.folder}: its base has {key} {value}, the others {base.get(key)}: {advice}")
    held = stored_tensors(folder)
    held = {OUTPUT: held[EMBEDDING]} | held
    for name, tensor in export.base.items():
        if name not in held or not torch.equal(held[name].make(), tensor.make()):
            raise ConversionError(
                f"{export.folder}: {name} differs from that of the others: combine expansions of one base"
            )


def _write_model(
    folder: Path, base: Mapping[str, Any], expansions: Mapping[str, Any], records: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Writes what is shared beside the base's weights: code, tokenizer, model card. Returns the config.json."""
    for file in code_files(CombinedForCausalLM):
        shutil.copy(file, folder)
    # In the order in which the model counts their pieces.
    first, *extended = sorted(name for name, record in records.items() if record["new_tokens"]) or list(records)[:1]
    _copy_tokenizer(folder / EXPANSIONS / first, folder)
    for name in extended:
        join_extensions(folder, folder / EXPANSIONS / name)
    write_text(folder / CARD, _card(records))
    write_json(folder / COMBINATION.record, {"format": COMBINATION.format})
    config = {
        **base,
        "architectures": [CombinedForCausalLM.__name__],
        "auto_map": {
            "AutoConfig": "configuration_scale_combined.CombinedConfig",
            "AutoModelForCausalLM": "modeling_scale_combined.CombinedForCausalLM",
        },
        "model_type": CombinedConfig.model_type,
        "transformers_version": NEEDED,
        "expansions": dict(expansions),
    }
    write_json(folder / "config.json", dict(sorted(config.items())))
    return config


def rows_of(records: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """A row for each expansion, under HEADER."""
    return [
        [
            name,
            str(record["method"].get("variant")),
            f"{record['parameters']:,}",
            f"{record['new_tokens']:,}",
            f"{record['position']['tokens_seen']:,}",
        ]
        for name, record in records.items()
    ]


HEADER = ["expansion", "variant", "parameters", "new tokens", "trained on tokens"]


def _card(records: Mapping[str, Mapping[str, Any]]) -> str:
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [continual-pretraining, scale-cpt]
---

# One base with {len(records)} expansions

Each was trained alone on the frozen base. Where no gate opens, the model is its base.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, active=["{next(iter(records))}"])
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
```

{markdown_table(HEADER, rows_of(records))}
"""


@torch.no_grad()
def _verify(folder: Path, config: Mapping[str, Any], name: str, export: Export) -> None:
    """Compares the logits of one expansion of `folder` beside its base with its export's: equal to the last bit.

    Raises:
        ConversionError: they differ.
    """
    alone = load_hf_model(export.folder)
    model = CombinedForCausalLM.from_pretrained(folder, active=[name], dtype=export.dtype)
    for window in windows_of(BUILT_IN.values(), export.folder, int(config["max_position_embeddings"])):
        tokens = window.unsqueeze(0)
        expected = alone(tokens, use_cache=False).logits
        columns = torch.arange(expected.shape[-1])
        # Its pieces may have other ids here, and those of other expansions come before or behind.
        columns[export.base_rows :] += model.pieces[model.names.index(name)].start - export.base_rows
        found = model(columns[tokens], use_cache=False).logits[..., columns]
        if not torch.equal(found, expected):
            difference = float((found - expected).abs().max())
            raise ConversionError(
                f"{export.folder}: {name} beside its base differs by {difference:.3g} in a logit; not kept"
            )
