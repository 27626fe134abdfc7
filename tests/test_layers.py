"""Dependencies point one way (CONTRIBUTING.md, Rules): the imports of the package, read with ast."""

from __future__ import annotations

import ast
import functools
import re
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Encoding, Tokenizer

from forgather_cli.cli import app

PACKAGE = Path(__file__).parents[1] / "forgather_cli"
FREE = {
    "config.schema", "documents", "errors", "hardware", "hub", "labels", "run_dir", "shards", "targets", "terminal", "",
}  # fmt: skip
"""Anyone may import these; "" is __init__ with the version."""

# layer -> what it may import of ours, besides itself and FREE. A name stands for a module or for everything below it.
ALLOWED = {
    **dict.fromkeys(FREE | {"config", "distributed", "optim", "loss", "quantized"}, frozenset()),
    **dict.fromkeys(("api", "cli", "worker"), frozenset("*")),
    "adapters": {
        "checkpoint", "config.decode", "data.cache", "data.text.corpus", "data.text.read", "inference.source", "models",
        "precision",
    },
    "finalize": {
        "adapters.directory", "adapters.merge", "checkpoint", "cli.output", "cli.words", "config.decode",
        "config.load", "data", "distributed", "gguf",
        "inference.source", "loss", "models", "quantized", "strategies.single", "trainer.evaluate",
    },
    "gguf": {
        "adapters", "checkpoint", "data", "finalize.plain_transformers", "finalize.sample", "inference.source",
        "launch.processes", "loss", "models",
    },
    "housekeeping": {
        "callbacks.console", "checkpoint.files", "cli.output", "cli.style", "cli.words", "control.registry",
        "control.server", "data.cache", "launch.exit_status", "launch.layout", "launch.processes", "launch.run_lock",
        "runs.find", "runs.summary",
    },
    "inspection": {"data", "launch.layout"},
    "launch": {"checkpoint.choice", "config", "distributed"},
    "plan": {
        "adapters.layers", "adapters.nf4", "cli.output", "cli.words", "config.batch", "config.decided", "config.decode",
        "config.diloco", "config.load", "config.pipeline_layout", "data", "diloco.encoding", "diloco.fragments",
        "launch.exit_status", "launch.layout", "launch.processes", "models", "optim.groups", "precision",
        "trainer.build", "trainer.metrics",
    },
    "pictures": {"runs"},
    "runs": {"callbacks.columns", "launch.exit_status", "launch.processes"},
    "inference": {
        "adapters.directory", "adapters.load", "checkpoint", "config.decode", "data", "distributed",
        "finalize.quantize", "loss", "models", "precision", "strategies.base",
        "strategies.build", "trainer",
    },
    "trainer": {
        "adapters", "strategies.base", "strategies.build", "callbacks.base", "distributed", "checkpoint",
        "data.loaders", "data.text.auto_tokenizer",
        "data.chat.ends", "loss", "optim", "models.attention", "models.parts", "models.transform", "models.pretrained",
        "config.batch",
        "config.accelerate_file", "config.rules", "config.decode", "config.schedule",
        "precision", "targets",
        "callbacks.build", "callbacks.norms", "callbacks.textgen", "launch.exit_status", "launch.run_lock",
        "launch.signals",
    },
    "serve": {
        "adapters.directory", "checkpoint.choice", "checkpoint.files", "cli.output", "cli.words", "data.cache",
        "data.text.corpus", "data.text.read", "finalize", "gguf",
    },
    "tasks": {
        "adapters.directory", "adapters.load", "callbacks.base", "callbacks.json_logger", "cli.output", "data",
        "distributed", "inference.evaluation", "loss", "models", "strategies.base", "strategies.build",
        "trainer.evaluate", "trainer.states",
    },
    "sweeps": {
        "callbacks.console", "cli.output", "cli.words", "config", "launch.exit_status", "launch.layout",
        "launch.processes", "launch.rank_log", "launch.signals", "runs.summary",
    },
    "strategies": {
        "config.pipeline_layout", "distributed", "loss", "precision", "models.init", "models.stages",
        "models.transform",
    },
    "callbacks": {
        "control", "data.chat.ends", "diloco.worker", "distributed", "models.generate", "models.parts", "config.decode",
        "config.schedule",
    },
    "control": {"callbacks.base", "launch.exit_status"},
    "diloco": {
        "callbacks.json_logger", "checkpoint", "config.decode", "config.diloco", "control.accept",
        "data.loaders.collate", "data.loaders.map_style", "data.order", "distributed", "launch.context",
        "launch.exit_status", "models.parts",
        "optim.eager", "trainer.checkpoints", "trainer.run", "trainer.step_sync", "worker",
    },
    "checkpoint": {"distributed", "optim.groups", "optim.state"},
    "models": {"config.pipeline_layout"},
    "data": {"checkpoint.files", "distributed", "launch.processes"},
    "precision": {"loss"},
    "preference": {
        "callbacks.norms", "checkpoint.replication", "data", "distributed", "loss", "models.build", "models.parts",
        "strategies.base", "strategies.build", "trainer.build", "trainer.evaluate", "trainer.run",
    },
}  # fmt: skip

