"""How many micro-batches of each model chunk are alive at once on a pipeline stage.

Source: core/pipeline_parallel/schedules.py:902 get_pp_rank_microbatches, :962 get_schedule_table of megatron-core
0.19.2.
"""

from functools import lru_cache


@lru_cache(maxsize=65536)
def in_flight(stages: int, stage: int, chunks: int, microbatches: int, group: int, overlapped: bool) -> tuple[int, ...]:
    """By chunk of `stage`, the micro-batches forwarded and not yet backwarded when most are.

    1F1B warms up with PP - stage - 1 micro-batches; interleaved with 2 (PP - stage - 1) + (VPP - 1) x group, chunk
    after chunk in groups. Overlapping expert-parallel communication keeps one more: its
    forward runs beside a backward.
    """
    total = microbatches * chunks
    if stages == 1:
        return (min(total, 2 if overlapped else 1),)
    if chunks == 1:
        return (min(microbatches, stages - stage + (1 if overlapped else 0)),)
    warm = (stages - stage - 1) * 2 + (chunks - 1) * group + (1 if overlapped else 0)
    alive = min(total, warm + 1)
    counts = [0] * chunks
    whole, rest = divmod(alive, group * chunks)
    for chunk in range(chunks):
        counts[chunk] = whole * group + min(max(rest - chunk * group, 0), group)
    return tuple(counts)
