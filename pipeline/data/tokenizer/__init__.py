"""A tokenizer: loading it, chat templates, special tokens, and how `transformers` reads its folder."""
