"""Change lines of the pure modules, one at a time, and see whether the tests of their folders fail.

    scripts/mutants --seed 0 --n 60                       # 60 mutants, drawn evenly over all modules
    scripts/mutants --seed 1 --n 40 forgather_cli/data    # of these modules alone
    scripts/mutants --seed 0 --n 60 --quick               # against the first tests alone; without --quick it goes on
    scripts/mutants --seed 0 --n 60 --out before.jsonl    # what is in this file is not done again

A seed draws the same mutants again. Each is run in a copy of the tree, first against the tests that are of its module
alone, then against those of its folder; it is killed by a test that fails, a process that dies or a time that is over.
Survivors are printed at the end as entries of scripts/mutation/equal.toml, where those belong that are equal to the
original, with the reason why; the others want a test. Exit code 1 if there are others, if more than 5 % of the drawn
are equal, or if an entry there does not match the source any more.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from places import Mutant, draw, read
from trials import LIBRARIES, Copies, Outcome, Trial, warm_up

ROOT = Path(__file__).parents[2]
_SHARDED = (
    "checkpoint/test_checkpoint_ranks.py checkpoint/test_golden.py optim/test_optimizers_ranks.py "
    "strategies/test_fsdp2.py strategies/test_stages.py strategies/test_pipeline.py"
)
_TEMPLATE = " ".join(f"data/test_masks.py::test_{name}" for name in (
    "families", "a_conversation_may_begin_with_an_answer_and_a_turn_may_be_written_nowhere",
    "a_loop_over_numbers_tells_as_much_though_a_turn_is_shown_otherwise_once_another_follows",
    "results_may_be_written_with_the_call_and_tools_with_the_last_question",
    "blocks_where_they_stand_are_those_of_transformers",
    "blocks_that_are_written_elsewhere_are_found_where_transformers_masks_what_is_not_theirs",
    "of_a_prompt_nothing_is_learned_under_all", "a_part_of_another_message_is_not_guessed",
    "keys_that_may_be_marks_are_refused_unless_the_template_reads_them",
)) + " data/test_chat.py data/test_data_refusals.py"  # fmt: skip
_UL2 = " ".join(f"data/test_ul2.py::test_{name}" for name in (
    "spans_are_those_of_t5", "a_prefix_is_cut_between_a_fifth_and_four_fifths",
    "corruption_is_the_mean_share_after_a_prefix", "examples_of_the_shipped_mixtures_stay_as_they_were",
    "other_shares_are_other_rules", "every_token_of_a_window_is_in_one_example_that_fits",
    "a_window_is_cut_into_the_fewest_pieces_that_fit",
    "rows_are_full_on_both_sides",
)) + " data/test_data_refusals.py"  # fmt: skip
_TOKENS = "data/test_add_bos.py::test_tokens_from_elsewhere_are_taken_as_they_are_and_that_is_told " + " ".join(
    f"data/test_data_build.py::test_{name}" for name in (
        "documents_end_behind_their_separator_and_evaluation_begins_with_one", "indexes_of_before_are_used_again",
        "bin_and_npy_read_as_one", "documents_of_token_files",
    )
) + " data/test_data_refusals.py"  # fmt: skip
MODULES: dict[str, tuple[str, ...]] = {
    "data/order.py": ("data/test_order.py", "data"),
    "data/packing.py": ("data/test_packing.py data/test_instruct.py::test_rows_in_turn", "data"),
    "data/paired/denoise.py": (_UL2, "data"),
    "data/chat/template.py": (_TEMPLATE, "data"),
    "data/chat/marks.py": ("data/test_marks.py", "data"),
    "data/text/token_files.py": (_TOKENS, "data inspection"),
    "diloco/rounds.py": ("diloco/test_rounds.py", "diloco"),
    "diloco/ledger.py": ("diloco/test_rounds.py", "diloco"),
    "config/batch.py": (
        "config/test_config_errors.py::TestBatchPlan launch/test_auto_batch.py::test_sizes_that_are_left", "config",
    ),
    "config/schedule.py": ("config/test_schedule.py", "trainer callbacks"),
    "optim/schedules.py": ("optim/test_schedules.py", "optim"),
    "optim/transformers_schedules.py": (
        "trainer/test_hugging_face.py::test_schedules_have_the_library_s_values "
        "trainer/test_hugging_face.py::test_values_that_cannot_be_had_are_named", "optim",
    ),
    "checkpoint/retention.py": ("checkpoint/test_retention.py", "checkpoint"),
    "checkpoint/format.py": (
        "checkpoint/test_format.py "
        "checkpoint/test_checkpoint_ranks.py::test_what_one_rank_cannot_save_no_rank_saves", "checkpoint",
    ),
    "shards.py": ("test_shards.py", f"checkpoint/test_mesh.py {_SHARDED}"),
    "strategies/mesh.py": ("strategies/test_degrees.py", f"checkpoint/test_mesh.py {_SHARDED}"),
}  # fmt: skip
"""The pure modules, and tests: those of seconds that are run first, and those that are run where these pass."""
_MOST_EQUAL = 0.05


def main(
    words: list[str],
    root: Path = ROOT,
    modules: dict[str, tuple[str, ...]] = MODULES,
    libraries: Sequence[str] = LIBRARIES,
) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--n", type=int, default=60, help="how many mutants (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=root / "outputs/mutants.jsonl", help="results (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="only the tests of each module alone, not its folder's")
    parser.add_argument("--list", action="store_true", help="print what is drawn, and run nothing")
    parser.add_argument("paths", nargs="*", metavar="PATH", help="modules or folders of forgather_cli/ (default: all)")
    args = parser.parse_args(words)
    package = root / "forgather_cli"
    everything = read(package, list(modules))
    chosen = {file: of for file, of in everything.items() if _is_in(package / file, args.paths)}
    if not chosen:
        parser.error(f"none of the pure modules is in {', '.join(args.paths)}; they are {', '.join(modules)}")
    drawn = draw(chosen, args.seed, args.n)
    equal, stale = _equal(root / "scripts/mutation/equal.toml", everything)
    if args.list:
        print(*drawn, sep="\n")
        return 0
    if args.quick:
        modules = {file: stages[:1] for file, stages in modules.items()}
    results = Results(args.out)
    with tempfile.TemporaryDirectory(prefix="forgather-mutants-") as work:
        wanted = [mutant for mutant in drawn if mutant.key not in equal]
        if any(results.killed_by(mutant, modules[mutant.file]) is None for mutant in wanted):
            warm_up(libraries)
            _run(wanted, modules, results, Copies(root, Path(work), args.jobs))
    return _report(drawn, equal, stale, results, modules)


def _is_in(file: Path, paths: list[str]) -> bool:
    return not paths or any(file.is_relative_to(Path(path).absolute()) for path in paths)


class Results:
    """A file of JSON lines: what tests took without a mutant, and what killed a mutant, if anything of those tests."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.found: dict[tuple[str, str], dict[str, Any]] = {}
        """By tests and the mutant's key, which is empty where there is none."""
        lines = file.read_text().split("\n") if file.exists() else []
        for line in lines:
            if line.endswith("}"):  # else it was being written when the tool was killed
                found = json.loads(line)
                self.found[found["tests"], found["mutant"]] = found
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{json.dumps(found)}\n" for found in self.found.values()))

    def add(self, trial: Trial, outcome: Outcome) -> None:
        mutant = trial.mutant
        found: dict[str, Any] = {"tests": trial.tests, "mutant": mutant.key if mutant else ""}
        found |= {"killed_by": outcome.killed_by, "seconds": round(outcome.seconds, 1)}
        self.found[found["tests"], found["mutant"]] = found
        with self.file.open("a") as file:
            file.write(f"{json.dumps(found)}\n")

    def killed_by(self, mutant: Mutant, stages: tuple[str, ...]) -> str | None:
        """None where it is not known; empty for a survivor."""
        for tests in stages:
            if (found := self.found.get((tests, mutant.key))) is None or found["killed_by"]:
                return None if found is None else str(found["killed_by"])
        return ""


