"""Rules of fused kernels: permute, router, grouped GEMM, activation, rope, cross entropy, the op fuser."""

from search_spaces.rules.rule import Rule

RULES: tuple[Rule, ...] = ()
