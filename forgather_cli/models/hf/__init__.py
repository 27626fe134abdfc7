"""Causal language models of the transformers library as models of ours: built, initialised, loaded, run."""
