"""The decoder and what turns settings or a directory into a model with weights.

layers.py      linear, embedding and norm, each of which says how its parameters start
rope.py        rotary position embedding and its scaling types
cache.py       keys and values of positions already seen
decoder.py     the model
families.py    which Hugging Face architecture a set of settings is
init.py        parameters from (seed, name); memory for models built on meta
pretrained.py  config.json to settings and back
build.py       an option of the config to a model; weights from safetensors
transform.py   activation checkpointing and compilation, block by block
generate.py    sampling
"""
