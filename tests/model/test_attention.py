"""Every attention kernel against a literal one, forward and backward; and what the CUDA path never
allocates."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu.attention import literal_attention
from pipeline.methods.registry import method_for
from pipeline.model.attention import (
    CausalAttention,
    DocumentAttention,
    Documents,
    FlexAttention,
    MaskedAttention,
    VarlenAttention,
    _block_mask,
    attention_kernel,
)
from pipeline.parallel.parameters import default_dtype
from pipeline.parallel.topology import SINGLE
from tests.tolerances import assert_near, rounding
from tests.widened import METHODS, SEED, Watched, packed

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BOUND = rounding(128, 3)  # the products of 24 or 128 terms, the softmax, and the sum of the values
LAYOUTS = {
    "one document": [[24], [24]],
    "ragged": [[5, 16, 3], [1, 1, 22]],
    "single tokens": [[1] * 24, [23, 1]],
}
HEADS = {"multi-head": (4, 4, 64), "grouped": (6, 2, 128)}


def documents_of(lengths):
    return packed(*lengths)[1]


lengths = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@given(st.lists(lengths, min_size=1, max_size=4), st.integers(0, 4))
def test_starts_are_where_documents_begin(rows, some):
    row_length = max(map(sum, rows))
    # Rows of a batch are equally long: shorter ones get one more document.
    rows = [row if sum(row) == row_length else [*row, row_length - sum(row)] for row in rows]
    all_lengths = list(chain.from_iterable(rows))
    documents = documents_of(rows)
    assert [stop - start for start, stop in pairwise(documents.starts.tolist())] == all_lengths
    assert documents.per_row == tuple(map(len, rows))
    some = min(some, len(rows))
    first = documents.first_rows(some)
    if some:
        again = documents_of(rows[:some])
        assert torch.equal(first.ids, again.ids)
        assert torch.equal(first.starts, again.starts)
        assert first.per_row == again.per_row


def heads_of(query_heads, key_heads, head_dim, dtype=torch.float32):
    random = torch.Generator().manual_seed(1)
    shapes = [(2, 24, count, head_dim) for count in (query_heads, key_heads, key_heads)]
    return [torch.randn(shape, generator=random).to(dtype).requires_grad_() for shape in shapes]


def results(attend, inputs):
    """The heads, and the gradients of query, key and value."""
    heads = attend(*inputs)
    weights = torch.randn(heads.shape, generator=torch.Generator().manual_seed(2))
    return heads, *torch.autograd.grad((heads * weights).sum(), inputs)


@pytest.fixture
def varlen_on_the_cpu():
    """A forward kernel for the CPU of torch's operator, which has one for CUDA only: each document
    by itself."""
    pytest.importorskip("torch.nn.attention.varlen")

    def forward(
        query,
        key,
        value,
        starts,
        starts_of_keys,
        longest,
        longest_key,
        causal,
        scale,
        window,
        *rest,
    ):
        assert rest[-1] == 1, "parts of the keys, chosen by the batch, round by the batch"
        assert torch.equal(starts, starts_of_keys) and longest == longest_key >= max(
            starts.diff().tolist()
        )
        assert starts.dtype == torch.int32 and window[1] == 0
        key, value = (
            heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1)
            for heads in (key, value)
        )
        pieces = []
        for own in (slice(*pair) for pair in pairwise(starts.tolist())):
            scores = (
                query[own].transpose(0, 1)
                @ key[own].permute(1, 2, 0)
                * (scale or query.shape[-1] ** -0.5)
            )
            seen = torch.ones_like(scores, dtype=torch.bool).tril()
            seen = seen if window[0] < 0 else seen.triu(-window[0])
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            pieces.append((weights @ value[own].transpose(0, 1)).transpose(0, 1))
        log_sums = query.new_zeros(query.shape[1], query.shape[0])
        return torch.cat(pieces), log_sums, torch.zeros(2, dtype=torch.uint64)

    library = torch.library.Library("torch_attn", "FRAGMENT")
    torch.library.register_kernel("torch_attn::_varlen_attn", "cpu", forward, lib=library)
    yield
    library._destroy()


@pytest.mark.parametrize(
    ("window", "scale", "softcap"),
    [(None, None, None), (1, None, None), (7, None, None), (None, 0.3, None), (7, 0.3, 0.5)],
)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_agree(layout, heads, window, scale, softcap, varlen_on_the_cpu):
    documents = documents_of(LAYOUTS[layout])
    inputs = heads_of(*HEADS[heads])
    _, _, head_dim = HEADS[heads]

    def literal(query, key, value):
        scaled = query if scale is None else query * scale * head_dim**0.5
        return literal_attention(scaled, key, value, documents.ids, window, softcap)

    expected = results(literal, inputs)
    options = {"window": window, "scale": scale, "softcap": softcap}
    kernels = {
        "of the CPU": attention_kernel(documents, CPU, torch.float32, head_dim, **options),
        "of compiled layers": attention_kernel(
            documents, CPU, torch.float32, head_dim, compiled=True, **options
        ),
    }
    if layout == "one document" and window is None:
        kernels["causal"] = attention_kernel(None, CPU, torch.float32, head_dim, scale=scale)
    for name, kernel in kernels.items():
        for found, wanted in zip(results(kernel, inputs), expected, strict=True):
            # Of the heads' size: with one token in a window, gradients of scores are zero.
            assert_near(found, wanted, BOUND, name, scale=expected[0])

    # The kernels of GPUs, which have no backward pass on the CPU.
    of_gpus = [FlexAttention(_block_mask(documents.ids, window), scale, softcap)]
    if softcap is None:
        of_gpus.append(VarlenAttention(documents.starts, window, scale))
    detached = [heads_of_kind.detach() for heads_of_kind in inputs]
    for kernel in of_gpus:
        assert_near(kernel(*detached), expected[0], BOUND)

    # Attention that ignores documents and windows gives something else.
    crossing = CausalAttention()(*inputs)
    assert "causal" in kernels or (crossing - expected[0]).abs().max() > 0.1


def test_the_kernel_suits_the_device():
    documents, inputs = documents_of([[24], [24]]), heads_of(6, 2, 16)
    for dtype, head_dim, of_documents in (
        (torch.bfloat16, 128, VarlenAttention),
        (torch.float16, 256, VarlenAttention),
        (torch.bfloat16, 36, FlexAttention),
        (torch.float32, 64, FlexAttention),
        (torch.bfloat16, 512, FlexAttention),
    ):
        assert isinstance(attention_kernel(documents, CUDA, dtype, head_dim), of_documents)
        # The other kernels of a GPU without scores of S x S take no grouped heads.
        whole_rows = attention_kernel(None, CUDA, dtype, head_dim)
        assert whole_rows.grouped == (dtype != torch.float32 and head_dim <= 256)
        assert_near(whole_rows(*inputs), CausalAttention()(*inputs), BOUND)
    assert isinstance(
        attention_kernel(documents, CUDA, torch.bfloat16, 64, softcap=50.0), FlexAttention
    )
    for options, of_documents in (
        ({}, DocumentAttention),
        ({"window": 7}, MaskedAttention),
        ({"softcap": 50.0}, MaskedAttention),
        ({"compiled": True}, MaskedAttention),  # the same graph for every batch
    ):
        kernel = attention_kernel(documents, CPU, torch.bfloat16, 64, **options)
        assert isinstance(kernel, of_documents), options


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_document_has_the_same_bits_whatever_else_is_in_its_batch(dtype):
    query, key, value = heads_of(6, 2, 64, dtype)
    batch = attention_kernel(documents_of([[5, 16, 3], [1, 1, 22]]), CPU, dtype, 64)
    whole = results(batch, [query, key, value])
    own = [heads[:1, 5:21].detach().requires_grad_() for heads in (query, key, value)]
    alone = attention_kernel(documents_of([[16]]), CPU, dtype, 64)(*own)
    assert torch.equal(alone, whole[0][:1, 5:21])
    weights = torch.randn(whole[0].shape, generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad((alone * weights[:1, 5:21]).sum(), own)
    for gradient, expected in zip(found, whole[1:], strict=True):
        assert torch.equal(gradient, expected[:1, 5:21])


def pairs_of_tokens(spec, method, device, folder):
    """The shapes with two dimensions of S that a training step makes on `device`, in bf16."""
    length = 192  # no other size of the model
    with device, default_dtype(torch.bfloat16):
        model = method_for(METHODS[method], folder, SEED).build(spec, SINGLE, "none")
    tokens = torch.zeros(2, length, dtype=torch.long, device=device)
    starts = torch.tensor([0, 64, 128, length, 288, 2 * length], dtype=torch.int32, device=device)
    documents = Documents(tokens, starts, (3, 2))
    seen: set[tuple[int, ...]] = set()
    with Watched(lambda _, taken, made: seen.update(tuple(tensor.shape) for tensor in made)):
        model(tokens, tokens, None, documents).total.backward()
    return {shape for shape in seen if shape.count(length) > 1}


@pytest.mark.parametrize("method", ["fft", "route"])
@pytest.mark.parametrize("name", ["llama", "mistral window", "gemma3"])
def test_no_tensor_of_all_pairs_of_tokens_is_made_on_a_gpu(base, name, method, tmp_path):
    """The meta device stands for the GPU, and takes its kernels."""
    spec = base(name).spec
    assert pairs_of_tokens(spec, method, torch.device("meta"), tmp_path) == set()
    # The test sees them where they are: a CPU masks windows.
    on_cpu = pairs_of_tokens(spec, method, CPU, tmp_path)
    assert ((2, 1, 192, 192) in on_cpu) == (name != "llama")
