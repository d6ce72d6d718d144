"""What transformers passes to an export of a hosted base: how it is to attend, and what its Trainer
counts."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import transformers
from transformers import AttentionInterface, AutoModelForCausalLM, QuantoConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pipeline.extensions.hosted.export import config_entries
from pipeline.hf.remote_code.configuration_scale_hosted import HostedScaleConfig
from pipeline.hf.remote_code.modeling_scale_hosted import HostedScaleForCausalLM
from tests.conversion.exports import check_vocabulary_keeps_its_size
from tests.extensions.hosted.bases import hosted, opened, save_hosted
from tests.widened import some_tokens


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> HostedScaleConfig:
    """The configuration of an export whose base is a granite."""
    base = opened(save_hosted("granite", tmp_path_factory.mktemp("base") / "granite"))
    model = hosted(base)
    entries = config_entries(base.spec, model.plan)
    return HostedScaleConfig(**entries, tie_word_embeddings=False)


@pytest.fixture
def model(config) -> HostedScaleForCausalLM:
    return HostedScaleForCausalLM(deepcopy(config)).eval()


def test_the_loss_divides_by_the_labels_of_all_micro_batches(model):
    """Trainer gives their number, and does not divide by the number of micro-batches itself."""
    tokens = some_tokens(model.config, 2, 12)
    whole = model(tokens, labels=tokens, num_items_in_batch=22).loss
    torch.testing.assert_close(whole, model(tokens, labels=tokens).loss)
    parts = []
    for part in tokens.split(1):
        parts.append(model(part, labels=part, num_items_in_batch=torch.tensor(22)).loss)
    torch.testing.assert_close(sum(parts), whole)


def test_the_loss_is_the_first_output(model):
    tokens = some_tokens(model.config, 2, 12)
    named = model(tokens, labels=tokens)
    assert next(iter(named)) == "loss"
    assert torch.equal(named[0], named.loss) and torch.equal(named[1], named.logits)
    assert torch.equal(model(tokens, labels=tokens, return_dict=False)[0], named.loss)
    assert torch.equal(model(tokens)[0], named.logits)


def test_the_vocabulary_keeps_its_size(model):
    check_vocabulary_keeps_its_size(model, "of its base")
    tokens = some_tokens(model.config, 2, 12)
    assert model(tokens).logits.shape[-1] == model.config.vocab_size


def test_a_trainer_that_wants_hidden_states_is_told_what_to_take(model):
    """As TRL's, which take `base_model` and the weight of the head."""
    tokens = some_tokens(model.config, 2, 12)
    assert model.get_output_embeddings() is None
    with pytest.raises(ValueError, match=r"no backbone .*labels=labels") as caught:
        model.base_model(input_ids=tokens, use_cache=False)
    assert "\n" not in str(caught.value)


def test_the_base_attends_as_was_asked_for(config):
    AttentionInterface.register("of_this_test", sdpa_attention_forward)
    for asked in ("eager", "sdpa", "of_this_test"):
        wanted = deepcopy(config)
        wanted._attn_implementation = asked
        model = HostedScaleForCausalLM(wanted)
        assert model.base.config._attn_implementation == asked
        assert model.config._attn_implementation == asked
    default = HostedScaleForCausalLM(deepcopy(config))
    assert default.base.config._attn_implementation == "sdpa"


def test_what_the_base_lacks_is_refused(config, monkeypatch):
    wanted = deepcopy(config)
    wanted._attn_implementation = "sdpa"
    monkeypatch.setattr(transformers.GraniteForCausalLM, "_supports_sdpa", False)
    with pytest.raises(ValueError, match=r"GraniteForCausalLM does not support .*scaled_dot"):
        HostedScaleForCausalLM(wanted)
    # The default is what the base has, and a configuration that was used asks for the same again.
    used = deepcopy(config)
    for _ in range(2):
        model = HostedScaleForCausalLM(used)
        assert model.base.config._attn_implementation == "eager"


@torch.no_grad()
@pytest.mark.parametrize("is_tied", [False, True])
def test_quantisers_leave_the_map_of_the_logits(is_tied, config, tmp_path):
    """`get_output_embeddings` does not name it, by which the library knows it."""
    wanted = deepcopy(config)
    wanted.base_config = {**config.base_config, "tie_word_embeddings": is_tied}
    model = HostedScaleForCausalLM(wanted).eval()
    shared = model.base.lm_head.weight is model.get_input_embeddings().weight
    assert shared == is_tied
    model.save_pretrained(tmp_path)
    asked = QuantoConfig(weights="int8")
    tokens = some_tokens(model.config, 2, 12)
    logits = model(tokens).logits
    # By the library's own, and where the configuration is not read yet.
    for load in (AutoModelForCausalLM.from_pretrained, HostedScaleForCausalLM.from_pretrained):
        quantised = load(tmp_path, quantization_config=asked)
        left = []
        for name, module in quantised.named_modules():
            if type(module) is torch.nn.Linear:
                left.append(name)
        assert left == ["base.lm_head"]
        assert 0 < (quantised(tokens).logits - logits).abs().max() < 0.2 * logits.std()
    assert asked.modules_to_not_convert is None
    named = QuantoConfig(weights="int8", modules_to_not_convert=["mlp"])
    quantised = HostedScaleForCausalLM.from_pretrained(tmp_path, quantization_config=named)
    assert type(quantised.base.lm_head) is not torch.nn.Linear, "the user's own names count"
