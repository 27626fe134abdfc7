"""Templates that write the date: the day on which a run begins stays with it, whatever the clock says later."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from chats import conversation, write_chats, write_lines
from program import document, forgather, printed, refusal, write

from forgather_cli.cli.words import quoted
from forgather_cli.config.decode import load_saved
from forgather_cli.config.schema import InstructSettings
from forgather_cli.data.build import load_data
from forgather_cli.data.chat.template import CHATML, ChatTemplate
from forgather_cli.data.splits import DataSplits
from forgather_cli.run_dir import RunDir
from forgather_cli.sweeps.run import plan_jobs

DATED = "<|day|>{{ strftime_now('%d %b %Y') }}\n" + CHATML
FIRST, NEXT = "2026-07-01", "2026-07-02"
WORDS = [
    "model=nano", "precision=fp32", "data=instruct", "data.files=[chats.jsonl]", "data.chat_template=dated.jinja",
    "tokenizer=bytes", "seq_len=300", "packing=pad", "data.cache_dir=cache", "global_batch_size=2", "device=cpu",
    "warmup_steps=1", "eval_strategy=no", "data.add_tokens=false",
    "~callbacks.textgen", "~callbacks.control",
]  # fmt: skip
Clock = Callable[[str], None]

pytestmark = pytest.mark.usefixtures("own_directory")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Sets the clock of commands to a moment."""

    def at(moment: str) -> None:
        class Fixed(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
                return datetime.fromisoformat(moment).astimezone(tz) if tz else datetime.fromisoformat(moment)

        for module in ("launch.start", "data.chat.template"):
            monkeypatch.setattr(f"forgather_cli.{module}.datetime", Fixed)
        tell = time.strftime
        monkeypatch.setattr(time, "strftime", lambda style, *at: tell(style, *(at or (Fixed.now().timetuple(),))))

    return at


@pytest.fixture(autouse=True)
def _files(own_directory: Path) -> None:
    write_chats(Path("chats.jsonl"), 12)
    write("dated.jinja", DATED)


def first_text(data: DataSplits) -> str:
    ids = data.train[0]["input_ids"].tolist()
    return str(data.tokenizer.decode(ids))


def of_run(run: str = "run") -> DataSplits:
    """What a rank on any node reads, of a run."""
    return load_data(load_saved(RunDir(Path(run)).newest_config()).data, seed=42)


def load(**settings: Any) -> DataSplits:
    both: dict[str, Any] = {"chat_template": "dated.jinja", "packing": "pad", "seq_len": 300, "cache_dir": "cache"}
    return load_data(InstructSettings(**{"files": ["chats.jsonl"], **both, **settings}), seed=0)


def test_a_run_keeps_its_day(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    clock(f"{FIRST}T23:59:59")
    done = printed(capsys, "train", *WORDS, "output_dir=run", "max_steps=2")
    assert done.code == 0
    clock(f"{NEXT}T00:00:01")  # a second node past midnight
    shutil.rmtree("cache")
    data = of_run()
    assert first_text(data).startswith("<|day|>01 Jul 2026<|im_start|>")
    assert done.out.count(FIRST) == 1, "said once"
    shutil.rmtree("cache")
    assert forgather("resume", "run", "max_steps=3") == 0
    words = [*WORDS, "output_dir=run", "max_steps=4"]
    assert forgather("train", *words, "resume_from_checkpoint=true") == 0  # composed anew
    saved = {RunDir(Path("run")).later_config(n) for n in (1, 2)}
    assert all(yaml.safe_load(path.read_text())["data"]["template_date"] == FIRST for path in saved)
    assert of_run().fingerprint == data.fingerprint
    state = json.loads(Path("run/checkpoints/step-00000004/state.json").read_text())
    assert data.fingerprint in json.dumps(state)

    shutil.rmtree("cache")
    assert document(capsys, "eval", "run")["data"]["template_date"] == FIRST
    shown = document(capsys, "data", "show", "run", "--count", "1")["samples"][0]
    assert "".join(shown["pieces"]).startswith("<|day|>01 Jul 2026")
    assert forgather("train", *WORDS, "output_dir=run", "overwrite_output_dir=true", "max_steps=1") == 0
    assert first_text(of_run()).startswith("<|day|>02 Jul 2026"), "another run"
    template = ChatTemplate(DATED, {})  # of generate --chat
    assert template.render(conversation(1)).startswith("<|day|>02 Jul 2026")


def test_a_day_that_is_typed_counts(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    clock(f"{NEXT}T12:00:00")
    assert forgather("train", *WORDS, "output_dir=run", "max_steps=1", f"data.template_date={FIRST}") == 0
    assert first_text(of_run()).startswith("<|day|>01 Jul 2026")
    for wrong in ("monday", "2026-13-01", "1"):
        said = refusal(capsys, "train", *WORDS, f"data.template_date='{wrong}'")
        assert f"template_date: must be a day as YYYY-MM-DD, got '{wrong}'" in said
    assert "data.template_date" in refusal(capsys, "resume", "run", "max_steps=2", f"data.template_date={NEXT}")


def test_only_templates_that_write_the_date_have_it_in_their_keys(clock: Clock) -> None:
    days = [load(template_date=day) for day in (FIRST, NEXT)]
    assert [first_text(each)[7:18] for each in days] == ["01 Jul 2026", "02 Jul 2026"]
    assert days[0].fingerprint != days[1].fingerprint
    assert load(template_date=FIRST).fingerprint == days[0].fingerprint
    clock(f"{FIRST}T10:00:00")
    assert load().fingerprint == days[0].fingerprint
    plain = {load(chat_template="chatml", template_date=day).fingerprint for day in (None, FIRST, NEXT)}
    assert plain == {load(chat_template="chatml").fingerprint}
    assert "template_date" not in load(chat_template="chatml").description


def test_streams_have_the_day(clock: Clock) -> None:
    both = {"files": [], "data_files": ["chats.jsonl"], "streaming": True, "eval_fraction": 0.05}
    for day, text in ((FIRST, "01 Jul 2026"), (NEXT, "02 Jul 2026")):
        clock(f"{NEXT}T10:00:00")
        data = load(**both, template_date=day)
        ids = next(iter(data.train))["input_ids"].tolist()
        assert data.tokenizer.decode(ids).startswith(f"<|day|>{text}")
        assert data.description["template_date"] == day
    assert load(**both, template_date=FIRST).fingerprint != data.fingerprint == load(**both).fingerprint


BEFORE = "b5e3a52b83174427faff4e025ad14d14"
"""The fingerprint that these data had before there was the setting."""


def test_a_run_of_before_has_the_day_on_which_it_began(clock: Clock) -> None:
    write_lines(Path("chats.jsonl"), [{"messages": conversation(n)} for n in range(12)])
    clock(f"{FIRST}T22:00:00")
    moment = f"{FIRST}T22:00:00+02:00"
    assert forgather("train", *WORDS, "output_dir=run", "max_steps=1", f"data.template_date='{moment}'") == 0
    assert of_run().fingerprint == BEFORE
    tree = yaml.safe_load(Path("run/config.yaml").read_text())
    del tree["data"]["template_date"]
    Path("run/config.yaml").write_text(yaml.safe_dump(tree))
    origin = yaml.safe_load(Path("run/origin.yaml").read_text()) | {"started_at": moment}
    Path("run/origin.yaml").write_text(yaml.safe_dump(origin))
    shutil.rmtree("cache")
    clock(f"{NEXT}T09:00:00")
    assert forgather("resume", "run", "max_steps=2") == 0
    assert first_text(of_run()).startswith("<|day|>01 Jul 2026")
    assert of_run().fingerprint == BEFORE
    assert forgather("train", *WORDS, "output_dir=run", "max_steps=3", "resume_from_checkpoint=true") == 0
    assert of_run().fingerprint == BEFORE


def test_jobs_of_a_sweep_have_the_day_on_which_it_began(clock: Clock) -> None:
    words = [*WORDS, "max_steps=1", "seed=1,2"]
    clock(f"{FIRST}T23:59:00")
    first, second = plan_jobs(None, words, None)
    clock(f"{NEXT}T00:01:00")  # when the process of the first job begins
    assert forgather("train", *first.overrides, f"output_dir={quoted(first.run.root)}") == 0
    assert first_text(of_run(str(first.run.root)))[7:18] == "01 Jul 2026"
    clock(f"{NEXT}T10:00:00")  # the same command again
    kept, new = plan_jobs(None, words, None)
    dated = [[word for word in job.overrides if "_date" in word] for job in (kept, new)]
    assert dated == [[], [f"data.template_date={FIRST}"]]
    assert (kept.run, new.run) == (first.run, second.run), "they have their names still"
    typed = plan_jobs(None, [*words, f"data.template_date={NEXT}"], None)
    assert all(job.overrides.count(f"data.template_date={NEXT}") == 1 for job in typed)
    others = plan_jobs(None, ["data=synthetic", "max_steps=1,2"], None)
    assert not [word for job in others for word in job.overrides if "_date" in word]
