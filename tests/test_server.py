"""The server on the embedded model, over HTTP, with OpenAI's client."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest
import torch
from serving import client, metric, running, wait_until

from retrodraft import RetroDraft
from retrodraft.server.run import warm_up
from retrodraft.workloads import render_prompt

ASK: Any = [{"role": "user", "content": "Write a short list of three rivers 🙂"}]
KEYS = ["alpha", "beta", "gamma", "delta"]
AUTH = {"Authorization": "Bearer alpha"}


@pytest.fixture(scope="module")
def rd(embedded: Any) -> RetroDraft:
    wrapped = RetroDraft(*embedded, budget=8)
    warm_up(wrapped)
    return wrapped


@pytest.fixture(scope="module")
def url(rd: RetroDraft) -> Iterator[str]:
    with running(rd, api_keys=KEYS, max_queue=3, max_context=2048) as address:
        yield address


@pytest.fixture(scope="module")
def alpha(url: str) -> openai.OpenAI:
    return client(url, "alpha")


def plain(rd: RetroDraft, messages: Any, **options: Any) -> Any:
    """What `model.generate` gives for the rendered prompt."""
    ids = torch.tensor([render_prompt(rd.tokenizer, messages)])
    options = {"do_sample": False, **options}
    return rd.model.generate(ids, attention_mask=torch.ones_like(ids), **options), ids.shape[1]


def text_of(rd: RetroDraft, output: Any, length: int) -> str:
    return str(rd.tokenizer.decode(output[0, length:], skip_special_tokens=True))


def chat(caller: openai.OpenAI, messages: Any = ASK, **options: Any) -> Any:
    options = {"max_tokens": 10, "temperature": 0, **options}
    return caller.chat.completions.create(model="embedded", messages=messages, **options)


def test_greedy_answers_are_plain_generates(rd: RetroDraft, alpha: openai.OpenAI) -> None:
    """O10, O11: whole and streamed, twice, and a second turn on the first one's keys and values."""
    output, length = plain(rd, ASK, max_new_tokens=16)
    whole = chat(alpha, max_tokens=16)
    text = whole.choices[0].message.content
    assert text == text_of(rd, output, length)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (length, 16)
    assert whole.choices[0].finish_reason == "length" and whole.model == "embedded"
    chunks = list(chat(alpha, max_completion_tokens=16, max_tokens=None, stream=True,
                       stream_options={"include_usage": True}))  # fmt: skip
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 16
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == length - 1
    turn = [*ASK, {"role": "assistant", "content": text}, {"role": "user", "content": "And one more?"}]
    output, length = plain(rd, turn, max_new_tokens=10)
    second = chat(alpha, turn)
    assert second.choices[0].message.content == text_of(rd, output, length)
    assert second.usage.prompt_tokens_details.cached_tokens >= whole.usage.prompt_tokens + 12