# third-party package -> the only layers that may import it, a room with commands beside cli
ONLY_IN = {
    "typer": "cli sweeps", "hydra": "config", "omegaconf": "config", "pydantic": "config",
    "lm_eval": "tasks", "matplotlib": "pictures", "h11": "control", "uvicorn": "diloco",
}  # fmt: skip
NO_TORCH_AT_MODULE_LEVEL = {
    "api", "cli", "config", "documents", "errors", "hardware", "housekeeping", "hub", "launch", "pictures", "plan",
    "run_dir", "runs", "sweeps", "targets", "terminal", "worker", "",
}  # fmt: skip
MAY_IMPORT_TORCH = {"documents.encoding", "launch.agent"}
TORCH_TOO = {"torch", "transformers", "accelerate", "torchdata", "numpy", "tensorboard", "datasets"}


class Modules(UserDict[str, Any]):
    """Dotted name below the package -> syntax tree, made when it is asked for: every process of xdist is here."""

    def __init__(self) -> None:
        super().__init__()
        for path in sorted(PACKAGE.rglob("*.py")):
            parts = path.relative_to(PACKAGE).with_suffix("").parts
            self[".".join(part for part in parts if part != "__init__")] = path

    def __getitem__(self, name: str) -> ast.Module:
        if isinstance(found := self.data[name], Path):
            self[name] = found = ast.parse(found.read_text(encoding="utf-8"))
        return found


MODULES = Modules()
COMMANDS = {where.partition(":")[0].removeprefix("forgather_cli.") for where in app.COMMANDS.values()}
"""The modules of commands, which a room has in its own folder."""


def layer(module: str) -> str:
    return module.split(".")[0]


