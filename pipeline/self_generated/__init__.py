"""Text that a base model writes itself, as a token corpus."""
