"""Replay: the walk, what each system may see, views of shown texts, costs, groups, and the command."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from command import retrodraft, retrodraft_here
from replayed import said, sentence, write
from typer.testing import CliRunner

from retrodraft.budget import Budget, CostCurve
from retrodraft.commands.replay import replay
from retrodraft.models import load_tokenizer
from retrodraft.replay.costs import EXAMPLE_CURVE, Costs, load_curve, shipped_curves
from retrodraft.replay.opened import OpenedTexts, without_line_numbers
from retrodraft.replay.report import _curve_table
from retrodraft.replay.run import ABLATIONS, BASELINES, SYSTEMS, System, Tally, accepted_path, replay_logs
from retrodraft.replay.tokens import Turn
from retrodraft.tree import DraftTree

FLAT = CostCurve([256], [1, 64], [[1e6, 1e6]])  # forwards of a million seconds, next to which drafting is nothing


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The embedded model's."""
    return load_tokenizer()


def random_tree(rng: random.Random, size: int) -> DraftTree:
    """Of three tokens; siblings differ."""
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(size):
        parent, token = rng.randrange(len(tokens) + 1), rng.randrange(3)
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
    return DraftTree.from_nodes(0, tokens, parents)


def test_the_walk_takes_what_the_text_says() -> None:
    """The visited nodes spell the answer, stop before its last token, and no child would have gone on."""
    for seed in range(300):
        rng = random.Random(seed)
        tree = random_tree(rng, rng.randrange(1, 20))
        answer = [int(tree.token_ids[0]), *(rng.randrange(3) for _ in range(rng.randrange(1, 8)))]
        path = accepted_path(tree, answer, 1)
        assert path[0] == 0 and tree.token_ids[path].tolist() == answer[: len(path)]
        assert [int(tree.parents[node]) for node in path[1:]] == path[:-1]
        assert len(path) <= len(answer) - 1
        assert len(path) == len(answer) - 1 or tree.child(path[-1], answer[len(path)]) < 0


def played(name: str, *trajectories: list[tuple[list[int], list[int]]], nodes: int = 8) -> list[list[Tally]]:
    system = System(name, 200, Costs(FLAT, nodes), Budget(nodes, None), nodes, 1 << 20)
    return [
        system.play([Turn(np.array(prompt, np.int32), np.array(answer, np.int32)) for prompt, answer in turns])
        for turns in trajectories
    ]


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_token_is_accounted_for(name: str) -> None:
    """Each forward emits the accepted nodes and one token more, on random text and on repeats."""
    rng = random.Random(1)
    turns = []
    text: list[int] = [1]
    for _ in range(6):
        prompt = text + [rng.randrange(6) for _ in range(20)]
        answer = [rng.randrange(6) for _ in range(rng.randrange(1, 40))]
        turns.append((prompt, answer))
        text = prompt + answer
    for tally, (_, answer) in zip(played(name, turns)[0], turns, strict=True):
        assert tally.num_tokens == len(answer) == tally.num_forwards + tally.num_accepted_tokens
        assert tally.num_forwards <= len(answer) and len(tally.draft_us) == tally.num_forwards - 1
        assert tally.num_draft_tokens <= 8 * tally.num_drafts
        assert all(tally.accepted[name] <= count for name, count in tally.proposed.items())


def test_prompt_lookup_by_hand() -> None:
    """A copy of 30 tokens: one for the prompt's forward, one without a match, then chains of ten and one more."""
    copied = list(range(100, 130))
    ((tally,),) = played("prompt_lookup", [(copied + [1, 2], copied)], nodes=32)
    # 100 | 101..111 | 112..122 | 123..129: after 100 alone a window of one token matches
    assert (tally.num_forwards, tally.num_drafts, tally.num_accepted_tokens) == (4, 3, 26)
    ((short,),) = played("prompt_lookup", [(copied + [1, 2], copied)], nodes=4)
    assert short.num_draft_tokens == 4 * short.num_drafts


