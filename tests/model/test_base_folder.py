"""Reading a pretrained folder: whole or in shards, in one file or several; and what is refused, in
one line."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.errors import BaseModelError, LayoutError
from pipeline.hf.load import load_hf_model
from pipeline.model import bases as hosted_bases
from pipeline.model.base_folder import INDEX_FILE, SINGLE_FILE, three_16_bit_rows
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import load_base, open_base
from pipeline.parallel.parameters import partition_of
from pipeline.parallel.sharding import merge
from pipeline.parallel.topology import TensorParallel
from pipeline.scale.plan import Widths
from tests.bases import reference, save_base
from tests.files import change_json, cut
from tests.tolerances import assert_parity
from tests.widened import some_tokens, unwidened


def load(path):
    return unwidened(open_base(path))


def change_config(path, **entries):
    change_json(path / "config.json", **entries)


def forget_a_tensor(path):
    weight_map = json.loads((path / INDEX_FILE).read_text())["weight_map"]
    change_json(path / INDEX_FILE, weight_map=dict(list(weight_map.items())[1:]))


def move_weights_out(path):
    shutil.move(path / "model-00001.safetensors", path.parent / "elsewhere.safetensors")
    index = path / INDEX_FILE
    index.write_text(
        index.read_text().replace("model-00001.safetensors", "../elsewhere.safetensors")
    )


def shard(path):
    """Splits a folder's weights into three files, as for large models."""
    tensors = load_file(path / SINGLE_FILE)
    names = sorted(tensors)
    parts = {f"model-{part:05d}.safetensors": names[part::3] for part in range(3)}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, path / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    (path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / SINGLE_FILE).unlink()


@pytest.fixture
def llama(tmp_path):
    return save_base("llama", tmp_path / "base")


@pytest.fixture
def sharded(llama):
    shard(llama)
    return llama


def test_several_files_load_as_one(base, sharded):
    tokens = some_tokens(base("llama").spec, 1, 20)
    assert torch.equal(load(sharded).logits(tokens), unwidened(base("llama")).logits(tokens))
    assert len(open_base(sharded).hashes) == 3


@pytest.mark.parametrize(
    "name", ["llama", "neox", "llama one kv head", "neox tied", "phi3", "gemma3", "qwen3_moe"]
)
@pytest.mark.parametrize("tp_size", [2, 4])
def test_shards_of_every_weight_make_up_the_whole_and_any_rows_can_be_read(base, name, tp_size):
    folder = base(name)
    whole = dict(unwidened(folder).named_parameters())
    generator = torch.Generator().manual_seed(0)
    shards = []
    for rank in range(tp_size):
        tp = TensorParallel(rank=rank, size=tp_size)
        model = Decoder(folder.spec, tp=tp)
        load_base(model, folder, tp)
        of_rank = dict(model.named_parameters())
        shards.append(of_rank)
        for parameter, shard in of_rank.items():
            first, stop = sorted(torch.randperm(len(shard) + 1, generator=generator)[:2].tolist())
            rows = folder.read(parameter, partition_of(shard), rank, tp_size, rows=(first, stop))
            assert torch.equal(rows, shard[first:stop]), (parameter, first, stop)

    # The inner width is split: no rank has all of it, as merging replicas would not show.
    inner = "layers.0.ffn.up.base.weight"
    if name == "qwen3_moe":
        inner = "layers.0.ffn.base.experts.up.weight"
    assert sum(shard[inner].numel() for shard in shards) == whole[inner].numel()
    for parameter, full in whole.items():
        partition = partition_of(shards[0][parameter])
        size = 0 if partition.dim is None else full.shape[partition.dim]
        merged = merge([of_rank[parameter] for of_rank in shards], partition, size)
        assert torch.equal(merged, full), parameter


