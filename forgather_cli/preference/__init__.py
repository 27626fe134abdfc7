"""Preferences: data of pairs, and the losses that compare the two sides of each."""