def test_what_each_session_sees() -> None:
    """Answers and tool outputs of this trajectory and of earlier ones, as the name says, and nothing of later ones."""
    a, b, c, d = (list(range(start, start + 30)) for start in (40, 80, 120, 160))
    first = [([1, 2] + a, b), ([3], c)]  # sees a and says b; then says c, after a history that was cut
    second = [([4, 5], a), ([6], b), ([7], c), ([8], d), ([9], d)]

    def forwards(name: str) -> list[int]:
        return [tally.num_forwards for tally in played(name, first, second, nodes=40)[1]]

    cold = forwards("request")
    assert min(cold) >= 28  # nothing in the prompts helps
    warm, outputs, own, others = (forwards(name) for name in ("session", *ABLATIONS))
    assert max(warm[0], warm[1], warm[2], warm[4]) <= 8 and warm[3] >= 28
    assert outputs[0] >= 28 and max(outputs[1], outputs[2], outputs[4]) <= 8
    assert min(own[:4]) >= 28 and own[4] <= 8
    assert max(others[:3]) <= 8 and min(others[3:]) >= 28
    assert forwards("suffix")[0] >= 28 and forwards("suffix")[1] <= 8  # its global tree holds answers alone


def test_new_texts_are_remembered_with_what_came_before() -> None:
    """A second answer to a known prompt: that it followed the prompt decides where its first token alone does not."""
    shared, first, second = list(range(100, 120)), list(range(60, 80)), [7, *range(20, 40)]
    noise = [token for other in range(140, 190) for token in (7, other)]
    asked = [[(shared, first), (shared, second)], [([1], noise)], [(shared, second)]]
    assert played("session", *asked, nodes=24)[-1][0].num_forwards == 3  # the prompt's, and two over the answer


def test_drafting_is_part_of_the_predicted_time() -> None:
    """Next to forwards that cost nothing, it is all of it; forwards over some nodes count as the curve has them."""
    text = list(range(40)) * 3
    free = System("request", 200, Costs(CostCurve([256], [1, 64], [[1e-15, 1e-15]]), 8), Budget(8, None), 8, 1 << 20)
    (tally,) = free.play([Turn(np.array(text, np.int32), np.array(text, np.int32))])
    drafting = 1e-6 * sum(tally.draft_us)
    assert drafting > 0 and tally.predicted_seconds == pytest.approx(drafting, rel=1e-3)
    ((flat,),) = played("request", [(text, text)])
    assert flat.predicted_seconds == pytest.approx(1e6 * flat.num_forwards, rel=1e-3)
    assert flat.plain_seconds == pytest.approx(1e6 * len(text), rel=1e-6)


def test_recycling_needs_logits(tmp_path: Path, tokenizer: Any) -> None:
    """Without logits it is plain decoding; with them it drafts, and so does retro's row of adjacency."""
    content = " ".join(sentence(i, 3) for i in range(8))
    ids = tokenizer(content, add_special_tokens=False).input_ids
    pieces = [tokenizer.decode([token]) for token in ids]
    entries = [{"token": piece, "top_logprobs": [{"token": piece, "logprob": -0.1}]} for piece in pieces]
    for logged in (False, True):
        choice = {"message": said("assistant", content), "logprobs": {"content": entries} if logged else None}
        records = [
            {"request": {"messages": [said("user", f"q{i}")]}, "response": {"choices": [choice]}} for i in range(2)
        ]
        write(tmp_path / "log.jsonl", *records)
        names = ["token_recycling", "request"]
        file = replay_logs([tmp_path / "log.jsonl"], tokenizer, names, 32, FLAT)["files"]["log"]
        assert file["num_requests_with_logits"] == 2 * logged
        recycling, request = (file["systems"][name] for name in names)
        rate = recycling["tokens_per_forward"]
        assert rate > 1.3 if logged else rate == 1.0
        assert (request["proposers"].get("token_recycling", {"accepted": 0})["accepted"] > 10) is logged


def test_views_draft_what_the_session_can_not(tmp_path: Path, tokenizer: Any) -> None:
    """A tool shows a file by line numbers; the answer writes it in a tool call. The view of that form helps."""
    lines = [f'    {sentence(i, 4)} = "{sentence(40 + i, 3)}"' for i in range(12)]
    shown = "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines, 1))
    answer = json.dumps({"path": "a.py", "text": "\n".join(lines)})
    write(tmp_path / "log.jsonl", {"messages": [said("user", "cat -n a.py"), said("assistant", "reads"),
                                                said("tool", shown), said("assistant", answer)]})  # fmt: skip
    names = ["session", "views", "views:json", "views:diff_added"]
    systems = replay_logs([tmp_path / "log.jsonl"], tokenizer, names, 16, FLAT)["files"]["log"]["systems"]
    session, every, escaped, added = (systems[name]["tokens_per_forward"] for name in names)
    assert min(every, escaped) > 1.5 * session and added < 1.2 * session
    assert systems["views:json"]["proposers"]["workspace"]["accepted"] > 100
    assert not systems["session"]["proposers"]["workspace"]["proposed"]
    assert without_line_numbers("1: one\n2: two") == "one\ntwo" and without_line_numbers("a\nb\n3|c") == "a\nb\n3|c"