CONFIG_FAULTS = {
    "rope type": (
        {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4, "factor": 2.0}},
        "rope_type 'proportional' is not among",
    ),
    "architecture": ({"model_type": "cohere"}, "model_type 'cohere' is not among llama"),
    "activation": ({"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu' is not among"),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    "a size that is none": ({"hidden_size": "wide"}, "hidden_size"),
    "heads in no equal groups": (
        {"num_attention_heads": 5},
        "num_key_value_heads: 2 does not divide",
    ),
    "another width": (
        {"hidden_size": 64},
        r"embedding.base.weight has shape \(97, 32\), .* implies \(97, 64\)",
    ),
    "too many layers": ({"num_hidden_layers": 4}, "lacks the tensor model.layers.3"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers"),
    "a vocabulary beyond 64 bits": ({"vocab_size": 2**63}, "vocab_size"),
    "a model_type that is no name": ({"model_type": []}, "config.json"),
    "rope_parameters that are none": ({"rope_parameters": 5}, "config.json"),
}


def refused(path):
    """The one line that a user reads."""
    with pytest.raises(BaseModelError) as refusal:
        load(path)
    message = str(refusal.value)
    assert "\n" not in message and str(path) in message and len(message) < 800
    return message


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_a_config_that_cannot_be_run_is_refused(llama, fault):
    entries, expected = CONFIG_FAULTS[fault]
    change_config(llama, **entries)
    assert re.search(expected, refused(llama))


def test_fused_weights_of_another_shape_are_refused(tmp_path):
    path = save_base("neox", tmp_path / "base")
    change_config(path, hidden_size=64)
    assert "has shape" in refused(path)
    change_config(path, hidden_size=32)
    tensors = load_file(path / SINGLE_FILE)
    name = "gpt_neox.layers.0.attention.query_key_value.weight"
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, path / SINGLE_FILE)
    assert "attention.query.base.weight has shape (95, 32)" in refused(path)


_EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
MIXTURE_FAULTS = {
    "an expert missing": ({_EXPERT: None}, {}, f"lacks the tensor {_EXPERT}"),
    "an expert of another size": ({_EXPERT: (19, 32)}, {}, "the experts of .* differ in size"),
    "a router of another width": (
        {"model.layers.1.mlp.gate.weight": (7, 32)},
        {},
        r"router.weight has shape \(7, 32\)",
    ),
    "more experts to a token than there are": (
        {},
        {"num_experts_per_tok": 7},
        "num_experts_per_tok: expected 1 to 6",
    ),
}


def test_a_difference_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "scale_difference"}))
    expected = r"'scale_difference': .* cannot be a base; .* --format merged --without-gate"
    for opened in (open_base, hosted_bases.open_base):
        with pytest.raises(BaseModelError, match=expected):
            opened(tmp_path)


def test_three_numbers_of_16_bits_hold_one_in_fp32():
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 7
    assert torch.equal(three_16_bit_rows(values).bfloat16().float().sum(0), values)


@pytest.mark.parametrize("fault", MIXTURE_FAULTS)
def test_a_mixture_of_experts_that_is_none_is_refused(tmp_path, fault):
    shapes, entries, expected = MIXTURE_FAULTS[fault]
    path = save_base("qwen3_moe", tmp_path / "base")
    change_config(path, **entries)
    tensors = load_file(path / SINGLE_FILE) | {
        name: shape and torch.ones(shape) for name, shape in shapes.items()
    }
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None}, path / SINGLE_FILE
    )
    assert re.search(expected, refused(path))


def test_a_tied_base_with_another_output_projection_is_refused(tmp_path):
    path = save_base("llama tied", tmp_path / "base")
    tensors = load_file(path / SINGLE_FILE)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(
        {**tensors, "lm_head.weight": embedding.clone()}, path / SINGLE_FILE, {"format": "pt"}
    )
    load(path)
    save_file({**tensors, "lm_head.weight": embedding + 1e-3}, path / SINGLE_FILE, {"format": "pt"})
    assert "set tie_word_embeddings to false" in refused(path)
    change_config(path, tie_word_embeddings=False)
    tokens = some_tokens(open_base(path).spec, 2, 20)
    assert_parity(load(path).logits(tokens), reference(path)(tokens).logits)


FILE_FAULTS = {
    "no folder": (shutil.rmtree, "config.json: no such file"),
    "no config": (lambda path: (path / "config.json").unlink(), "config.json: no such file"),
    "config not JSON": (lambda path: cut(path / "config.json"), "config.json: not JSON"),
    "a file missing": (
        lambda path: (path / "model-00001.safetensors").unlink(),
        "model-00001.safetensors: no such file",
    ),
    "a file cut off": (
        lambda path: cut(path / "model-00001.safetensors"),
        "model-00001.safetensors: damaged",
    ),
    "a pickle in its place": (
        lambda path: torch.save({"weight": torch.zeros(2)}, path / "model-00000.safetensors"),
        "model-00000.safetensors: damaged",
    ),
    "an index cut off": (lambda path: cut(path / INDEX_FILE), "index.json: not JSON"),
    "an index that lists": (
        lambda path: change_json(path / INDEX_FILE, weight_map=["a"]),
        "not an index of files in its folder",
    ),
    "an index that promises too little": (forget_a_tensor, "lacks the tensor"),
    "an index that leads outside": (move_weights_out, "not an index of files in its folder"),
}


