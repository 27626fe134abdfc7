"""Config mistakes: one clear line each, all at once."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
import yaml
from omegaconf import OmegaConf
from program import write

from forgather_cli.config.batch import BatchPlan, batch_plan
from forgather_cli.config.decode import dump_tree
from forgather_cli.config.diloco import load_server_settings
from forgather_cli.config.load import load_config
from forgather_cli.config.mistakes import ELSEWHERE
from forgather_cli.config.options import GROUPS, shipped
from forgather_cli.config.paths import settings, walk
from forgather_cli.config.schema import RunSettings
from forgather_cli.errors import ConfigError

Problems = Callable[..., list[str]]


@pytest.fixture
def problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Problems:
    monkeypatch.chdir(tmp_path)

    def find(*overrides: str, recipe: str | None = None, config_dir: Path | None = None) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load_config(recipe, overrides, config_dir=config_dir)
        assert caught.value.exit_code == 2
        return caught.value.problems

    return find


def words(overrides: str) -> list[str]:
    return re.split(r" (?=[+\w.]{2,}=)", overrides)


TYPED_WRONG = {
    "learning_rat=1": "learning_rat: unknown setting; did you mean learning_rate?",
    "model.hiden_size=3": "model.hiden_size: unknown setting; did you mean model.hidden_size?",
    "top_k=3": "top_k: unknown setting; did you mean callbacks.textgen.top_k or ",
    "post_local_sgd.perod=3": "post_local_sgd.perod: unknown setting;",
    "callbacks.textgn.top_k=3": "callbacks.textgn.top_k: unknown callback; did you mean textgen?",
    "+callbacks.mine.every=3": "callbacks.mine.every: unknown callback; One of your own needs callbacks.mine._target_",
    "model=tinyy": "model=tinyy: no such option; did you mean tiny? Options: decoder, nano,",
    "trainer=5": "trainer=5: no such option; Options: ddp, fsdp2, pipeline, single",
    "loss=null": "loss=null: no such option; Options: auto, cross_entropy, ",
    "n_microbatches=8": "n_microbatches: only trainer=pipeline has this setting, but trainer=single is selected",
    "files=[x]": "files: only data=text|tokens|instruct|ul2|seq2seq|preference has this setting, but data=python",
    "beta2_decay=-1": "beta2_decay: only optimizer=adafactor has this setting, but optimizer=muon is selected",
    "trainer.type=ddp": "trainer.type: follows from the option; choose one with trainer=...",
    "recipe=x": "recipe: is named by the first word",
    "seq_len=x": "seq_len: must be a whole number, got 'x'",
    "max_steps=10.0": "max_steps: must be a whole number, got 10.0; write max_steps=10",
    "max_eval_steps=0": "max_eval_steps: must be -1 or greater than 0, got 0",
    "per_device_train_batch_size=0": "per_device_train_batch_size: must be greater than 0, got 0",
    "learning_rate=big": "learning_rate: must be a number, got 'big'",
    "learning_rate=nan": "learning_rate: must be a finite number, got nan",
    "torch_compile=on_gpu": "torch_compile: must be true or false or auto, got 'on_gpu'",
    "eval_strategy=stps": "eval_strategy: must be no, steps or epoch, got 'stps'; did you mean steps?",
    "nproc_per_node=x": "nproc_per_node: must be a whole number or auto, got 'x'",
    "resume_components=[model,foo]": "resume_components.1: must be model, optimizer, scheduler,",
    "rdzv_id=5": "rdzv_id: must be text, got 5;",
    "betas=[0.1]": "betas: must have more values, got [0.1]; give 2 or more",
    "betas=[0.1,1.0]": "betas.1: must be less than 1, got 1.0",
    "betas=0.9": "betas: must be a list, got 0.9; write betas=[0.9,0.95]",
    "lr=1e-3": "lr: unknown setting; did you mean learning_rate?",
    "bf16=true": "bf16: unknown setting; did you mean precision=bf16?",
    "device=gpu": "device: must be auto, cpu, cuda, cuda:N (a number) or mps, got 'gpu'; set it to auto",
    "hidden_size=12": "model.hidden_size: rotary embedding needs an even head size, got 12 / model.num_attention_heads",
    "head_dim=1": "model.head_dim: rotary embedding needs an even head size, got 1; set model.head_dim=2",
    "+optimizer.groups.x={regex: '('}": "optimizer.groups.x.regex: not a regular expression (missing ), unterminated",
    "+optimizer.groups.x={regex: a, settings: {weight_decey: 0}}": (
        "optimizer.groups.x.settings.weight_decey: muon has no such setting; did you mean weight_decay?"
    ),
    "+optimizer.groups.x={regex: a, optimizer: {type: sgd, nesterov: true}}": (
        "optimizer.groups.x.settings.nesterov: looks ahead along the momentum, got momentum=0; set momentum=0.9"
    ),
    "data=text": "data.files: required by data=text; set data.files=[...]",
    "logging_dir=${nothing}": "logging_dir: cannot be resolved",
    "a b=1": "a b=1: not an override",
    "learning_rate=1,2": "learning_rate=1,2: several values; add -m",
    "lr_scheduler={_target_: torch.optim.lr_scheduler.StepLR, step: 3}": "lr_scheduler.step: torch.optim.lr_scheduler",
    "optimizer={type: sgd, momentum: 0.9}": "optimizer.type: follows from the option; choose it with optimizer=sgd,",
    "warmup_steps=10.5": "lr_scheduler.warmup_steps: must be whole steps, or below 1 a fraction of all, got 10.5",
    "warmup_steps=500": "warmup_steps: 500 steps are more than the run has, so learning_rate=0.005 is never reached",
    "+callbacks.x._target_=collections.OrderedDict": "callbacks.x._target_: is no callback, got collections.Ordered",
    "+callbacks.x._target_=os.path": "callbacks.x._target_: cannot import os.path (it is a module, no class",
    "+callbacks.x={_target_: forgather_cli.callbacks.base.TrainerCallback, pth: x}": "callbacks.x.pth: forgather_cli.",
    "callbacks=none": "callbacks=none: no such option; remove it with ~callbacks;",
    "+callbacks.wandb={}": "callbacks.wandb: unknown callback; did you mean callbacks.trackers.names=[wandb]?",
    "model.n_layer=3": "model.n_layer: unknown setting; did you mean model.num_hidden_layers?",
    "+trackers.names=[a]": "trackers.names: unknown setting; did you mean callbacks.trackers.names?",
    "output_dir=": "output_dir: is empty; name a directory",
    "callbacks.textgen=false": "callbacks.textgen: must be a mapping of settings, got false; remove it with ~callbacks",
    "callbacks.textgen.generation_config={topk:1}": "callbacks.textgen.generation_config.topk: unknown setting; did",
    "callbacks.textgen.prompts=[]": "callbacks.textgen.prompts: is empty; give texts or a YAML file",
    "seed=range(3)": "seed=range(3): several values; add -m",
    "hydra.run.dir=x": "hydra.run.dir: Hydra's own settings have no effect here",
    "+max_steps=3": "+max_steps: is there already; leave the + out",
    "~nothing": "~nothing: nothing of that name to remove",
    "~max_steps=3": "~max_steps: is 300, not 3",
    "optimizer.groups.no_dcay.regex=x": "optimizer.groups.no_dcay.regex: nothing of that name there; did you mean no_d",
    "++callbacks.mine._target_=collections.Nothing": "callbacks.mine._target_: cannot import collections.Nothing (",
    "trainer=fsdp2 replicate=3 nproc_per_node=4": "replicate: 4 ranks cannot be divided into 3 copies of the model; "
    "set it to a div",
    "trainer=fsdp2 param_dtype=fp16": "param_dtype: fp16 needs the loss scaling of precision=fp16; set that",
    "trainer=fsdp2 param_dtype=fp32 precision=bf16": "param_dtype: fp32 contradicts precision=bf16; set precision=fp32",
    "trainer=fsdp2 optimizer=adafactor": "optimizer: adafactor cannot train parameters of which each rank holds some "
    "rows",
    "trainer=fsdp2 +optimizer.groups.embed={regex: embed, optimizer: {type: "
    "adafactor}}": "optimizer.groups.embed.optimizer: adafac",
    "trainer=fsdp2 block_classes=[]": "block_classes: names no class, got []",
    "trainer=fsdp2 reshard_after_forward=2": "reshard_after_forward: must be true or false, got 2",
    "data=synthetic precision=fp16 trainer=pipeline": "precision: fp16 scales the loss, which trainer=pipeline does "
    "not; set precision=bf16",
    "data=synthetic precision=fp16 optimizer=adamw fuse_optim_with_backward=true "
    "max_grad_norm=null": "fuse_optim_with_backward: steps before",
    "data=synthetic precision=fp16 trainer=ddp post_local_sgd.enabled=true": "post_local_sgd.enabled: ranks that train "
    "by themselves would",
    "data=synthetic precision=fp16 trainer=ddp comm_hook=powersgd": "comm_hook: an overflow of precision=fp16 would "
    "stay in powersgd's error",
    "data=synthetic precision=fp16 trainer=fsdp2 param_dtype=bf16": "param_dtype: bf16 contradicts precision=fp16; set "
    "precision=bf16",
    "data=synthetic precision=bf16_true trainer=ddp comm_hook=fp16_compress": "comm_hook: fp16_compress makes "
    "gradients of precision=bf16_tru",
    "data=synthetic precision=bf16_true trainer=fsdp2 param_dtype=fp32": "param_dtype: fp32 contradicts "
    "precision=bf16_true",
    "data=synthetic precision=fp8 emulate=false device=cpu": "emulate: device=cpu does not multiply in float8",
    "data=synthetic precision=fp8 precision.exclude=['(']": "precision.exclude: not a regular expression",
    "data=synthetic precision=fp8 loss=linear_cross_entropy precision.exclude=[]": "precision.exclude: "
    "loss=linear_cross_entropy",
    "data=synthetic precision=fp8 trainer=fsdp2 param_dtype=fp32": "param_dtype: fp32 contradicts precision=fp8",
    "data=synthetic precision=qat qat_recipe=int8-weight-only group_size=32": "group_size: nothing reads it with "
    "qat_recipe=int8-weight",
    "data=synthetic precision=qat group_size=1": "group_size: must be at least 2, got 1",
    "data=synthetic precision=qat qat_recipe=int4-weight-only group_size=16": "group_size: qat_recipe=int4-weight-only "
    "takes one of",
    "data=synthetic precision=qat loss=linear_cross_entropy precision.exclude=[]": "precision.exclude: "
    "loss=linear_cross_entropy",
    "data=synthetic precision=qat trainer=fsdp2 param_dtype=bf16": "param_dtype: bf16 contradicts precision=qat",
    "+callbacks.trackers.names=[wandbb]": "callbacks.trackers.names: unknown tracker, got 'wandbb'; did you mean "
    "wandb?",
    "+callbacks.trackers.names=[]": "callbacks.trackers.names: is empty; name a tracker, or remove it with "
    "~callbacks.trackers",
    "+callbacks.trackers.names=wandb": "callbacks.trackers.names: must be a list",
    "+callbacks.trackers.init_kwargs={mlflow: {run_id: a}}": "callbacks.trackers.init_kwargs.mlflow: nothing reads it, "
    "since",
    "+callbacks.trackers.run=a": "callbacks.trackers.run: unknown setting",
    "model=nano callbacks.divergence.threshold=null": "callbacks.divergence.threshold: null without relative_threshold "
    "judges nothing",
    "model=nano callbacks.divergence.max_rollbacks=2": "callbacks.divergence.max_rollbacks: nothing reads it with "
    "action=stop",
    "model=nano callbacks.divergence.use_eval_loss=true "
    "callbacks.divergence.metric_key=loss": "callbacks.divergence.metric_key: names another metric",
    "model=nano callbacks.divergence.use_eval_loss=true eval_strategy=no": "callbacks.divergence.use_eval_loss: needs "
    "evaluations",
    "model=nano callbacks.divergence.action=rollback save_strategy=no": "callbacks.divergence.action: rollback needs "
    "checkpoints",
    "model._target_=own_stages.Words trainer=pipeline model_splitter=own_stages.split": "model_splitter: must be a "
    "mapping with a _target_, got 'own_stages.split'",
    "trainer=pipeline schedule=Zigzag": "schedule: must be 1F1B, GPipe, Interleaved1F1B, LoopedBFS, "
    "InterleavedZeroBubble, ZBVZeroBubble or DualPipeV or a mapping with a _target_, got 'Zigzag'",
}
"""Overrides -> how the one line begins that they are told in."""


@pytest.mark.parametrize("overrides", TYPED_WRONG)
def test_one_mistake_one_line(problems: Problems, overrides: str) -> None:
    found = problems(*words(overrides))
    assert len(found) == 1, found
    assert found[0].startswith(TYPED_WRONG[overrides])
    assert "\n" not in found[0]


def test_names_from_elsewhere_are_no_settings_of_ours_and_stand_for_some() -> None:
    of_others = ("callbacks.", "diloco.")
    known = {*settings(), *GROUPS, *(s.leaf for path, s in settings().items() if not path.startswith(of_others))}
    for name, meant in ELSEWHERE.items():
        assert name not in known, name
        for each in meant.split(" or "):
            setting, _, value = each.partition("=")
            assert setting in known | {"callbacks.trackers"} or setting in settings(), each
            assert not value or setting not in GROUPS or (shipped("conf") / setting / f"{value}.yaml").is_file(), each


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("base_model", "model.path"), ("lora_r", "adapter.r"), ("lora_rank", "adapter.r"),
        ("sample_packing", "data.packing=best_fit"), ("val_set_size", "data.eval_fraction"),
        ("lora_target_linear", "adapter.target_modules=all-linear"), ("evals_per_epoch", "eval_steps"),
        ("wandb_project", "callbacks.trackers.project"), ("micro_batch_size", "per_device_train_batch_size"),
        ("num_epochs", "num_train_epochs"), ("cutoff_len", "seq_len"), ("load_in_4bit", "adapter=qlora"),
        ("template", "data.chat_template"), ("datasets", "data.files or data.dataset"),
    ],
)  # fmt: skip
def test_names_of_other_trainers_get_ours_in_a_recipe_and_on_the_command_line(
    problems: Problems, tmp_path: Path, typed: str, meant: str
) -> None:
    assert problems(f"{typed}=1") == [f"{typed}: unknown setting; did you mean {meant}?"]
    file = write(tmp_path / "theirs.yaml", f"defaults: [train, _self_]\n{typed}: 1\n")
    assert problems(recipe=str(file)) == [f"{typed}: unknown setting in {file}; did you mean {meant}?"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("deepspeed", "trainer=fsdp2"), ("ddp", "trainer=ddp"), ("lerning_rate", "learning_rate"), ("seeds", "seed"),
        ("learningrate", "learning_rate"), ("evaluation_strategy", "eval_strategy"), ("min_lr", "min_lr_ratio"),
        ("n_micro_batches", "n_microbatches"), ("save_total", "save_total_limit"), ("num_eval_steps", "eval_steps"),
        ("lr_scheduler.warmup", "lr_scheduler.warmup_steps"), ("weigth_decay", "weight_decay"),
        ("loss_fn", "loss"),
        *((other, None) for other in ("step_size", "ddp_backend", "lora", "T_max", "push_to_hub")),
    ],
)  # fmt: skip
def test_suggestions_are_the_same_words_mistyped_and_no_others(
    problems: Problems, typed: str, meant: str | None
) -> None:
    (found,) = problems(f"{typed}=1")
    assert found.startswith(f"{typed}: unknown setting;")
    assert f"did you mean {meant}?" in found if meant else "did you mean" not in found


@pytest.mark.parametrize(
    ("overrides", "wrong", "near"),
    [
        (["data=txt", "data.files=[a]"], "data=txt", "text"),
        (["trainer=dpp", "trainer.comm_hook=x"], "trainer=dpp", "ddp"),
        (["loss=ce", "loss.x=1"], "loss=ce", "cross_entropy"),
    ],
)
def test_a_mistyped_option_with_a_setting_of_it_is_one_mistake_beside_others(
    problems: Problems, overrides: list[str], wrong: str, near: str
) -> None:
    (found,) = problems(*overrides)
    assert found.startswith(f"{wrong}: no such option;")
    assert near in found
    assert len(problems(*overrides, "max_steps=x", "learning_rat=1")) == 3


def test_mistakes_in_a_recipe_name_the_file(problems: Problems, tmp_path: Path) -> None:
    file = write(
        tmp_path / "recipes/mine.yaml",
        "defaults: [train, _self_]\nlearning_rat: 1\nn_microbatches: 8\nmodel: {hiden_size: 3}\nsave_steps: soon\n",
    )
    assert problems(recipe="mine") == [
        f"save_steps: must be a number, got 'soon' in {file}",
        f"model.hiden_size: unknown setting in {file}; did you mean model.hidden_size?",
        f"n_microbatches: only trainer=pipeline has this setting, but trainer=single is selected in {file}; "
        "choose trainer=pipeline or remove it with ~n_microbatches",
        f"learning_rat: unknown setting in {file}; did you mean learning_rate?",
    ]


def test_the_advice_for_a_text_gives_what_was_typed(problems: Problems, tmp_path: Path) -> None:
    """Hydra and YAML make numbers of 2023_09 and 1e5: as a name, another one is meant than their digits say."""
    for typed in ("2023_09", "1E5", "1.50", "TRUE", "inf"):
        for name in ("output_dir", "data.tokenizer", "resume_from_checkpoint"):
            if name == "resume_from_checkpoint" and typed.lower() == "true":
                continue
            (problem,) = problems(f"{name}={typed}")
            advice = f"""{name}="'{typed}'\""""
            assert re.fullmatch(rf"{name}: must be .*text, got {re.escape(typed)}; write {re.escape(advice)}", problem)
            assert dict(walk(load_config(None, shlex.split(advice), cwd=tmp_path).tree))[name] == typed
    assert problems("data=text", "files=[a,2023_09,1e5]", "text_key=1_0") == [
        "files.1: must be text, got 2023_09; write '2023_09' with the quotes",
        "files.2: must be text, got 1e5; write '1e5' with the quotes",
        """text_key: must be text, got 1_0; write text_key="'1_0'\"""",
    ]
    write(tmp_path / "conf/model/2023_09.yaml", "defaults: [nano]\n")
    assert problems("model=2023_09") == ["""model=2023_09: is read as 202309; write model="'2023_09'\""""]
    load_config(None, ["model='2023_09'"], cwd=tmp_path)
    assert problems("model=1e9")[0].startswith("model=1e9: no such option")
    with pytest.raises(ConfigError, match=r"""diloco\.host: must be text, got 1e5; write diloco\.host="'1e5'\""""):
        load_server_settings(["diloco.host=1e5"])