def test_completions(rd: RetroDraft, url: str) -> None:
    """Texts and token ids, several at once; a session that the header names."""
    caller = client(url, "beta").with_options(default_headers={"X-Session-Id": "rivers"})
    ids = rd.tokenizer("The Nile is").input_ids
    answers = caller.completions.create(model="embedded", prompt=["The Nile is", "One, two,"], temperature=0)
    same = caller.completions.create(model="embedded", prompt=[ids], temperature=0, max_tokens=16)
    output = rd.model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)
    assert answers.choices[0].text == same.choices[0].text == text_of(rd, output, len(ids))
    assert [choice.index for choice in answers.choices] == [0, 1] and answers.usage.completion_tokens == 32
    streamed = list(caller.completions.create(model="embedded", prompt="The Nile is", temperature=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == same.choices[0].text
    listed = httpx.get(f"{url}/v1/sessions", headers={"Authorization": "Bearer beta"}).json()["data"]
    assert [record["id"] for record in listed] == ["rivers"] and listed[0]["requests"] == 4


def test_models_and_health(url: str, alpha: openai.OpenAI) -> None:
    assert [model.id for model in alpha.models.list()] == ["embedded"]
    assert alpha.models.retrieve("embedded").id == "embedded"
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-9'"):
        alpha.models.retrieve("gpt-9")


def test_stop_texts_across_tokens(alpha: openai.OpenAI) -> None:
    """A stop text that begins and ends inside tokens is not in the answer, streamed or not."""
    text = chat(alpha, max_tokens=16).choices[0].message.content
    stop = text[11:17]
    expected = text[: text.index(stop)]
    for stops in (stop, ["never said", stop]):
        done = chat(alpha, max_tokens=16, stop=stops)
        assert done.choices[0].message.content == expected and done.choices[0].finish_reason == "stop"
        assert done.usage.completion_tokens < 16
    chunks = list(chat(alpha, max_tokens=16, stop=stop, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"
    half = text[-4:] + "no more of this"  # begins like the answer's end, which has to come out all the same
    assert chat(alpha, max_tokens=16, stop=half).choices[0].message.content == text


def test_seeds(rd: RetroDraft, alpha: openai.OpenAI) -> None:
    """The same seed gives plain generate's text; the first of several answers is that of one."""
    torch.manual_seed(7)
    sampling: Any = dict(do_sample=True, temperature=0.9, top_p=0.8, top_k=0)
    output, length = plain(rd, ASK, max_new_tokens=8, **sampling)
    options: Any = dict(temperature=0.9, top_p=0.8, max_tokens=8)
    one = chat(alpha, seed=7, **options)
    two = chat(alpha, seed=7, n=2, **options)
    texts = [choice.message.content for choice in two.choices]
    assert one.choices[0].message.content == texts[0] == text_of(rd, output, length)
    assert len(set(texts)) > 1 and two.usage.completion_tokens == 16
    assert [choice.message.content for choice in chat(alpha, seed=7, n=2, **options).choices] == texts
    unseeded = {chat(alpha, **options).choices[0].message.content for _ in range(2)}
    assert len(unseeded | {texts[0]}) > 1


def test_logprobs_are_the_targets(rd: RetroDraft, alpha: openai.OpenAI) -> None:
    output, length = plain(rd, ASK, max_new_tokens=8, return_dict_in_generate=True, output_logits=True)
    done = chat(alpha, max_tokens=8, logprobs=True, top_logprobs=2)
    entries = done.choices[0].logprobs.content
    assert len(entries) == 8
    for entry, logits, token in zip(entries, output.logits, output.sequences[0, length:], strict=True):
        expected = logits[0].log_softmax(-1)
        assert entry.logprob == pytest.approx(float(expected[token]), abs=1e-4)
        assert entry.top_logprobs[0].logprob == pytest.approx(float(expected.max()), abs=1e-4)
        assert len(entry.top_logprobs) == 2
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == done.choices[0].message.content
    streamed = list(chat(alpha, max_tokens=8, logprobs=True, stream=True))
    parts = [chunk.choices[0].logprobs.content for chunk in streamed if chunk.choices[0].logprobs]
    assert [entry.token for part in parts for entry in part] == [entry.token for entry in entries]
    old = alpha.completions.create(model="embedded", prompt="The Nile is", max_tokens=3, temperature=0, logprobs=1)
    assert "".join(old.choices[0].logprobs.tokens) == old.choices[0].text
    assert old.choices[0].logprobs.text_offset[0] == 0


def test_predicted_outputs(url: str) -> None:
    text = chat(client(url, "gamma"), max_tokens=24).choices[0].message.content
    other = client(url, "delta")  # which has not seen that answer
    done = chat(other, max_tokens=24, prediction={"type": "content", "content": text})
    assert done.choices[0].message.content == text
    assert done.usage.completion_tokens_details.accepted_prediction_tokens > 5
    again = chat(other, max_tokens=4)
    assert again.usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_keys_share_nothing(url: str) -> None:
    """The same prompt, and the same session id, under two keys."""
    question: Any = [{"role": "user", "content": "What is a namespace good for, in one sentence?"}]
    named = {"extra_headers": {"X-Session-Id": "mine"}}
    first = chat(client(url, "alpha"), question, max_tokens=4, **named)
    second = chat(client(url, "beta"), question, max_tokens=4, **named)
    third = chat(client(url, "beta"), question, max_tokens=4, extra_body={"metadata": {"session_id": "mine"}})
    assert first.choices[0].message.content == second.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens == 0
    assert third.usage.prompt_tokens_details.cached_tokens == third.usage.prompt_tokens - 1
    alone = chat(client(url, "gamma"), question, max_tokens=4)
    assert alone.usage.prompt_tokens_details.cached_tokens < 40  # its own chats share the template's first words
    ids = {}
    for key in ("alpha", "gamma"):
        listed = httpx.get(f"{url}/v1/sessions", headers={"Authorization": f"Bearer {key}"}).json()["data"]
        ids[key] = {record["id"] for record in listed}
    assert "mine" in ids["alpha"] and "mine" not in ids["gamma"]


def test_files_of_a_session(rd: RetroDraft, url: str) -> None:
    """What a posted file says is drafted; after its deletion no more."""
    text = chat(client(url, "gamma"), max_tokens=24).choices[0].message.content
    caller, address = client(url, "beta"), f"{url}/v1/sessions/filed/files"
    auth, named = {"Authorization": "Bearer beta"}, {"extra_headers": {"X-Session-Id": "filed"}}
    added = httpx.post(address, headers=auth, json={"path": "notes/rivers.md", "text": text})
    assert added.json() == {"id": "filed", "object": "session", "added": ["notes/rivers.md"]}
    tokens = len(rd.tokenizer(text, add_special_tokens=False).input_ids)
    listed = httpx.get(address, headers=auth).json()
    assert listed == {"id": "filed", "object": "session", "files": [{"path": "notes/rivers.md", "tokens": tokens}]}
    assert httpx.get(address, headers={"Authorization": "Bearer gamma"}).json()["files"] == []
    name = "retrodraft:spec_decode_num_accepted_tokens_by_proposer_total"
    before = _by_proposer(url, name)
    assert chat(caller, max_tokens=24, **named).choices[0].message.content == text
    assert _by_proposer(url, name) - before > 5
    gone = httpx.request("DELETE", address, headers=auth, json={"paths": ["notes/rivers.md", "never/was.py"]})
    assert gone.status_code == 200
    assert gone.json() == {
        "id": "filed", "object": "session", "removed": ["notes/rivers.md"], "not_found": ["never/was.py"]
    }  # fmt: skip
    assert httpx.get(address, headers=auth).json() == {"id": "filed", "object": "session", "files": []}
    before = _by_proposer(url, name)
    chat(caller, [{"role": "user", "content": "Say something else"}], **named)
    assert _by_proposer(url, name) == before


def _by_proposer(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    found = [
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and 'proposer="workspace"' in line
    ]
    return sum(found)


def test_concurrent_clients_get_their_own_answers(rd: RetroDraft, url: str) -> None:
    questions = [f"Count from {i} to ten" for i in range(4)]
    expected = []
    for question in questions:
        output, length = plain(rd, [{"role": "user", "content": question}], max_new_tokens=10)
        expected.append(text_of(rd, output, length))
    got: dict[int, str] = {}

    def ask(index: int) -> None:
        caller = client(url, KEYS[index])
        parts = chat(caller, [{"role": "user", "content": questions[index]}], max_tokens=10, stream=True)
        got[index] = "".join(chunk.choices[0].delta.content or "" for chunk in parts)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[index] for index in range(4)] == expected


def test_disconnect_queue_and_fairness(url: str) -> None:
    """A client that goes away frees the model; a full queue is refused; another key does not wait behind it."""
    body: Any = {"model": "embedded", "messages": ASK, "max_tokens": 1500, "temperature": 1.5, "stream": True}
    body["logit_bias"] = {"2": -100}  # no end before that
    with httpx.Client(base_url=url, headers=AUTH, timeout=60) as caller:
        with ExitStack() as stack:
            first = stack.enter_context(caller.stream("POST", "/v1/chat/completions", json=body))
            lines = first.iter_lines()  # kept: httpx closes the response with it
            while '"content":"' not in (line := next(lines)) or '"content":""' in line:
                pass
            waiting = [stack.enter_context(caller.stream("POST", "/v1/chat/completions", json=body)) for _ in range(3)]
            wait_until(lambda: metric(url, "vllm:num_requests_waiting") == 3)
            refused = caller.post("/v1/chat/completions", json=body)
            assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
            assert all(response.status_code == 200 for response in [first, *waiting])
            short = {**body, "max_tokens": 2, "seed": 1}
            other = stack.enter_context(
                httpx.stream("POST", f"{url}/v1/chat/completions", json=short, timeout=60,
                             headers={"Authorization": "Bearer beta"})
            )  # fmt: skip
            wait_until(lambda: metric(url, "vllm:num_requests_waiting") == 4)
            first.close()
            assert list(other.iter_lines())[-2] == "data: [DONE]"  # before alpha's second, of 1,500 tokens
    wait_until(lambda: metric(url, "vllm:num_requests_running") + metric(url, "vllm:num_requests_waiting") == 0)
    with pytest.raises(httpx.ReadTimeout):  # the same for a client that does not stream
        httpx.post(f"{url}/v1/chat/completions", headers=AUTH, json={**body, "stream": False}, timeout=1)
    wait_until(lambda: metric(url, "vllm:num_requests_running") == 0)


CHAT = {"model": "embedded", "messages": ASK, "max_tokens": 1}


@pytest.mark.parametrize(
    "body,status,message",
    [
        (b"{", 400, "not JSON"),
        (b'"text"', 400, "Content-Type: application/json"),
        (b"\xff\xfe", 400, ""),
        (b"[" * 100_000, 400, ""),
        ({**CHAT, "model": "gpt-9"}, 404, "there is no model 'gpt-9'"),
        ({**CHAT, "foo": 1}, 400, "unknown parameter 'foo': leave it out"),
        ({**CHAT, "presence_penalty": 0.5}, 400, "presence_penalty is not supported: leave it at 0"),
        ({**CHAT, "response_format": {"type": "json_object"}}, 400, "ask for the format in the prompt"),
        ({**CHAT, "tools": [{"type": "function"}]}, 400, "tools[0] must be of type 'function'"),
        ({**CHAT, "tools": [{"type": "function", "function": {"name": ["f"]}}]}, 400, "tools[0] must be of type"),
        ({**CHAT, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, 400, "'chat_template' is none: leave it out"),
        ({**CHAT, "chat_template_kwargs": {"tools": []}}, 400, "'tools' is none: leave it out"),
        ({**CHAT, "tool_choice": "required"}, 400, "tool_choice can be 'auto' or 'none'"),
        ({**CHAT, "n": 0}, 400, "n: "),
        ({**CHAT, "n": 10**9}, 400, "n: "),
        ({**CHAT, "temperature": -1}, 400, "temperature: "),
        ({**CHAT, "top_p": 0}, 400, "top_p: "),
        ({**CHAT, "max_tokens": 0}, 400, "max_tokens: "),
        ({**CHAT, "seed": "x"}, 400, "seed: "),
        ({**CHAT, "top_logprobs": 2}, 400, "top_logprobs needs logprobs"),
        ({**CHAT, "logit_bias": {"x": 1}}, 400, "logit_bias: 'x' is no token id"),
        ({**CHAT, "messages": []}, 400, "messages: "),
        ({**CHAT, "messages": "hello"}, 400, "messages: "),
        ({**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "send text"),
        ({**CHAT, "messages": [{"role": "user", "content": "\ud800"}]}, 400, "as a unicode string"),
        ({**CHAT, "messages": [{"role": "user", "content": "word " * 3000}]}, 400, "the context of 2048"),
        ({**CHAT, "metadata": {"session_id": "../up"}}, 400, "a session id has 1 to 128"),
        ({**CHAT, "metadata": {"session_id": 5}}, 400, "metadata.session_id must be a text"),
        (b'{"x": "' + b"y" * (9 << 20) + b'"}', 413, "larger than 8388608 bytes"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, int | str) else "body",
)
def test_bad_requests(url: str, body: Any, status: int, message: str) -> None:
    """OpenAI's error JSON, with a sentence that says what to do; and the server goes on."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {**AUTH, "Content-Type": "application/json"}
    answer = httpx.post(f"{url}/v1/chat/completions", headers=headers, timeout=60, content=content)
    assert answer.status_code == status, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert message in answer.json()["error"]["message"]


def test_other_refusals(url: str) -> None:
    assert httpx.get(f"{url}/v1/nothing", headers=AUTH).json()["error"]["message"] == "there is no /v1/nothing"
    assert httpx.put(f"{url}/v1/models", headers=AUTH).status_code == 405
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "alpha"}):
        refused = httpx.get(f"{url}/v1/models", headers=headers)
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
    chunked = httpx.post(f"{url}/v1/completions", headers=AUTH, content=(b"x" * (1 << 20) for _ in range(9)))
    assert chunked.status_code == 413
    plain_text = httpx.post(f"{url}/v1/completions", headers={**AUTH, "Content-Type": "text/plain"}, content=b"{}")
    assert plain_text.status_code == 400
    assert httpx.post(f"{url}/v1/sessions/s/files", headers=AUTH, json={"path": "/etc/hostname"}).status_code == 400
    large = httpx.post(f"{url}/v1/sessions/s/files", headers=AUTH, json={"path": "x", "text": "x" * 3_000_000})
    assert large.status_code == 413


def test_metrics_have_vllms_names(url: str, alpha: openai.OpenAI) -> None:
    chat(alpha)
    for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos"):
        assert metric(url, f"vllm:spec_decode_num_{name}_total") > 0, name
    assert metric(url, "vllm:prompt_tokens_total") > metric(url, "vllm:prefix_cache_hits_total") > 0
    assert metric(url, "vllm:generation_tokens_total") > 0 and metric(url, "vllm:time_to_first_token_seconds_count") > 0


def test_loopback_without_keys_takes_no_foreign_host(rd: RetroDraft) -> None:
    with running(rd) as address:
        assert httpx.get(f"{address}/v1/models").status_code == 200
        assert httpx.get(f"{address}/v1/models", headers={"Host": "evil.example"}).status_code == 400
