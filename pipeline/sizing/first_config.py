"""A first configuration for a base and texts: sizes that fit both, in the paper's proportions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pipeline.config.method import OwnRows, ScaleMethod
from pipeline.config.run import GateSettings, RunConfig, parse_config
from pipeline.config.sources import merged
from pipeline.data.sources.records import Keys
from pipeline.data.tokenize.documents import sampled_documents
from pipeline.data.tokenizer.chats import chat_template
from pipeline.data.tokenizer.load import Tokenizer, fertility, load_tokenizer
from pipeline.errors import ConfigError, DataError, LayoutError
from pipeline.hosted.bases import open_base
from pipeline.hosted.spec import HostedSpec
from pipeline.hosted.transformers_model import parameter_kept_in_fp32
from pipeline.hosted.unsupported import check_hosted_method
from pipeline.hub import model_folder
from pipeline.installation import with_pages_found
from pipeline.model.merged_model import merged_widths
from pipeline.model.spec import DecoderSpec
from pipeline.scale.plan import GATE_LAYER, Widths
from pipeline.sizing.cluster import GIB, Cluster
from pipeline.sizing.estimate import open_estimator, parameters_of
from pipeline.sizing.meta_device import NotTracedError

_SAMPLE_BYTES = 4 * 2**20
_WIDER_BY = 1 / 8
"""The paper's expansion, as a share of every width."""
_L_FP_SHARE = 3 / 16
"""The paper's share of the layers without W12."""
_GATED_L_FP = 0
"""l_fp under a gate: open tokens have weights of their own from there on. The lower they begin, the
more they learn (studies/LOG.md); the layers below the gate then run twice, 2 of them by default
(docs/adr/0033-lora-under-a-gate.md)."""
_LOW_RANK = 8
"""Rank of open tokens' low-rank differences beside the expansion (studies/LOG.md)."""
_MULTIPLE_OF = 8
"""Added widths are multiples of it, as kernels prefer."""
_PAPER_HIDDEN_SIZE = 2048
_PAPER_RATE = 1e-3
_LONGEST = 8192
_SHORTEST = 64
"""Bounds of a sequence's length in tokens."""
_SEQUENCES = 4096
"""Sequences that a run reads at least, if its texts suffice: shorter ones make more of them."""
_STEPS = 1000
_LARGEST_STEP = 2**22
"""Tokens of a step of the paper's run; smaller runs make about _STEPS smaller steps."""
_SMALLEST_BATCH = 8
_MICRO_BATCHES = (16, 8, 4, 2, 1)
_LITTLE_TEXT = 100_000_000
_REPEATED = 4
"""Texts of fewer tokens than _LITTLE_TEXT are read so many times: up to four passes are about as
good as new text (Muennighoff et al. 2023, "Scaling Data-Constrained Language Models")."""
_PASSES_OF_CHATS = 2
_SHARE_OF_CHATS = 3 / 4
_RATE_OF_CHATS = 1 / 3
"""How often chats in the new language are read after the texts, their share of the sequences there,
and the learning rate as a share of the texts' own (docs/results/chat.md)."""
_KL_FRACTION_OF_CHATS = 1 / 8
"""The share of the sequences on which a chat model under a gate stays near its base: with it the
answers to users of the new language end, and tuning on their chats begins from what the base can do
(docs/results/chat.md)."""
_CHATS_HELDOUT = 0.01
_MUON_STATE_BYTES = 12
"""Bytes of training state a parameter: weight, gradient, master weight and momentum."""
_GATE_TEXT = 4
"""Self-generated text for a gate, in times of gate.tokens: to fit it, to set its threshold, and
twice that to spare."""


