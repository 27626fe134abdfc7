"""What a run will need, before it runs: parameters, steps, operations and memory. Nothing is trained or downloaded."""