def _run(drawn: list[Mutant], modules: dict[str, tuple[str, ...]], results: Results, copies: Copies) -> None:
    """Every mutant against its first tests, then what is left against the next."""
    for stage in range(max(map(len, modules.values()))):
        left = [
            (mutant, stages[stage])
            for mutant in drawn
            if len(stages := modules[mutant.file]) > stage and results.killed_by(mutant, stages[: stage + 1]) is None
        ]
        wanted = dict.fromkeys(tests for _, tests in left)
        for trial, outcome in copies.run(Trial(tests) for tests in wanted if (tests, "") not in results.found):
            if outcome.killed_by:
                raise SystemExit(f"{outcome.output}\n{trial.tests}: without a mutant: {outcome.killed_by}")
            results.add(trial, outcome)
            print(f"without a mutant  {outcome.seconds:6.1f} s  {trial.tests}", flush=True)
        trials = [Trial(tests, mutant, 30 + 3 * results.found[tests, ""]["seconds"]) for mutant, tests in left]
        for trial, outcome in copies.run(trials):
            results.add(trial, outcome)
            verdict = "killed" if outcome.killed_by else "survived"
            print(f"{verdict:16}  {outcome.seconds:6.1f} s  {trial.mutant}  {outcome.killed_by}", flush=True)


def _equal(file: Path, everything: dict[str, list[Mutant]]) -> tuple[set[str], list[str]]:
    """Keys of the mutants that the file lists, and those of them that are no mutant any more or that have no reason."""
    entries = tomllib.loads(file.read_text()).get("equal", []) if file.exists() else []
    known = {mutant.key for mutants in everything.values() for mutant in mutants}
    stale = [entry["key"] for entry in entries if entry["key"] not in known or not entry["why"]]
    return {entry["key"] for entry in entries}, stale


def _report(
    drawn: list[Mutant], equal: set[str], stale: list[str], results: Results, modules: dict[str, tuple[str, ...]]
) -> int:
    counts: dict[str, Counter[str]] = {file: Counter() for file in modules}
    survivors = []
    for mutant in drawn:
        killed_by = results.killed_by(mutant, modules[mutant.file])
        kind = "equal" if mutant.key in equal else "killed" if killed_by else "survived"
        counts[mutant.file].update(("drawn", kind))
        if kind == "survived":
            survivors.append(mutant)
    rows = {file: count for file, count in counts.items() if count}
    rows["all"] = sum(rows.values(), Counter())
    width = max(map(len, rows))
    columns = ("drawn", "killed", "survived", "equal")
    print(f"\n{'':{width}}  {'  '.join(f'{name:>8}' for name in columns)}")
    for file, count in rows.items():
        print(f"{file:{width}}  {'  '.join(f'{count[name]:8}' for name in columns)}")
    for mutant in survivors:
        print(f'\n# {mutant}\n[[equal]]\nkey = {json.dumps(mutant.key, ensure_ascii=False)}\nwhy = ""')
    for line in stale:
        print(f"stale in equal.toml, or without a reason: {line}")
    too_many = rows["all"]["equal"] > _MOST_EQUAL * len(drawn)
    if too_many:
        print(f"more than {_MOST_EQUAL:.0%} are said to be equal")
    return int(bool(survivors or stale or too_many))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and leave no copies
    sys.exit(main(sys.argv[1:]))
