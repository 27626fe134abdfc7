"""Samples to batches on the device: one optimizer step at a time for training, one batch for evaluation."""