def test_the_advice_for_a_text_gives_what_a_file_has(problems: Problems, tmp_path: Path) -> None:
    option = write(tmp_path / "conf/data/mine.yaml", "type: text\nfiles: [2023_09]\ntext_key: 1e5\n")
    file = write(
        tmp_path / "recipes/mine.yaml",
        "defaults: [train, {override data: mine}, _self_]\noutput_dir: 2023_09 # of September\njob_id: 0x10\n"
        "logging_dir: no\nmetric_for_best_model: 1:30\ntokenizer: 010\ndata:\n  eval_files:\n  - a\n  - 1_0\n",
    )
    found = dict(problem.split(": ", 1) for problem in problems(recipe="mine"))
    typed = {"output_dir": "2023_09", "job_id": "0x10", "logging_dir": "no", "metric_for_best_model": "1:30",
             "tokenizer": "010", "data.eval_files.1": "1_0"}  # fmt: skip
    of_option = {"data.files.0": "2023_09", "data.text_key": "1e5"}
    for name, text in (typed | of_option).items():
        at = option if name in of_option else file
        assert found.pop(name) == f"must be text, got {text} in {at}; write '{text}' with the quotes"
        at.write_text(re.sub(rf"(?m)(: |- |\[){text}( |$|\])", rf"\1'{text}'\2", at.read_text()))
    assert not found
    loaded = load_config("mine", ["++callbacks.control={}"], cwd=tmp_path)
    assert (loaded.config.output_dir, loaded.config.job_id, loaded.config.data.text_key) == ("2023_09", "0x10", "1e5")
    # what is shown is a recipe: it has the quotes that it needs
    shown = dump_tree({**loaded.tree, "job_id": "1e5"})
    assert OmegaConf.create(shown)["job_id"] == yaml.safe_load(shown)["job_id"] == "1e5"


