"""Runs on disk: which directories are runs, what they have logged, in numbers, and where their time went. No torch."""
