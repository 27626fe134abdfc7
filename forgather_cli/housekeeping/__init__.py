"""What is left on a machine, and removing it: ``forgather runs``, ``forgather cache`` and ``forgather doctor``."""
