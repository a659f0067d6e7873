"""Whatever a configuration or its file holds, `moetune check` answers it or says what is wrong with it."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from search_spaces.errors import MoetuneError
from search_spaces.explicit_knobs import known_words
from tests.search_spaces.published import rows
from tests.tuner.check_cases import FACTS, STACK
from tuner.commands.check import answer, check

KINDS = [*rows("kinds.jsonl")]
WORDS = [*sorted(known_words()), "mixed_precision", "comm_overlap.bucket_size", "dataset.x", "NUM_OF_X", "env", ""]
ODD = st.sampled_from([
    None, True, False, 0, 1, -1, 3, 2**70, 1.5, -0.5, float("nan"), float("inf"), "", "x", "8", "[", "[[]]", '["a"]',
    "selective", "flex", "Et*99999999999|L", "(t*4|)*", "a" * 5000, [], [None], [1, 2], ["attn", None], [[]], [{}], {},
    {"a": 1}, {"": None},
])  # fmt: skip
PARTS = ("stack", "model", "knobs", "env")


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(KINDS), st.data())
def test_no_configuration_is_more_than_a_fault(real: dict[str, Any], data: st.DataObject) -> None:
    raw: dict[str, Any] = {**real, "model": dict(FACTS), "env": {}}
    raw |= {name: dict(real[name]) for name in ("stack", "knobs")}
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.sampled_from([*PARTS, *PARTS, *raw]))
        inside = raw.get(place)
        if place in PARTS and isinstance(inside, dict):
            known = WORDS if place == "knobs" else [*inside, *STACK, *FACTS, "moe_layer_freq", *WORDS[:20]]
            inside[data.draw(st.sampled_from(known))] = data.draw(ODD)
        else:
            raw[place] = data.draw(ODD)
    verdict, faults = answer(raw, 1)
    assert verdict.model_dump_json()
    assert bool(faults) == (verdict.rule == "UNK-00")
    assert not (faults and verdict.valid)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(KINDS), st.data())
def test_no_text_is_more_than_an_error_of_input(tmp_path: Path, real: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(real, indent=data.draw(st.sampled_from([None, 1])))
    for _ in range(data.draw(st.integers(1, 3))):
        at, length = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 30))
        new = data.draw(st.text(max_size=5) | st.sampled_from(["{", "]", ":", "\n- ", "&a", "\\u", "!!"]))
        text = text[:at] + new + text[at + length :]
    path = tmp_path / data.draw(st.sampled_from(["cases.json", "cases.yaml"]))
    path.write_bytes(text.encode(errors="surrogatepass"))
    with suppress(MoetuneError):
        assert check(path).model_dump_json()
