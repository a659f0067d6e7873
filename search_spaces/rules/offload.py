"""Rules of offload: activations and optimizer state kept in host memory."""

from search_spaces.rules.rule import Rule

RULES: tuple[Rule, ...] = ()
