"""What the method saves: below the first collaborative layer the base stream has no graph and no
activations."""

from __future__ import annotations

import pytest

from tests.widened import kept_for_backward, scale_settings, some_batch, widened

# Widths of stories260K and of this expansion are all different, so that a tensor's last dimension
# names its stream.
WIDTHS = {"hidden_size": 12, "intermediate_size": 10, "num_attention_heads": 2}
RESIDUAL, INNER = 64, 172
VARIANTS = [
    ("preserve", {}),
    ("adapt", {"l_fp": 3}),
    ("route", {"l_fp": 3, "collaborative_modules": "both"}),
]


def model_of(base, variant, changes):
    return widened(
        base("stories260K"), scale_settings(variant, expansion=WIDTHS, **changes), noise=0.1
    )


@pytest.mark.parametrize(("variant", "changes"), VARIANTS, ids=[name for name, _ in VARIANTS])
def test_the_base_stream_needs_no_gradient_before_the_first_collaborative_layer(
    base, variant, changes
):
    model = model_of(base, variant, changes)
    calls = []
    for index, layer in enumerate(model.layers):
        layer.register_forward_hook(
            lambda _, inputs, out, index=index: calls.append((index, inputs[-1], *out))
        )
    model(*some_batch(model.spec, 2, 32))
    for index, open_tokens, x, x_up in calls:
        depends_on_w12 = not open_tokens.none and index >= changes.get("l_fp", 5)
        assert x.requires_grad == depends_on_w12
        assert (x.grad_fn is not None) == depends_on_w12
        assert x_up.requires_grad


def kept_tensors(model, batch):
    """What autograd keeps for the backward pass: tensors, and the names of parameters."""
    parameters = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
    with kept_for_backward() as kept:
        model(*batch)
    others = [tensor for pointer, tensor in kept.items() if pointer not in parameters]
    return others, {parameters[pointer] for pointer in kept.keys() & parameters.keys()}


def test_preserve_keeps_only_the_inputs_of_w21_of_the_base_stream(base):
    model = model_of(base, "preserve", {})
    kept, parameters = kept_tensors(model, some_batch(model.spec, 2, 32))
    layers = model.spec.num_layers
    # A layer's W21 read four tensors: the two norms' outputs, the attended base heads, the FFN's
    # inner activations.
    assert sum(tensor.shape[-1] == RESIDUAL for tensor in kept) == 3 * layers
    assert sum(tensor.shape[-1] == INNER for tensor in kept) == layers
    assert not [name for name in parameters if ".base." in name or name == "output.base"]