@functools.cache
def imports(tree: ast.Module, *, lazy: bool = True) -> list[str]:
    """Dotted names that a module imports; without ``lazy`` only those that its own import runs."""
    found = []
    for node in ast.walk(tree) if lazy else at_module_level(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def at_module_level(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from at_module_level(child)


@functools.cache
def ours(tree: ast.Module, *, lazy: bool = True) -> set[str]:
    """Modules of ours that a module imports; names of functions and classes are cut off."""
    found = set()
    for name in imports(tree, lazy=lazy):
        if name.split(".")[0] == "forgather_cli":
            parts = name.split(".")[1:]
            while parts and ".".join(parts) not in MODULES:
                parts.pop()
            found.add(".".join(parts))
    return found


def allowed(importer: str, imported: str) -> bool:
    names = ALLOWED[layer(importer)]
    if {imported, layer(imported)} & FREE or layer(imported) == layer(importer) or "*" in names:
        return True
    return any(imported == name or imported.startswith(f"{name}.") for name in names)


def test_the_layers_are_those_of_the_package_and_name_modules_that_are_there() -> None:
    assert {layer(name) for name in MODULES} - {"__main__"} <= set(ALLOWED)
    named = {*FREE, *ALLOWED, *set().union(*ALLOWED.values()), *" ".join(ONLY_IN.values()).split(), *MAY_IMPORT_TORCH}
    assert not (named | NO_TORCH_AT_MODULE_LEVEL) - {"*", *MODULES, *map(layer, MODULES)}


@pytest.mark.parametrize("name", [name for name in MODULES if name not in ("", "__main__")])
def test_dependencies_point_one_way(name: str) -> None:
    wrong = {found for found in ours(MODULES[name]) if not allowed(name, found)}
    assert not wrong, f"{name} must not import {', '.join(sorted(wrong))}"


def test_loop_evaluation_checkpoints_and_callbacks_have_no_branch_on_the_strategy() -> None:
    """Neither by its class nor by its name: what differs is a fact on the seam (``supports_fp16``, ...)."""
    for name, tree in MODULES.items():
        if layer(name) in ("trainer", "callbacks", "checkpoint"):
            for node in ast.walk(tree):
                asks = node.args if isinstance(node, ast.Call) and ast.unparse(node.func) in _TYPE_CHECKS else []
                compared = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
                subject = [node.subject] if isinstance(node, ast.Match) else []
                for part in [*asks[:1], *compared, *subject]:
                    assert not _STRATEGY.search(ast.unparse(part)), f"{name}:{part.lineno}: {ast.unparse(node)}"


_TYPE_CHECKS = ("isinstance", "hasattr", "type")
_STRATEGY = re.compile(r"\bstrategy(\.name)?$|args\.trainer\b|config\.trainer\b|trainer\.type\b")


@pytest.mark.parametrize(("package", "home"), ONLY_IN.items())
def test_third_party_packages_have_one_importer(package: str, home: str) -> None:
    users = {name for name, tree in MODULES.items() if package in {i.split(".")[0] for i in imports(tree)}}
    assert users, f"nobody imports {package}"
    assert {layer(name) for name in users if name not in COMMANDS or package != "typer"} == set(home.split())


def test_nothing_private_of_hydra_and_omegaconf_is_imported() -> None:
    """A minor version takes it away, as omegaconf 2.4 did ``_utils.get_yaml_loader``."""
    taken = {found for name in MODULES if layer(name) == "config" for found in imports(MODULES[name])}
    assert not {found for found in taken if re.match(r"(hydra|omegaconf)\..*\b_(?!_)", found)}


OF_TOKENIZERS_1_0 = {
    "Encoding", "Padding", "Tokenizer", "Truncation", "attention_mask", "decode", "decode_tokens", "encode",
    "encode_batch", "from_file", "from_pretrained", "ids", "padding", "tokenize", "truncation", "type_ids",
}  # fmt: skip
"""Names of 1.0.0rc3: of the package, of ``Tokenizer`` and of ``Encoding``."""


def test_what_tokenizers_1_0_lacks_is_imported_by_one_module_and_methods_by_three() -> None:
    """To be done before 1.0 is allowed: training and added tokens need another library, piecewise.py goes (see there),
    and tokenizer.py reads ids and added tokens from tokenizer.json."""
    methods = {name for kind in (Tokenizer, Encoding) for name in dir(kind) if name[0] != "_"} - OF_TOKENIZERS_1_0
    imported, called = {}, {}
    for name, tree in MODULES.items():
        if any(found.split(".")[0] == "tokenizers" for found in imports(tree)):
            attributes = {node for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            imported[name] = {found.split(".")[1] for found in imports(tree) if found.startswith("tokenizers.")}
            imported[name] |= {node.attr for node in attributes if ast.unparse(node.value) == "tokenizers"}
            imported[name] -= OF_TOKENIZERS_1_0
            called[name] = {node.attr for node in attributes} & methods
    assert {name: found for name, found in imported.items() if found} == {
        "data.text.library": {
            "AddedToken", "Regex", "decoders", "models", "normalizers", "pre_tokenizers", "trainers",
        },
    }  # fmt: skip
    assert {name: found for name, found in called.items() if found} == {
        "data.text.library": {
            "add_special_tokens", "add_tokens", "decoder", "from_str", "pre_tokenizer", "train_from_iterator",
        },
        "data.text.piecewise": {
            "encode_batch_fast", "get_added_tokens_decoder", "model", "normalizer", "pre_tokenizer", "token_to_id",
        },
        "data.text.tokenizer": {
            "decoder", "encode_batch_fast", "get_added_tokens_decoder", "get_vocab", "id_to_token", "no_padding",
            "no_truncation", "offsets", "save", "special_tokens_mask", "token_to_id",
        },
    }  # fmt: skip


def test_what_answers_without_tensors_imports_no_torch() -> None:
    """Directly, or through a module of ours that it imports at module level."""
    for name in MODULES:
        if (layer(name) in NO_TORCH_AT_MODULE_LEVEL or name in COMMANDS) and name not in MAY_IMPORT_TORCH:
            assert_light(name)


FOLDERS = sorted(".".join(file.parent.relative_to(PACKAGE).parts) for file in PACKAGE.rglob("__init__.py"))


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_with_options_imports_no_torch(name: str) -> None:
    """Any may have a ``settings.py``, which commands import, and with it the folder's ``__init__``."""
    assert_light(name)


def assert_light(name: str) -> None:
    for reached in closure(name):
        heavy = {i.split(".")[0] for i in imports(MODULES[reached], lazy=False)} & TORCH_TOO
        assert not heavy, f"{name} imports {reached}, which imports {heavy}"


def closure(name: str) -> set[str]:
    """``name`` and all modules of ours that importing it runs, their packages included."""
    seen: set[str] = set()
    todo = {name}
    while todo:
        current = todo.pop()
        seen.add(current)
        parts = current.split(".")
        packages = {".".join(parts[:n]) for n in range(1, len(parts))}
        todo |= (ours(MODULES[current], lazy=False) | packages & set(MODULES)) - seen
    return seen


def test_the_map_of_launch_has_each_of_its_modules() -> None:
    told = ast.get_docstring(MODULES["launch"]) or ""
    assert not [name for name in MODULES if layer(name) == "launch" != name and f"{name[7:]}.py" not in told]


def test_the_tour_names_each_folder_and_each_module_of_the_root_which_are_few() -> None:
    tour = (PACKAGE.parent / "CONTRIBUTING.md").read_text().split("```")[1]
    folders = {f"{path.name}/" for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    in_root = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert not {part for part in folders | in_root if part not in tour}
    assert len(in_root) <= 10, "give it to the folder that uses it most"


def test_a_class_name_stands_for_one_thing() -> None:
    """Those of the encoder-decoder's modeling file aside: it stands alone in a model directory."""
    homes: dict[str, list[str]] = {}
    for module, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    doubled = {name: where for name, where in homes.items() if len(where) > 1}
    alone = {"Qwen3DecoderLayer", "Qwen3EncoderLayer", "Qwen3ForSeq2SeqLM"}
    assert doubled == {key: ["models.encoder_decoder", "models.modeling_qwen3_encdec"] for key in alone}
