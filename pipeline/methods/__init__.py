"""The training methods: which parameters exist, which train, and how they start."""
