"""What ``forgather train`` would run, as a Trainer in a script: a small model on these pages, in seconds."""

from pathlib import Path

from forgather_cli import compose

pages = Path(__file__).resolve().parents[1]
trainer = compose(
    "default",
    "model=nano",
    "data=text",
    f'data.files=["{pages}/*.md"]',
    "seq_len=64",
    "max_steps=20",
    "warmup_steps=2",
    "logging_steps=5",
    "eval_steps=10",
    "save_steps=10",
    "max_eval_samples=16",
    "callbacks.textgen.max_new_tokens=20",
    "output_dir=outputs/pages",
    "overwrite_output_dir=true",
)
print(f"before: {trainer.evaluate()['eval_loss']:.2f} nats per byte")
result = trainer.train()
print(f"after {result.global_step} steps: {trainer.evaluate()['eval_loss']:.2f}")
