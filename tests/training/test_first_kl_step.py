"""KL(base || model) before any weight has changed: exactly zero, and so is its gradient."""

from __future__ import annotations

import pytest

from pipeline.model.bases import open_base
from pipeline.model.chunked_loss import IGNORED
from tests.distributed import run_ranks
from tests.extensions.hosted.bases import hosted, opened, save_hosted
from tests.training.runs import make_run, prepared, trained
from tests.widened import METHODS, shake, some_tokens, trained_gradients, widened

SEQUENCES = 8


def kl_alone(model, sequences: int):
    """The losses of a batch whose first sequences train by KL, and the others by nothing."""
    tokens = some_tokens(model.spec, SEQUENCES, 48)
    targets = tokens.roll(-1, dims=1)
    targets[sequences:] = IGNORED
    return model(tokens, targets, kl_sequences=sequences, reference_sequences=sequences)


@pytest.mark.parametrize("method", ["lora", "adapt"])
@pytest.mark.parametrize("code", ["native", "transformers"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_the_first_gradient_is_exactly_zero(kind, code, method, tmp_path):
    folder = save_hosted(kind, tmp_path)
    if code == "native":
        model = widened(open_base(folder, code), METHODS[method])
    else:
        model = hosted(opened(folder), method)
    model.equals_base = True
    for sequences in (1, 3, SEQUENCES):
        model.zero_grad()
        losses = kl_alone(model, sequences)
        losses.total.backward()
        assert losses.kl.abs().max() == 0
        gradients = trained_gradients(model)
        assert gradients
        assert all(not gradient.any() for gradient in gradients.values())
    # Afterwards the base has a pass of its own.
    model.equals_base = False
    shake(model, 0.1)
    assert kl_alone(model, 3).kl.max() > 1e-3


def flags_of_two_steps(config):
    """Whether the model counted as the base's equal, for each of its training forwards, by the steps
    that were complete."""
    trainer = prepared(config)
    flags = []

    def look(model, *_):
        if model.training:
            flags.append((trainer.position.step, model.equals_base))

    trainer.engine.model.register_forward_pre_hook(look)
    trained(trainer)
    return flags


def test_only_the_first_step_of_a_run_takes_the_model_for_its_base(tokens, tmp_path):
    base = save_hosted("qwen3_moe", tmp_path / "base")
    path = make_run(
        tmp_path / "run",
        tokens,
        zero=1,
        base=str(base),
        method={"name": "lora", "rank": 2},
        schedule__steps=2,
        data__replay_loss="kl",
    )
    (flags,) = run_ranks(flags_of_two_steps, 1, path)
    assert {step for step, equals in flags if equals} == {0}
    assert {step for step, equals in flags if not equals} == {1}