def test_mistakes_in_a_users_option_name_the_file(problems: Problems, tmp_path: Path) -> None:
    file = write(tmp_path / "conf/model/own.yaml", "type: decoder\nhiden_size: 3\nnum_hidden_layers: x\n")
    assert sorted(problems("model=own")) == [
        f"model.hiden_size: unknown setting in {file}; did you mean model.hidden_size?",
        f"model.num_hidden_layers: must be a whole number, got 'x' in {file}",
    ]
    write(file, "hidden_size: 3\n")
    types = "types: decoder, qwen3_encdec, pretrained, transformers"
    assert problems("model=own") == [f"model: an option names a _target_ or its type, got null in {file}; {types}"]
    write(file, "type: decoder\nhidden_size: [\n")
    assert re.search(r"own\.yaml.*line \d", problems("model=own")[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not valid YAML"),
        ("seed: 1\nseed: 2\ndefaults: [train]\n", "not valid YAML"),
        ("- 1\n", "must be a mapping"),
        ("seed: 1\n", "a recipe begins with 'defaults: [train, _self_]'"),
        ("defaults: [_self_]\n", "its defaults list starts from nothing"),
        ("defaults: [train, {model: nano}, _self_]\n", "model: train chooses it already"),
        ("defaults: [train, {override model: nanno}, _self_]\n", "model=nanno: no such option; did you mean nano?"),
        ("defaults: [train, {override modle: nano}, _self_]\n", "modle: no such group"),
        ("defaults: [trian, _self_]\n", "recipe trian: no such recipe"),
        ("defaults: [mine, _self_]\n", "starts from itself"),
        ("defaults: [train, _self_]\nmodel: nano\n", "write '- override model: nano' there"),
        ("defaults: [train, _self_]\nhydra: {}\n", "hydra: Hydra's own settings"),
        ("defaults: [train, _self_]\nseq_len: 3\ndata: {seq_len: 4}\n", "seq_len: set twice, data.seq_len"),
        ("defaults: [train, _self_]\nlogging_dir: ${a.b}\n", "logging_dir: cannot be resolved"),
    ],
)
def test_broken_recipes(problems: Problems, tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path / "recipes/mine.yaml", text)
    found = problems(recipe="mine")
    assert any(message in problem for problem in found), found
    if "resolved" not in message:
        assert any(str(file) in problem for problem in found), found


