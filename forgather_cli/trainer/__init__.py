"""The training loop and its Python interface."""
