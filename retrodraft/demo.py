"""The demonstration behind `make demo`: one prompt, plain and drafted, side by side."""

from __future__ import annotations

import time
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from retrodraft.workloads import render_prompt

PROMPT = """Add a method `transfer` to this class. Give the whole class.

class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("insufficient funds")
        self.balance -= amount
        return self.balance
"""


def run_demo(rd: Any, tokenizer: Any, max_new_tokens: int) -> bool:
    """Print the answer and what drafting saved; returns whether the two outputs are equal."""
    console = Console()
    ids = torch.tensor([render_prompt(tokenizer, [{"role": "user", "content": PROMPT}])], device=rd.model.device)
    options: dict[str, Any] = dict(max_new_tokens=max_new_tokens, do_sample=False)
    console.print(f"[bold]Prompt[/bold]\n{escape(PROMPT)}")
    console.print(f"Drafting on this model: {rd.capabilities}. Compiling and measuring once ...")
    rd.generate(ids[:, :32], max_new_tokens=8, do_sample=False)
    rd.model.generate(ids[:, :32], max_new_tokens=8, do_sample=False)
    rd.reset()
    plain, plain_seconds = _timed(rd.model.generate, ids, options)
    new = plain.shape[1] - ids.shape[1]
    answer = tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True)
    console.print(f"[bold]Answer[/bold]\n{escape(answer)}\n")  # unescaped, `values[i]` would turn italic
    table = Table("", "tokens", "target forwards", "seconds", "tokens/s")
    table.add_row("plain generate", str(new), str(new), f"{plain_seconds:.2f}", f"{new / plain_seconds:.1f}")
    equal = True
    for name in ("retrodraft", "retrodraft, asked again"):
        drafted, seconds = _timed(rd.generate, ids, options)
        equal = equal and torch.equal(plain, drafted)
        made = drafted.shape[1] - ids.shape[1]
        forwards = str(rd.stats.num_target_forwards)
        table.add_row(name, str(made), forwards, f"{seconds:.2f}", f"{made / seconds:.1f}")
    console.print(table)
    if equal:
        console.print("[bold]The texts are identical.[/bold]")
    elif rd.model.dtype == torch.float32:
        console.print("[bold red]The texts differ.[/bold red] In float32 that is a fault: please report it.")
    else:
        console.print("The texts differ: in low precision, near ties may fall either way.")
    return equal or rd.model.dtype != torch.float32


def _timed(function: Any, ids: torch.Tensor, options: dict[str, Any]) -> tuple[torch.Tensor, float]:
    start = time.perf_counter()
    out = function(ids, attention_mask=torch.ones_like(ids), **options)
    return out, time.perf_counter() - start
