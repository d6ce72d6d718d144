"""Every family in every format that can express it: what transformers loads is the model that trained."""

from __future__ import annotations

import pytest

from pipeline.model.from_hf import open_base
from tests.bases import CONFIGS
from tests.conversion.exports import assert_exported, exported, loaded_with_base, pairs
from tests.tolerances import assert_near, rounding_of
from tests.widened import some_tokens, unwidened

PAIRS = pairs([name for name in CONFIGS if "eight" not in name], ("scale", "stock", "fft"))
PAIRS += [("qwen3_moe dense layer", method) for method in ("fft", "freeze", "lora", "llama_pro")]
PAIRS += [("glm4_moe", "lora"), ("exaone_moe", "llama_pro"), ("qwen2_moe windows", "freeze")]


@pytest.mark.parametrize(("name", "method"), PAIRS)
def test_every_family_is_exported(name, method, models, tmp_path):
    models.train(PAIRS)
    model, folder = models(name, method), tmp_path / "hf"
    if method == "scale":
        exported(model, "scale", folder)
    else:
        loaded, original = loaded_with_base(model, folder)
        if method == "fft":
            both = zip(loaded.parameters(), original.parameters(), strict=True)
            assert all(new.shape == old.shape for new, old in both)
        else:  # a base of a second round is read as transformers reads it
            tokens = some_tokens(model.spec, 2, 16)
            assert_near(unwidened(open_base(folder)).logits(tokens), loaded(tokens).logits, rounding_of(loaded.config))
    assert_exported(model, folder)
