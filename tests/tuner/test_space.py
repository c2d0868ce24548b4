"""The search space: what is in it by default, how one's own is written, what a point means."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from servekit.config.compose import compose_serve
from servekit.config.describe import accepts
from servekit.config.errors import ConfigError, show
from servekit.config.resolve import flatten
from servekit.config.roots import serve_root
from servekit.config.schema import Config
from servekit.tuner.default_space import (
    FIRST,
    NOT_OFFERED_FIRST,
    NOT_SEARCHED,
    Breadth,
    Facts,
    default_space,
    not_searched,
)
from servekit.tuner.grammar import parse_space
from servekit.tuner.space import Condition, Integers, Knob, Ladder, Options, Reals, Space, Warmth, words

FACTS = Facts(cores=4, is_gpu=False, max_model_len=1024)
GPU = Facts(cores=4, is_gpu=True, max_model_len=1024, has_graphs=True)
CHUNK = "scheduler.prefill.chunk_tokens"
CACHE = "scheduler.prefix_cache.kind"


def base(*overrides: str) -> Config:
    return compose_serve(overrides).config


def knobs(space: Space) -> dict[str, Knob]:
    return {knob.key: knob for knob in space.knobs}


# --- the default space ------------------------------------------------------------------------------------------------

def test_every_setting_of_scheduler_and_memory_is_searched_or_has_a_reason_not_to_be() -> None:
    config = base()
    searched, left_out = knobs(default_space(config, FACTS, Breadth.all)), not_searched(config)
    for key, value in flatten(config).items():
        annotation = serve_root().keys[key].annotation
        has_a_scale = isinstance(value, bool | int | float) or (isinstance(value, str) and not accepts(annotation, str))
        if key.startswith(("scheduler.", "memory.")) and has_a_scale and not key.endswith(".kind") and value != 0:
            assert (key in searched) is not (key in left_out), key
    assert "scheduler.max_num_seqs" in searched
    assert "memory.headroom" in left_out
    assert not [key for key in searched if key.startswith(("server.", "model."))]


def test_the_base_configuration_is_a_point_of_the_space() -> None:
    for overrides in ([], ["+preset=interactive"], ["+preset=batch", "scheduler.max_num_seqs=100"],
                      [f"{CHUNK}=null", "scheduler.prefix_cache=none"], ["scheduler/policy=vtc"],
                      ["engine.graph_batch_sizes=[1,3,64]"], ["engine.cuda_graphs=false"]):
        config = base(*overrides)
        for facts, breadth in ((FACTS, Breadth.default), (GPU, Breadth.all)):
            space = default_space(config, facts, breadth)
            point = space.locate(config)
            assert point == space.start
            assert base(*overrides, *space.overrides(point)) == config


def test_bounds_come_from_the_schema_and_the_facts() -> None:
    space = knobs(default_space(base("scheduler.admission.watermark=0.2"), FACTS, Breadth.all))
    assert space["scheduler.admission.watermark"].domain == Reals(0.025, 0.4, is_log=True), "the schema ends at 0.5"
    assert space[CHUNK].domain == Ladder((32, 64, 128, 256, 512, 1024)), "the model ends at 1,024"
    assert space["engine.threads"] == Knob("engine.threads", Ladder((1, 2, None)), warmth=Warmth.cold)
    assert "engine.threads" not in knobs(default_space(base(), replace(FACTS, is_gpu=True)))
    assert "engine.threads" not in knobs(default_space(base(), replace(FACTS, cores=1)))


def test_a_component_that_is_added_to_the_schema_is_searched(tmp_path: Path) -> None:
    """In a process of its own, since a component cannot be taken away again."""
    program = tmp_path / "added.py"
    program.write_text("""
from dataclasses import dataclass
from enum import Enum
from servekit.config.compose import compose_serve
from servekit.config.errors import require
from servekit.config.schema import PrefillConfig
from servekit.tuner.default_space import Breadth, Facts, default_space
from servekit.tuner.space import Condition, Ladder

class Kind(Enum):
    added = "added"

