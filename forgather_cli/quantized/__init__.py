"""What torchao does in training and behind it: ``precision=fp8``, ``precision=qat``, and recipes of finalize."""
