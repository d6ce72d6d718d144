"""A first configuration for a base and texts: sizes that fit both, in the paper's proportions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pipeline.config.run import GateSettings, RunConfig, parse_config
from pipeline.config.sources import merged
from pipeline.data.sources.records import Keys
from pipeline.data.tokenize.units import sampled_documents
from pipeline.data.tokenizer.load import Tokenizer, fertility, load_tokenizer
from pipeline.errors import LayoutError
from pipeline.files import with_pages_found
from pipeline.hub import model_folder
from pipeline.model.from_hf import open_base
from pipeline.model.merged_model import merged_widths
from pipeline.model.spec import DecoderSpec
from pipeline.scale.plan import Widths
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.estimate import open_estimator

_SAMPLE_BYTES = 4 * 2**20
_WIDER_BY, _L_FP_SHARE = (
    1 / 8,
    3 / 16,
)  # the paper's shares: of every width, and of the layers without W12
_WIDER_WITH_GATE = 1 / 4
"""With W12 in attention and FFN, 1.4 times the base's FLOPs and 1.5 times its parameters (docs/results/frontier.md)."""
_MULTIPLE_OF = 8
_PAPER_HIDDEN_SIZE, _PAPER_RATE = 2048, 1e-3
_LONGEST, _SHORTEST = 8192, 64
_SEQUENCES = 4096
"""Sequences that a run reads at least, where its texts hold them: shorter sequences make more of little text."""
_STEPS = 1000
_LARGEST_STEP = 2**22
"""Tokens of a step of the paper's run; smaller runs make about _STEPS smaller steps."""
_SMALLEST_BATCH = 8
_MICRO_BATCHES = (16, 8, 4, 2, 1)
_REPEATED = (4, 100_000_000)
"""Texts of fewer tokens are read so many times; up to four passes are about as good as new text."""


class Texts(NamedTuple):
    """What a kind of text holds, by a sample of it."""

    inputs: list[str]
    tokens: int
    tokens_per_byte: float


def measure(inputs: Sequence[str], tokenizer: Tokenizer, text_key: str = "text") -> Texts:
    """Estimates the tokens of a corpus of `inputs` from a sample of it.

    Raises:
        DataError: a file is missing, or holds no text.
    """
    sample, factor = sampled_documents(inputs, Keys(text_key), _SAMPLE_BYTES)
    found = fertility(tokenizer, (document.text for document in sample))
    framed = found.tokens + len(sample) * len([*tokenizer.document_start, *tokenizer.document_end])
    return Texts(list(inputs), max(1, round(factor * framed)), found.tokens_per_byte)


