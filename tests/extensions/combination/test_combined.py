"""One base with several expansions: each token is the base's or that of an expansion, as if alone."""

from __future__ import annotations

import json
import shutil
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from torch import nn

from pipeline.checkpoint.manifest import MANIFEST_FILE as MANIFEST
from pipeline.config.sources import RUN_FILE
from pipeline.data.tokenizer.extension.vocabulary import EXPORTED as EXTENDED
from pipeline.data.tokenizer.extension.vocabulary import learn_extension
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import ConversionError, DataError, OutputError
from pipeline.extensions.combination import command as combine_command
from pipeline.extensions.combination.combine import combine, open_export
from pipeline.files.hashes import file_hash
from pipeline.files.json_files import write_json, write_record
from pipeline.hf.folder_kinds import EXPORT
from pipeline.hf.load import load_hf_model
from pipeline.hf.remote_code.modeling_scale import ScaleForCausalLM
from pipeline.hf.remote_code.modeling_scale_combined import (
    LARGEST_MARGIN,
    RECENT,
    CombinedForCausalLM,
    is_of_base,
    opened_margin,
)
from pipeline.hf.remote_code.scale_math import NEVER
from pipeline.model.spec import MixtureSpec
from pipeline.run_folder.checkpoint_names import checkpoint_name
from tests.conversion.checkpoints import generate_greedily, scale_config, without_this_project
from tests.conversion.exports import check_vocabulary_keeps_its_size
from tests.data.helpers import contents
from tests.files import change_json
from tests.programs import call
from tests.tolerances import PARITY, assert_near

DEMO = Path("examples/data/models/stories260K")
LAYERS, BASE_TOKENS = 4, 512
PRESERVE = {"l_fp": LAYERS, "gate_layer": LAYERS}
ADAPT = {"l_fp": 2, "gate_layer": 2, "collaborative_modules": ["attention", "ffn"]}
OWN = {"own_rows": 9, "own_gains": True, "own_rank": 3}
# LoRA's weights begin at the embedding, below its gate.
LORA = {"l_fp": LAYERS, "own_first_layer": 0, "gate_layer": 2, "own_scale": 1.5}
# What differs from a ScaleConfig's defaults, and the expansion's width and heads.
EXPANSIONS = {
    "ko": (PRESERVE | {"norm_statistics": "base"}, 32, 4),
    "law": (PRESERVE | {"gate_features": "token+running_mean"}, 16, 2),
    "code": (ADAPT, 32, 4),
    "med": (ADAPT | {"gate_features": "token+running_mean", "gate_layer": 1}, 24, 1),
    "own": (ADAPT | OWN | {"own_first_layer": 2}, 32, 4),
    "lora": (LORA | OWN | {"gate_features": "token+running_mean"}, 0, 0),
    "pieces": (PRESERVE | {"vocab_size": BASE_TOKENS + 18}, 32, 4),
    "kana": (ADAPT | OWN | {"own_first_layer": 2, "vocab_size": BASE_TOKENS + 11}, 16, 2),
}
ALL = [*EXPANSIONS][:-1]
CARD = """---
base_model: org/stories
license: other
license_name: tales
license_link: LICENSE.md
---
"""
TEXTS = {
    "pieces": "나는 너를 나의 나라에서 너의 나비로 보았다. " * 3,
    "kana": "わたしはわたしのねこをみていた。" * 3,
}


