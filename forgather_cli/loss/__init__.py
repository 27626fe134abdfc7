"""Losses of language models: sums over targets, to be divided by the number of targets of a whole step.

Labels are those of Hugging Face: ``forgather_cli.labels`` says which position predicts which.

``model_io`` prepares what a loss compares, ``sums`` computes cross entropy, ``kernels`` lets other packages do it,
``eval_metrics`` counts beside them; ``base`` is what strategies see, ``build`` makes the one that settings select.
"""
