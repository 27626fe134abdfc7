"""Conversations: chat templates, records of chat files, and their tokens with a mask of the targets."""