def test_opened_texts_are_tokenised_once(tokenizer: Any) -> None:
    calls: list[str] = []

    def tokenize(text: str) -> list[int]:
        calls.append(text)
        return list(tokenizer(text).input_ids)

    opened = OpenedTexts(tokenize, "")
    first = opened.streams(["one\ntwo\n"])
    count = len(calls)
    again = opened.streams(["one\ntwo\n", "one\ntwo\n", "three\n"])
    assert [id(stream) for stream in again[: len(first)]] == [id(stream) for stream in first]
    assert len(calls) == len(set(calls)) > count and len(again) == len(calls)
    assert [tokenizer.decode(stream) for stream in OpenedTexts(tokenize, "diff_added").streams(["a\nb"])] == ["+a\n+b"]


def test_costs_follow_the_curve() -> None:
    """Interpolated over nodes and context, continued straight beyond the last size; the forecast is their sum."""
    curve = CostCurve([256, 1280], [1, 3, 5], [[1.0, 2.0, 4.0], [3.0, 3.0, 3.0]])
    costs = Costs(curve, 8)
    assert costs.seconds(256)[:9].tolist() == pytest.approx([1, 1.5, 2, 3, 4, 5, 6, 7, 8])
    assert costs.seconds(1280)[0] == pytest.approx(3.0)
    assert costs.seconds(2304)[0] == pytest.approx(5.0)  # longer contexts go on as the measured ones rise
    assert costs.seconds(128)[0] == pytest.approx(1.0)  # shorter ones cost what the shortest does
    copied = list(range(100, 130))
    turns = [Turn(np.array(copied + [1, 2], np.int32), np.array(copied, np.int32))]
    linear = CostCurve([256], [1, 64], [[1e6, 64e6]])
    (tally,) = System("prompt_lookup", 200, Costs(linear, 8), Budget(8, None), 8, 1 << 20).play(turns)
    record = tally.as_dict()
    expected = tally.num_tokens / (tally.num_forwards + tally.num_draft_tokens)
    assert record["predicted_speedup"] == pytest.approx(expected, rel=1e-4)
    (flat,) = played("prompt_lookup", [(copied + [1, 2], copied)])[0]
    assert flat.as_dict()["predicted_speedup"] == pytest.approx(flat.tokens_per_forward, rel=1e-4)


def test_priced_trees_are_worth_their_nodes(tmp_path: Path, tokenizer: Any) -> None:
    """Where nodes are dear, `auto` drafts few, and is forecast better than 32 nodes at any price."""
    messages = []
    for i in range(6):
        messages += [said("user", sentence(i)), said("assistant", sentence(i % 2) + " " + sentence(100 + i))]
    write(tmp_path / "log.jsonl", {"messages": messages})
    dear = CostCurve([256], [1, 64], [[1e6, 64e6]])
    figures = [
        replay_logs([tmp_path / "log.jsonl"], tokenizer, ["session"], nodes, dear)["files"]["log"]["systems"]["session"]
        for nodes in (32, None)
    ]
    assert figures[1]["nodes_per_forward"] < 3 < figures[0]["nodes_per_forward"]
    assert figures[0]["predicted_speedup"] < 0.5 and figures[1]["predicted_speedup"] > 0.85


def test_priced_trees_learn_what_a_forward_brings() -> None:
    """On text that drafts well a forward brings many tokens, so a node has to bring more to be worth its time."""
    budget = Budget(None, CostCurve([256], [1, 64], [[1.0, 2.0]]))
    before = budget.prices(256, 8)[-1]
    copied = np.arange(40, dtype=np.int32)
    system = System("request", 200, Costs(CostCurve([256], [1, 64], [[1.0, 2.0]]), 8), budget, 8, 1 << 20)
    for _ in range(8):
        system.play([Turn(np.tile(copied, 2), np.tile(copied, 3))])
    assert budget.prices(256, 8)[-1] > 1.5 * before


