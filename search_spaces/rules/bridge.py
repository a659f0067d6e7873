"""Rules of Megatron Bridge only: what its configuration layers overwrite, and what its own validation refuses."""

from search_spaces.rules.rule import Rule

RULES: tuple[Rule, ...] = ()
