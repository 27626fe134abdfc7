"""What a run will need, before it runs: parameters, steps, operations and memory. Nothing is trained or downloaded."""

from forgather_cli.plan.memory import RankMemory
from forgather_cli.plan.pipeline import PlannedStage
from forgather_cli.plan.run import RunPlan, make_plan

__all__ = ["PlannedStage", "RankMemory", "RunPlan", "make_plan"]
