"""Corpora, tokenizers, packing, order and loaders. Nothing is imported here, so that a plan costs no torch."""
