"""The decoder and what turns settings or a directory into a model with weights.

layers.py      linear, embedding and norm, each of which says how its parameters start
rope.py        rotary position embedding and its scaling types
cache.py       keys and values of positions already seen
decoder.py     the model
init.py        parameters from (seed, name); memory for models built on meta
pretrained.py  config.json to settings and back
files.py       safetensors files of a Hugging Face directory, read by rows
resize.py      rows for tokens that a model does not have yet
hf/            any causal language model of the transformers library (model=transformers)
build.py       an option of the config to a model with weights
transform.py   activation checkpointing and compilation, block by block
generate.py    sampling
"""
