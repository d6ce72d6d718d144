"""From a variant to blocks: where W12 exists, and which sizes are refused."""

from __future__ import annotations

import pytest

from pipeline.errors import ConfigError
from pipeline.scale.plan import Widths, check_tensor_parallel, plan_expansion
from tests.widened import scale_settings

LLAMA_1B = Widths(
    hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8
)


def widths(heads=4, inner=1024):
    return {"hidden_size": 256, "intermediate_size": inner, "num_attention_heads": heads}


def plan(variant="preserve", base=LLAMA_1B, num_layers=16, heads=4, inner=1024, **changes):
    return plan_expansion(
        scale_settings(variant, expansion=widths(heads, inner), **changes), base, num_layers
    )


def test_the_papers_widening_of_llama_1b():
    added = plan("adapt", l_fp=3).expansion
    assert (LLAMA_1B.hidden_size + added.hidden_size, 8192 + added.intermediate_size) == (
        2304,
        9216,
    )
    assert (32 + added.num_attention_heads, 8 + added.num_key_value_heads) == (36, 9)


@pytest.mark.parametrize("variant", ["preserve", "adapt", "route"])
@pytest.mark.parametrize("modules", ["attention", "ffn", "both"])
def test_w12_exists_where_the_variant_says(variant, modules):
    changes = {} if variant == "preserve" else {"l_fp": 3, "collaborative_modules": modules}
    found = plan(variant, **changes)
    for layer in range(16):
        for module in ("attention", "ffn"):
            expected = variant != "preserve" and layer >= 3 and modules in (module, "both")
            assert found.has_expansion_to_base(layer, module) == expected
    assert found.routed == (variant == "route")


def test_an_l_fp_or_heads_that_no_plan_has_are_refused():
    with pytest.raises(
        ConfigError, match=r"method.l_fp: 16 leaves none .* use 0 to 15, or variant preserve"
    ):
        plan("adapt", l_fp=16)
    with pytest.raises(
        ConfigError, match=r"num_attention_heads: expected a multiple of 4, .* found 6$"
    ):
        plan(heads=6)


@pytest.mark.parametrize(
    ("sizes", "tp_size", "message"),
    [
        ({"inner": 3}, 4, "intermediate_size: expected a multiple of parallel.tp_size 4, found 3"),
        (
            {"heads": 12},
            2,
            "num_attention_heads: 12, with 3 key/value heads: .* divisors of parallel.tp_size 2",
        ),
    ],
)
def test_widths_that_do_not_divide_over_the_ranks_are_refused(sizes, tp_size, message):
    with pytest.raises(ConfigError, match=rf"method.expansion.{message}$"):
        check_tensor_parallel(plan(**sizes), tp_size)
