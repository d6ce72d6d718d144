"""A tokenizer: loading, chat templates, special tokens, and how `transformers` reads its folder."""
