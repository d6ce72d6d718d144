"""What serving precisions cost an export: how weights are rounded, how the cost is measured, and what is refused."""

from __future__ import annotations

import json
import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from pipeline.conversion import ServedPrecision, stock
from pipeline.conversion.convert import Conversion, convert
from pipeline.conversion.hf_folder import load_hf_model
from pipeline.conversion.precisions import Loss, losses, nll_in, stored_as
from pipeline.conversion.trained_model import open_trained
from pipeline.conversion.verify import probe_maker
from pipeline.errors import ConversionError
from tests.bases import STORIES
from tests.conversion.checkpoints import checkpoint_in, save, scale
from tests.distributed import run_ranks
from tests.texts import STORIES_HELDOUT

ALL = get_args(ServedPrecision)
PROBE = probe_maker({"stories": [str(STORIES_HELDOUT)]})
# The largest error, as a share of the largest weight of a row: half a step of the format at its largest.
STEPS = {"bf16": 2**-8, "fp16": 2**-11, "q8_0": 0.6 / 127, "fp8": 2**-4, "nf4": 0.16}


@pytest.mark.parametrize("precision", STEPS)
def test_a_weight_is_rounded_by_less_than_a_step(precision):
    weight = torch.randn(24, 512, generator=torch.Generator().manual_seed(1)) * torch.logspace(-2, 1, 24).unsqueeze(1)
    found = stored_as(weight, precision).float()
    assert not torch.equal(found, weight)
    assert ((found - weight).abs() <= STEPS[precision] * weight.abs().amax(1, keepdim=True)).all()
    assert torch.equal(stored_as(found, precision).float(), found)
    assert torch.equal(stored_as(torch.zeros(3, 256), precision).float(), torch.zeros(3, 256))
    if precision == "q8_0":  # rows that do not divide
        assert torch.equal(stored_as(weight[:, :37], precision), weight[:, :37].half().float())


def test_the_quantised_blocks_are_those_of_gguf():
    gguf = pytest.importorskip("gguf")
    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(2)) * 1e-3
    kind = gguf.GGMLQuantizationType.Q8_0
    expected = torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind))
    assert torch.allclose(stored_as(weight, "q8_0"), expected, rtol=0, atol=1e-9)
    assert (stored_as(weight, "q8_0") - weight).abs().max() > 1e-6


def a_probe() -> dict[str, list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return {"a": [torch.randint(0, 512, (24,), generator=generator) for _ in range(2)]}


@pytest.mark.parametrize("precision", ["bf16", "q8_0", "nf4"])
def test_a_model_computes_with_the_rounded_weights_and_is_left_as_it_was(precision):
    """stories260K has a tied output projection. Rounding everything beforehand gives the same."""
    model, rounded = load_hf_model(STORIES, torch.float32), load_hf_model(STORIES, torch.float32)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    found = nll_in(model, precision, a_probe())
    assert model.state_dict().keys() == rounded.state_dict().keys()
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    embedding = rounded.get_input_embeddings().weight
    for parameter in rounded.parameters():
        parameter.data = stored_as(parameter.data, precision, in_linear_map=parameter is not embedding)
    assert found == nll_in(rounded, "bf16" if precision == "bf16" else "fp32", a_probe())
    assert found != nll_in(model, "fp32", a_probe())


def test_adapters_keep_their_type():
    """PEFT looks at it before the adapter itself runs."""
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(load_hf_model(STORIES, torch.float32), settings).eval()
    seen: set[torch.dtype] = set()
    for name, module in model.named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_hook(lambda module, *_: seen.add(module.weight.dtype))
    found, plain = nll_in(model, "bf16", a_probe())["a"], nll_in(model, "fp32", a_probe())["a"]
    assert seen == {torch.float32} and found != plain and abs(found - plain) < 0.2


def test_an_export_may_lose_little_more_than_its_base():
    nan, inf = math.nan, math.inf
    for export, base in ((1.009, 1.0), (1.02, 1.015), (nan, nan)):
        assert Loss({}, export, base).is_acceptable
    for export, base in ((1.02, 1.0), (nan, 1.0), (inf, 1.0)):
        assert not Loss({}, export, base).is_acceptable


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    widths = {"hidden_size": 32, "intermediate_size": 20, "num_attention_heads": 4}  # in all 96, 192 and 12
    run_ranks(save, 1, STORIES, scale("adapt", norm="base", expansion=widths), folder / "run", 1, None, 12, 0.0)
    return checkpoint_in(folder / "run", 12)


def asked(checkpoint, folder, *precisions):
    return Conversion(checkpoint, STORIES, folder / "hf", "stock", torch.bfloat16, precisions=precisions)


def test_a_stock_export_survives_every_precision_and_is_fine_tuned_by_other_tools(checkpoint, tmp_path):
    """AdamW moves a weight by the learning rate, however small it is: 2^-20 made the loss explode in a step."""
    assert convert(asked(checkpoint, tmp_path, "q8_0"), PROBE)
    assert not convert(asked(checkpoint, tmp_path, "q8_0"), PROBE)
    report = json.loads((tmp_path / "hf" / "verification.json").read_text())
    rows, plain = report["precisions"], report["texts"]["stories"]["exported_perplexity"]
    assert set(rows) == {"bf16", "fp16", "q8_0"} and rows["bf16"]["export_factor"] == 1.0
    assert rows["bf16"]["perplexities"] == {"stories": pytest.approx(plain, rel=1e-3)}
    probe = PROBE(open_trained(checkpoint, STORIES))
    found = losses((tmp_path / "hf", probe), (STORIES, probe), torch.bfloat16, ALL)
    assert all(loss.is_acceptable for loss in found.values())

    model = load_hf_model(tmp_path / "hf", torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.stack([window[:128] for window in probe["stories"]])
    losses_of_steps = []
    for _ in range(8):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses_of_steps.append(loss.item())
    assert losses_of_steps == sorted(losses_of_steps, reverse=True)
    assert losses_of_steps[-1] < 0.95 * losses_of_steps[0]


def test_a_scale_that_does_not_survive_is_refused(checkpoint, tmp_path, monkeypatch):
    """What exports did before: 2^-20 is exact in bf16, and vanishes in fp16 and in blocks with fp16 scales."""
    monkeypatch.setattr(stock, "scale_in", lambda dtype: 2.0**-20)
    with pytest.raises(ConversionError, match=r"in q8_0 its perplexity grows .* the base's .*leave q8_0 out"):
        convert(asked(checkpoint, tmp_path, "q8_0"), PROBE)
    assert not (tmp_path / "hf").exists()
