"""Read the literal arguments of a trainer of TRL, its configuration and LoraConfig from a script, not executing it.

Names count if the script assigns them once, to a literal.
"""

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any

from r1_cli.config.section import Tree

_MISSING = object()
_LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "task_type": "lora_task_type"}
_LORA |= {"modules_to_save": "lora_modules_to_save"}
_TRAINER = {  # its positional parameters, by the first word of its name
    "GRPO": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
    "SFT": ("model", "args", "data_collator", "train_dataset", "eval_dataset"),
    "DPO": ("model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset"),
    "KTO": ("model", "ref_model", "args", "train_dataset", "eval_dataset"),
    "Reward": ("model", "args", "data_collator", "train_dataset", "eval_dataset"),
}
_OTHERS = {  # trainers of TRL without a counterpart of the same kind: their scripts, and what r1 has in their place
    "CPO": ("cpo", "sft.loss=simpo of `r1 sft` needs no reference either"),
    "ORPO": ("orpo", "sft.loss=simpo of `r1 sft` needs no reference either"),
    "GKD": ("gkd", "`r1 train` with worker.teacher distils on policy"),
    "OnlineDPO": (
        "dpo_online|online_dpo",
        "use `r1 sample`, `r1 rows --as pairs` and `r1 sft` with sft.loss=dpo, again and again",
    ),
    "RLOO": ("rloo", "convert its settings as those of a GRPOConfig, and set algorithm.adv_estimator=rloo"),
}
_FUNCTIONS = ("reward_funcs", "tools", "environment_factory", "rollout_func")  # arguments that are named functions
_HERE = (
    "args",
    "peft_config",
    "processing_class",
    "tokenizer",
    "data_collator",
)  # of a trainer: read by themselves, or not needed


def refuse_commands(text: str) -> None:
    """Raise ValueError if the text is a command of a trainer that r1 lacks."""
    _refuse_others(
        lambda _, script: re.search(rf"(?m)^[^#\n]*\b(trl\s+({script})\b|({script})\.py\b)", text) is not None
    )


def _refuse_others(is_named: Callable[[str, str], bool]) -> None:
    for word, (script, instead) in _OTHERS.items():
        if is_named(word, script):
            raise ValueError(f"r1 has no counterpart of TRL's {word}Trainer; {instead}")


def read_script(text: str) -> tuple[Tree, list[str], str] | None:
    """Return the arguments as in a file, `call(name=code)` of those that are no literals, and the trainer (`sft`).

    None: the text is not Python, or calls no trainer of TRL and no configuration of one. Raises ValueError for one that
    r1 lacks.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    calls = [(name, node) for node in ast.walk(tree) if isinstance(node, ast.Call) and (name := _name(node.func))]
    names = {name for name, _ in calls}
    trainer = next((word for word in _TRAINER if {f"{word}Config", f"{word}Trainer"} & names), None)
    _refuse_others(lambda word, _: bool({f"{word}Config", f"{word}Trainer"} & names))
    if trainer is None:
        return None
    value = _evaluator(tree)
    given: Tree = {}
    unread: list[str] = []
    for name, call in calls:
        if name == f"{trainer}Config":
            found = dict(_arguments(call, ("output_dir",)))
        elif name == "LoraConfig":
            found = {_lora_name(key): node for key, node in _arguments(call, ("task_type", "r"))}
            given["use_peft"] = True
        elif name == f"{trainer}Trainer":
            found = {key: node for key, node in _arguments(call, _TRAINER[trainer]) if key not in _HERE}
            for key, ours in (("train_dataset", "dataset_train_split"), ("eval_dataset", "dataset_test_split")):
                if key in found and (rows := _rows(tree, found[key], value)):
                    given |= {"dataset_name": rows[0], ours: rows[1]}
                    del found[key]
            found = {"model_name_or_path" if key == "model" else key: node for key, node in found.items()}
        else:
            continue
        for key, node in found.items():
            literal = _functions(node) if key in _FUNCTIONS else value(node)
            if literal is _MISSING:
                unread.append(f"{name}({'**' if key == '**' else f'{key}='}{ast.unparse(node)})")
            else:
                given[key] = literal
    return given, unread, trainer.lower()


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _lora_name(key: str) -> str:
    return _LORA.get(key, key)


def _arguments(call: ast.Call, positional: tuple[str, ...]) -> Iterator[tuple[str, ast.expr]]:
    yield from zip(positional, call.args, strict=False)
    yield from ((keyword.arg or "**", keyword.value) for keyword in call.keywords)


def _assigned(tree: ast.Module) -> dict[str, ast.expr]:
    found = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
    }
    stores = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return {name: node for name, node in found.items() if stores.count(name) == 1}


def _evaluator(tree: ast.Module) -> Callable[[ast.expr], Any]:
    assigned = _assigned(tree)

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Name) and node.id in assigned:
            node = assigned[node.id]
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return _MISSING

    return value


def _rows(tree: ast.Module, node: ast.expr, value: Callable[[ast.expr], Any]) -> tuple[str, str] | None:
    if isinstance(node, ast.Name):
        node = _assigned(tree).get(node.id, node)
    if not isinstance(node, ast.Call) or _name(node.func) != "load_dataset":
        return None
    parts = {key: value(part) for key, part in _arguments(node, ("path",))}
    if parts.keys() != {"path", "split"} or not all(isinstance(part, str) for part in parts.values()):
        return None
    return parts["path"], parts["split"]


def _functions(node: ast.expr) -> Any:
    nodes = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    names = [one.value if isinstance(one, ast.Constant) else _name(one) for one in nodes]
    return names if all(isinstance(name, str) and name for name in names) else _MISSING
