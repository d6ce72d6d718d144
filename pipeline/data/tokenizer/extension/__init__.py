"""An extended vocabulary: new tokens on top of those of an existing tokenizer."""
