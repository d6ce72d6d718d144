"""What a model knows and what it has forgotten: perplexity, benchmarks, and the summary of a run."""