def export(folder: Path, name: str, *, base: str = "base", **changes) -> Path:
    """An export with random weights. Those of its base depend on `base` alone, the others on
    `name`."""
    settings, width, heads = EXPANSIONS[name]
    config = scale_config(
        base_vocab_size=BASE_TOKENS,
        expansion_hidden_size=width,
        expansion_num_attention_heads=heads,
        expansion_num_key_value_heads=heads,
        num_attention_heads=8 + heads,
        num_key_value_heads=8 + heads,
        **({} if width else {"expansion_intermediate_size": 0}),
        **settings | changes,
    )
    model = ScaleForCausalLM(config)
    for key, parameter in (*model.named_parameters(), *model.named_buffers()):
        # Of the base's weights every export on it has the same.
        owner = base if is_of_base(key) else name
        random = torch.Generator().manual_seed(zlib.crc32(f"{owner} {key}".encode()))
        is_learned = isinstance(parameter, nn.Parameter)
        if is_learned or key in ("token_gate.mean", "token_gate.weight"):
            # Row by row, so that the base's rows are the same under an extended vocabulary.
            std = 1.0 if key.startswith(("token_gate.", "embedding.")) else 0.1
            parameter.data.copy_(torch.randn(parameter.shape, generator=random) * std)
    if config.own_rows:
        choose_own_rows(model)
    model.save_pretrained(folder)
    for file in DEMO.glob("*token*"):
        shutil.copy(file, folder)
    if added := config.vocab_size - BASE_TOKENS:
        text = TEXTS.get(name, TEXTS["pieces"])
        extension = learn_extension(DEMO, [text], ["Once upon a time " * 99], add=added, min_uses=2)
        write_json(folder / "tokenizer.json", extension.content)
        write_record(folder / EXTENDED, extension.record)
        assert len(extension.record.tokens) == added
    record = {"format": EXPORT.format, "method": {"variant": name}, "position": {"tokens_seen": 1}}
    (folder / EXPORT.record).write_text(json.dumps(record | {"checkpoint_manifest": name}))
    return folder


def choose_own_rows(model: ScaleForCausalLM) -> None:
    """Each of the base's tokens has one of the own rows; new tokens have a row of zeros."""
    added = model.config.vocab_size - BASE_TOKENS
    rows = model.config.own_rows - (1 if added else 0)
    for module, values in (
        (model.own_input, model.own_input.rows.weight),
        (model.output, model.output.own_rows),
    ):
        module.row_of_token.copy_(torch.arange(model.config.vocab_size) * 7 % rows)
        if added:
            module.row_of_token[BASE_TOKENS:] = rows
            values.data[rows] = 0


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("exports")
    made = {name: export(folder / name, name) for name in EXPANSIONS}
    # Only one export has its card, which names a base on the hub.
    (made["law"] / "README.md").write_text(CARD)
    return made


