"""The sizes of a first configuration, by base and machine, and in the hours that it may take."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import ConfigError, LayoutError
from pipeline.evaluation.perplexity import DEFAULT_BYTES
from pipeline.extensions.first_config.draft import Draft
from pipeline.extensions.first_config.fitting import Fit, layouts
from pipeline.extensions.first_config.method import min_count_of, smaller_methods
from pipeline.extensions.first_config.propose import tokens_within
from pipeline.extensions.first_config.texts import TextMeasure
from pipeline.extensions.first_config.time_limit import (
    EVALUATED_BYTES,
    TimeLimit,
    rhythm,
    within_limit,
)
from pipeline.extensions.first_config.wanted import FirstRun
from pipeline.model.from_hf import read_spec
from pipeline.model.spec import DecoderSpec
from pipeline.scale.plan import Widths
from pipeline.sizing.cluster import Cluster, gpu_speed
from tests.bases import STORIES

BASES = Path(__file__).parents[3] / "configs" / "bases"
FP32, BF16 = torch.float32, torch.bfloat16


def text(tokens: int, counts: list[int] | None = None) -> TextMeasure:
    return TextMeasure(["a.jsonl"], tokens, 0.5, np.array(counts or [50] * 100))


def spec_of(name: str) -> DecoderSpec:
    if name != "135m":
        return read_spec(BASES / f"{name}.json")
    # The sizes of SmolLM2-135M.
    like = read_spec(BASES / "llama-1m.json")
    return replace(
        like,
        widths=Widths(576, 1536, 9, 3),
        head_dim=64,
        layers=(like.layers[0],) * 30,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )


def draft_of(name: str, cluster: Cluster, dtype: torch.dtype, tokens: int = 2 * 10**9) -> Draft:
    tokenizer = load_tokenizer(STORIES)
    run = FirstRun("first", STORIES, ["a.jsonl"], ["b.jsonl"])
    learned, known = text(tokens), text(10**7)
    return Draft(run, STORIES, spec_of(name), tokenizer, learned, known, cluster, dtype)


@cache
def fitted(name: str, cluster: Cluster, dtype: torch.dtype) -> Fit:
    return draft_of(name, cluster, dtype).fitted()


TWO_PROCESSES = Cluster(2, gpus_per_node=2, gpu_memory_gib=12.0, on_cpu=True)
CASES = [
    # base, ranks, dtype; length, DeepSpeed's file, recomputed layers, compiled, rank, own rows
    ("135m", TWO_PROCESSES, FP32, 4096, "zero1_fp32", "none", False, 72, True),
    ("135m", TWO_PROCESSES, BF16, 8192, "zero1", "none", False, 72, True),
    (
        "135m",
        replace(TWO_PROCESSES, gpu_memory_gib=2.0),
        BF16,
        1024,
        "zero1",
        "none",
        False,
        72,
        False,
    ),
    ("llama-3.2-1b", Cluster(1, gpu_memory_gib=24.0), BF16, 8192, "zero1", "all", True, 256, True),
    ("llama-3.2-1b", Cluster(1, gpu_memory_gib=12.0), BF16, 8192, "zero1", "all", True, 256, False),
    ("llama-3.1-8b", Cluster(1, gpu_memory_gib=24.0), BF16, 4096, "zero1", "all", True, 32, False),
    ("llama-3.1-8b", Cluster(1), BF16, 8192, "zero1", "all", True, 512, True),
    ("llama-3.1-8b", Cluster(8), BF16, 8192, "zero3", "none", False, 512, True),
    ("llama-3.1-8b", Cluster(64), BF16, 8192, "zero3", "none", False, 512, True),
]


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1].gpus}")
def test_sizes_by_base_and_machine(case):
    name, cluster, dtype, length, deepspeed, recomputed, compiled, rank, has_rows = case
    config, values = fitted(name, cluster, dtype)
    assert config.data.sequence_length == length
    assert config.deepspeed.stem == deepspeed
    assert config.activation_checkpointing == recomputed
    assert config.compile == values.get("compile", False) == compiled
    assert config.method.rank == rank
    assert (config.method.open_rows is not None) == has_rows
    per_rank = config.schedule.global_batch_size // cluster.gpus
    assert per_rank % config.schedule.micro_batch_size == 0
    assert values["schedule"]["steps"] == config.schedule.steps > 100


@pytest.mark.full
def test_a_mixture_gets_an_expansion_and_fits_on_few_gpus():
    config, _ = fitted("qwen3-moe-96m", Cluster(1, gpu_memory_gib=8.0), BF16)
    assert config.method.name == "scale" and config.method.low_rank == 8
    assert config.schedule.optimizer == "muon"
    assert not config.compile


@pytest.mark.full
def test_a_refusal_names_what_would_fit():
    small = Cluster(1, gpu_memory_gib=16.0)
    with pytest.raises(LayoutError, match=r"it would fit with --gpus (\d+) or with ") as refused:
        fitted("llama-3.1-8b", small, BF16)
    words = str(refused.value).split()
    gpus = int(words[words.index("--gpus") + 1])
    gib = float(words[words.index("--gpu-memory-gib") + 1])
    assert gib > small.gpu_memory_gib
    for enough in (replace(small, gpus=gpus), replace(small, gpu_memory_gib=gib)):
        assert fitted("llama-3.1-8b", enough, BF16).config.data.sequence_length >= 512


@pytest.mark.full
def test_a_refusal_on_cpus_names_one_process():
    """The memory of one process is that of both; the weights are there once."""
    two = Cluster(2, gpus_per_node=2, gpu_memory_gib=0.6, on_cpu=True)
    with pytest.raises(LayoutError, match="with NPROC=1, one process with all memory"):
        fitted("135m", two, FP32)
    one = Cluster(1, gpus_per_node=1, gpu_memory_gib=1.2, on_cpu=True)
    assert fitted("135m", one, FP32).config.data.sequence_length >= 512


@pytest.mark.full
def test_a_limit_of_hours_cuts_steps_and_what_is_too_little_is_refused():
    # 0.2 TFLOP/s a process, as of a slow processor: given, so that the test measures nothing.
    cluster = replace(TWO_PROCESSES, peak_tflops=0.2, mfu=1.0)
    draft = draft_of("135m", cluster, BF16)
    texts = draft.learned, draft.known
    read: list[int] = []
    for hours in (2.0, 1.0):
        limit = TimeLimit(3600 * hours, given=True)
        shorter = draft.reading(tokens_within(limit, draft))
        whole = shorter.fitted()
        cut = within_limit(whole, limit, draft.spec, cluster, texts).config
        assert whole.config.schedule.steps > cut.schedule.steps
        step = cut.schedule.global_batch_size * cut.data.sequence_length
        read.append(cut.schedule.steps * step)
    assert read[0] > 1.8 * read[1]
    # At most an hour at 0.4 TFLOP/s and 0.8 GFLOP a token.
    assert 300_000 < read[1] < 3600 * 0.4e12 / 0.8e9
    with pytest.raises(ConfigError, match=r"--hours: expected [\d.]+ or more"):
        within_limit(whole, TimeLimit(60, given=True), draft.spec, cluster, texts)


def test_dense_bases_are_compiled_on_gpus_where_no_layer_is_gathered():
    """No rank of a layout with `compile` refuses it: neither ZeRO-3, nor a mixture, nor a hosted
    base has it."""
    dense = spec_of("135m")

    def compiled(spec: DecoderSpec, cluster: Cluster) -> dict[int, set[bool]]:
        found: dict[int, set[bool]] = {}
        for layout in layouts(spec, cluster, BF16):
            found.setdefault(layout.zero_stage, set()).add(layout.compile)
            assert layout.values(BF16).get("compile", False) == layout.compile
        return found

    assert compiled(dense, Cluster(8)) == {1: {True}, 2: {True}, 3: {False}}
    assert compiled(dense, Cluster(1)) == {1: {True}}
    assert compiled(dense, TWO_PROCESSES) == {1: {False}}
    assert compiled(spec_of("qwen3-moe-96m"), Cluster(1)) == {1: {False}}
    hosted = SimpleNamespace(is_native=False, mixture=None)
    assert compiled(hosted, Cluster(1)) == {1: {False}}


def test_a_base_with_a_long_context_gets_no_tiny_sequences():
    draft = draft_of("135m", TWO_PROCESSES, BF16).reading(50_000)
    assert draft.length == 256
    short = replace(draft, spec=replace(draft.spec, max_position_embeddings=512))
    assert short.length == 64


def test_a_small_corpus_gets_a_min_count_that_its_tokens_reach():
    assert min_count_of(text(100_000)) == 20
    assert min_count_of(text(30, [3] * 10)) == 2
    assert min_count_of(text(10, [1] * 10)) == 1
    # Of a sample of a tenth: 5 in it are 50 in all.
    assert min_count_of(text(500, [5] * 10)) == 20


def test_what_takes_less_memory_loses_rows_before_rank():
    wanted = {"name": "lora", "rank": 256, "open_rows": {"min_count": 20}, "open_gains": True}
    tried = [(method["rank"], "open_rows" in method) for method in smaller_methods(wanted)]
    assert tried == [(256, True), (256, False), (64, False), (16, False)]
    no_rows = {"name": "scale", "open_gains": True}
    assert list(smaller_methods(no_rows)) == [no_rows]


def test_validations_take_a_small_part_of_a_short_run():
    short = rhythm({"steps": 60, "global_batch_size": 8})["validation"]
    long = rhythm({"steps": 20_000, "global_batch_size": 8})["validation"]
    validations = 1 + 60 // short["every_steps"]
    assert validations * 2 * short["max_sequences"] < 60 * 8 and long["max_sequences"] == 64


def test_the_time_of_evaluation_is_that_of_its_default():
    assert EVALUATED_BYTES == DEFAULT_BYTES


def test_the_speed_of_gpus_says_what_is_assumed():
    dense, mixed = (gpu_speed(Cluster(8), has_experts=experts) for experts in (False, True))
    assert (dense.peak_tflops, dense.mfu) == (989.0, 0.4)
    assert mixed.mfu < dense.mfu and "nobody has measured for mixtures" in str(mixed)
    small = gpu_speed(Cluster(1, gpu_memory_gib=24.0), has_experts=False)
    assert small.peak_tflops == 125.0 and "A10" in str(small)
    given = gpu_speed(Cluster(1, peak_tflops=50.0, mfu=0.5), has_experts=True)
    assert given.flops_per_second == 25e12 and str(given).endswith("as given")
