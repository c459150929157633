"""Keys of the settings that single estimators and losses declare in the registry."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from math import inf
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, Field, create_model

from r1_cli.config.problems import KeyProblem
from r1_cli.config.section import Section, Tree, lookup
from r1_core import registry
from r1_core.registry import Entry, Setting
from r1_core.settings import fault

# Settings that mean the same wherever they occur have one key for all, null unless set: each owner has a default of its
# own. The names are EasyR1's where it has them.
SHARED = {
    "algorithm": {
        "gamma": ("gamma", "discount of a reward, per token or turn"),
        "gamma_per": ("gamma_per", "token, or turn: gamma counts only from a turn of an episode to the next"),
        "lam": ("lam", "of GAE"),
        "norm_by_std": ("norm_adv_by_std", "false: advantages keep the scale of the rewards"),
        "unbiased": ("adv_unbiased_std", "false: the variance over n, as OpenRLHF has it"),
        "eps": ("adv_eps", "added to a std"),
        "reward_clip": ("reward_clip_range", "[-10, 10] as in OpenRLHF, for every estimator"),
    },
    "worker.actor": {
        "clip_low": ("clip_ratio_low", "widths mean something else in every loss"),
        "clip_high": ("clip_ratio_high", ""),
        "clip_dual": ("clip_ratio_dual", ""),
    },
}
# The key of any other setting is {name}_{setting}, but for these, which are older than the rule.
OLDER = {
    "reinforce_baseline_baseline": "adv_baseline",
    "reinforce_baseline_whiten": "adv_whiten",
    "optimal_token_baseline_free_tail": "otb_free_tail",
    "optimal_token_baseline_by_column": "otb_by_column",
    "sapo_tau_pos": "tau_positive",
    "sapo_tau_neg": "tau_negative",
    "clip_cov_cov_low": "clip_cov_lb",
    "clip_cov_cov_high": "clip_cov_ub",
    "kl_cov_kl_coef": "kl_cov_coef",
    "vespo_lam_pos": "vespo_lambda_pos",
    "vespo_lam_neg": "vespo_lambda_neg",
}


@dataclass(frozen=True, slots=True)
class Option:
    key: str
    setting: str  # the owners' name for it
    owners: Mapping[str, Setting]  # by values of `adv_estimator` or `loss_type`
    shared: bool
    help: str

    @property
    def leaf(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def default(self) -> Any:
        return None if self.shared else next(iter(self.owners.values())).default


def find_options(section: str, entries: Mapping[str, Entry]) -> tuple[Option, ...]:
    found: dict[str, Option] = {}
    for name, entry in entries.items():
        for setting in entry.settings:
            by_rule = f"{entry.names[0]}_{setting.name}"
            shared = SHARED[section].get(setting.name)
            leaf, words = shared or (OLDER.get(by_rule, by_rule), setting.help)
            key = f"{section}.{leaf}"
            if key in found and found[key].setting != setting.name:
                raise ValueError(f"{entry.where}: the key {key} of its setting {setting.name!r} is taken; rename it")
            before = found[key].owners if key in found else {}
            found[key] = Option(key, setting.name, {**before, name: setting}, shared is not None, words)
    return tuple(found.values())


def shared_key(key: str) -> str | None:
    """Return the key of a shared setting: `adv_eps` for `algorithm.grpo_eps`."""
    section, _, leaf = key.rpartition(".")
    endings = {setting: shared for setting, (shared, _) in SHARED.get(section, {}).items()}
    found = next((setting for setting in sorted(endings, key=len, reverse=True) if leaf.endswith(f"_{setting}")), None)
    return None if found is None else f"{section}.{endings[found]}"


def section_of(name: str, options: Iterable[Option]) -> type[Section]:
    fields: Tree = {option.leaf: (_type(option), option.default) for option in options}
    return create_model(name, __base__=Section, **fields)


def _type(option: Option) -> Any:
    kinds = [_lenient(setting.type) for setting in option.owners.values()]
    return reduce(or_, kinds, None) if option.shared else kinds[0]


def _lenient(kind: Any) -> Any:
    if get_origin(kind) is tuple:
        return Annotated[kind, Field(strict=False)]
    parts = get_args(kind)
    is_union = parts and type(None) in parts
    return reduce(or_, [_lenient(part) for part in parts if part is not type(None)], None) if is_union else kind


ESTIMATOR_OPTIONS = find_options("algorithm", registry.estimators())
LOSS_OPTIONS = find_options("worker.actor", registry.losses())
if TYPE_CHECKING:
    EstimatorName = str
    LossName = str

    class EstimatorSettings(Section): ...

    class LossSettings(Section): ...

else:
    EstimatorName, LossName = Literal[tuple(registry.estimators())], Literal[tuple(registry.losses())]
    EstimatorSettings = section_of("EstimatorSettings", ESTIMATOR_OPTIONS)
    LossSettings = section_of("LossSettings", LOSS_OPTIONS)


def refuse_clashes(section: type[BaseModel], options: Iterable[Option]) -> None:
    """Raise ValueError if a section declares an estimator's or a loss's key."""
    written = [vars(one) for one in section.__mro__ if one not in (EstimatorSettings, LossSettings)]
    names = {name for body in written for name in body.get("__annotations__", ())}
    for option in options:
        if not option.shared and option.leaf in names:
            owner = next(iter(option.owners))
            raise ValueError(f"{option.key} is a key of every run; rename the setting {option.setting!r} of {owner!r}")


def settings_of(section: BaseModel, options: Iterable[Option], name: str) -> Tree:
    """Return the settings of `name` that the user gave and that are not null."""
    given = {leaf: value for leaf in section.model_fields_set if (value := lookup(section, leaf)) is not None}
    return {option.setting: given[option.leaf] for option in options if name in option.owners and option.leaf in given}


def own_defaults(section: BaseModel, options: Iterable[Option], name: str) -> Iterator[tuple[str, Any]]:
    """Yield key and default of each null setting of `name`. Infinity (no bound) stays null."""
    for option in options:
        if name in option.owners and lookup(section, option.leaf) is None:
            default = option.owners[name].default
            yield option.key, None if default == inf else default


def needs_of(entries: Mapping[str, Entry], name: str) -> tuple[str, ...]:
    if name in entries:
        return entries[name].needs
    path, _, function = name.rpartition(":")
    try:
        return registry.own_needs(Path(path), function) or ()
    except (OSError, SyntaxError, ValueError):
        return ()  # reported by `function_problems`


def range_problems(section: BaseModel, options: Iterable[Option], name: str) -> Iterator[KeyProblem]:
    """Yield settings outside the range of `name`; or of other owners, if none of them accepts the value."""
    for option in options:
        value = lookup(section, option.leaf)
        owners = [option.owners[name]] if name in option.owners else option.owners.values()
        faults = [fault(owner.type, value) for owner in owners]
        if value is not None and all(faults):
            yield option.key, str(faults[0])
