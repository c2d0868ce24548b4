"""A model with oddities, served: padded vocabulary, two ends of sequence, no BOS, no template, a broken weight."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.configurations import left_as_found
from faults.serving import CHAT, COMPLETIONS, Json, Served, refusal, served
from faults.tiny_folder import BROKEN, FIRST_END, NUM_ROWS, NUM_TOKENS, SECOND_END, write_tiny_folder

SETTINGS = ("engine.threads=1", "server.port=0", "model.dtype=float64", "memory.num_kv_blocks=64",
            "scheduler.prefill.chunk_tokens=16", "model.name=odd")
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def odd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("odd")
    with served(folder, f"model.source={write_tiny_folder(folder / 'model')}", *SETTINGS) as server:
        yield server


@pytest.fixture
def odd(odd_server: Served) -> Iterator[Served]:
    yield from left_as_found(odd_server)


def body(prompt: object, **fields: object) -> Json:
    return {"prompt": prompt, "max_tokens": 20, "temperature": 0, "return_token_ids": True, **fields}


def test_a_weight_that_is_not_a_number_fails_its_request_alone(odd: Served) -> None:
    """F05: never 200 with garbage; the requests beside it, and those that get its blocks later, are right."""
    healthy = [body(f"neighbour {i}", ignore_eos=True) for i in range(6)]
    expected = [odd.post(COMPLETIONS, one).json["choices"][0]["token_ids"] for one in healthy]
    failed_before = odd.metric("request_success_total", finished_reason="error")
    broken = body([5] * 40 + [BROKEN] + [6] * 10, ignore_eos=True)
    for _ in range(3):
        replies = odd.together([*healthy[:3], broken, {**broken, "stream": True}, *healthy[3:]])
        failed, answered = replies[3:5], replies[:3] + replies[5:]
        assert [reply.json["choices"][0]["token_ids"] for reply in answered] == expected
        for reply in failed:
            assert (reply.status, reply.error["code"]) == (500, "generation_failed")
            assert "not finite" in reply.error["message"]
    assert odd.metric("request_success_total", finished_reason="error") == failed_before + 6
    assert [odd.post(COMPLETIONS, one).json["choices"][0]["token_ids"] for one in healthy] == expected


@pytest.mark.parametrize("end", [FIRST_END, SECOND_END])
@pytest.mark.parametrize("stream", [False, True])
def test_every_end_of_sequence_token_ends_a_sequence(odd: Served, end: int, stream: bool) -> None:
    """F13: also the one that only generation_config.json names; its marker is not part of the text."""
    forced = body("hello", logit_bias={str(end): 100}, stream=stream)
    reply = odd.post(COMPLETIONS, forced)
    choice = reply.events[-1]["choices"][0] if stream else reply.json["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("", "stop", [end])
    went_on = odd.post(COMPLETIONS, {**forced, "ignore_eos": True, "stream": False}).json["choices"][0]
    assert (went_on["finish_reason"], went_on["token_ids"], went_on["text"]) == ("length", [end] * 20, "")
    added = odd.post(COMPLETIONS, {**forced, "stop_token_ids": [65], "stream": False}).json["choices"][0]
    assert (added["finish_reason"], added["token_ids"]) == ("stop", [end]), "stop_token_ids add to the model's own"


@pytest.mark.parametrize(("prompt", "status"), [
    ("", 400), ([""], 400), ([], 400), ([[]], 400), (["a", ""], 400), (None, 400), ("   ", 200), (["a", " "], 200)],
    ids=str)
def test_an_empty_prompt_of_a_model_without_bos_is_refused(odd: Served, prompt: object, status: int) -> None:
    """F09: there is nothing to compute; the engine never sees it."""
    reply = odd.post(COMPLETIONS, body(prompt))
    assert reply.status == status, reply.text
    assert status == 200 or reply.error["param"] == "prompt"


@pytest.mark.parametrize("wrong", [-1, NUM_ROWS, 2**31, 2**63, 2**64])
@pytest.mark.parametrize("place", ["prompt", "prompts", "logit_bias", "stop_token_ids", "allowed_token_ids"])
def test_a_token_id_outside_the_embedding_is_named(odd: Served, place: str, wrong: int) -> None:
    """F10: in every place that takes ids."""
    fields: Json = {"prompt": body([1, wrong]), "prompts": body([[1], [2, wrong]]),
                    "logit_bias": body("x", logit_bias={str(wrong): 1})}
    reply = odd.post(COMPLETIONS, fields.get(place) or body("x", **{place: [wrong]}))
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error"), reply.text
    assert str(wrong) in reply.error["message"] or wrong > 2**63 - 1


@pytest.mark.parametrize("wrong", ["5", 1.0, 1.5, True, None, [1]])
@pytest.mark.parametrize("place", ["prompt", "stop_token_ids", "allowed_token_ids"])
def test_a_token_id_of_another_type_is_refused(odd: Served, place: str, wrong: object) -> None:
    """F10: never rounded, counted or guessed. A list of texts is a list of prompts, so it is mixed with an id."""
    reply = odd.post(COMPLETIONS, body([1, wrong]) if place == "prompt" else body("x", **{place: [1, wrong]}))
    assert reply.status == 400, reply.text
    assert reply.error["param"].startswith(place)


def test_rows_of_the_embedding_without_a_token_are_harmless(odd: Served) -> None:
    """F10: ids between the tokenizer's size and the padded embedding's can be asked for and generated."""
    reply = odd.post(COMPLETIONS, body([NUM_TOKENS, NUM_ROWS - 1], allowed_token_ids=[NUM_TOKENS + 1], echo=True))
    choice = reply.json["choices"][0]
    assert (choice["token_ids"], choice["text"], choice["finish_reason"]) == ([NUM_TOKENS + 1] * 20, "", "length")


@pytest.mark.parametrize("stream", [False, True])
def test_chat_without_a_template_is_refused_with_the_way_out(odd: Served, stream: bool) -> None:
    """F22: completions work, chat says what to do."""
    reply = odd.post(CHAT, {"messages": MESSAGES, "stream": stream})
    assert (reply.status, reply.error["param"]) == (400, "messages")
    assert "/v1/completions" in reply.error["message"] and "model.chat_template" in reply.error["message"]


def test_an_untied_head_that_is_missing_is_an_error_not_random(folder: Path) -> None:
    """F18: the server does not start, and the line names the tensor."""
    model = write_tiny_folder(folder / "model", leave_out="lm_head.weight")
    status, line = refusal(folder, f"model.source={model}", *SETTINGS)
    assert status == 3 and "lm_head.weight" in line


def test_a_template_file_that_is_missing_stops_the_start(folder: Path) -> None:
    """F22: found before anything is served."""
    model = write_tiny_folder(folder / "model")
    status, line = refusal(folder, f"model.source={model}", *SETTINGS, "model.chat_template=/no/such/file.jinja")
    assert status == 2 and line.startswith("servekit: model.chat_template=/no/such/file.jinja: ")
