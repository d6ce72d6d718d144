"""The formulas that training and exported models both compute.

Training imports this file. A folder in the format `scale` carries a copy of it beside its
`modeling_scale.py`, so that both compute the same. Therefore it needs torch alone, has only
functions and constants, and imports nothing of this project. `hf/remote_code/scale_math.py` is a
symbolic link to it: the code of an export imports it as `from .scale_math import ...`, in this
package as well as in an exported folder. Building a wheel and writing an export both follow the
link and store a copy.

Shapes: B batch, S sequence, N tokens, D hidden, U expansion, H heads, K head dim, V vocabulary.
"SCALE" is "SCALE: Upscaled Continual Learning of Large Language Models",
https://aclanthology.org/2026.findings-acl.2037/.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

NEVER = -1e30
"""A logit whose probability is 0. It is finite, because some losses subtract logits."""
LEAST_EXPERT_SUM = 1e-20
"""Added to the sum of the chosen experts' scores, as the families with sigmoid scores do: all of
them may be 0.
"""
LEAST_SQUARE = 1e-12
"""Added to the mean square of the stream that a gate reads."""
GATE_DECAY = 0.8
"""By how much a token counts less in a gate's running mean with each token that follows it."""
WINDOW_DOUBLINGS = 7
WINDOW = 2**WINDOW_DOUBLINGS
"""How many tokens a running mean reads: 0.8 ** 128 is below the resolution of fp32."""


# Linear maps and norms.


def sum_of_squares(x: Tensor, normed_size: int | None = None, rest_scale: float = 0.0) -> Tensor:
    """The sum of squares that an RMSNorm takes: x [..., D] -> [..., 1] in fp32.

    In a base that was widened before, the channels from `normed_size` on count times `rest_scale`.
    """
    squares = x.float().square()
    if normed_size is None:
        return squares.sum(-1, keepdim=True)
    rest = squares[..., normed_size:].sum(-1, keepdim=True)
    return squares[..., :normed_size].sum(-1, keepdim=True) + rest_scale**2 * rest


def rms_normalised(x: Tensor, mean_square: Tensor, eps: float) -> Tensor:
    """x over its root mean square, in fp32; x: [..., D], mean_square: [..., 1].

    The mean square may be that of another stream.
    """
    return x.float() * torch.rsqrt(mean_square + eps)


def with_gain(
    normal: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    gain_offset: bool,
    rounds_once: bool = False,
) -> Tensor:
    """The result of an RMSNorm in `dtype`: normal [..., D] in fp32, weight [D].

    With `gain_offset` the gain is 1 + weight. That one multiplies in fp32, as every gain does with
    `rounds_once`; others multiply after rounding.
    """
    # The orders of transformers' norms: Gemma's, OLMo 2's and Llama's. Another order differs in the
    # last bits of bf16, and preservation is checked to the bit.
    if gain_offset:
        return (normal * (1 + weight.float())).to(dtype)
    if rounds_once:
        return (normal * weight.float()).to(dtype)
    return weight * normal.to(dtype)


