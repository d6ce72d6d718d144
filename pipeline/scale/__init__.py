"""SCALE: which blocks exist (also those of LoRA), how they start, how they multiply, how the router
chooses. What is not in the paper says so."""
