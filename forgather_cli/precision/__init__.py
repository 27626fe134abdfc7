"""Number formats of a run: ``dtypes`` says which, ``scaling`` keeps small gradients of fp16."""