def layer_norm_by(
    statistics_of: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """LayerNorm of x [..., D] with the mean and the variance of `statistics_of` [..., D']."""
    variance, mean = torch.var_mean(statistics_of.float(), dim=-1, keepdim=True, correction=0)
    normal = (x.float() - mean) * torch.rsqrt(variance + eps)
    return weight * normal.to(x.dtype) + bias


# Rotary position embedding.


def frequencies_by_length(
    lengths: Tensor, context: int, frequencies: Tensor, long_frequencies: Tensor
) -> Tensor:
    """The frequencies of longrope: others for texts that are longer than `context`.

    lengths: [...], frequencies: [R / 2] each -> [..., R / 2].
    """
    return torch.where(lengths.unsqueeze(-1) > context, long_frequencies, frequencies)


def rotary_table(
    frequencies: Tensor, positions: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles at `positions` [..., S], times `factor`, both [..., S, R] in
    `dtype`.

    frequencies: the angle per position of each pair of channels, [R / 2], or those of each token
    [..., R / 2].
    """
    # In fp32 whatever the model's type: bf16 counts exactly to 256 only.
    angles = positions.float().unsqueeze(-1) * frequencies
    # Channels i and i + R / 2 turn by one angle: the halves of the table are the same.
    angles = torch.cat([angles, angles], dim=-1)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys [..., K] with their first R channels rotated; cos and sin broadcast to [...,
    R].

    Channel i is paired with channel i + R / 2, as in transformers. The result has the type of the
    heads, also where cos and sin are in fp32.
    """
    width = cos.shape[-1]
    half = width // 2
    rotated = heads[..., :width]
    partner = torch.cat([-rotated[..., half:], rotated[..., :half]], dim=-1)
    rotated = (rotated * cos + partner * sin).to(heads.dtype)
    if width == heads.shape[-1]:
        return rotated
    return torch.cat([rotated, heads[..., width:]], dim=-1)


# The mixture of experts.


def choose_experts(
    x: Tensor, weight: Tensor, bias: Tensor | None, top_k: int, normalised: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The experts that each token takes.

    Args:
        x: [N, D], the base stream.
        weight: [E, D], the router's.
        bias: [3, E], whose rows' sum counts for the choice alone, beside scores that are sigmoids.
            None: the scores are a softmax.
        top_k: how many experts a token takes.
        normalised: whether the scores of those that it takes are divided by their sum.
        scale: by which they are multiplied then.

    Returns:
        The weights of the experts that each token takes and their numbers, [N, k], and all scores,
        [N, E]; weights and scores in fp32.
    """
    if bias is None:
        # The product in the model's type and the softmax in fp32, as in Mixtral's and Qwen's code
        # in transformers; the sigmoid families compute the product in fp32 as well.
        scores = F.linear(x, weight).float().softmax(-1)
        weights, chosen = scores.topk(top_k, dim=-1)
    else:
        scores = F.linear(x.float(), weight.float()).sigmoid()
        # The bias steers which experts are chosen and is no part of their weights (DeepSeek-V3,
        # section 2.1.2).
        chosen = (scores + bias.float().sum(0)).topk(top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
    if normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST_EXPERT_SUM)
    return weights * scale, chosen, scores


def rows_by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The order in which the N·k rows of `chosen` [N, k] are sorted by expert, and where those of
    each expert end.

    The sort is stable: the rows of one expert are in the order of the text. Row r is of token r //
    k.
    """
    taken, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(experts, device=chosen.device)
    ends = torch.searchsorted(taken, numbers, right=True, out_int32=True)
    return order, ends


# The router of Route.


def keeps_preserved_path(
    product: Tensor, square_p: Tensor, square_a: Tensor, threshold: float
) -> Tensor:
    """The router of SCALE-Route (Eq. 5): for which tokens cos(z_p, z_a) > threshold.

    Args:
        product: the sum of z_p · z_a over the base's vocabulary, for each token; z_p are the logits
            of the preserved path, z_a those of the adapted one.
        square_p: the sum of squares of z_p.
        square_a: the sum of squares of z_a.
        threshold: the setting `router_threshold`.
    """
    # cos > t, multiplied out: a division by 0 would give NaN for logits that are all 0.
    return product > threshold * (square_p * square_a).sqrt()


# Logits, and the tokens of an extended vocabulary.


def separate_products(x: Tensor, weight: Tensor, rows: list[int]) -> Tensor:
    """x weightᵀ, [..., V], computed in a product of its own for each part of `weight` [V, D].

    `rows` are the sizes of the parts. The columns of a part are the same to the bit whatever other
    columns there are: the rounding of a matrix product may depend on its size.
    """
    return torch.cat([F.linear(x, part) for part in weight.split(rows)], dim=-1)


def own_row_logits(x: Tensor, own_rows: Tensor, row_of_column: Tensor) -> Tensor:
    """What open tokens' own output rows add to the logits: x [..., D] -> [..., V] in fp32.

    own_rows: [r, D]; row_of_column: [V], the row of each token of the vocabulary. The product is
    with the few rows, and not with a matrix of the vocabulary's size.
    """
    return F.linear(x, own_rows).float()[..., row_of_column]


def soft_capped(z: Tensor, cap: float | None) -> Tensor:
    """Logits z as cap · tanh(z / cap)."""
    if cap is None:
        return z
    return torch.tanh(z / cap) * cap


def without_new_tokens(z: Tensor, closed: Tensor, base_columns: int) -> Tensor:
    """Logits z [..., V] in which no token from `base_columns` on may follow a closed one; closed:
    bool [..., 1].
    """
    is_new = torch.arange(z.shape[-1], device=z.device) >= base_columns
    return z.masked_fill(closed & is_new, NEVER)


# The gate.


def stream_over_rms(x: Tensor) -> Tensor:
    """x [..., D] over its root mean square, in fp32: what a gate reads of the base's stream."""
    normal = x.float()
    return normal * torch.rsqrt(normal.pow(2).mean(-1, keepdim=True) + LEAST_SQUARE)


def running_mean(
    values: Tensor,
    documents: Tensor | None = None,
    counts: Tensor | None = None,
    decay: float = GATE_DECAY,
) -> Tensor:
    """The decaying mean of each token's value and of those before it in its document: [B, S, D].

    A token d tokens back weighs decay ** d, and nothing beyond WINDOW. The sum is built of pairs,
    pairs of pairs and so on. So every token's mean is the same sum in the same order, however the
    text is cut into calls that see the whole window, and a text takes a few passes over the tensor
    and not one for every token.

    Args:
        values: [B, S, D] in fp32.
        documents: [B, S], equal numbers for the tokens of one document; None: each row is one.
        counts: [B, S, 1], 0 for padding, which the mean leaves out, and 1 for text; None: all is
            text.
        decay: by how much a token counts less with each token that follows it.
    """
    if counts is None:
        counts = values.new_ones(*values.shape[:2], 1)
    else:
        values = values * counts
    total = torch.cat([values, counts], dim=-1)
    for doubling in range(WINDOW_DOUBLINGS):
        # `total` holds, for each token, the sum over the last 2 ** doubling tokens.
        shift = 2**doubling
        if shift >= total.shape[1]:
            break
        # The sum of the 2 ** doubling tokens before those of `total`, which are so many tokens
        # older.
        earlier = decay**shift * total[:, :-shift]
        if documents is not None:
            # Documents are contiguous: if the token `shift` back is of the same one, so are all
            # between.
            is_same = documents[:, shift:] == documents[:, :-shift]
            earlier = earlier * is_same.unsqueeze(-1)
        total = torch.cat([total[:, :shift], total[:, shift:] + earlier], dim=1)
    # Padding before a text has a sum of counts of 0.
    return total[..., :-1] / total[..., -1:].clamp(min=1e-30)


def gate_scores(features: Tensor, mean: Tensor, std: Tensor, weight: Tensor, bias: float) -> Tensor:
    """The log odds that each token is new to the base: features [..., F] -> [...]; the parameters
    are [F] in fp32.

    It is no matrix product: the rounding of one may depend on the number of tokens, and TF32 would
    shorten it.
    """
    return ((features - mean) / std * weight).sum(-1) + bias
