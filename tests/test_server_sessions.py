"""Which session a request without an id belongs to, and that it feeds what is new alone."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from chats import drafting, fed, plain
from serving import client, running
from tiny import random_prompt, tiny, tiny_llama

from retrodraft.server.sessions import HEADER_TOKENS, Sessions

SYSTEM = random_prompt(300, seed=1)[0].tolist()


def text(size: int, seed: int) -> list[int]:
    return random_prompt(size, seed=seed)[0].tolist()


class Clients:
    """Clients of one server without its HTTP: sessions found by prefix, over a tiny model."""

    def __init__(self, max_sessions: int = 8) -> None:
        self.rd = drafting(tiny_llama(max_position_embeddings=4096))
        self.sessions = Sessions(lambda space, name: self.rd.session(name, namespace=space), None, max_sessions, None)

    def ask(self, prompt: list[int], count: int = 6, namespace: str = "n", name: str | None = None) -> dict[str, Any]:
        """A request; the answer is that of a model without any cache."""
        ids = torch.tensor([prompt])
        options: Any = dict(max_new_tokens=count, do_sample=False)
        with fed(self.rd.model) as lengths:
            entry = self.sessions.acquire(namespace, name, np.array(prompt, np.int32))
            output = entry.session.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
            self.sessions.release(entry)
        assert torch.equal(output, plain(self.rd.model, ids, **options))
        return {
            "session": entry.name, "fed": lengths[0], "cached": entry.session.cached_tokens,
            "text": output[0].tolist(),
        }  # fmt: skip


def test_a_continuation_joins_and_feeds_its_suffix() -> None:
    """Turns in a row; an answer that comes back cut, or otherwise begun; the same question again."""
    clients = Clients()
    first = clients.ask(SYSTEM + text(20, 2))
    assert first["fed"] == 320 and first["cached"] == 0
    history = first["text"]
    for turn in range(3):
        new = text(10 + turn, 3 + turn)
        again = clients.ask(history + new)
        assert again["session"] == first["session"]
        # All that was in the text before is cached, but for the last token of the answer, which was never fed.
        assert again["cached"] == len(history) - 1 and again["fed"] == len(new) + 1
        history, before = again["text"], len(history) + len(new)
    asked = history[:before]
    assert clients.ask(asked)["session"] == first["session"]
    assert clients.ask(asked)["fed"] == 1
    cut = clients.ask(asked + history[before : before + 2] + text(9, 9))  # a stop text cut the answer
    assert cut["session"] == first["session"] and cut["cached"] >= before
    reworded = clients.ask(cut["text"][: before + 11 - HEADER_TOKENS] + text(30, 10))
    assert reworded["session"] == first["session"]


def test_what_shares_less_gets_a_session_and_a_copy() -> None:
    """Two agents with one system prompt take turns: neither rolls the other back, and the prompt is fed once."""
    clients = Clients()
    histories = {agent: SYSTEM + text(40, agent) for agent in (2, 3)}
    sessions: dict[int, str] = {}
    for turn in range(4):
        for agent, history in histories.items():
            got = clients.ask(history)
            assert sessions.setdefault(agent, got["session"]) == got["session"]
            if turn == 0:
                assert got["fed"] == (340 if agent == 2 else 40)  # the second begins with a copy of the system prompt
            else:
                assert got["fed"] == 31  # its new tokens and the last one of its answer
            histories[agent] = got["text"] + text(30, 100 * turn + agent)
    assert len(set(sessions.values())) == 2
    short = clients.ask(SYSTEM + text(5, 77))  # a short question leaves the long ones alone too
    assert short["session"] not in sessions.values() and short["fed"] == 5
    rewound = clients.ask(histories[2][:345])  # back to an early turn: the later ones are kept
    assert rewound["session"] not in sessions.values() and rewound["cached"] >= 340 - 1
    for agent, history in histories.items():
        got = clients.ask(history)
        assert got["session"] == sessions[agent] and got["fed"] == 31


def test_an_edited_history_copies_up_to_the_edit() -> None:
    clients = Clients()
    first = clients.ask(SYSTEM + text(200, 2))
    edited = first["text"][:400] + text(50, 5)
    second = clients.ask(edited)
    assert second["session"] != first["session"] and second["cached"] == 400 and second["fed"] == 50


def test_nothing_crosses_namespaces() -> None:
    clients = Clients()
    prompt = SYSTEM + text(20, 2)
    first = clients.ask(prompt, namespace="a")
    other = clients.ask(prompt, namespace="b")
    assert other["cached"] == 0 and other["fed"] == len(prompt) and other["session"] != first["session"]
    assert clients.ask(prompt, namespace="b", name="named")["cached"] == len(prompt) - 1  # a copy, within b


def test_copies_are_given_for_gain_alone() -> None:
    """A few shared tokens are fed rather than copied; a session that has closed gives nothing."""
    clients = Clients()
    clients.ask(text(400, 2), name="one")
    few = clients.ask(text(400, 2)[:50] + text(100, 3), name="two")
    assert few["cached"] == 0 and few["fed"] == 150
    more = clients.ask(text(400, 2)[:80] + text(100, 3), name="three")
    assert more["cached"] == 80 and more["fed"] == 100
    clients.rd.session("one", namespace="n").close()
    clients.rd.session("three", namespace="n").close()
    assert clients.ask(text(400, 2), name="four")["cached"] == 0


def test_texts_that_were_copied_are_remembered_once() -> None:
    """The memory takes of a copied prompt what is new; what it drafts from is there already."""
    clients = Clients()
    first = clients.ask(SYSTEM + text(20, 2))
    space = clients.rd.session(first["session"], namespace="n").namespace
    before = len(space.memory.newer)
    clients.ask(SYSTEM + text(20, 3))
    assert len(space.memory.newer) - before < 100


def test_copies_while_the_owner_runs() -> None:
    """Sessions of one namespace in threads: right answers, whoever copies from whom."""
    clients = Clients()
    wrong: list[Any] = []
    prompts = [SYSTEM + text(30, seed) for seed in range(4)]
    options: Any = dict(max_new_tokens=8, do_sample=False)
    expected = [plain(clients.rd.model, torch.tensor([prompt]), **options) for prompt in prompts]

    def work(number: int) -> None:
        session = clients.rd.session(f"s{number}", namespace="n")
        for turn in range(6):
            index = (number + turn) % 4
            ids = torch.tensor([prompts[index]])
            output = session.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
            if not torch.equal(output, expected[index]):
                wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    "family",
    ["llama", "mistral_sliding", "qwen2_mixed", "gemma3", "gpt2", "deepseek_v3", "llama4", "qwen3_next", "bloom"],
)
def test_copies_of_every_kind_of_cache(family: str) -> None:
    """Where a window has passed the shared part, or states can't be rolled back, all is fed. Right either way."""
    rd = drafting(tiny(family))
    shared = text(150, 1)
    options: Any = dict(max_new_tokens=20, do_sample=False)
    for name, size in (("one", 30), ("two", 40), ("one", 35), ("three", 8)):
        ids = torch.tensor([shared + text(size, size)])
        session = rd.session(name)
        output = session.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
        assert torch.equal(output, plain(rd.model, ids, **options)), name
        if family in ("llama", "gpt2", "deepseek_v3"):
            assert session.cached_tokens == (0 if session.turns == 1 and name == "one" else 150)