@pytest.fixture(scope="module")
def combined(exports, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("combined") / "all"
    combine(folder, {name: exports[name] for name in ALL})
    return folder


@pytest.fixture(scope="module")
def model(combined) -> ScaleForCausalLM:
    return load_hf_model(combined)


def prompts(count: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts, some of them padded on the left."""
    tokens = torch.randint(3, BASE_TOKENS, (count, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, :3] = mask[2, :5] = 0
    return tokens, mask


@torch.no_grad()
def alone(path: Path, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An export's logits [S, V], and by how much its gate's score is above the threshold [S]."""
    model = load_hf_model(path)
    margins = []
    model.token_gate.register_forward_hook(
        lambda gate, read, _: margins.append(gate.scores(*read) - gate.threshold)
    )
    logits = model(tokens, use_cache=False).logits[0]
    is_new = (tokens >= BASE_TOKENS).unsqueeze(-1)
    # A new token opens the gate whatever its score.
    margin = margins[0].masked_fill(is_new, torch.inf)
    return logits, margin[0, :, 0]


def by_the_rule(
    margins: dict[str, torch.Tensor],
) -> Iterator[tuple[str, str | None]]:
    """For each token the leader, and the expansion whose logits it gets or None: the base's.

    margins: by name, how far a gate's score is above its threshold at each token.
    """
    used: str | None = None
    for at in range(len(next(iter(margins.values())))):
        lately = {}
        for name, of in margins.items():
            lately[name] = of[max(0, at - RECENT + 1) : at + 1].clamp(0, LARGEST_MARGIN)
        # Of equal sums the first by name: `max` keeps the first.
        leader = max(sorted(margins), key=lambda name: lately[name].double().sum())
        if lately[leader][-1] > 0:
            used = leader
        yield leader, used


@torch.no_grad()
def test_each_token_is_the_bases_or_that_of_the_expansion_in_use(exports, model):
    # Passages of four words each, for which other gates open.
    generator = torch.Generator().manual_seed(4)
    passages = torch.randint(3, BASE_TOKENS + 18, (6, 4), generator=generator)
    text = passages.repeat(1, 20).view(1, -1)

    seen: set[tuple[str | None, bool]] = set()
    for names in (["pieces"], ALL, ["ko"], ["code", "med"], ["code"]):
        tokens = text if names == ["pieces"] else text % BASE_TOKENS
        model.set_active([])
        expected = model(tokens, use_cache=False).logits[0]
        found = {name: alone(exports[name], tokens) for name in names}
        for at, (_, used) in enumerate(by_the_rule({n: m for n, (_, m) in found.items()})):
            if used is not None:
                logits, margins = found[used]
                # An extended vocabulary has more logits than the base and the other expansions.
                expected[at, : logits.shape[-1]] = logits[at]
                seen.add((used, bool(margins[at] > 0)))
            else:
                seen.add((None, False))
        model.set_active(names)
        assert torch.equal(model(tokens, use_cache=False).logits[0], expected), names

    cases = {(None, False), ("code", False)}
    for name in ALL:
        cases.add((name, True))
    assert cases <= seen, seen

    # A new token is open for the expansion that brought it, whatever came before.
    model.set_active(ALL)
    is_new = text[0] >= BASE_TOKENS
    assert is_new.any()
    found_logits = model(text, use_cache=False).logits[0]
    expected_logits, _ = alone(exports["pieces"], text)
    assert torch.equal(found_logits[is_new], expected_logits[is_new])


@torch.no_grad()
def test_an_open_expansion_goes_on_where_the_leader_is_closed(exports, model):
    """The token gets what it alone gives of an open token, and no mixture of two."""
    tokens = torch.randint(3, BASE_TOKENS, (1, 500), generator=torch.Generator().manual_seed(0))
    found = {name: alone(exports[name], tokens) for name in ("ko", "med")}
    model.set_active(found)
    logits = model(tokens, use_cache=False).logits[0, :, :BASE_TOKENS]
    beside_leader = 0
    for at, (leader, used) in enumerate(by_the_rule({n: of for n, (_, of) in found.items()})):
        if used is not None:
            of_model, margins = found[used]
            assert torch.equal(logits[at], of_model[at]), (at, leader, used)
            beside_leader += leader != used and bool(margins[at] > 0)
    assert beside_leader > 0


@torch.no_grad()
def test_of_equal_gates_the_first_by_name_is_used_and_combine_says_so(exports, tmp_path, caplog):
    second = export(tmp_path / "second", "code")
    tensors = load_file(second / "model.safetensors")
    for key in [
        key for key in tensors if not key.startswith("token_gate.") and not is_of_base(key)
    ]:
        tensors[key] += 0.1
    save_file(tensors, second / "model.safetensors", {"format": "pt"})
    both = {"second": second, "first": exports["code"], "ko": exports["ko"]}
    with caplog.at_level("WARNING"):
        combine(tmp_path / "both", both)
    [said] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "first and second have equal gates" in said and "active" in said

    assert "first and second have equal gates" in (tmp_path / "both" / "README.md").read_text()

    model = load_hf_model(tmp_path / "both")
    tokens = torch.randint(3, BASE_TOKENS, (1, 60), generator=torch.Generator().manual_seed(0))
    of_first, margins = alone(exports["code"], tokens)
    of_second, of_other_margins = alone(second, tokens)
    assert torch.equal(margins, of_other_margins)
    is_used = (margins > 0).cummax(0).values
    assert is_used.any() and (of_first - of_second)[is_used].abs().max() > 0.1
    for active, expected in ((["second", "first"], of_first), (["second"], of_second)):
        model.set_active(active)
        assert torch.equal(model(tokens, use_cache=False).logits[0], expected)


def test_the_card_names_base_and_licence_and_its_code_runs(combined, monkeypatch):
    card = (combined / "README.md").read_text()
    data = ModelCard(card).data
    assert (data.base_model, data.base_model_relation) == ("org/stories", "finetune")
    assert (data.license, data.license_name) == ("other", "tales")
    # The link is to a file that the exports do not have.
    assert data.get("license_link") is None
    assert f"# {combined.name}\n\n`org/stories` with {len(ALL)} expansions." in card
    code = card.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(combined.parent)
    # The class of this project in the place of its copy in the folder, which takes longer.
    lines = code.replace("AutoModelForCausalLM.from", "CombinedForCausalLM.from")
    exec(lines, {"CombinedForCausalLM": CombinedForCausalLM})


def test_an_expansion_that_was_not_loaded_is_named_with_the_remedy(combined):
    only = CombinedForCausalLM.from_pretrained(combined, active=["ko"])
    for ask in (lambda: only.set_active(["law"]), lambda: only.allowed([["law"]])):
        with pytest.raises(ValueError, match=r"found law; law was not loaded: load without active"):
            ask()
    with pytest.raises(ValueError, match=r"expected some of ko, .*, found nobody$"):
        only.set_active(["nobody"])


def with_open_ids(folder: Path, name: str, ids: list[int]) -> Path:
    """An export whose gate is open at these ids, and by its score nowhere."""
    export(folder, name, gate_open_ids=True, gate_threshold=45.0)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    assert not tensors["token_gate.is_open_id"].any()
    tensors["token_gate.is_open_id"][ids] = True
    save_file(tensors, file, {"format": "pt"})
    return folder


@torch.no_grad()
def test_an_id_that_two_gates_open_is_of_the_one_whose_score_is_higher(tmp_path):
    ids = {"ko": [7, 8, 300], "law": [8, 9]}
    exports = {name: with_open_ids(tmp_path / name, name, own) for name, own in ids.items()}
    # It also compares each expansion beside the base with its export, to the bit.
    combine(tmp_path / "both", exports)
    model = load_hf_model(tmp_path / "both")
    plain = torch.tensor([[20, 21, 22, 23]])

    def used_on(token: int) -> str:
        """Whose logits those of the text's last token are."""
        text = torch.cat([plain, torch.tensor([[token]])], dim=1)
        model.set_active(model.names)
        found = model(text, use_cache=False).logits[0]
        model.set_active([])
        of_base = model(text, use_cache=False).logits[0]
        assert torch.equal(found[:-1], of_base[:-1])
        candidates = {"base": of_base[-1]}
        for name, folder in exports.items():
            candidates[name] = load_hf_model(folder)(text, use_cache=False).logits[0, -1]
        # Where a gate is closed, its export gives the base's logits too: the base comes first.
        return next(name for name, of in candidates.items() if torch.equal(found[-1], of))

    assert [used_on(token) for token in (7, 9, 30, 300)] == ["ko", "law", "base", "ko"]
    scores = {}
    for name, folder in exports.items():
        alone = load_hf_model(folder)
        alone.token_gate.register_forward_hook(
            lambda gate, read, _, name=name: scores.update({name: float(gate.scores(*read)[0, -1])})
        )
        alone(torch.tensor([[20, 21, 22, 23, 8]]), use_cache=False)
    assert used_on(8) == max(scores, key=scores.__getitem__)


def test_the_margin_of_an_opened_id_is_above_zero_and_in_the_order_of_scores():
    margins = torch.tensor([-64.0, -30.0, -1.0, 0.0, 1.0, 30.0, 1e4])
    opened = opened_margin(margins)
    assert (opened > 0).all() and (opened.diff() > 0).all()
    assert torch.equal(opened[-2:], margins[-2:])
    assert opened_margin(torch.tensor(-1e4)) > 0


REQUESTS = [["ko"], ["code", "law", "med"], [], ALL, ["own", "lora"]]


@pytest.mark.full
@torch.no_grad()
def test_each_text_of_a_batch_is_continued_as_alone(model):
    """Padded on the left, with expansions of its own, cached or not, searched by beams or not."""
    (tokens, mask), active = prompts(), model.allowed(REQUESTS)
    for options in ({}, {"use_cache": False}, {"num_beams": 3}):
        found = generate_greedily(
            model, tokens, attention_mask=mask, new_tokens=12, active=active, **options
        )
        for row, names in enumerate(REQUESTS):
            model.set_active(names)
            text = tokens[row : row + 1, int((mask[row] == 0).sum()) :]
            assert torch.equal(
                generate_greedily(model, text, new_tokens=12, **options)[0, -12:], found[row, -12:]
            )
    assert len({tuple(row) for row in found[:, -12:].tolist()}) == len(REQUESTS)


@pytest.mark.full
@torch.no_grad()
def test_a_text_that_is_read_in_parts_is_the_whole(model):
    tokens, mask = prompts()
    active = model.allowed(REQUESTS)
    whole = model(tokens, attention_mask=mask, active=active, use_cache=False).logits

    cache = None
    parts = []
    for start, end in ((0, 6), (6, 7), (7, 12)):
        part = model(
            tokens[:, start:end], attention_mask=mask[:, :end], active=active, past_key_values=cache
        )
        cache = part.past_key_values
        parts.append(part.logits)
    is_text = mask.bool()  # logits of padding mean nothing
    assert_near(torch.cat(parts, 1)[is_text], whole[is_text], PARITY)


@pytest.mark.full
@torch.no_grad()
def test_an_expansion_costs_from_its_first_token_on_and_preserve_pays_the_base_once(model):
    """Counts the tokens that each path's first layer computes, in a prompt and eight more tokens."""
    tokens = prompts()[0][1:2]
    expansions = dict(zip(model.names, model.expansions, strict=True))
    computed: Counter[str] = Counter()

    def count_tokens(name: str, _: Any, read: tuple[torch.Tensor, ...], __: Any) -> None:
        computed[name] += read[0].shape[:-1].numel()

    handles = []
    for name, part in {"base": model, **expansions}.items():
        first_layer = part.layers[0].attention.query
        handles.append(first_layer.register_forward_hook(partial(count_tokens, name)))

    cost = {}
    for names in ((), ("ko",), ("code",)):
        model.set_active(names)
        computed.clear()
        for name in names:
            expansions[name].token_gate.threshold -= 100  # opens everywhere
        generate_greedily(model, tokens, new_tokens=9)
        for name in names:
            expansions[name].token_gate.threshold += 100
        cost[names] = dict(computed)
    for handle in handles:
        handle.remove()
    # The last of the nine tokens is generated, and not computed. Preserve goes on from what the
    # base computed of the prompt; Adapt computes all of it again.
    assert cost[()] == {"base": 12 + 8}
    assert cost[("ko",)] == {"base": 12, "ko": 12 + 8}
    assert cost[("code",)] == {"base": 12 + 8, "code": 12 + 8}


@pytest.mark.full
@torch.no_grad()
def test_guessing_tokens_ahead_changes_nothing(model, tmp_path):
    """The cache is cropped where a guess was wrong, with sliding windows too."""
    windows = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
    combine(tmp_path / "served", {"ko": export(tmp_path / "ko", "ko", **windows)})
    tokens = prompts()[0][1:2].repeat(1, 2)
    served = load_hf_model(tmp_path / "served")
    for one, active in ((model, ["ko"]), (model, ["own", "lora"]), (served, ["ko"]), (served, [])):
        one.set_active(active)
        found = generate_greedily(one, tokens, new_tokens=12, prompt_lookup_num_tokens=3)
        assert torch.equal(found, generate_greedily(one, tokens, new_tokens=12))


@pytest.mark.full
def test_arguments_it_cannot_follow_are_refused(exports, model):
    tokens, mask = prompts()
    for options, error in (
        ({"attention_mask": mask[:, None, None].bool()}, r"expected a tensor \[B, T\]"),
        (
            {"active": ["ko"]},
            r"what model.allowed makes, .*, such as active=model.allowed\(\[\['code'\]\] \* 5\)",
        ),
        (
            {"position_ids": torch.arange(12).remainder(6)[None], "use_cache": False},
            "one text in a row",
        ),
        ({"inputs_embeds": torch.zeros(5, 12, 64)}, "takes input_ids"),
        (
            {"past_key_values": load_hf_model(exports["ko"])(tokens).past_key_values},
            "expected the cache of this model",
        ),
    ):
        with pytest.raises(ValueError, match=error):
            model(tokens, **options)
    embedded = model.get_input_embeddings()(tokens)
    with pytest.raises(ValueError, match="takes input_ids"):
        model(inputs_embeds=embedded)
    with pytest.raises(ValueError, match="takes input_ids"):
        generate_greedily(
            model,
            tokens[:, :0],
            new_tokens=2,
            inputs_embeds=embedded,
            attention_mask=torch.ones_like(tokens),
        )


@pytest.mark.full
def test_the_vocabulary_of_all_expansions_keeps_its_size(model):
    assert model.config.vocab_size > BASE_TOKENS
    check_vocabulary_keeps_its_size(model, "extended before training, by scale-cpt vocabulary")


@pytest.mark.full
@torch.no_grad()
def test_a_combination_replaces_an_earlier_one_and_is_loaded_in_part(exports, tmp_path):
    folder, tokens = tmp_path / "served", prompts()[0]
    combine(folder, {"ko": exports["ko"]})
    first, one = contents(folder), load_hf_model(folder)(tokens).logits
    combine(folder, {name: exports[name] for name in ("law", "code", "pieces", "ko")})
    changed = {name for name, value in contents(folder).items() if first.get(name, value) != value}
    assert changed == {"served/config.json", "served/README.md", "served/tokenizer.json"}
    only = CombinedForCausalLM.from_pretrained(folder, active=["ko"])
    # The expansion with new tokens too: the tokenizer may give them.
    assert only.names == ["ko", "pieces"]
    assert only.active == ["ko"]
    assert torch.equal(only(tokens).logits[..., :BASE_TOKENS], one)
    only(tokens + 10)


@pytest.mark.full
@torch.no_grad()
def test_a_tensor_that_an_expansion_lacks_is_named(exports, tmp_path):
    """Parameters, tables of ids, which are buffers, and the rows of new tokens."""
    own = export(tmp_path / "own", "own", gate_open_ids=True)
    folder = tmp_path / "combined"
    combine(folder, {"own": own, "pieces": exports["pieces"]})
    CombinedForCausalLM.from_pretrained(folder)
    for name, tensor in (
        ("own", "token_gate.weight"),
        ("own", "token_gate.is_open_id"),
        ("own", "own_input.row_of_token"),
        ("own", "output.row_of_token"),
        ("pieces", "new_rows.embedding"),
        ("pieces", "new_rows.output"),
    ):
        [file] = (folder / "expansions" / name).glob("*.safetensors")
        whole = load_file(file)
        assert tensor in whole
        save_file({key: value for key, value in whole.items() if key != tensor}, file)
        with pytest.raises(ValueError, match=rf"^expansion {name}: lacks {tensor}; combine it ag"):
            CombinedForCausalLM.from_pretrained(folder)
        save_file(whole, file)


@pytest.mark.full
def test_frequencies_that_no_folder_holds_are_not_called_missing(exports, tmp_path, monkeypatch):
    """The expansions share the base's, which may have no values yet."""
    folder = tmp_path / "combined"
    combine(folder, {"ko": exports["ko"]})
    share_base = CombinedForCausalLM.share_base

    def share_without_values(model):
        model.rotary.to("meta")
        share_base(model)

    monkeypatch.setattr(CombinedForCausalLM, "share_base", share_without_values)
    model = CombinedForCausalLM.from_pretrained(folder)
    assert next(model.rotary.buffers()).is_meta
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.full
@torch.no_grad()
def test_two_vocabularies_cut_and_predict_their_texts_as_alone(exports, tmp_path):
    folder = tmp_path / "served"
    owners = list(TEXTS)
    combine(folder, {name: exports[name] for name in ("ko", *owners)})
    model = load_hf_model(folder)
    served = load_tokenizer(folder)

    def served_ids(text: str) -> list[int]:
        return served.reference.encode([text]).ids.tolist()

    everything = torch.tensor([served_ids("".join(TEXTS.values()))])
    for name, other in zip(owners, reversed(owners), strict=True):
        own_ids = model.new_tokens[model.names.index(name)]
        other_ids = model.new_tokens[model.names.index(other)]
        own_tokenizer = load_tokenizer(exports[name])
        tokens = torch.tensor([own_tokenizer.reference.encode([TEXTS[name]]).ids.tolist()])
        assert (tokens >= BASE_TOKENS).any()
        # The id in the combination of each token of the expansion alone.
        served_id = torch.tensor([*range(BASE_TOKENS), *own_ids])
        assert served_id[tokens][0].tolist() == served_ids(TEXTS[name])

        model.set_active([name])
        found = model(served_id[tokens]).logits
        expected, _ = alone(exports[name], tokens)
        assert torch.equal(found[0, :, served_id], expected)
        assert (found[..., list(other_ids)] == NEVER).all()

        # With all active, what follows a new token is predicted by the expansion that brought it.
        model.set_active(model.names)
        is_own = (everything[0] >= own_ids.start) & (everything[0] < own_ids.stop)
        after_own = model(everything).logits[0, is_own]
        assert len(after_own) > 0
        assert (after_own[:, list(own_ids)] > NEVER).all()
        assert (after_own[:, list(other_ids)] == NEVER).all()
    combine(folder, {owners[1]: exports[owners[1]]})
    assert load_tokenizer(folder).fingerprint == load_tokenizer(exports[owners[1]]).fingerprint


@pytest.mark.full
def test_experts_of_a_mixture_are_the_bases(tmp_path):
    mixture = asdict(
        MixtureSpec(4, top_k=2, intermediate_size=16, normalised=True, shared_size=8, gated=True)
    )
    added = {
        name: export(tmp_path / name, name, mixture=mixture, expert_layers=[1, 3])
        for name in ("ko", "code")
    }
    combine(tmp_path / "served", added)  # verifies
    for name in added:
        held = load_file(tmp_path / "served" / "expansions" / name / "model.safetensors")
        assert "layers.1.ffn.gate.base_to_expansion.weight" in held
        assert not any("experts" in key or "router" in key or "shared" in key for key in held)


@pytest.mark.full
@pytest.mark.parametrize(
    ("error", "changes"),
    [
        ("it has no gate", {"gate_layer": None}),
        ("combine expansions of one base", {"base": "another"}),
        ("its base has layer_norm_epsilon", {"layer_norm_epsilon": 1e-3}),
        ("Route", {"routed": True}),
        (
            "for the letters that the others' have tokens for, such as [가-힣]:",
            {"vocab_size": BASE_TOKENS + 3},
        ),
    ],
)
def test_what_cannot_be_combined_is_refused_and_the_folder_stays(exports, tmp_path, error, changes):
    folder, other = tmp_path / "served", export(tmp_path / "other", "ko", **changes)
    combine(folder, {"pieces": exports["pieces"]})
    before = contents(folder)
    with pytest.raises((ConversionError, DataError), match=error):
        combine(folder, {"pieces": exports["pieces"], "other": other})
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("model_type", "error"),
    [
        ("scale_difference", "two models of the base's class, .*; serve the export alone"),
        ("scale_hosted", "runs by transformers' own code, .*; serve the export alone"),
        ("llama", "no export in the format scale; convert the run again with --format scale"),
    ],
)
def test_exports_of_other_formats_are_refused_by_name(model_type, error, exports, tmp_path):
    folder = shutil.copytree(exports["ko"], tmp_path / "other")
    change_json(folder / "config.json", model_type=model_type)
    with pytest.raises(ConversionError, match=error) as refused:
        open_export(folder)
    assert "\n" not in str(refused.value)


def run_of(export: Path, folder: Path, step: int = 20) -> Path:
    """The folder of a run that was converted at a step to this export."""
    shutil.copytree(export, folder / "hf")
    (folder / RUN_FILE).write_text("run: law\n")
    save_step(folder, step)
    gate = folder / "gate" / "gate.json"
    gate.parent.mkdir()
    gate.write_text("{}")
    change_json(
        folder / "hf" / EXPORT.record,
        position={"step": step, "tokens_seen": 1},
        checkpoint_manifest=file_hash(folder / "checkpoints" / checkpoint_name(step) / MANIFEST),
        gate=file_hash(gate),
    )
    return folder


def save_step(run: Path, step: int, manifest: str = "{}") -> None:
    """Makes a checkpoint of this step the run's newest."""
    checkpoint = run / "checkpoints" / checkpoint_name(step)
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / MANIFEST).write_text(manifest)
    (run / "checkpoints" / "latest").write_text(checkpoint.name)


