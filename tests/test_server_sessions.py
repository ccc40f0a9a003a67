"""Which session a request without an id belongs to, and that it feeds what is new alone."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from chats import drafting, fed, plain
from serving import client, running
from tiny import random_prompt, tiny, tiny_llama

from retrodraft.server.protocol import ApiError
from retrodraft.server.sessions import HEADER_TOKENS, Sessions

SYSTEM = random_prompt(300, seed=1)[0].tolist()


def text(size: int, seed: int) -> list[int]:
    return random_prompt(size, seed=seed)[0].tolist()


class Clients:
    """Clients of one server without its HTTP: sessions found by prefix, over a tiny model."""

    def __init__(self, max_sessions: int = 8, workspace: Path | None = None) -> None:
        self.rd = drafting(tiny_llama(max_position_embeddings=4096))
        self.sessions = Sessions(
            lambda space, name: self.rd.session(name, namespace=space), None, max_sessions, workspace
        )  # fmt: skip

    def files(self, name: str, namespace: str = "n") -> dict[str, int]:
        """Tokens by path."""
        listed = self.sessions.files(namespace, name, lambda text: self.rd.tokenizer(text).input_ids)
        return {file["path"]: file["tokens"] for file in listed}

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
    clients.sessions.add_files("n", "filed", {"a.txt": "x"})
    assert clients.ask(SYSTEM)["session"] != "filed"


def test_files_that_wait_and_files_of_the_namespace() -> None:
    """Those that wait are the session's alone; with its request they are the namespace's. Removed at once, and told."""
    clients = Clients()
    sessions = clients.sessions
    sessions.add_files("n", "one", {"b.txt": "four", "a.txt": "sixteen", "z.txt": ""})
    assert clients.files("one") == {"a.txt": 7, "b.txt": 4, "z.txt": 0} and list(clients.files("one"))[0] == "a.txt"
    assert clients.files("two") == {} == clients.files("one", namespace="m")
    assert sessions.remove_files("n", "one", ["b.txt", "no", "b.txt"]) == (["b.txt"], ["no"])
    assert sessions.remove_files("n", "two", ["a.txt"]) == ([], ["a.txt"])
    clients.ask(SYSTEM, name="one")
    assert clients.files("one") == {"a.txt": 7, "z.txt": 0} == clients.files("two")
    sessions.add_files("n", "two", {"a.txt": "again", "c.txt": "x"})
    assert clients.files("two") == {"a.txt": 5, "c.txt": 1, "z.txt": 0} and clients.files("one")["a.txt"] == 7
    assert sessions.remove_files("m", "one", ["z.txt"]) == ([], ["z.txt"])
    assert sessions.remove_files("n", "two", ["c.txt", "a.txt", "b.txt"]) == (["c.txt", "a.txt"], ["b.txt"])
    assert clients.files("one") == {"z.txt": 0} == clients.files("two")
    assert [record["id"] for record in sessions.records("n")] == ["one"]  # no name is left of a request that never came
    workspace = clients.rd.session("one", namespace="n").namespace.workspace
    assert workspace.paths == ("z.txt",)
    with pytest.raises(ApiError, match="a session id has 1 to 128"):
        clients.files("../up")


def test_files_outlive_their_session(tmp_path: Path) -> None:
    """A session that had to go leaves its files to the namespace, where they are listed and removed as before."""
    clients = Clients(max_sessions=1)
    clients.sessions.add_files("n", "one", {"a.txt": "text"})
    clients.ask(SYSTEM, name="one")
    clients.ask(SYSTEM, name="two")
    assert [record["id"] for record in clients.sessions.records("n")] == ["two"]
    assert clients.files("one") == {"a.txt": 4}
    assert clients.sessions.remove_files("n", "one", ["a.txt"]) == (["a.txt"], [])
    assert clients.files("two") == {}


def test_room_for_files_is_told_at_once() -> None:
    """Not when it is too late to tell; what is replaced or removed makes room."""
    clients = Clients()
    add = clients.sessions.add_files
    clients.ask(SYSTEM, name="one")
    add("n", "one", {str(number): "x" * 2_000_000 for number in range(15)})
    clients.ask(SYSTEM, name="one")
    for name in ("one", "two"):
        with pytest.raises(ApiError, match="would take 34,000,000 bytes, and there is room for 33,554,432") as caught:
            add("n", name, {"new": "x" * 2_000_000, "newer": "x" * 2_000_000})
        assert caught.value.status == 413
    add("n", "two", {"new": "x" * 2_000_000})
    with pytest.raises(ApiError, match="room for"):  # the other session's waits
        add("n", "one", {"newer": "x" * 2_000_000})
    add("n", "one", {"3": "x", "newer": "x" * 2_000_000})
    add("m", "one", {"newer": "x" * 2_000_000})
    assert clients.sessions.remove_files("n", "two", ["new"]) == (["new"], [])
    clients.ask(SYSTEM, name="one")
    workspace = clients.rd.session("one", namespace="n").namespace.workspace
    assert workspace.num_bytes == 15 * 2_000_000 + 1


def test_names_without_requests_take_no_others_place() -> None:
    """Where there are too many sessions, the first name for which files wait goes; not for one that is known."""
    clients = Clients(max_sessions=2)
    clients.ask(SYSTEM, name="one")
    for name in ("two", "three", "three", "four"):
        clients.sessions.add_files("n", name, {f"{name}.txt": "x"})
    assert [record["id"] for record in clients.sessions.records("n")] == ["one", "four"]
    clients.sessions.add_files("n", "four", {"more.txt": "x"})
    assert clients.files("four") == {"four.txt": 1, "more.txt": 1}


def test_files_of_a_session_that_cannot_be_opened_still_wait() -> None:
    clients = Clients()
    opened = clients.sessions._open

    def refuse(namespace: str, name: str) -> Any:
        raise ValueError("it is of another model")

    clients.sessions.add_files("n", "one", {"a.txt": "x"})
    clients.sessions._open = refuse  # type: ignore[method-assign]
    with pytest.raises(ApiError, match="session 'one' can't be used: it is of another model"):
        clients.ask(SYSTEM, name="one")
    assert clients.files("one") == {"a.txt": 1}
    clients.sessions._open = opened  # type: ignore[method-assign]
    clients.ask(SYSTEM, name="one")
    assert clients.rd.session("one", namespace="n").namespace.workspace.paths == ("a.txt",)


def test_a_workspace_that_goes_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers go on without its files; while it is there they are drafted from, but no client's to list or remove."""
    monkeypatch.setattr("retrodraft.server.sessions.SEARCH_SECONDS", 0.0)
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a.txt").write_text("text")
    clients = Clients(workspace=folder)
    clients.ask(SYSTEM, name="one")
    path = str(folder / "a.txt")
    workspace = clients.rd.session("one", namespace="n").namespace.workspace
    assert workspace.paths == (path,) and clients.files("one") == {}
    assert clients.sessions.remove_files("n", "one", [path]) == ([], [path]) and workspace.paths == (path,)
    (folder / "a.txt").unlink()
    folder.rmdir()
    clients.ask(SYSTEM, name="one")
    assert workspace.paths == ()
