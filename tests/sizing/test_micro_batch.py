"""A micro-batch on tensors without data costs what it costs with data."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks.recorded_steps import real_batch, real_model
from pipeline.errors import LayoutError
from pipeline.model import chunked_loss, output
from pipeline.model.from_hf import read_spec
from pipeline.parallel import fused_cross_entropy
from pipeline.parallel.topology import Layout, ProcessGroups
from pipeline.sizing.live_memory import LiveMemory
from pipeline.sizing.micro_batch import measure_micro_batch
from tests.distributed import run_ranks
from tests.sizing.real_runs import METHODS, SCALE, run_config
from tests.widened import kept_for_backward, scale_settings

pytestmark = pytest.mark.full

DTYPE = torch.bfloat16


@pytest.fixture
def config_of(tmp_path):
    def of(method, layout=Layout(1), **changes):  # noqa: B008
        return run_config(tmp_path, "zero1", method, layout, **changes)

    return of


def estimated(config):
    tp_size, checkpointing = config.parallel.tp_size, config.activation_checkpointing
    return measure_micro_batch(
        config,
        read_spec(config.base),
        tp_size,
        checkpointing,
        DTYPE,
        config.recomputation_keeps,
    )


def saved_bytes(model, batch):
    """What autograd saves of a real forward pass, parameters and batch aside."""
    with kept_for_backward() as kept:
        loss = model(*batch)[0]
    assert loss.requires_grad
    given = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *batch)}
    return sum(
        tensor.untyped_storage().nbytes()
        for pointer, tensor in kept.items()
        if pointer not in given
    )


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        *((method, {}) for method in METHODS),
        ("adapt", {"data__document_mask": True}),
        ("preserve", {"base_precision": "fp8"}),
        ("adapt", {"base_precision": "nf4"}),  # of which nothing decoded is kept
        ("lora", {"base_precision": "nf4"}),
    ],
    ids=str,
)
def test_weights_and_activations_are_those_of_a_real_pass(config_of, method, changes):
    config = config_of(method, **{"data__document_mask": False, **changes})
    model, costs = real_model(config, DTYPE), estimated(config)
    saved = saved_bytes(
        model, real_batch(config)[:3]
    )  # without documents, which take a mask on the CPU
    assert saved > 0
    assert costs.activation_bytes == pytest.approx(saved, rel=0.05)
    assert costs.parameter_bytes == sum(parameter.nbytes for parameter in model.parameters())


def saved_bytes_of_rank(config):
    layout = Layout(dist.get_world_size(), config.parallel.tp_size)
    groups = ProcessGroups(layout, sequence_parallel=config.parallel.sequence_parallel)
    return saved_bytes(real_model(config, DTYPE, groups.tensor_parallel), real_batch(config)[:3])


@pytest.mark.parametrize("method", ["preserve", "fft"])
def test_sequence_parallel_ranks_save_less(config_of, method):
    """Norms save half as much on two ranks: their input in fp32, the normalised one in bf16, and
    one number per token.

    Frozen gains need no normalised input, and Preserve's base stream nothing at all.
    """
    whole, split = [], []
    for saved, choice in ((whole, False), (split, True)):
        config = config_of(method, Layout(2, 2), parallel__sequence_parallel=choice)
        saved += run_ranks(saved_bytes_of_rank, 2, config)
        assert estimated(config).activation_bytes == pytest.approx(saved[0], rel=0.05)
        assert saved[0] == saved[1]
    norms, tokens, trained = (
        2 * 5 + 1,
        2 * 32,
        64 if method == "fft" else SCALE["expansion"]["hidden_size"],
    )
    assert whole[0] - split[0] == norms * tokens * (trained * (4 + 2) + 4) // 2


@pytest.mark.parametrize("method", ["preserve", "adapt"])
def test_ranks_that_share_experts_send_tokens_and_sums(base, tmp_path, method):
    """Forward in each layer; backward where the base stream has a gradient, under Adapt from the
    attention of layer 1 on."""
    folder = base("qwen3_moe")
    settings = scale_settings(
        method, **({"collaborative_modules": "both"} if method == "adapt" else {})
    )
    changes = {"base": str(folder.path), "parallel__expert_size": 2}
    config = run_config(tmp_path, "zero1", "adapt", Layout(2, 1, 2), **changes)
    config = config.model_copy(update={"method": settings})
    costs = measure_micro_batch(config, folder.spec, 1, "none", DTYPE, expert_size=2)
    mixture, width = folder.spec.mixture, folder.spec.widths.hidden_size
    tokens = 2 * config.schedule.micro_batch_size * config.data.sequence_length
    with_weights = tokens * (width + mixture.top_k) * DTYPE.itemsize
    chosen = tokens * mixture.top_k * torch.int32.itemsize
    sums = tokens * width * DTYPE.itemsize
    backward = 2 if method == "adapt" else 0
    assert costs.expert_payload_bytes == {
        (2, "all-gather"): 3 * (with_weights + chosen) + backward * sums,
        (2, "all-to-all"): 3 * sums + backward * with_weights,
    }
    assert not costs.payload_bytes
    held = sum(one.size for one in costs.parameters if one.kept_whole)
    assert 2 * held == 3 * mixture.experts * 3 * width * mixture.intermediate_size


def test_a_sequence_that_does_not_divide_over_the_ranks_is_refused(config_of):
    config = config_of(
        "adapt", Layout(4, 4), parallel__sequence_parallel=True, data__sequence_length=30
    )
    with pytest.raises(
        LayoutError, match=r"data.sequence_length: .* a multiple of parallel.tp_size 4, found 30"
    ):
        estimated(config)


def results_alone(function):
    """In place of a compiled function."""
    return lambda logits, *rest: fused_cross_entropy._RESULTS[function.__name__](
        logits.of_x, rest[-1]
    )


@pytest.mark.parametrize(
    ("method", "checkpointing"),
    [
        *(("adapt", checkpointing) for checkpointing in ("none", "collaborative", "all")),
        *(("route", checkpointing) for checkpointing in ("none", "all")),
        *(("adapt", f"all but {kept}") for kept in ("attention", "products")),
        ("route", "collaborative but products"),
        ("lora", "all but products"),
        ("fft", "all"),
        ("fft", "all but attention"),
        ("adapt nf4", "none"),
        ("adapt fp8", "all"),
        ("adapt fp8", "all but products"),
    ],
)
def test_the_peak_is_that_of_a_real_pass(config_of, method, checkpointing, monkeypatch):
    """But for the loss, which is compiled on a GPU, for which the estimate is: of that, this pass
    has the results alone."""
    monkeypatch.setattr(output, "compiles_by_default", lambda device: True)
    monkeypatch.setattr(fused_cross_entropy, "_compiled", results_alone)
    monkeypatch.setattr(chunked_loss, "add_product_", lambda total, left, right: None)
    method, _, precision = method.partition(" ")
    checkpointing, _, kept = checkpointing.partition(" but ")
    changes = {
        "activation_checkpointing": checkpointing,
        "recomputation_keeps": kept or "nothing",
        "base_precision": precision or "bf16",
        "fp8": {"skip_small": False},
    }
    config = config_of(method, data__document_mask=False, **changes)
    model, batch = real_model(config, DTYPE), real_batch(config)[:3]
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda parameter: setattr(parameter, "grad", None)
            )
    with LiveMemory(*model.parameters()) as live:
        total, *_ = model(*batch)
        total.backward()
    costs = estimated(config)
    assert costs.activation_bytes + costs.loss_bytes + costs.temporary_bytes == live.peak