def test_turns_over_http_feed_their_suffix() -> None:
    """What the server reports as cached is what was not fed: the forward of a later turn has its new tokens alone."""
    model = tiny_llama(max_position_embeddings=2048)
    rd = drafting(model)
    with fed(model) as lengths, running(rd) as url:
        caller = client(url)
        messages: Any = [{"role": "user", "content": "a" * 200}]
        held = 0
        for turn in range(4):
            start = len(lengths)
            done = caller.chat.completions.create(
                model="embedded", messages=messages, max_tokens=9, temperature=0, logit_bias={"0": -100, "1": -100}
            )
            usage = done.usage
            assert lengths[start] == usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
            if turn:
                assert usage.prompt_tokens_details.cached_tokens == held - 1
            held = usage.prompt_tokens + usage.completion_tokens
            answer = done.choices[0].message.content
            assert len(answer) == 9  # a letter a token
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"on {turn}"}]
        listed = httpx.get(f"{url}/v1/sessions").json()["data"]
        assert len(listed) == 1 and listed[0]["requests"] == 4


def test_a_session_without_an_answer_is_not_joined() -> None:
    clients = Clients()
    clients.sessions.put_files("n", "filed", {"a.txt": "x"})
    assert clients.ask(SYSTEM)["session"] != "filed"