@dataclass(frozen=True)
class AddedPrefillConfig(PrefillConfig):
    '''Added.'''
    kind: Kind = Kind.added
    '''Which component this is.'''
    depth: int = 16
    '''How deep.'''
    share_timeout_s: float = 2.0
    '''Not to be searched.'''

    def __post_init__(self) -> None:
        require(4 <= self.depth <= 64, "scheduler.prefill.depth", self.depth, "must lie between 4 and 64", "or else")

knobs = {knob.key: knob for knob in default_space(compose_serve().config, Facts(1, True, 1024), Breadth.all).knobs}
assert "added" in knobs["scheduler.prefill.kind"].domain.values
assert knobs["scheduler.prefill.depth"].domain == Ladder((4, 8, 16, 32, 64)), knobs
assert knobs["scheduler.prefill.depth"].condition == Condition("scheduler.prefill.kind", ("added",))
assert "added" not in knobs["scheduler.prefill.chunk_tokens"].condition.kinds
assert "scheduler.prefill.share_timeout_s" not in knobs
""")
    subprocess.run([sys.executable, program], check=True)


def test_what_only_a_study_can_know_is_not_offered() -> None:
    for overrides in ([], ["scheduler/admission=worst_case", "scheduler.admission.reserve=oracle"]):
        config = base(*overrides)
        assert ("oracle" in offered(config, Breadth.all)) is bool(overrides), "unless the base configuration has it"


def offered(config: Config, breadth: Breadth) -> set[Any]:
    return {value for knob in default_space(config, FACTS, breadth).knobs if isinstance(knob.domain, Options)
            for value in knob.domain.values}


def test_patterns_of_what_is_not_searched_have_reasons() -> None:
    reasons = (*NOT_SEARCHED.values(), *FIRST.values(), *NOT_OFFERED_FIRST.values())
    assert all(reason and not reason.endswith(".") for reason in reasons)


@pytest.mark.parametrize("facts", [FACTS, GPU], ids=["cpu", "gpu"])
def test_the_default_is_a_few_of_all_and_says_which_are_left(facts: Facts) -> None:
    """A study of some dozen trials cannot learn about 40 knobs."""
    first, everything = (default_space(base(), facts, breadth) for breadth in Breadth)
    assert set(knobs(first)) <= set(FIRST) <= set(serve_root().keys)
    assert {*knobs(first), *first.left_out} == set(knobs(everything)) and not everything.left_out
    assert not set(knobs(first)) & set(first.left_out) and len(first.knobs) <= 13 < len(everything.knobs) // 2
    assert {"scheduler.max_num_seqs", "scheduler.max_step_tokens", CHUNK, CACHE} <= set(knobs(first))


def test_a_value_that_is_no_matter_of_load_is_offered_only_where_the_base_has_it_or_all_is_searched() -> None:
    assert not offered(base(), Breadth.default) & set(NOT_OFFERED_FIRST)
    assert set(NOT_OFFERED_FIRST) <= offered(base(), Breadth.all)
    assert offered(base("scheduler/policy=vtc"), Breadth.default) & set(NOT_OFFERED_FIRST) == {"vtc"}


# --- CUDA graphs ------------------------------------------------------------------------------------------------------

SEQS, SIZES, GRAPHS = "scheduler.max_num_seqs", "engine.graph_batch_sizes", "engine.cuda_graphs"


def test_graph_sizes_are_lists_that_go_with_every_batch_for_which_they_are_offered() -> None:
    """Half as many as the powers of two that null means, and twice as many."""
    space = default_space(base(f"{SEQS}=96"), GPU)
    knob = knobs(space)[SIZES]
    assert knob.domain == Options((None, "[1, 4, 16, 64, 96]", "[1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96]"))
    assert knob.warmth is Warmth.hot, "they are captured anew with every cache"
    assert knob.condition == Condition(SEQS, (96, 128, 256, 512, 1024))
    for count, sizes in product((64, 96, 128), knob.domain.values[1:]):
        point = {**space.start, SEQS: count, SIZES: sizes}
        config = base(*(text for text in space.overrides(point) if text.startswith((SEQS, SIZES))))
        assert space.locate(config)[SIZES] == (sizes if count >= 96 else None)
        assert show(config.engine.graph_batch_sizes) == (sizes if count >= 96 else "null")


def test_graphs_are_searched_where_there_can_be_some() -> None:
    assert not {SIZES, GRAPHS} & set(knobs(default_space(base(), FACTS, Breadth.all)))
    assert not {SIZES, GRAPHS} & set(knobs(default_space(base(), replace(GPU, has_graphs=False), Breadth.all)))
    assert SIZES in knobs(default_space(base(), GPU))
    assert GRAPHS not in knobs(default_space(base(), GPU, Breadth.all)), "lists of sizes of no graphs would be refused"
    without = knobs(default_space(base(f"{GRAPHS}=false"), GPU, Breadth.all))
    assert without[GRAPHS] == Knob(GRAPHS, Options((None, False)), warmth=Warmth.cold) and SIZES not in without
    assert GRAPHS not in knobs(default_space(base(f"{GRAPHS}=false"), GPU))
    assert GRAPHS not in knobs(default_space(base(f"{SIZES}=[1,2]"), GPU, Breadth.all))


# --- points -----------------------------------------------------------------------------------------------------------

SPACE = Space((Knob("a.kind", Options(("plain", "deep"))), Knob("a.depth", Ladder((1, 2, 4, None)),
                                                                Condition("a.kind", ("deep",)))),
              {"a.kind": "plain", "a.depth": 1})


def test_what_does_not_matter_is_no_part_of_a_point() -> None:
    assert SPACE.active({"a.kind": "plain", "a.depth": 4}) == {"a.kind": "plain"}
    assert SPACE.overrides({"a.kind": "plain", "a.depth": 4}) == SPACE.overrides({"a.kind": "plain", "a.depth": 1})
    assert SPACE.overrides({"a.kind": "deep", "a.depth": None}) == ["a.kind=deep", "a.depth=null"]


def test_a_component_is_chosen_by_its_file() -> None:
    space = default_space(base(), FACTS)
    assert "scheduler/prefix_cache=none" in space.overrides({**space.start, CACHE: "none"})
    assert base(*space.overrides({**space.start, CACHE: "none"})).scheduler.prefix_cache.kind.name == "none"


def test_a_configuration_outside_the_space_is_refused() -> None:
    space = parse_space({"scheduler.max_num_seqs": "choice(16, 32)"}, base(), FACTS)
    assert space.locate(base("scheduler.max_num_seqs=32")) == {"scheduler.max_num_seqs": 32}
    with pytest.raises(ConfigError, match=r"max_num_seqs=128: is outside the search space: 16, 32; add it to search"):
        space.locate(base())


def test_fingerprint_is_of_the_knobs() -> None:
    one = parse_space({"scheduler.max_num_seqs": "choice(16, 32)"}, base(), FACTS)
    assert one.fingerprint == parse_space({"scheduler.max_num_seqs": "32,16"}, base("+preset=batch"), FACTS).fingerprint
    assert one.fingerprint != parse_space({"scheduler.max_num_seqs": "choice(16, 64)"}, base(), FACTS).fingerprint


@pytest.mark.parametrize(("domain", "inside", "outside"), [
    (Options((False, True)), [True], [1, None]), (Ladder((16, 32, None)), [16, None], [24]),
    (Integers(4, 8), [4, 8], [3, 9, 5.0, True]), (Reals(0.5, 2.0), [0.5, 1, 2.0], [2.1, None])])
def test_domains(domain: Any, inside: list[Any], outside: list[Any]) -> None:
    assert all(domain.contains(value) for value in inside)
    assert not any(domain.contains(value) for value in outside)
    assert all(domain.including(value).contains(value) for value in [*inside, outside[0]])


def test_a_ladder_stays_in_order() -> None:
    assert Ladder((16, 64)).including(32).including(None) == Ladder((16, 32, 64, None))
    assert words(Ladder((16, None))) == "16, null"
    assert words(Integers(4, 64, is_log=True)) == "4 to 64 on a log scale"


# --- a space of one's own ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("text", "domain"), [
    ("choice(64, 16, 32)", Ladder((16, 32, 64))), ("16,32,null", Ladder((16, 32, None))),
    ("range(32, 129, 32)", Ladder((32, 64, 96, 128))), ("interval(32, 256)", Integers(32, 256)),
    ("tag(log, interval(32, 256))", Integers(32, 256, is_log=True)),
    ("tag(log, int(interval(32, 256)))", Integers(32, 256, is_log=True)),
])
def test_hydras_grammar(text: str, domain: Any) -> None:
    assert knobs(parse_space({CHUNK: text}, base(), FACTS))[CHUNK].domain == domain


def test_other_types_in_hydras_grammar() -> None:
    space = knobs(parse_space({"scheduler/prefix_cache": "choice(none, hash)", "scheduler.admission.watermark":
                               "interval(0.01, 0.1)", "engine.threads": "choice(1, 2)"}, base(), FACTS))
    assert space[CACHE].domain == Options(("none", "hash"))
    assert space["scheduler.admission.watermark"].domain == Reals(0.01, 0.1)
    assert (space[CACHE].warmth, space["engine.threads"].warmth) == (Warmth.hot, Warmth.cold)
    assert parse_space("default", base(), FACTS) == default_space(base(), FACTS)
    assert parse_space("all", base(), FACTS) == default_space(base(), FACTS, Breadth.all)


@pytest.mark.parametrize(("search", "message"), [
    ({}, "search={}: names no knob"),
    (None, "search=null: names no knob"),
    ("everything", "search=everything: names no knob; write search=default, search=all, or knobs such as"),
    ({"engine.graph_batch_sizes": "choice([1,2],[1,4])"}, "search.engine.graph_batch_sizes=[1, 2]: a list cannot be "
                                                          "searched by its name"),
    ({"scheduler.max_seqs": "choice(1, 2)"}, "search.scheduler.max_seqs=choice(1, 2): there is no such setting; did "
                                             "you mean scheduler.max_num_seqs?"),
    ({"model": "choice(a, b)"}, "search.model=choice(a, b): does not belong to a component of the scheduler; choose "
                                "model in the base"),
    ({CHUNK: 64}, f"search.{CHUNK}=64: is one value, or a pattern"),
    ({CHUNK: "choice(64)"}, f"search.{CHUNK}=choice(64): leaves nothing to search"),
    ({CHUNK: "choice(64, 64)"}, f"search.{CHUNK}=64, 64: names 64 twice"),
    ({CHUNK: "choice(64"}, f"search.{CHUNK}=choice(64: is not in Hydra's override grammar"),
    ({CHUNK: "choice(64, many)"}, f"search.{CHUNK}=many: {CHUNK} takes a whole number or null"),
    ({CHUNK: "choice(0, 64)"}, f"search.{CHUNK}=0: must be a number of at least 1"),
    ({CHUNK: "interval(1.5, 64)"}, f"search.{CHUNK}=interval(1.5, 64): {CHUNK} takes whole numbers"),
    ({CHUNK: "interval(64, 32)"}, f"search.{CHUNK}=interval(64, 32): ends before it begins"),
    ({CHUNK: "tag(log, interval(0, 32))"}, f"search.{CHUNK}=tag(log, interval(0, 32)): a log scale has no zero"),
    ({CHUNK: "tag(log, choice(16, 32))"}, f"search.{CHUNK}=tag(log, choice(16, 32)): the tag log says nothing here"),
    ({CHUNK: "shuffle(16, 32)"}, f"search.{CHUNK}=shuffle(16, 32): the order of a search is the sampler's"),
    ({"scheduler/policy": "choice(fifo, lottery)"}, "search.scheduler/policy=lottery: scheduler.policy.kind takes one "
                                                    "of"),
    ({"scheduler/prefix_cache": "none,hash", CACHE: "hash,none"}, f"search.{CACHE}=hash,none: {CACHE} is given twice"),
])
def test_a_wrong_space_is_refused_in_one_line(search: Any, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_space(search, base(), FACTS)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_a_knob_of_a_component_that_is_never_chosen_is_refused() -> None:
    option = "scheduler.prefix_cache.share_in_batch_tokens"
    if option not in serve_root().keys:
        pytest.skip("no prefix cache has an option")
    search = {option: "choice(16, 32)"}
    with pytest.raises(ConfigError, match="never matters: the base configuration has none of"):
        parse_space(search, base("scheduler/prefix_cache=none"), FACTS)
    assert knobs(parse_space(search, base(), FACTS))[option].condition is None
    both = parse_space({"scheduler/prefix_cache": "none,hash", **search}, base("scheduler/prefix_cache=none"), FACTS)
    assert knobs(both)[option].condition is not None
