"""Rules of expert capacity, routing and the paged stash."""

from search_spaces.rules.rule import Rule

RULES: tuple[Rule, ...] = ()
