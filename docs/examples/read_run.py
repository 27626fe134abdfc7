"""What a run has left: metrics as a table, checkpoints, and the model. Run compose.py first."""

from forgather_cli import Run

run = Run("outputs/pages")
print(run.config["learning_rate"], "to step", run.exit.step, "which is", run.exit.state)

for row in run.table("loss", "eval_loss"):  # pandas.DataFrame(run.table()) is a frame of all metrics
    print(row)

for checkpoint in run.checkpoints:
    print(checkpoint.step, checkpoint.metrics)

print(run.generate("The ", max_new_tokens=20))
model = run.model(run.checkpoints[0].step)  # in eval mode, with the weights of the first checkpoint
print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