@dataclass(frozen=True)
class FirstRun:
    """What a first configuration is asked for.

    Attributes:
        name: of the run.
        base: a Hugging Face folder, or a model on the hub, which is fetched.
        new: files of the text to learn.
        old: files of the base's own domain.
        text_key: the field of the texts.
        old_text_key: the field of the old texts; default: text_key.
        vocabulary: the folder of a tokenizer that extends the base's; default: the base's own.
        old_chats: files of chats in languages that the base knows, which it answers itself.
        new_chats: files of chats in the new language, whose answers are learned after the texts.
        messages_key: the field of the messages in both.
        gated: whether the run has a gate, which learns from self-generated text where to stay
            closed. Without one the model trains on self-generated text, and may leave as an
            ordinary one.
    """

    name: str
    base: Path
    new: Sequence[str]
    old: Sequence[str]
    text_key: str = "text"
    old_text_key: str | None = None
    vocabulary: Path | None = None
    old_chats: Sequence[str] = ()
    new_chats: Sequence[str] = ()
    messages_key: str = "messages"
    gated: bool = True

    @property
    def has_chats(self) -> bool:
        """Whether the run reads chats, on some of which it stays near its base by KL."""
        return bool(self.old_chats or self.new_chats)


class TextMeasure(NamedTuple):
    """What a kind of text holds, by a sample of it."""

    inputs: list[str]
    tokens: int
    tokens_per_byte: float


def measure(inputs: Sequence[str], tokenizer: Tokenizer, text_key: str = "text") -> TextMeasure:
    """Estimates the tokens of a corpus of `inputs` from a sample of it.

    Raises:
        DataError: a file is missing, or holds no text.
    """
    sample, factor = sampled_documents(inputs, Keys(text_key), _SAMPLE_BYTES)
    found = fertility(tokenizer, (document.text for document in sample))
    tokens_around = len(tokenizer.document_start) + len(tokenizer.document_end)
    framed = found.tokens + len(sample) * tokens_around
    return TextMeasure(list(inputs), max(1, round(factor * framed)), found.tokens_per_byte)


def measure_chats(
    inputs: Sequence[str], tokenizer: Tokenizer, messages_key: str = "messages"
) -> TextMeasure:
    """Estimates the tokens of a corpus of chats, prompts included, from a sample of it.

    Raises:
        DataError: the tokenizer has no chat template, a file is missing, or no chat has an answer.
    """
    keys = Keys(messages_key, messages_key, chat=chat_template(tokenizer.path))
    sample, factor = sampled_documents(inputs, keys, _SAMPLE_BYTES)
    found = fertility(tokenizer, (document.whole_text for document in sample))
    return TextMeasure(list(inputs), max(1, round(factor * found.tokens)), found.tokens_per_byte)


