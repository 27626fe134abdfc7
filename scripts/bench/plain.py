"""What the benches of other things than learning measure with: fp32, AdamW and a plain Llama, as most peers train."""

PLAIN = (
    "precision=fp32", "optimizer=adamw", "learning_rate=2e-3", "model.qk_norm=false", "model.zero_init_outputs=false",
)  # fmt: skip
