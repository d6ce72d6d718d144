"""The decoder on two streams, for every family of bases, and its names in Hugging Face's
folders."""
