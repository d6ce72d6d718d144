"""SCALE as the paper defines it: which blocks exist, how they start, how they multiply, how the
router chooses."""
