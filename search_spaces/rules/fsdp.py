"""Rules of fully sharded data parallelism, of gradient buckets and of the optimizer."""

from search_spaces.rules.rule import Rule

RULES: tuple[Rule, ...] = ()
