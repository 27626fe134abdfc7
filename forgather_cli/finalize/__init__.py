"""From a checkpoint to a model directory that other tools load, with a proof that it is the same model."""
