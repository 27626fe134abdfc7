"""Checkpoints: one format for all strategies.

    step-00000500/
      manifest.json                      what it is, its metrics, size and SHA-256 of every other file
      model/model.safetensors            weights, or shards and an index; a whole Hugging Face directory
      optimizer/optimizer.safetensors    optimizer tensors, named <parameter>.<state>
      state.json, state.safetensors      components that are equal on all ranks, and their tensors
      state-rank-00000.json, ...         components that each rank has of its own, or has stored for its group or node

``format`` (which byte of which file a tensor's rows are), ``files``, ``manifest``, ``choice`` (of which one a resume
takes) and ``retention`` do without torch.
"""