def test_rates_of_groups_weigh_tokens() -> None:
    """Tokens by forwards of all, as everywhere: not the mean of the turns' rates."""
    point = {"num_requests": 1}
    systems = {
        "request": {
            "by_turn": [
                {**point, "turn": 3, "num_tokens": 10, "tokens_per_forward": 1.0},
                {**point, "turn": 4, "num_tokens": 90, "tokens_per_forward": 3.0},
            ],
            "by_position": [], "first_attempts": None, "retries": None,
        }
    }  # fmt: skip
    table = _curve_table("log", systems)
    assert dict(zip(*(list(column.cells) for column in table.columns), strict=True))["turns 3-4"] == "2.500"


def test_results_are_grouped(tmp_path: Path, tokenizer: Any) -> None:
    """Categories, attempts, turns and places add up to the whole; each file is a namespace of its own."""
    records = [
        {"category": "even" if i % 2 == 0 else "odd",
         "messages": [said("user", sentence(i % 3)), said("assistant", sentence(50 + i % 3)),
                      said("user", "more"), said("assistant", sentence(70 + i))]}
        for i in range(5)
    ]  # fmt: skip
    for name in ("one", "two"):
        write(tmp_path / f"{name}.jsonl", *records)
    calls: list[tuple[str, int, int]] = []
    results = replay_logs(
        [tmp_path], tokenizer, ["request", "session"], 16, FLAT, progress=lambda *call: calls.append(call)
    )
    assert calls[0] == ("one", 0, 20) and calls[-1] == ("two", 20, 20)
    for system in ("request", "session"):
        one, two = (results["files"][name]["systems"][system] for name in ("one", "two"))
        assert one["num_forwards"] == two["num_forwards"]  # the second file began anew
        assert results["geometric_mean_tokens_per_forward"][system] == pytest.approx(one["tokens_per_forward"])
        total = one["num_tokens"]
        assert sum(cell["num_tokens"] for cell in one["categories"].values()) == total
        assert one["first_attempts"]["num_requests"] == 6 and one["retries"]["num_requests"] == 4
        assert [(point["turn"], point["num_requests"]) for point in one["by_turn"]] == [(1, 5), (2, 5)]
        assert sum(point["num_tokens"] for point in one["by_position"]) == total and len(one["by_position"]) == 5
    session = results["files"]["one"]["systems"]["session"]
    assert session["retries"]["tokens_per_forward"] > 1.3 * session["first_attempts"]["tokens_per_forward"]
    limited = replay_logs([tmp_path / "one.jsonl"], tokenizer, ["session"], 16, FLAT, limit=2)
    assert limited["files"]["one"]["num_trajectories"] == 2


def test_example_curves_and_files(tmp_path: Path) -> None:
    """Every shipped curve loads and says that it is an example; a file that is no curve is refused."""
    assert EXAMPLE_CURVE in shipped_curves() and len(shipped_curves()) >= 3
    for name in shipped_curves():
        curve, described = load_curve(name)
        assert described["example"] and "example" in described["note"] and curve.relative(300)[0] == 1.0
    good = {"context_lengths": [256], "tree_sizes": [1, 8], "seconds": [[1.0, 2.0]]}
    path = write(tmp_path / "curve.json", good)
    curve, described = load_curve(str(path))
    assert curve.tree_sizes == [1, 8] and not described["example"]
    for change in ({"seconds": [[1.0]]}, {"tree_sizes": [2, 8]}, {"seconds": [[1.0, -1.0]]}, {"tree_sizes": "x"}):
        write(path, {**good, **change})
        with pytest.raises(ValueError, match="no cost curve"):
            load_curve(str(path))
    with pytest.raises(ValueError, match="no cost curve"):
        load_curve(str(write(path, [1])))
    with pytest.raises(ValueError, match="can't be read: .*flat-20ms"):
        load_curve("absent")


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(replay)
    return CliRunner().invoke(app, list(arguments))


