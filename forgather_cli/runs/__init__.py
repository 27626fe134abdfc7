"""Runs on disk: which directories are runs, what they have measured, and which of their settings differ. No torch."""