def test_missing_recipes_and_those_that_replace_a_shipped_file(problems: Problems, tmp_path: Path) -> None:
    assert problems(recipe="defalt")[0].startswith("recipe defalt: no such recipe; did you mean default? Recipes:")
    assert problems(recipe="./no.yaml")[0].startswith("recipe ./no.yaml: no such file")
    assert problems(config_dir=tmp_path / "no")[0].startswith("--config-dir: no such directory, got")
    option = write(tmp_path / "conf/model/tiny.yaml", "type: decoder\n")
    recipe = write(tmp_path / "recipes/default.yaml", "defaults: [train]\n")
    found = problems()
    for what, own, folder in (("model=tiny:", option, "conf"), ("recipe default:", recipe, "recipes")):
        assert any(p.startswith(what) and str(own) in p and str(shipped(folder)) in p for p in found)


def test_a_plain_copy_of_the_shipped_files_replaces_nothing(tmp_path: Path) -> None:
    """As in a checkout whose package is installed elsewhere."""
    for folder in ("conf", "recipes"):
        copytree(shipped(folder), tmp_path / folder)
    assert load_config(None, [], cwd=tmp_path).config.recipe == "default"


def test_targets_are_bound_before_anything_starts(problems: Problems, tmp_path: Path) -> None:
    write(
        tmp_path / "own_parts_k1.py",
        "def net(vocab_size, *, width): ...\ndef loss(logits, labels, alpha=1): ...\n"
        "class Opt:\n    def __init__(self, params, lr, rho): ...\n",
    )
    write(tmp_path / "own_broken_k1.py", "raise RuntimeError('not today')\n")
    for group, target in {"model": "net", "loss": "loss", "optimizer": "Opt"}.items():
        write(tmp_path / f"conf/{group}/own.yaml", f"_target_: own_parts_k1.{target}\n")
    write(tmp_path / "conf/model/broken.yaml", "_target_: own_broken_k1.Net\n")
    assert problems("model=own", "loss=own", "++loss.alpa=2", "optimizer=own") == [
        "model.width: own_parts_k1.net requires it; set model.width=...",
        "optimizer.rho: own_parts_k1.Opt requires it; set optimizer.rho=...",
        "loss.alpa: own_parts_k1.loss takes no such argument; did you mean alpha? Arguments: alpha",
    ]
    assert "RuntimeError: not today" in problems("model=broken")[0]
    own = "{regex: head, optimizer: {_target_: own_parts_k1.Opt, rho: 1, roh: 2}}"
    [found] = problems(f"+optimizer.groups.head={own}")
    assert found.startswith("optimizer.groups.head.optimizer.roh: own_parts_k1.Opt")


