"""Pictures of runs. The only importer of matplotlib, which is an optional package (``forgather[plot]``)."""
