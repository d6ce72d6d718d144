"""Lets the project, which asks for torch 2.13, run on the torch 2.11 of the machine with a GPU; put
on
its Python path.

Two things differ there: `varlen_attn` takes grouped heads without being told, and the count of
attention's FLOPs refuses them.
"""

import torch

if torch.__version__.startswith("2.11."):
    from torch.nn.attention import varlen
    from torch.utils import flop_counter

    _varlen_attn = varlen.varlen_attn
    _sdpa_flop_count = flop_counter.sdpa_flop_count

    def varlen_attn(*arguments, enable_gqa=False, **options):
        return _varlen_attn(*arguments, **options)

    def sdpa_flop_count(query_shape, key_shape, value_shape):
        heads = query_shape[1]
        return _sdpa_flop_count(
            query_shape,
            (key_shape[0], heads, *key_shape[2:]),
            (value_shape[0], heads, *value_shape[2:]),
        )

    varlen.varlen_attn = varlen_attn
    flop_counter.sdpa_flop_count = sdpa_flop_count