CONTRADICTIONS = {
    "fuse_optim_with_backward=true": "fuse_optim_with_backward: gradients are gone before max_grad_norm=1",
    "fuse_optim_with_backward=true max_grad_norm=null gradient_accumulation_steps=4": "gradient_accumulation_steps=4",
    "fuse_optim_with_backward=true max_grad_norm=0 per_device_train_batch_size=4": "global_batch_size=8 with",
    "fuse_optim_with_backward=true max_grad_norm=0 optimizer=muon": "optimizer=muon brings AdamW",
    "optimizer=adamw fuse_optim_with_backward=true max_grad_norm=0 "
    "+optimizer.groups.h={regex: h, optimizer: {type: sgd}}": "groups.h",
    "fuse_optim_with_backward=true max_grad_norm=0": "choose optimizer=adamw",
    "fuse_optim_with_backward=true max_grad_norm=0 trainer=ddp": "not possible with trainer=ddp; choose trainer=single",
    "trainer=pipeline schedule=ZBVZeroBubble torch_compile=true": "torch_compile: compiled blocks get wrong gradients",
    **{
        f"torch_compile=true torch_compile_scope=model trainer={trainer}": f"torch_compile_scope: trainer={trainer} "
        "compiles block by block, got model; set torch_compile_scope=blocks"
        for trainer in ("fsdp2", "pipeline")
    },
    "torch_compile=true torch_compile_scope=model optimizer=adamw fuse_optim_with_backward=true max_grad_norm=0": (
        "torch_compile_scope: fuse_optim_with_backward=true compiles block by block, got model"
    ),
    "torch_compile_scope=blocks": "torch_compile_scope: nothing reads it with torch_compile=false",
    "trainer=pipeline schedule=ZBVZeroBubble loss=liger": "loss: the kernels of liger have one backward",
    "loss=liger device=cpu": "loss: liger needs a CUDA GPU and Triton, got device=cpu; set loss=linear_cross_entropy",
    "loss=cut_cross_entropy device=cuda:1 precision=fp32": "loss: the backward of cut_cross_entropy takes bf16",
    "loss=cut_cross_entropy deterministic=true": "deterministic: the kernels of loss=cut_cross_entropy add up in any",
    "loss=cut_cross_entropy z_loss=0.1": "z_loss: only loss=auto|cross_entropy|",
    "trainer=pipeline nproc_per_node=4 n_microbatches=2": "n_microbatches: schedule=1F1B with 4 stages needs at least",
    "trainer=pipeline schedule=DualPipeV nproc_per_node=2 n_microbatches=2": "DualPipeV with 4 stages needs at least",
    "trainer=pipeline schedule=InterleavedZeroBubble nproc_per_node=2 n_microbatches=5 global_batch_size=null "
    "per_device_train_batch_size=5": "n_microbatches: schedule=InterleavedZeroBubble on 2 ranks needs a multiple of 2",
    "trainer=pipeline shard=2 nproc_per_node=2": "trainer: pipeline with shard=2 needs at least 4 ranks, got 2",
    "trainer=pipeline shard=2 nproc_per_node=5": "shard: 5 ranks cannot be divided into groups of 2",
    "trainer=pipeline shard=2 schedule=ZBVZeroBubble": "set shard=1 or schedule=Interleaved1F1B",
    "trainer=pipeline shard=2 nproc_per_node=4 optimizer=adafactor": "optimizer: adafactor cannot train parameters",
    "trainer=pipeline shard=2 nproc_per_node=4 global_batch_size=7": "global_batch_size: 7 sequences cannot be shared",
    "trainer=pipeline schedule=GPipe stages_per_rank=2": "schedule=GPipe runs one stage per rank, got 2",
    "trainer=pipeline schedule=ZBVZeroBubble stages_per_rank=4": "runs exactly two stages per rank, got 4",
    "trainer=pipeline schedule=LoopedBFS stages_per_rank=1": "interleaves several stages per rank, got 1",
    "trainer=pipeline nproc_per_node=2 split=[1,1,2]": "split: names 3 stages, schedule and ranks make 2",
    "data=text data._target_=mine.data": "data._target_: takes the place of data=text; leave one of them out",
    "trainer=pipeline n_microbatches=3": "divisible by n_microbatches=3",
    "gradient_accumulation_steps=3": "gradient_accumulation_steps: 3 disagrees with global_batch_size=8",
    "trainer=ddp comm_hook=powersgd post_local_sgd.enabled=true": "post_local_sgd.enabled: excludes comm_hook=powersgd",
    "trainer=ddp post_local_sgd.enabled=true nproc_per_node=4 post_local_sgd.subgroup=3": "4 ranks cannot be divided",
    "trainer=ddp post_local_sgd.period=8": "period: nothing reads it with enabled=false; set post_local_sgd.enabled",
    "trainer=ddp skip_all_reduce_unused_params=true": "nothing reads it with find_unused_parameters=false; set find",
    "load_best_model_at_end=true eval_strategy=no": "load_best_model_at_end: needs evaluations, got eval_strategy=no",
    "load_best_model_at_end=true save_strategy=no": "load_best_model_at_end: needs checkpoints, got save_strategy=no",
    "greater_is_better=true": "greater_is_better: true keeps the worst metric_for_best_model=eval_loss",
    "hang_timeout=8": "hang_timeout: ends the job before hang_report_after=30 says which rank hangs, got 8; set hang",
    "hang_report_after=1900": "hang_timeout: ends the job before hang_report_after=1900 says which rank hangs, got 18",
    "activation_memory_budget=0.5": "activation_memory_budget: nothing reads it with torch_compile=false",
    "dataloader_prefetch_factor=2": "dataloader_prefetch_factor: nothing reads it with dataloader_num_workers=0; set",
    "dataloader_persistent_workers=true": "dataloader_persistent_workers: nothing reads it with dataloader",
    "max_steps=-1 num_train_epochs=-1": "max_steps: -1 with num_train_epochs=-1 never ends on data=python_stdlib",
    "max_steps=-1 num_train_epochs=-1 data=hf data_files=[a.jsonl]": "num_train_epochs=-1 never ends on data=hf",
    "max_steps=-1 num_train_epochs=0": "num_train_epochs: must be above 0 with max_steps=-1, got 0",
    "max_steps=0": "max_steps: 0 trains nothing",
    "resume_from_checkpoint=true overwrite_output_dir=true": "nothing reads it with resume_from_checkpoint=true",
    "eval_strategy=no eval_steps=5": "eval_steps: nothing reads it with eval_strategy=no; set eval_strategy=steps",
    "logging_strategy=no logging_steps=5": "logging_steps: nothing reads it with logging_strategy=no",
    "gradient_checkpointing_every=2": "gradient_checkpointing_every: nothing reads it with gradient_checkpointing=",
    "save_strategy=best eval_strategy=no": "save_strategy: best saves after an evaluation, got eval_strategy=no; set e",
    "save_strategy=best data=synthetic num_eval_samples=0": "save_strategy: needs evaluations, got num_eval_samples=0",
    "save_strategy=best save_steps=5": "save_steps: nothing reads it with save_strategy=best",
    "nproc_per_node=2": "nproc_per_node: nothing reads it with trainer=single; choose trainer=ddp, fsdp2 or pipeline",
    "replication_check=full": "replication_check: nothing reads it with trainer=single; choose trainer=ddp, fsdp2",
    "bpe_vocab_size=300 tokenizer=bytes": "bpe_vocab_size: nothing reads it with tokenizer=bytes; set tokenizer=bpe",
    "torch_compile_mode=default": "torch_compile_mode: nothing reads it with torch_compile=false",
    "num_train_epochs=2": "num_train_epochs: nothing reads it with max_steps=300; set max_steps=-1",
    "optimizer=sgd nesterov=true": "nesterov: looks ahead along the momentum, got momentum=0; set momentum=0.9 or",
    "load_best_model_at_end=true data=synthetic num_eval_samples=0": "needs evaluations, got num_eval_samples=0, which",
    "load_best_model_at_end=true eval_fraction=0": "needs evaluations, got eval_fraction=0.0, which leaves nothing",
    "load_best_model_at_end=true data=hf dataset=x streaming=true": "needs evaluations, got streaming=true, which",
    "data=text files=[a] eval_files=[b] eval_fraction=0.1": "eval_fraction: nothing reads it with eval_files=[b];",
    "data=tokens files=[a] eval_files=[b] eval_fraction=0.1": "eval_fraction: nothing reads it with eval_files=[b]",
    "trainer=pipeline nproc_per_node=2 split=[2,2] input_weight=2": "input_weight: nothing reads it with split=[2,2];",
    "resume_components=[model]": "resume_components: nothing reads it with resume_from_checkpoint=false; set resume_",
    "ignore_data_skip=true": "ignore_data_skip: nothing reads it with resume_from_checkpoint=false; set resume_from",
    "lr_scheduler=infinite anneal_steps=5": "anneal_steps: nothing reads it with anneal_start_step=null; set anneal_",
    "lr_scheduler=infinite min_lr_ratio=0.1": "min_lr_ratio: nothing reads it with anneal_start_step=null; set anneal",
    "rope_scaling={rope_type: linear, low_freq_factor: 2}": "low_freq_factor: nothing reads it with rope_type=linear;",
    "rope_scaling={factor: 2}": "factor: nothing reads it with rope_type=default; set rope_type=linear, dynamic, yarn",
    "eval_strategy=no max_eval_samples=5": "max_eval_samples: nothing reads it with eval_strategy=no; set eval_strat",
    "eval_strategy=no per_device_eval_batch_size=5": "per_device_eval_batch_size: nothing reads it with eval_strategy",
    "eval_strategy=no metric_for_best_model=eval_perplexity": "metric_for_best_model: nothing reads it with eval_strat",
    "data=synthetic num_eval_samples=0 eval_steps=5": "eval_steps: nothing reads it with num_eval_samples=0; set num_",
    "eval_strategy=no +callbacks.early_stopping={patience: 1}": "callbacks.early_stopping: nothing reads it with eval_",
    "callbacks.textgen.top_k=3 callbacks.textgen.generation_config.top_k=5": "top_k: generation_config says it too, ",
    "callbacks.textgen.typical_p=0.3 callbacks.textgen.generation_config.typical_p=0.5": "typical_p: generation_conf",
    "eval_strategy=no callbacks.textgen.top_k=5": "callbacks.textgen.top_k: nothing reads it with eval_strategy=no;",
    "auto_find_batch_size=true fuse_optim_with_backward=true max_grad_norm=null": "which excludes fuse_optim_with_bac",
    "auto_find_batch_size=true trainer=ddp nnodes=2 rdzv_endpoint=a:1": "starts the ranks of one node again, got",
    "model=transformers": "model.path: model=transformers needs a directory",
    "model=transformers path=x trust_remote_code=true": "trust_remote_code: code that lies in a model directory is nev",
    "model=transformers path=x model.config=y": "model.config: model.path=x has a config.json, got 'y' besides",
    "model=transformers model.config={n_layer: 2}": "model.config: names no model_type",
    "adapter=lora": "adapter: lora adapts a model that exists, got model=decoder",
    "adapter=lora model=qwen3_encdec data=ul2": "adapter: lora does not adapt encoder-decoders yet",
    "adapter=lora model=pretrained model.path=x precision=qat": "precision: qat changes the layers",
    "adapter=lora model=pretrained model.path=x average_last=3": "average_last: a mean of adapters",
    "adapter=lora model=pretrained model.path=x trainer=pipeline trainer.shard=2": "trainer.shard: a pipeline whose",
    "adapter=lora model=pretrained model.path=x target_modules='(q'": "not a regular expression",
    "adapter=qlora model=pretrained model.path=x trainer=fsdp2": "adapter: qlora trains under trainer=single and ddp",
    # what peft has for layers alone
    "adapter=dora model=transformers model.path=x target_parameters=[experts.up]": "dora adapts layers, got target_",
    "adapter=lora lora_dropout=0.1 model=transformers model.path=x target_parameters=[e.up]": "adapted without dropout",
    "trainer=pipeline schedule=ZBVZeroBubble nproc_per_node=4": "trainer: 8 pipeline stages are more than "
    "num_hidden_layers=4 (schedule=ZBVZeroBubble, 2 on each of 4 ranks); set num_hidden_layers=8, or choose "
    "schedule=1F1B, or take 2 ranks (nproc_per_node)",
    "trainer=pipeline model=nano schedule=LoopedBFS nproc_per_node=2": "set num_hidden_layers=4, or choose "
    "schedule=1F1B, or choose trainer=single",
    "trainer=pipeline nproc_per_node=3 split=[1,1,1]": "split: adds up to 3 layers, got num_hidden_layers=4",
    "trainer=pipeline schedule=Interleaved1F1B nproc_per_node=2 n_microbatches=5 "
    "num_hidden_layers=8": "needs a multiple of 2, got 5; set n_microbatches=4",
    "model=qwen3_encdec": "data: model=qwen3_encdec .* choose data=ul2",
    "data=ul2": "model: data=ul2 .* choose model=qwen3_encdec",
    "model._target_=own_stages.Words trainer=pipeline "
    "model_splitter._target_=own_stages.splitt": "model_splitter._target_: cannot import own_stages.splitt",
    "model._target_=own_stages.Words trainer=pipeline model_splitter={_target_: own_stages.split, depth: "
    "2}": "model_splitter.depth: own_stages.split takes no",
    "model=qwen3_encdec data=ul2 trainer=pipeline pack_encoder=64 ul2_task_weights=[1.0] data.files=[a] "
    "cross_attention=self": (
        "trainer: pipeline .* choose trainer=fsdp2 or ddp\n"
        "pack_encoder: must hold .* max_encoder_length\n"
        "ul2_task_weights: .* give 5\n"
        "files: nothing reads it with source=python_stdlib\n"
        "cross_attention: .* set model.init_from=DIR"
    ),
    "data=hf": "dataset: data=hf reads a dataset of the hub, a directory or data_files, got none",
    "data=hf dataset=x streaming=true tokenizer=bpe eval_fraction=0.1 train_split='train[:5%]'": (
        "tokenizer: bpe is trained on a whole corpus\n"
        "eval_fraction: nothing reads it with streaming=true\n"
        "train_split: a stream is read from its beginning"
    ),
    "data=hf dataset=x trainer=ddp dispatch_batches=false shuffle_buffer=5 eval_files=[a.json]": (
        "dispatch_batches: nothing reads it with data=hf\n"
        "shuffle_buffer: nothing reads it with streaming=false\n"
        "eval_files: go with data_files"
    ),
    "data=instruct": "files: data=instruct reads files, or a dataset",
    "data=instruct files=[a.jsonl] dataset=x": "dataset: nothing reads it with files=[a.jsonl]; leave files out",
    "data=instruct dataset=x streaming=true eval_files=[a.json]": (
        "eval_files: go with files or data_files\npacking: best_fit"
    ),
}
"""Overrides -> what one of the problems holds, line by line; each problem says after a semicolon what to do."""


