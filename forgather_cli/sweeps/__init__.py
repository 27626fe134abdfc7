"""A run for each combination of values: ``forgather train -m``."""
