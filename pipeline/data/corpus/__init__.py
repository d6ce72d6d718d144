"""A token corpus on disk: shards in Megatron's format, and a manifest."""