@pytest.mark.parametrize("overrides", CONTRADICTIONS)
def test_contradictions_name_both_settings(problems: Problems, overrides: str) -> None:
    found = problems(*words(overrides))
    for told in CONTRADICTIONS[overrides].splitlines():
        pattern = ".*".join(map(re.escape, told.split(" .* ")))
        assert any(re.search(pattern, problem) for problem in found), found
    assert all("; " in problem for problem in found)


def test_a_setting_that_a_later_one_makes_void_is_no_mistake(problems: Problems, tmp_path: Path) -> None:
    write(tmp_path / "recipes/base.yaml", "defaults: [train, _self_]\nmax_eval_samples: 3\nseq_len: 64\n")
    write(tmp_path / "recipes/mine.yaml", "defaults: [base, _self_]\neval_strategy: 'no'\n")
    write(tmp_path / "recipes/both.yaml", "defaults: [base, _self_]\neval_strategy: 'no'\nmax_eval_steps: 3\n")
    load_config("mine", [])
    load_config("base", ["eval_strategy=no"])
    assert load_config("default", ["max_steps=5"]).config.lr_scheduler.warmup_steps == 20
    assert [problem.partition(":")[0] for problem in problems(recipe="both")] == ["max_eval_steps"]
    assert [problem.partition(":")[0] for problem in problems("eval_steps=3", recipe="mine")] == ["eval_steps"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["save_strategy=no"],  # the recipe sets save_steps
        ["eval_strategy=no", "callbacks=full"],
        ["eval_strategy=no", "eval_on_start=true", "max_eval_samples=5", "callbacks.textgen.top_k=5"],
        ["eval_strategy=no", "eval_on_save=true", "max_eval_steps=5", "+callbacks.early_stopping.patience=1"],
        ["eval_strategy=no", "callbacks.textgen.generation_steps=5"],
        ["callbacks.textgen.top_k=5", "callbacks.textgen.generation_config={top_p:0.9,num_beams:3,do_sample:false}"],
        ["data=hf", "dataset=x", "streaming=true", "eval_split=test", "load_best_model_at_end=true"],
        ["resume_from_checkpoint=true", "resume_components=[model]", "ignore_data_skip=true"],
        ["resume_from_checkpoint=a/path", "resume_components=[model]"],
        ["rope_scaling={rope_type: llama3, factor: 8, low_freq_factor: 2, original_max_position_embeddings: 64}"],
        ["optimizer=sgd", "nesterov=true", "momentum=0.9"],
        ["device=mps", "eval_strategy=epoch", "tokenizer=bpe", "bpe_vocab_size=300", "load_best_model_at_end=true"],
        ["trainer=pipeline", "n_microbatches=8", "nproc_per_node=4"],
        ["trainer=pipeline", "schedule=ZBVZeroBubble", "nproc_per_node=2"],
        ["trainer=pipeline", "loss=liger", "nproc_per_node=2", "z_loss=0.1", "label_smoothing=0.1"],
        ["loss=cut_cross_entropy", "device=cuda", "precision=bf16"],
        ["loss=cut_cross_entropy", "device=cpu", "deterministic=true"],
        ["fuse_optim_with_backward=true", "max_grad_norm=null", "optimizer=adamw"],
        ["torch_compile=true", "activation_memory_budget=0.5"],
        ["gradient_accumulation_steps=4", "max_steps=-1", "num_train_epochs=2"],
        ["max_steps=-1", "num_train_epochs=-1", "data=hf", "data_files=[a.jsonl]", "streaming=true"],
    ],
)
def test_sound_combinations_pass(tmp_path: Path, overrides: list[str]) -> None:
    typed = {word.partition("=")[0].removeprefix("+").rpartition(".")[2] for word in overrides}
    assert typed <= {name.rpartition(".")[2] for name in load_config(None, overrides, cwd=tmp_path).given}


