"""Evaluation of a model: perplexity, benchmarks, and the summary of a run."""
