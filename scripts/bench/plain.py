"""What the benches of other things than learning measure with: AdamW and a plain Llama, as most peers train."""

PLAIN = ("optimizer=adamw", "learning_rate=2e-3", "model.qk_norm=false", "model.zero_init_outputs=false")
