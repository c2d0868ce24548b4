"""servekit.LLM: the offline interface, on random weights and on the default model."""

from __future__ import annotations

from pathlib import Path

import pytest

import servekit
from servekit import LLM
from servekit.core.request import FinishReason


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("dummy:tiny", ["model.dtype=float64", "scheduler.max_num_seqs=4", "engine.threads=1",
                              "scheduler.admission.max_queue_requests=2"])


def test_prompts_are_answered_in_order_even_beyond_the_queues_limit(llm: LLM) -> None:
    prompts = [f"prompt number {i}" for i in range(12)]
    together = llm.generate(prompts, max_tokens=6, temperature=0.0)
    alone = [llm.generate(prompt, max_tokens=6, temperature=0.0)[0] for prompt in prompts]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert all(c.finish_reason in (FinishReason.length, FinishReason.stop) for c in together)


def test_token_ids_and_texts_are_both_prompts(llm: LLM) -> None:
    ids = llm.generate("abc", max_tokens=1)[0].prompt_token_ids
    assert llm.generate(ids, max_tokens=4, temperature=0.0)[0].text == \
        llm.generate("abc", max_tokens=4, temperature=0.0)[0].text
    assert len(llm.generate([list(ids), [5, 6]], max_tokens=2)) == 2


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    free = llm.generate("hello", max_tokens=30, temperature=1.0, seed=4, ignore_eos=True)[0]
    stop = free.text[3:5]
    stopped = llm.generate("hello", max_tokens=30, temperature=1.0, seed=4, ignore_eos=True, stop=[stop])[0]
    assert stopped.text == free.text[:free.text.index(stop)] and stopped.finish_reason is FinishReason.stop
    assert len(stopped.token_ids) < len(free.token_ids)


def test_logprobs_of_prompt_and_output(llm: LLM) -> None:
    answer = llm.generate([5, 6, 7], max_tokens=3, logprobs=1, prompt_logprobs=0, ignore_eos=True)[0]
    assert len(answer.logprobs) == 3 and [s.token_id for s in answer.prompt_logprobs[1:] if s] == [6, 7]


@pytest.mark.parametrize("prompt, options, words", [
    ([], {}, "no tokens"),
    ([[512]], {}, "512"),
    ([[-1]], {}, "-1"),
    ([[3] * 3000], {}, "3000 tokens"),
    (["a"], {"max_tokens": 0}, "max_tokens=0"),
])
def test_what_cannot_be_honoured_is_refused_with_the_value(llm: LLM, prompt: list, options: dict, words: str) -> None:
    if not prompt:
        assert llm.generate([], **options) == []
        prompt = [[]]
    with pytest.raises(ValueError, match=words):
        llm.generate(prompt, **options)


def test_an_unknown_sampling_parameter_is_refused(llm: LLM) -> None:
    with pytest.raises(TypeError, match="temprature"):
        llm.generate("a", temprature=0.5)


def test_chat(llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "hi"}], max_tokens=3)
    assert 1 <= len(answer.token_ids) <= 3


def test_the_package_offers_it_lazily() -> None:
    assert servekit.LLM is LLM
    with pytest.raises(AttributeError):
        servekit.nothing_of_the_kind  # noqa: B018


def test_the_default_model_knows_the_capital_of_france(default_model_path: Path) -> None:
    llm = LLM("smollm2-135m", [f"model.source={default_model_path}", "model.max_model_len=512"])
    (answer,) = llm.generate("The capital of France is", max_tokens=4, temperature=0.0)
    assert answer.text.startswith(" Paris")
    chat = llm.chat([{"role": "user", "content": "Name the capital of France."}], max_tokens=32, temperature=0.0)
    assert "Paris" in chat.text and chat.finish_reason is FinishReason.stop
