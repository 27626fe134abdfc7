"""Stands in for liger-kernel: its name, and of its contents what losses use."""