def propose(
    name: str,
    base: Path,
    new: Sequence[str],
    old: Sequence[str],
    cluster: Cluster,
    *,
    text_key: str = "text",
    old_text_key: str | None = None,
    vocabulary: Path | None = None,
    gated: bool = True,
) -> tuple[RunConfig, str]:
    """A configuration of a run on `cluster`, and the commented YAML that describes it.

    `base` may be a model on the hub, which is fetched; the YAML names it as it was given. `text_key` is that of all
    texts, or with `old_text_key` of the new ones alone. `vocabulary`: the folder of a tokenizer that extends the
    base's. What the base writes itself teaches a gate where to stay closed; without one (`gated`) it is rehearsed, and
    the model may leave as an ordinary one.

    Raises:
        BaseModelError, DataError: the base or a text cannot be read.
        ConfigError, LayoutError: no such run is possible.
    """
    folder = model_folder(base)
    spec, tokenizer = open_base(folder).spec, load_tokenizer(vocabulary or folder)
    of_old = old_text_key or text_key
    learned, known = measure(new, tokenizer, text_key), measure(old, tokenizer, of_old)
    schedule, length = _schedule(learned, spec, cluster)
    own: dict[str, Any] = {
        "tokens": max(
            20_000, min(4 * GateSettings().tokens if gated else 50_000_000, _read(learned) // 300)
        ),
        "max_tokens": min(length, 2048),
    }
    if not tokenizer.document_start:  # nothing to begin a text with
        own |= {
            "prompts": [*known.inputs],
            "prompt_tokens": min(16, length // 4),
        }  # a copy, or YAML writes an anchor
    key, old_key = ({} if name == "text" else {"text_key": name} for name in (text_key, of_old))
    corpora = {
        "new": {**_corpus(learned, length), **key},
        "old": {**_corpus(known, length), "role": "replay", **old_key},
        "self_generated": {
            "role": "self_generated",
            "sample": own,
            **old_key,
        },  # its prompts are old texts
    }
    values: dict[str, Any] = {
        "name": name,
        "folder": f"runs/{name}",
        "base": str(folder),
        "method": _method(spec, gated=gated),
        "data": {"folder": f"runs/{name}/tokens", "sequence_length": length, "corpora": corpora},
        "schedule": schedule,
        "validation": {"every_steps": max(1, schedule["steps"] // 20), "max_sequences": 64},
        "checkpoints": {"every_steps": max(1, schedule["steps"] // 10)},
        "deepspeed": "ds_configs/zero1_fp32.json" if cluster.on_cpu else "ds_configs/zero1.json",
    }
    if gated:
        values["data"]["self_generated_fraction"], values["gate"] = 0.0, {}
    if vocabulary is not None:
        values["vocabulary"] = {"folder": str(vocabulary)}
    config, values = _fitted(values, cluster)
    return config, with_pages_found(
        _as_yaml(values | {"base": str(base)}, spec, learned, known, cluster)
    )


def _method(spec: DecoderSpec, *, gated: bool) -> dict[str, Any]:
    """SCALE with all widths grown by a share, as closely as heads and an ordinary model without zeros allow."""
    base, wider_by = spec.widths, _WIDER_WITH_GATE if gated else _WIDER_BY
    hidden_size = _MULTIPLE_OF * max(1, round(wider_by * base.hidden_size / _MULTIPLE_OF))
    share = hidden_size / base.hidden_size
    intermediate_size = _MULTIPLE_OF * max(1, round(share * base.intermediate_size / _MULTIPLE_OF))
    kv_heads = max(1, math.ceil(share * base.num_key_value_heads - 0.5))
    heads = kv_heads * base.num_attention_heads // base.num_key_value_heads
    whole = asdict(merged_widths(Widths(hidden_size, intermediate_size, heads, kv_heads), spec))
    added = {
        name: whole[name] - width
        for name, width in asdict(base).items()
        if name != "num_key_value_heads"
    }
    l_fp = min(spec.num_layers - 1, max(1, round(spec.num_layers * _L_FP_SHARE)))
    own = {"collaborative_modules": "both"} if gated else {"norm": "base"}
    return {"name": "scale", "variant": "adapt", "expansion": added, "l_fp": l_fp, **own}


def _read(learned: Texts) -> int:
    """How many tokens a run reads."""
    return (_REPEATED[0] if learned.tokens < _REPEATED[1] else 1) * learned.tokens


def _schedule(learned: Texts, spec: DecoderSpec, cluster: Cluster) -> tuple[dict[str, Any], int]:
    """The section `schedule`, and the length of a sequence."""
    read = _read(learned)
    length = min(_LONGEST, 2 ** int(math.log2(spec.max_position_embeddings)))
    while read < _SEQUENCES * length and length > _SHORTEST:
        length //= 2
    batch = 2 ** round(math.log2(max(1.0, min(_LARGEST_STEP, read / _STEPS) / length)))
    batch = cluster.gpus * max(1, round(max(batch, _SMALLEST_BATCH) / cluster.gpus))
    rate = _PAPER_RATE * math.sqrt(_PAPER_HIDDEN_SIZE / spec.widths.hidden_size)
    steps = max(1, round(read / (batch * length)))
    return {
        "steps": steps,
        "global_batch_size": batch,
        "micro_batch_size": 1,
        "learning_rate": float(f"{rate:.1e}"),
    }, length


def _corpus(text: Texts, length: int) -> dict[str, Any]:
    """A corpus whose held-out share of the documents holds about 128 sequences, within limits."""
    heldout = float(f"{min(0.1, max(0.001, 128 * length / text.tokens)):.1g}")
    return {"input": text.inputs, "heldout_fraction": heldout}


def _fitted(values: dict[str, Any], cluster: Cluster) -> tuple[RunConfig, dict[str, Any]]:
    """The settings with the first layout that fits, and its largest micro-batch."""
    layouts: list[dict[str, Any]] = [{}]
    if not cluster.on_cpu:
        layouts += [{"deepspeed": f"ds_configs/zero{stage}.json"} for stage in (2, 3)]
        layouts += [{"deepspeed": "ds_configs/zero3.json", "activation_checkpointing": "all"}]
    per_rank = values["schedule"]["global_batch_size"] // cluster.gpus
    for layout in layouts:
        for micro_batch in (size for size in _MICRO_BATCHES if per_rank % size == 0):
            fitted = merged(merged(values, layout), {"schedule": {"micro_batch_size": micro_batch}})
            config = parse_config(fitted, source="the proposed configuration")
            estimator = open_estimator(config, cluster)
            if estimator.memory(estimator.own_choice)[0].total <= cluster.recommended_bytes:
                return config, fitted
    raise LayoutError(
        f"memory: this base does not fit on {cluster.gpus} GPUs of {cluster.gpu_memory_gib:g} GiB; take more of them "
        "(--gpus, --gpu-memory-gib), or a tensor-parallel size that scale-cpt estimate recommends"
    )


def _as_yaml(
    values: dict[str, Any], spec: DecoderSpec, learned: Texts, known: Texts, cluster: Cluster
) -> str:
    """The settings with comments on where each section's values come from."""
    schedule, base, added = values["schedule"], asdict(spec.widths), values["method"]["expansion"]
    gated = "gate" in values
    names = {
        "hidden_size": "hidden",
        "intermediate_size": "FFN",
        "num_attention_heads": "attention heads",
    }
    growth = ", ".join(
        f"{name} {base[key]} by {added[key] / base[key]:.0%}" for key, name in names.items()
    )
    tokens = schedule["steps"] * schedule["global_batch_size"] * values["data"]["sequence_length"]
    more = (
        "the gate learns from it where to stay closed"
        if gated
        else "it keeps the model near the base"
    )
    comments = {
        "name": "Written by `scale-cpt config init`: sizes in the paper's proportions, a place to start from.\n"
        "Every setting is explained in docs/configuration.md; see what this file says with `scale-cpt config show`.",
        "method": f"The base's widths grow: {growth}. The paper's grow by an eighth each,\n"
        "those under a gate by a quarter, a small base's by what servers can split.\n"
        f"l_fp: the lower 3/16 of the {spec.num_layers} layers never read the new blocks.",
        "data": f"new: about {learned.tokens:,} tokens ({learned.tokens_per_byte:.2f} a byte; where it takes many, "
        f"`scale-cpt vocabulary` adds tokens).\nold: about {known.tokens:,}; only its held-out part is read, to "
        f"measure what is forgotten.\nown_text is written by the base: {more} (docs/self_generated.md).",
        "gate": "Fitted after training: text on which it stays closed gets the base's own logits (docs/gate.md).\n"
        "For an ordinary model, which any server runs: scale-cpt config init --without-gate.",
        "schedule": f"{tokens:,} tokens in all, {tokens / learned.tokens:.2g} passes over the new text. The rate is "
        "the paper's for a hidden size of 2048,\ntimes the square root of 2048 / this one: also try half and twice.",
        "deepspeed": f"The first layout that fits on {cluster.gpus} ranks of {cluster.gpu_memory_gib:g} GiB; "
        "`scale-cpt estimate` compares others.",
    }
    parts = []
    for key, value in values.items():
        comment = "".join(f"# {line}\n" for line in comments.get(key, "").splitlines())
        style = None if isinstance(value, dict) else False
        section = yaml.safe_dump(
            {key: value}, sort_keys=False, allow_unicode=True, default_flow_style=style, width=110
        )
        parts.append(("\n" if isinstance(value, dict) or comment else "") + comment + section)
    return "".join(parts).lstrip("\n")