def propose(wanted: FirstRun, cluster: Cluster) -> tuple[RunConfig, str]:
    """A configuration of a run on `cluster`, and the commented YAML that describes it.

    The YAML names the base as it was given.

    Raises:
        BaseModelError: the base cannot be read.
        DataError: a text cannot be read.
        ConfigError: the base and the texts allow no such run.
        LayoutError: the base does not fit on the cluster.
    """
    folder = model_folder(wanted.base)
    spec = open_base(folder).spec
    tokenizer = load_tokenizer(wanted.vocabulary or folder)
    learned = measure(wanted.new, tokenizer, wanted.text_key)
    known = measure(wanted.old, tokenizer, wanted.old_text_key or wanted.text_key)
    schedule, length = _schedule(learned, spec, cluster)
    gated = wanted.gated and not _has_no_gate(spec)
    wanted = replace(wanted, gated=gated)
    stages: list[dict[str, Any]] = []
    if wanted.new_chats:
        tuned = measure_chats(wanted.new_chats, tokenizer, wanted.messages_key)
        stages = _stages(schedule, length, tuned)
        schedule["steps"] = sum(stage["steps"] for stage in stages)
    values: dict[str, Any] = {
        "name": wanted.name,
        "folder": f"runs/{wanted.name}",
        "base": str(folder),
        "method": _method(spec),
        "data": {
            "folder": f"runs/{wanted.name}/tokens",
            "sequence_length": length,
            "corpora": _corpora(wanted, learned, known, tokenizer, length),
        },
        "schedule": schedule,
        "stages": stages,
        "validation": {"every_steps": max(1, schedule["steps"] // 20), "max_sequences": 64},
        "checkpoints": {"every_steps": max(1, schedule["steps"] // 10)},
        "deepspeed": f"ds_configs/zero1{_precision(spec, cluster)}.json",
    }
    if not stages:
        del values["stages"]
    if wanted.gated:
        values["gate"] = {}
        # Without chats the gate alone reads the self-generated text.
        values["data"]["self_generated_fraction"] = 0.0
        if wanted.has_chats:
            values["data"]["self_generated_fraction"] = _KL_FRACTION_OF_CHATS
        if wanted.new_chats:
            # On answers to users of the new language the gate would learn to stay shut.
            negatives = ["self_generated"]
            if wanted.old_chats:
                negatives.append("self_generated_chats")
            values["gate"] = {"negatives": negatives}
    if wanted.vocabulary is not None:
        values["vocabulary"] = {"folder": str(wanted.vocabulary)}
    layouts = _layouts(spec, cluster)
    if wanted.gated:
        config, values = _fitted_with_own_weights(values, spec, layouts, cluster)
    else:
        if spec.is_native:
            values["method"] |= {"norm": "base"}  # which a merged export needs
        config, values = _fitted(values, layouts, cluster)
    comments = {
        "gate": _gate_comment(spec),
        "data": _data_comment(values, learned, known) + _chats_comment(wanted, tokenizer),
        "stages": (
            "First the texts, then chats in the new language, with the loss on their answers alone "
            "(docs/chat.md)."
        ),
    }
    comments["method"] = _method_comment(values, spec)
    if _may_be_a_difference(values, spec):
        base_parameters = parameters_of(config, spec).base
        comments["method"] += "\n" + _difference_comment(base_parameters)
    comments["deepspeed"] = _layout_comment(spec, cluster)
    text = _as_yaml(values | {"base": str(wanted.base)}, comments, learned)
    return config, with_pages_found(text)


def _corpora(
    wanted: FirstRun, learned: TextMeasure, known: TextMeasure, tokenizer: Tokenizer, length: int
) -> dict[str, Any]:
    """The section `data.corpora`."""
    new = _corpus(learned, length)
    if wanted.text_key != "text":
        new["text_key"] = wanted.text_key
    old = {**_corpus(known, length), "role": "replay"}

    most = 50_000_000
    if wanted.gated and not wanted.has_chats:
        most = _GATE_TEXT * GateSettings().tokens
    sample: dict[str, Any] = {
        "tokens": max(20_000, min(most, _read(learned) // 300)),
        "max_tokens": min(length, 2048),
    }
    if not tokenizer.document_start:
        # The tokenizer has no token to begin a text with: the base continues old texts.
        sample["prompts"] = list(known.inputs)  # a copy, or YAML writes an anchor
        sample["prompt_tokens"] = min(16, length // 4)
    self_generated: dict[str, Any] = {"role": "self_generated", "sample": sample}

    old_key = wanted.old_text_key or wanted.text_key
    if old_key != "text":
        old["text_key"] = old_key
        self_generated["text_key"] = old_key  # of its prompts, which are old texts
    corpora = {"new": new, "old": old, "self_generated": self_generated}
    return corpora | _corpora_of_chats(wanted, sample)


def _corpora_of_chats(wanted: FirstRun, sample: dict[str, Any]) -> dict[str, Any]:
    """The corpora of chats; `sample` is what the base is asked to write of other text."""
    corpora: dict[str, Any] = {}
    if wanted.old_chats:
        corpora["self_generated_chats"] = _answered(wanted, sample, wanted.old_chats)
    if wanted.new_chats:
        # As often as all that the base writes in languages that it knows.
        weight = 1 + len(corpora)
        answered = _answered(wanted, sample, wanted.new_chats)
        corpora["self_generated_new_chats"] = {**answered, "weight": weight}
        corpora["new_chats"] = {
            "input": list(wanted.new_chats),
            "heldout_fraction": _CHATS_HELDOUT,
            "messages_key": wanted.messages_key,
        }
    return corpora


def _answered(wanted: FirstRun, sample: dict[str, Any], chats: Sequence[str]) -> dict[str, Any]:
    """A corpus of chats that the base answers itself."""
    lengths = {name: sample[name] for name in ("tokens", "max_tokens")}
    return {
        "role": "self_generated",
        "messages_key": wanted.messages_key,
        "sample": {**lengths, "prompts": list(chats)},
    }


def _stages(schedule: dict[str, Any], length: int, tuned: TextMeasure) -> list[dict[str, Any]]:
    """The stages of a run that learns texts as `schedule` says, and then chats.

    In the second some of the texts are read on, so that what they taught stays.
    """
    read = _PASSES_OF_CHATS * tuned.tokens / _SHARE_OF_CHATS
    steps = max(1, round(read / (schedule["global_batch_size"] * length)))
    rate = float(f"{schedule['learning_rate'] * _RATE_OF_CHATS:.1e}")
    # Weights of which new_chats has its share.
    weights = {"new": 1, "new_chats": round(_SHARE_OF_CHATS / (1 - _SHARE_OF_CHATS))}
    # The base's own answers there would be learned against better ones.
    weights["self_generated_new_chats"] = 0
    return [
        {"name": "texts", "steps": schedule["steps"], "weights": {"new_chats": 0}},
        {"name": "chats", "steps": steps, "learning_rate": rate, "weights": weights},
    ]


def _method(spec: DecoderSpec) -> dict[str, Any]:
    """SCALE with all widths grown by a share, as closely as heads and a merged export allow."""
    base = spec.widths
    hidden_size = _multiple(_WIDER_BY * base.hidden_size)
    share = hidden_size / base.hidden_size
    intermediate_size = _multiple(share * _inner_width(spec))
    kv_heads = max(1, math.ceil(share * base.num_key_value_heads - 0.5))
    heads = kv_heads * base.num_attention_heads // base.num_key_value_heads

    widths = Widths(hidden_size, intermediate_size, heads, kv_heads)
    added = asdict(widths)
    if spec.is_native:
        # The widths of the merged export, which pads some of them with zeros: train these, too.
        whole = asdict(merged_widths(widths, spec))
        for name, width in asdict(base).items():
            added[name] = whole[name] - width
    del added["num_key_value_heads"]  # it follows from the query heads

    l_fp = min(spec.num_layers - 1, max(1, round(spec.num_layers * _L_FP_SHARE)))
    return {"name": "scale", "variant": "adapt", "expansion": added, "l_fp": l_fp}


def _with_own_weights(
    method: dict[str, Any], spec: DecoderSpec, *, with_rows: bool
) -> dict[str, Any]:
    """The method for a run with a gate: what closed tokens never read may change more.

    On a mixture of experts no low-rank differences are proposed: its experts have none, and what
    those of its other maps gain was not measured.
    """
    if isinstance(spec, HostedSpec):
        return _hosted_with_own_weights(method, spec, with_rows=with_rows)
    gated = {
        **method,
        "l_fp": _GATED_L_FP,
        "collaborative_modules": "both",
        "norm": "base",
    }
    if with_rows:
        gated["own_rows"] = {"min_count": OwnRows().min_count}
    gated["own_gains"] = True
    if spec.mixture is None:
        gated["low_rank"] = _LOW_RANK
    return gated


def _hosted_with_own_weights(
    method: dict[str, Any], spec: HostedSpec, *, with_rows: bool
) -> dict[str, Any]:
    """As `_with_own_weights`, with those of the weights that a hosted base takes.

    Its layers run once, so that W12 begins where the gate reads.
    """
    l_fp = min(GATE_LAYER, spec.num_layers - 1)
    gated = {**method, "l_fp": l_fp, "collaborative_modules": "both"}
    own: dict[str, Any] = {"own_gains": True, "low_rank": _LOW_RANK}
    if with_rows:
        own = {"own_rows": {"min_count": OwnRows().min_count}, **own}
    for name, value in own.items():
        one_more = {**gated, name: value}
        try:
            check_hosted_method(ScaleMethod.model_validate(one_more), spec)
        except ConfigError:
            continue
        gated = one_more
    return gated


def _has_no_gate(spec: DecoderSpec) -> bool:
    """Whether nothing can close a hosted base: it has several residual streams, or one layer."""
    if not isinstance(spec, HostedSpec):
        return False
    return not spec.structure.has_one_stream or spec.num_layers == 1


def _inner_width(spec: DecoderSpec) -> int:
    """The inner width of the base's FFN; four times its hidden size where it tells none."""
    return spec.widths.intermediate_size or 4 * spec.widths.hidden_size


def _multiple(width: float) -> int:
    """The nearest multiple of _MULTIPLE_OF above 0."""
    return _MULTIPLE_OF * max(1, round(width / _MULTIPLE_OF))


def _read(learned: TextMeasure) -> int:
    """How many tokens a run reads."""
    passes = _REPEATED if learned.tokens < _LITTLE_TEXT else 1
    return passes * learned.tokens


def _schedule(
    learned: TextMeasure, spec: DecoderSpec, cluster: Cluster
) -> tuple[dict[str, Any], int]:
    """The section `schedule`, and the length of a sequence."""
    read = _read(learned)
    length = min(_LONGEST, 2 ** int(math.log2(spec.max_position_embeddings)))
    while read < _SEQUENCES * length and length > _SHORTEST:
        length //= 2

    # A power of two near the wanted tokens of a step, then a multiple of the GPUs.
    step_tokens = min(_LARGEST_STEP, read / _STEPS)
    sequences = max(_SMALLEST_BATCH, 2 ** round(math.log2(max(1.0, step_tokens / length))))
    # Every rank must have the same number of sequences in a step.
    batch = cluster.gpus * max(1, round(sequences / cluster.gpus))

    # The rule of thumb that rates fall with the square root of the width: between none, and the 1 /
    # width of muP for matrices (Yang et al. 2022).
    rate = _PAPER_RATE * math.sqrt(_PAPER_HIDDEN_SIZE / spec.widths.hidden_size)
    schedule = {
        "steps": max(1, round(read / (batch * length))),
        "global_batch_size": batch,
        "micro_batch_size": 1,
        "learning_rate": float(f"{rate:.1e}"),
    }
    return schedule, length


def _corpus(text: TextMeasure, length: int) -> dict[str, Any]:
    """A corpus whose held-out share of the documents holds about 128 sequences, within limits."""
    heldout = float(f"{min(0.1, max(0.001, 128 * length / text.tokens)):.1g}")
    return {"input": text.inputs, "heldout_fraction": heldout}


def _precision(spec: DecoderSpec, cluster: Cluster) -> str:
    """What the names of DeepSpeed's files end in: nothing for bf16."""
    is_in_fp32 = isinstance(spec, HostedSpec) and parameter_kept_in_fp32(spec) is not None
    return "_fp32" if cluster.on_cpu or is_in_fp32 else ""


def _layouts(spec: DecoderSpec, cluster: Cluster) -> list[dict[str, Any]]:
    """Settings of layouts, from the least communication to the least memory.

    Recomputation comes last, since it costs time: a fifth with products kept, half without.
    """
    if cluster.on_cpu:
        return [{}]
    precision = _precision(spec, cluster)
    stages = (3,) if precision else (2, 3)  # no file has ZeRO-2 in fp32: it saves gradients alone
    layouts: list[dict[str, Any]] = [{}]
    for stage in stages:
        layouts.append({"deepspeed": f"ds_configs/zero{stage}{precision}.json"})
    recomputed = {**layouts[-1], "activation_checkpointing": "all"}
    if spec.is_native:
        layouts.append({**recomputed, "recomputation_keeps": "products"})
    return [*layouts, recomputed]


def _fitted_with_own_weights(
    values: dict[str, Any], spec: DecoderSpec, layouts: Sequence[dict[str, Any]], cluster: Cluster
) -> tuple[RunConfig, dict[str, Any]]:
    """The settings of a run with a gate, as `_fitted`.

    Open tokens have rows of their own unless the vocabulary is extended, beside which they were not
    measured, or the base then does not fit: in a large vocabulary they are the most memory.
    """
    with_rows = _with_own_weights(values["method"], spec, with_rows=True)
    without_rows = _with_own_weights(values["method"], spec, with_rows=False)
    if "vocabulary" not in values:
        try:
            return _fitted(values | {"method": with_rows}, layouts, cluster)
        except LayoutError:
            # It is raised again below if the base does not fit without them either.
            pass
    return _fitted(values | {"method": without_rows}, layouts, cluster)


def _fitted(
    values: dict[str, Any], layouts: Sequence[dict[str, Any]], cluster: Cluster
) -> tuple[RunConfig, dict[str, Any]]:
    """The settings with the first of `layouts` that fits, and its largest micro-batch."""
    per_rank = values["schedule"]["global_batch_size"] // cluster.gpus
    # The largest first: larger matrix products reach more of the peak.
    micro_batches = [size for size in _MICRO_BATCHES if per_rank % size == 0]
    for layout in layouts:
        for micro_batch in micro_batches:
            fitted = merged(merged(values, layout), {"schedule": {"micro_batch_size": micro_batch}})
            config = parse_config(fitted, source="the proposed configuration")
            estimator = open_estimator(config, cluster)
            try:
                memory, _ = estimator.memory(estimator.own_choice)
            except NotTracedError:
                # The dry run says so. The smallest micro-batch is likeliest to fit.
                fitted = merged(values, {"schedule": {"micro_batch_size": 1}})
                return parse_config(fitted, source="the proposed configuration"), fitted
            if memory.total <= cluster.recommended_bytes:
                return config, fitted
    raise LayoutError(
        f"memory: this base does not fit on {cluster.gpus} GPUs of {cluster.gpu_memory_gib:g} GiB; "
        "take more of them (--gpus, --gpu-memory-gib), or a tensor-parallel size that "
        "scale-cpt estimate recommends"
    )


def _as_yaml(
    values: dict[str, Any],
    comments: dict[str, str],
    learned: TextMeasure,
) -> str:
    """The settings with comments on where each section's values come from, besides those given."""
    comments = comments | {
        "name": (
            "Written by `scale-cpt config init`: sizes in the paper's proportions, a place to "
            "start from.\n"
            "Every setting is explained in docs/configuration.md; see what this file says with "
            "`scale-cpt config show`."
        ),
        "schedule": _schedule_comment(values, learned),
    }
    text = ""
    for key, value in values.items():
        is_section = isinstance(value, dict)
        if is_section or key in comments:
            text += "\n"
        for line in comments.get(key, "").splitlines():
            text += f"# {line}\n"
        text += yaml.safe_dump(
            {key: value},
            sort_keys=False,
            allow_unicode=True,
            # None: a section is written in lines, and the lists in it in brackets.
            default_flow_style=None if is_section else False,
            width=110,
        )
    return text.lstrip("\n")


def _gate_comment(spec: DecoderSpec) -> str:
    comment = (
        "Fitted after training: text on which it stays closed gets the base's own logits "
        "(docs/gate.md)."
    )
    if not spec.is_native:
        return comment
    return (
        f"{comment}\n"
        "For an ordinary model, which any server runs: scale-cpt config init --without-gate."
    )


def _method_comment(values: dict[str, Any], spec: DecoderSpec) -> str:
    base = spec.widths
    added = values["method"]["expansion"]
    hidden = f"hidden {base.hidden_size} by {added['hidden_size'] / base.hidden_size:.0%}"
    inner = _inner_width(spec)
    ffn = f"FFN {inner} by {added['intermediate_size'] / inner:.0%}"
    heads_share = added["num_attention_heads"] / base.num_attention_heads
    heads = f"attention heads {base.num_attention_heads} by {heads_share:.0%}"
    comment = (
        f"The base's widths grow: {hidden}, {ffn}, {heads}. The paper's grow by an eighth each,\n"
        "a small base's by what servers can split.\n"
    )
    if isinstance(spec, HostedSpec):
        comment = (
            f"transformers computes this base ({spec.structure.model_class}), and the expansion "
            "stands beside its blocks\n(docs/architectures.md#hosted-bases): "
            f"{hidden}, {ffn}, {heads}.\n"
        )
    l_fp = values["method"]["l_fp"]
    if "gate" not in values:
        return (
            comment
            + f"l_fp: the lower {l_fp} of the {spec.num_layers} layers never read the new blocks."
        )
    own = [name for name in ("own_rows", "own_gains", "low_rank") if name in values["method"]]
    if not own:
        return comment + (
            f"l_fp: the gate reads before layer {l_fp} of {spec.num_layers}, from which on open "
            "tokens read the new blocks.\nSuch a run leaves in the format scale."
        )
    twice = ""
    if spec.is_native:
        twice = " The layers below the gate run twice."
    return comment + (
        f"From layer {l_fp} (l_fp) on, tokens that the gate opens also have weights of their own "
        f"({', '.join(own)}),\nin which most of the new language is learned (docs/gate.md)."
        f"{twice}\nSuch a run leaves in the format scale."
    )


def _layout_comment(spec: DecoderSpec, cluster: Cluster) -> str:
    comment = (
        f"The first layout that fits on {cluster.gpus} ranks of {cluster.gpu_memory_gib:g} GiB; "
        "`scale-cpt estimate` compares others."
    )
    if isinstance(spec, HostedSpec):
        name = parameter_kept_in_fp32(spec)
        if name is not None:
            comment += f"\nIn fp32, as transformers keeps {name} so in a model of 16 bits."
    return comment


def _may_be_a_difference(values: dict[str, Any], spec: DecoderSpec) -> bool:
    """Whether full fine-tuning behind the gate could leave as a packed difference."""
    return (
        "gate" in values and "vocabulary" not in values and spec.is_native and spec.mixture is None
    )


def _difference_comment(base_parameters: int) -> str:
    state = base_parameters * _MUON_STATE_BYTES / GIB
    return (
        "Full fine-tuning by Muon behind the same gate learns more, where its training state of "
        f"{state:,.3g} GiB over all\nranks fits: method {{name: fft}}, schedule.optimizer muon, "
        "then scale-cpt convert --format difference\n(docs/gate.md#the-full-difference)."
    )


def _data_comment(values: dict[str, Any], learned: TextMeasure, known: TextMeasure) -> str:
    purpose = "it keeps the model near the base"
    if values["data"].get("self_generated_fraction") == 0:
        purpose = "the gate learns from it where to stay closed"
    return (
        f"new: about {learned.tokens:,} tokens ({learned.tokens_per_byte:.2f} a byte; where it "
        "takes many, `scale-cpt vocabulary` adds tokens).\n"
        f"old: about {known.tokens:,}; only its held-out part is read, to measure what is "
        "forgotten.\n"
        f"self_generated is written by the base: {purpose} (docs/self_generated.md)."
    )


def _chats_comment(wanted: FirstRun, tokenizer: Tokenizer) -> str:
    """What is said of chats, on lines of its own; empty for a base that is no chat model."""
    lines: list[str] = []
    if wanted.old_chats:
        lines.append("self_generated_chats: the base answers the chats itself.")
    if wanted.new_chats:
        lines.append(
            "new_chats: chats in the new language, read in the second stage alone; the gate also "
            "learns from them where to open.\n"
            "self_generated_new_chats: what the base answers there, read in the first stage alone: "
            "so answers still end."
        )
    if not lines and _has_chat_template(tokenizer):
        lines.append(
            "The base has a chat template: --old-chats keeps its chats, and --new-chats teaches it "
            "to answer in the new language (docs/chat.md)."
        )
    return "".join(f"\n{line}" for line in lines)


def _has_chat_template(tokenizer: Tokenizer) -> bool:
    try:
        chat_template(tokenizer.path)
    except DataError:
        return False
    return True


def _schedule_comment(values: dict[str, Any], learned: TextMeasure) -> str:
    schedule = values["schedule"]
    sequences = schedule["steps"] * schedule["global_batch_size"]
    tokens = sequences * values["data"]["sequence_length"]
    return (
        f"{tokens:,} tokens in all, {tokens / learned.tokens:.2g} passes over the new text. "
        "The rate is the paper's for a hidden size of 2048,\n"
        "times the square root of 2048 / this one: also try half and twice."
    )
