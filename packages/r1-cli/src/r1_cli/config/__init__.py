"""The configuration of a run: read from files and overrides, validated and explained."""

from r1_cli.config.availability import Limit, require_available, unavailable, without_effect
from r1_cli.config.load import load_config
from r1_cli.config.problems import ConfigError, Problem, Provenance
from r1_cli.config.root import RunConfig, printable
from r1_cli.config.section import lookup

__all__ = [
    "ConfigError",
    "Limit",
    "Problem",
    "Provenance",
    "RunConfig",
    "load_config",
    "lookup",
    "printable",
    "require_available",
    "unavailable",
    "without_effect",
]
