"""Preferences: pairs of a chosen and a rejected answer, and the losses that learn from them."""
