"""Benchmarks by lm-evaluation-harness: lm.py answers it with any strategy's model, run.py runs tasks, source.py those
of ``forgather eval``, of which command.py is a part.
"""