class TestBatchPlan:
    def test_global_batch_gives_the_largest_even_micro_batch(self) -> None:
        run = RunSettings(global_batch_size=48, per_device_train_batch_size=10)
        assert batch_plan(run, 1) == BatchPlan(48, 8, 6)
        assert batch_plan(run, 2) == BatchPlan(48, 8, 3)
        assert batch_plan(run, 3) == BatchPlan(48, 8, 2)
        assert batch_plan(run, 1, multiple_of=6) == BatchPlan(48, 6, 8)
        assert batch_plan(RunSettings(global_batch_size=11), 1) == BatchPlan(11, 1, 11)

    def test_without_it_the_parts_multiply(self) -> None:
        run = RunSettings(per_device_train_batch_size=4, gradient_accumulation_steps=3)
        assert batch_plan(run, 2) == BatchPlan(24, 4, 3)
        assert batch_plan(RunSettings(), 1) == BatchPlan(8, 8, 1)

    @pytest.mark.parametrize("steps", [1, 2, 4, 8])
    def test_agreeing_accumulation_is_taken(self, steps: int) -> None:
        run = RunSettings(global_batch_size=16, per_device_train_batch_size=16, gradient_accumulation_steps=steps)
        assert batch_plan(run, 1) == BatchPlan(16, 16 // steps, steps)

    @pytest.mark.parametrize(
        ("batch", "steps", "world", "parts", "told"),
        [
            (16, None, 3, 1, "global_batch_size: 16.*3 ranks.*15 or 18"),
            (2, None, 3, 1, "global_batch_size: 2.*=3"),
            (16, 1, 1, 1, "gradient_accumulation_steps: 1.*global_batch_size=16.*per_device_train_batch_size=8"),
            (16, 3, 1, 1, "gradient_accumulation_steps: 3"),
            (16, 2, 1, 3, "gradient_accumulation_steps: 2"),
            (14, None, 1, 4, "global_batch_size: 14.*n_microbatches=4"),
            (None, None, 1, 3, "per_device_train_batch_size: 8.*n_microbatches=3.*6 or 9"),
        ],
    )
    def test_what_does_not_divide_is_said(
        self, batch: int | None, steps: int | None, world: int, parts: int, told: str
    ) -> None:
        run = RunSettings(global_batch_size=batch, gradient_accumulation_steps=steps)
        with pytest.raises(ConfigError, match=told):
            batch_plan(run, world, multiple_of=parts)