def leave_an_old_file(path):
    tensors = {name: 2 * tensor for name, tensor in load_tensors(path).items()}
    save_file(tensors, path / SINGLE_FILE, {"format": "pt"})


def hold_a_tensor_twice(path):
    last, name = path / "model-00002.safetensors", "lm_head.weight"
    assert name in load_file(path / "model-00000.safetensors")
    save_file(load_file(last) | {name: torch.zeros(97, 32)}, last, {"format": "pt"})


def hide_a_tensor(path):
    """An output of its own, where config.json says that it is the embedding."""
    change_config(path, tie_word_embeddings=True)
    weight_map = json.loads((path / INDEX_FILE).read_text())["weight_map"]
    del weight_map["lm_head.weight"]
    change_json(path / INDEX_FILE, weight_map=weight_map)


def name_other_weights(path):
    tensors = {name: 2 * tensor for name, tensor in load_tensors(path).items()}
    save_file(tensors, path / "other.safetensors", {"format": "pt"})
    change_config(path, transformers_weights="other.safetensors")


def add_an_adapter(path):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(reference(path), settings).save_pretrained(path)


def load_tensors(path):
    return {
        name: tensor
        for file in path.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


READ_OTHERWISE = {
    "a single file beside an index": (
        leave_an_old_file,
        f"base/{SINGLE_FILE}: {INDEX_FILE} beside it names other files",
    ),
    "a tensor in two files": (
        hold_a_tensor_twice,
        "for lm_head.weight, and model-00002.safetensors holds one too",
    ),
    "a tensor that the index lacks": (
        hide_a_tensor,
        f"{INDEX_FILE}: lacks the tensor lm_head.weight",
    ),
    "weights that config.json names": (
        name_other_weights,
        "config.json: transformers_weights: expected none, found 'o",
    ),
    "an adapter": (add_an_adapter, "base/adapter_config.json: an adapter"),
}


@pytest.mark.parametrize("name", READ_OTHERWISE)
def test_a_folder_that_transformers_reads_otherwise_is_refused_by_both_readers(base, sharded, name):
    change, expected = READ_OTHERWISE[name]
    tokens = some_tokens(base("llama").spec, 1, 20)
    before = load_hf_model(sharded)(tokens).logits
    change(sharded)
    # Of a hidden tensor a user runs what is stored, and training would read the embedding.
    assert torch.equal(reference(sharded)(tokens).logits, before) == (change is hide_a_tensor)
    assert expected in refused(sharded)
    with pytest.raises(BaseModelError, match=re.escape(expected)):
        load_hf_model(sharded)


def test_an_index_of_a_single_file_is_no_fault(base, llama):
    tensors = load_file(llama / SINGLE_FILE)
    (llama / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, SINGLE_FILE)}))
    tokens = some_tokens(base("llama").spec, 1, 20)
    assert torch.equal(load(llama).logits(tokens), unwidened(base("llama")).logits(tokens))
    load_hf_model(llama)


@pytest.mark.parametrize("fault", FILE_FAULTS)
def test_a_damaged_folder_is_refused(sharded, fault):
    damage, expected = FILE_FAULTS[fault]
    damage(sharded)
    assert expected in refused(sharded)


def test_code_in_the_folder_never_runs(llama):
    (llama / "modeling_evil.py").write_text("raise SystemExit('ran')")
    change_config(
        llama, auto_map={"AutoConfig": "modeling_evil.Evil", "AutoModel": "modeling_evil.Evil"}
    )
    load(llama)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "inner", "tp_size"), [(6, 6, 48, 4), (6, 3, 48, 2), (8, 4, 172, 8)]
)
def test_a_base_that_does_not_divide_over_the_ranks_is_refused(
    base, heads, kv_heads, inner, tp_size
):
    spec = replace(base("llama").spec, widths=Widths(32, inner, heads, kv_heads), head_dim=8)
    with pytest.raises(
        LayoutError, match=rf"parallel.tp_size: expected a divisor of .* found {tp_size}$"
    ):
        Decoder(spec, tp=TensorParallel(rank=0, size=tp_size))


def test_tensor_parallelism_of_a_norm_over_all_heads_is_refused(base):
    with pytest.raises(
        LayoutError, match=r"parallel.tp_size: expected 1, .* family olmo2 .* found 2; use ZeRO-3"
    ):
        Decoder(base("olmo2").spec, tp=TensorParallel(rank=0, size=2))