def test_an_export_that_is_older_than_its_run_is_refused(exports, tmp_path):
    run = run_of(exports["law"], tmp_path / "law")
    hf = run / "hf"
    again = f"convert it again: scale-cpt convert {run}"

    def refusal() -> str:
        with pytest.raises(ConversionError) as refused:
            open_export(run)
        return str(refused.value)

    assert open_export(run).folder == hf
    save_step(run, 21)
    assert refusal() == f"{hf}: exported from step 20, the run is at 21; {again}"
    # The export by itself is what the user asks for.
    assert open_export(hf).folder == hf
    save_step(run, 20, manifest="another")
    checkpoint = run / "checkpoints" / checkpoint_name(20)
    assert refusal() == (
        f"{hf}: exported from another checkpoint of step 20 than {checkpoint}; {again}"
    )
    save_step(run, 20)
    (run / "gate" / "gate.json").write_text("another")
    assert refusal() == f"{hf}: exported with another gate than {run / 'gate'}; {again}"
    # What the run no longer has is not compared.
    shutil.rmtree(run / "gate")
    shutil.rmtree(run / "checkpoints")
    assert open_export(run).folder == hf


def test_a_path_that_is_no_run_and_a_run_that_is_named_twice_are_refused(exports, tmp_path):
    run = run_of(exports["law"], tmp_path / "law")
    configuration = tmp_path / "law.yaml"
    configuration.write_text("")
    unconverted = tmp_path / "new"
    unconverted.mkdir()
    (unconverted / RUN_FILE).write_text("")
    expected = "expected the folder of a run or of an export"
    for path, error in (
        (configuration, f"{configuration}: found a file; {expected}"),
        (tmp_path / "none", f"{tmp_path / 'none'}: no such folder; {expected}"),
        (
            unconverted,
            f"{unconverted / 'hf'}: holds no export; convert the run first: scale-cpt convert "
            f"{unconverted}",
        ),
    ):
        with pytest.raises(ConversionError) as refused:
            open_export(path)
        assert str(refused.value) == error
    with pytest.raises(ConversionError, match=r"reviews and law are one run; name each run once"):
        combine(tmp_path / "served", {"reviews": run, "law": run / "hf"})


