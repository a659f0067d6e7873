"""Rule -> (a case that breaks it, one that just satisfies it): the two differ in as little as possible."""

from search_spaces.rules import Case

EXAMPLES: dict[str, tuple[Case, Case]] = {}
