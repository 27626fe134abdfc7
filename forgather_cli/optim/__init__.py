"""Optimizers by parameter group, the optimizer in the backward, and learning-rate schedules."""