@pytest.mark.full
def test_what_is_no_export_of_the_same_tokenizer_is_refused(exports, combined, tmp_path, model):
    before, other = contents(combined), export(tmp_path / "other", "ko")
    described = json.loads((other / "tokenizer.json").read_text())
    described["model"]["merges"].pop()
    (other / "tokenizer.json").write_text(json.dumps(described))
    for runs, error in (
        ({"../up": exports["ko"]}, "letters, digits"),
        ({"한국어": exports["ko"]}, "ASCII letters"),
        ({"more": tmp_path}, "holds no run and no export"),
        ({"pieces": exports["pieces"], "ko": other}, "its base's tokenizer differs from that of"),
    ):
        with pytest.raises(ConversionError, match=error):
            combine(combined, runs)
    with pytest.raises(OutputError):
        combine(tmp_path, {"ko": exports["ko"]})
    assert contents(combined) == before
    active = model.active
    for ask in (
        lambda: model.set_active(["nobody"]),
        lambda: CombinedForCausalLM.from_pretrained(combined, active=["nobody"]),
    ):
        with pytest.raises(ValueError, match=r"expected some of .*, found nobody"):
            ask()
    assert model.active == active


PROGRAM = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True, active=["ko"])
print(*model.active, AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True).vocab_size)
model.generate(torch.tensor([[1]]), max_new_tokens=3, do_sample=False)
"""


@pytest.mark.full
def test_the_folder_is_a_model_without_this_project(exports, tmp_path):
    folder = tmp_path / "served"
    call(combine_command, folder, f"ko={exports['ko']}", f"pieces={exports['pieces']}")
    ran = without_this_project(PROGRAM, folder, tmp_path)
    assert ran.stdout.split() == ["ko", str(BASE_TOKENS + 18)] and "Warning" not in ran.stderr, (
        ran.stderr
    )
