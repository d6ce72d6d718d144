"""Hosted bases: decoders of transformers that run as they are, with the expansion beside them."""
