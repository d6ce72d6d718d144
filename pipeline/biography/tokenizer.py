"""A small tokenizer of the kind that Pythia has: byte-level BPE, spaces with the word behind them, no BOS."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.files import write_json, write_text

END_OF_DOCUMENT = "<|endoftext|>"


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Trains one on `texts`, and writes it into `folder` as Hugging Face's libraries have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    write_text(folder / "tokenizer.json", tokenizer.to_str())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_DOCUMENT}
    write_json(folder / "tokenizer_config.json", settings)
