"""A trained model at work: source (which one, of a run, a checkpoint or a directory), generation, and evaluation."""
