"""What a model knows and what it has forgotten: perplexity on any corpora, and the summary of a run."""
