"""Mixtures of sources: which source, and which of its samples, stands at which position of a run.

All is arithmetic on integers; the same settings give the same answer everywhere.
    quotas.py     how many sequences each source should have had at each position: exact fractions
    dealing.py    whole sequences, at every position less than one away from the quotas
    stretches.py  ``Mixture``: settings that change on the way, passes over a source, the state
and what runs make of it.
    settings.py   ``data=mixture``: sources, each an option of data, with weights that may change
    source.py     each source read by its own DataSource, with one tokenizer
    dataset.py    their sequences as one dataset, and its order in training
"""
