"""Benchmarks by lm-evaluation-harness: lm.py answers it with any strategy's model, run.py runs tasks, source.py those of
``forgather eval``, which command.py is.
"""