def test_command(tmp_path: Path) -> None:
    """Tables, a folder with results and figures, JSON alone; nothing left half-written."""
    log = write(
        tmp_path / "log.jsonl",
        *({"messages": [said("user", sentence(0)), said("assistant", sentence(i % 2))]} for i in range(4)),
    )
    folder = tmp_path / "deep" / "report"
    systems = ",".join(("request", "session", "session:own", *BASELINES))
    done = run(str(log), "--systems", systems, "--nodes", "16", "-o", str(folder))
    assert done.exit_code == 0, done.output
    assert "a replay sees them only in logs with" in " ".join(done.output.split())
    assert sorted(path.name for path in folder.iterdir()) == ["growth-1-log.png", "replay.png", "results.json"]
    results = json.loads((folder / "results.json").read_text())
    for name in systems.split(","):
        figures = results["files"]["log"]["systems"][name]
        assert {"tokens_per_forward", "draft_us_p50", "predicted_speedup", "proposers", "by_turn"} <= set(figures)
    assert results["settings"]["profile"]["example"] is True and results["settings"]["nodes"] == 16
    quiet = run(str(log), "--systems", "session", "--nodes", "auto", "--profile", "flat-20ms", "--limit", "2", "--json")
    record = json.loads(quiet.stdout)
    assert record["files"]["log"]["num_trajectories"] == 2 and record["settings"]["nodes"] == "auto"


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--systems", "session,nonsense"], "systems must be of .*got 'nonsense'"),
        (["--systems", ","], "systems must be of"),
        (["--nodes", "-1"], "nodes must be auto or a whole number"),
        (["--profile", "nowhere.json"], "can't be read"),
        (["absent.jsonl"], "there is no log"),
        (["-o", "{file}"], "output folder .* must be a folder, and is a file"),
        (["-o", "{file}/deep"], "output folder .* can't be written"),
    ],
)
def test_command_refuses(arguments: list[str], message: str, tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", {"messages": [said("user", "x"), said("assistant", "y")]})
    done = run(str(log), *(argument.format(file=log) for argument in arguments))
    assert isinstance(done.exception, ValueError)
    with pytest.raises(ValueError, match=message):
        raise done.exception


@pytest.mark.parametrize(
    "line,message",
    [
        ('{"messages": [', "log.jsonl line 1: not JSON"),
        ("", "log '{log}' holds no answers"),
        ("\udcff", "log '{log}' is not UTF-8"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "log '{log}' holds no answers"),
        ("[]", "log.jsonl line 1: expected an object"),
        ("{}", "log.jsonl line 1: needs 'messages'"),
    ],
)
def test_broken_logs_are_one_line(line: str, message: str, tmp_path: Path) -> None:
    """Nothing of a progress bar above it, and nothing in the output folder."""
    log = tmp_path / "log.jsonl"
    log.write_text(line, errors="surrogateescape")
    done = retrodraft_here("replay", log, "-o", tmp_path / "out")
    assert done.returncode == 2 and done.stdout == "" and not list((tmp_path / "out").iterdir())
    assert done.stderr.startswith("retrodraft: " + message.format(log=log)), done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow  # the hub client tries again for a minute
def test_a_name_that_no_hub_knows_is_one_line(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", {"messages": [said("user", "x"), said("assistant", "y")]})
    done = retrodraft("replay", str(log), "--tokenizer", "no/such-tokenizer", HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("retrodraft: tokenizer 'no/such-tokenizer' can't be loaded")


def test_tables_have_room_in_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No head and no figure is cut, with all systems at once; systems that have no room stand in a further table."""
    log = write(
        tmp_path / "log.jsonl",
        *({"messages": [said("user", sentence(0)), said("assistant", sentence(i))]} for i in range(2)),
    )
    systems = [*SYSTEMS[:11], "views:json_diff_removed"]
    monkeypatch.setenv("COLUMNS", "80")
    done = retrodraft_here("replay", log, "--systems", ",".join(systems), "--nodes", "8")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "…" not in done.stdout and max(map(len, lines)) <= 80
    words = [word for line in lines for word in line.split()]
    assert {"tokens/", "forward", "accepted", "length", "nodes", "p50", "p99", "speed-up"} <= set(words)
    heads = [line.split() for line in lines if set(line.split()) <= set(systems) and line.split()]
    assert [name for head in heads for name in head if len(head) > 1 or name == systems[-1]] == systems
    assert len(lines[lines.index(next(line for line in lines if "first attempts" in line))].split()) > 3


def test_no_torch_on_import() -> None:
    code = "import sys, retrodraft.replay.run, retrodraft.commands.replay; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
