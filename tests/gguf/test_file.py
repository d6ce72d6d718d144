"""Which rotary embeddings and windows of a GGUF file are taken, and which are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.errors import BaseModelError
from pipeline.gguf.file import GgufFile

LLAMA = {"general.architecture": "llama", "llama.context_length": 4096}
PHI3 = {
    "general.architecture": "phi3",
    "phi3.context_length": 4096,
    "phi3.embedding_length": 64,
    "phi3.attention.head_count": 4,
    "phi3.rope.dimension_count": 16,
    "phi3.rope.scaling.original_context_length": 4096,
    "phi3.attention.sliding_window": 0,
}


def check(metadata: dict, *tensors: str) -> None:
    sizes = dict.fromkeys(["token_embd.weight", *tensors], 8)
    GgufFile(Path("mine.gguf"), metadata, ["F16"], sizes).check()


@pytest.mark.parametrize(
    "metadata",
    [
        LLAMA,
        LLAMA | {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 1.0},
        LLAMA | {"llama.rope.scaling.type": "none", "llama.rope.scaling.finetuned": False},
        LLAMA
        | {"llama.rope.scaling.type": "none", "llama.rope.scaling.original_context_length": 1},
        LLAMA | {"llama.rope.scale_linear": 1.0},
        PHI3,
        PHI3 | {"phi3.rope.scaling.attn_factor": 1.0},
        PHI3 | {"phi3.attention.sliding_window": 4096},
    ],
)
def test_a_plain_rotary_embedding_is_taken(metadata):
    check(metadata)


@pytest.mark.parametrize(
    ("metadata", "tensors", "expected"),
    [
        (LLAMA | {"llama.rope.scaling.type": "yarn"}, [], "type 'yarn'"),
        # llama.cpp scales linearly where no type is named.
        (LLAMA | {"llama.rope.scaling.factor": 4.0}, [], r"factor 4\.0"),
        (LLAMA | {"llama.rope.scale_linear": 4.0}, [], r"scale_linear 4\.0"),
        (LLAMA, ["rope_freqs.weight"], r"rope_freqs\.weight"),
        (PHI3, ["rope_factors_long.weight"], r"rope_factors_long\.weight"),
        (PHI3 | {"phi3.rope.scaling.attn_factor": 1.19}, [], r"attn_factor 1\.19"),
        (PHI3 | {"phi3.context_length": 131072}, [], "original_context_length 4096"),
        (
            PHI3 | {"phi3.rope.dimension_count": 12},
            [],
            "expected the size of a head, 64 / 4, found 12",
        ),
        (PHI3 | {"phi3.attention.sliding_window": 2047}, [], "4096 positions, found 2047"),
    ],
)
def test_what_transformers_does_not_read_is_refused(metadata, tensors, expected):
    with pytest.raises(BaseModelError, match=expected) as refused:
        check(metadata, *tensors)
    assert "use the model's own folder" in str(refused.value)


def test_layers_for_predicting_several_tokens_are_not_counted():
    sizes = {"token_embd.weight": 1, "blk.0.attn_q.weight": 2, "blk.1.attn_q.weight": 4}
    metadata = {"general.architecture": "qwen35", "qwen35.block_count": 2}
    assert GgufFile(Path("a.gguf"), metadata, ["F16"], sizes).count_elements() == 7
    metadata["qwen35.nextn_predict_layers"] = 1
    assert GgufFile(Path("a.gguf"), metadata, ["F16"], sizes).count_elements() == 3
