"""Linear layers over few rows: the same products, where they pay, and nowhere else."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import check_equal, clear_prompt, plain
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from retrodraft import RetroDraft, fastest_linear
from retrodraft.kernels import openmp
from retrodraft.kernels.few_rows import Form, by_columns, by_tiles, forms_for
from retrodraft.kernels.tile_product import STEP, TILE_ROWS
from retrodraft.target import tree_hooks

DTYPES = [torch.float32, torch.bfloat16]


@settings(max_examples=120, deadline=None)
@given(
    form=st.sampled_from([by_tiles, by_columns]),
    shape=st.lists(st.integers(1, 4), min_size=0, max_size=3),
    sizes=st.tuples(st.integers(1, 90), st.integers(TILE_ROWS, 90)),
    dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
    seed=st.integers(0, 100),
)
def test_it_is_linear(
    form: Form, shape: list[int], sizes: tuple[int, int], dtype: torch.dtype, with_bias: bool, seed: int
) -> None:
    """Any leading dimensions; as near to the exact product as `linear` may be."""
    generator = torch.Generator().manual_seed(seed)
    in_features, out_features = sizes
    if form is by_tiles:
        in_features *= STEP
    x = torch.randn(*shape, in_features, generator=generator).to(dtype)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    bias = 50 * torch.randn(out_features, generator=generator).to(dtype) if with_bias else None
    with torch.inference_mode():
        output = form(x, weight, bias)
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert output.dtype == dtype and output.shape == exact.shape and output.is_contiguous()
    assert torch.allclose(output.double(), exact, rtol=torch.finfo(dtype).eps, atol=in_features * 1e-5)


@pytest.mark.parametrize("form", [by_tiles, by_columns])
def test_a_view_of_other_strides(form: Form) -> None:
    """What attention gives to the output projection may be a transposed view."""
    x = torch.randn(1, 2 * STEP, 6).transpose(1, 2)
    for dtype in DTYPES:
        weight = torch.randn(20, 2 * STEP).to(dtype)
        expected = functional.linear(x.to(dtype).contiguous().double(), weight.double())
        assert torch.allclose(form(x.to(dtype), weight, None).double(), expected, rtol=0.02, atol=0.05)


def test_which_weights_have_forms() -> None:
    """Tiles want whole steps, and rows that lie one behind the other."""
    for dtype in DTYPES:
        assert list(forms_for(torch.ones(TILE_ROWS, STEP, dtype=dtype))) == ["tiles", "columns"]
        assert list(forms_for(torch.ones(TILE_ROWS - 1, STEP, dtype=dtype))) == ["columns"]
        assert list(forms_for(torch.ones(8, STEP + 1, dtype=dtype))) == ["columns"]
        assert list(forms_for(torch.ones(STEP, 64, dtype=dtype).T)) == ["columns"]
    assert forms_for(torch.ones(8, STEP, dtype=torch.float16)) == {}
    assert forms_for(torch.ones(8, STEP, device="meta")) == {}


def test_threads_that_are_not_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch keeps them in another library than GNU's, tiles use the caller's alone."""
    monkeypatch.setattr(openmp, "_parallel", lambda: None)
    weight, x = torch.randn(40, STEP), torch.randn(3, STEP)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.allclose(by_tiles(x, weight), x @ weight.T, atol=1e-4)
    finally:
        torch.set_num_threads(threads)


def test_a_view_that_is_negated_when_read() -> None:
    weight, x = torch.randn(20, STEP), torch.randn(3, STEP)
    assert torch.allclose(by_tiles(torch._neg_view(x), weight), -x @ weight.T, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_defaults_for_new_tensors_change_nothing(dtype: torch.dtype) -> None:
    weight, x = torch.randn(40, STEP).to(dtype), torch.randn(3, STEP).to(dtype)
    expected = by_tiles(x, weight)
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64 if dtype is torch.float32 else torch.bfloat16)
        with torch.device("meta"):
            found = by_tiles(x, weight)
    finally:
        torch.set_default_dtype(default)
    assert found.dtype is dtype and torch.equal(found, expected)


@pytest.fixture(params=["tiles", "columns"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, ...]]:
    """The form is used for every size that it takes; shapes of its inputs."""
    found: list[tuple[int, ...]] = []

    def counting(weight: torch.Tensor) -> dict[str, Form]:
        form = forms_for(weight).get(request.param)

        def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            assert form is not None
            found.append(tuple(x.shape))
            return form(x, weight, bias)

        return {} if form is None else {request.param: counted}

    monkeypatch.setattr(fastest_linear, "forms_for", counting)
    monkeypatch.setattr(fastest_linear, "LEAST_WEIGHTS", 0)
    monkeypatch.setattr(fastest_linear, "GAIN", float("inf"))
    monkeypatch.setattr(fastest_linear, "_known", {})
    monkeypatch.setenv("RETRODRAFT_CACHE", str(tmp_path))
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "mixtral", "gpt_neox", "llama4", "bloom"])
def test_output_stays_that_of_plain_generate(family: str, calls: list[tuple[int, ...]]) -> None:
    """With biases, tied heads, fused projections and experts, for all verify forwards and for those alone."""
    model = tiny(family)
    rd = RetroDraft(model, budget=9)
    prompt = clear_prompt(model, 40)
    reference = plain(model, prompt)
    calls.clear()  # of the measurement and the probe
    check_equal(rd, prompt, reference)
    assert calls and max(shape[-2] for shape in calls) <= 10
    before = len(calls)
    model(prompt)
    assert len(calls) == before


def test_other_threads_are_left_alone(calls: list[tuple[int, ...]]) -> None:
    """The stand-in lets through what is no verify forward of its own thread, and goes when the hooks go."""
    original = functional.linear
    weight = torch.nn.Parameter(torch.randn(4, 3))
    results: list[Any] = []
    with tree_hooks():
        assert functional.linear is not original
        thread = threading.Thread(target=lambda: results.append(functional.linear(torch.ones(2, 3), weight)))
        thread.start()
        thread.join()
        assert results[0].requires_grad and not calls
    assert functional.linear is original


class Steered(torch.nn.Module):
    """A layer that, inside the forward, takes a gradient, enters autocast, and multiplies by a vector."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.vector = inner, torch.nn.Parameter(torch.randn(64))
        self.probe = torch.nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            y = x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self.probe(y).sum(), y)
        with torch.autocast("cpu", torch.bfloat16):
            low = self.inner(x)
        return low.to(x.dtype) + 0.1 * gradient + functional.linear(x, self.vector)[..., None]


def test_what_a_forward_may_do_inside(calls: list[tuple[int, ...]]) -> None:
    model = tiny("llama")
    layer = model.model.layers[0]
    layer.self_attn.o_proj = Steered(layer.self_attn.o_proj)
    rd = RetroDraft(model, budget=9)
    assert rd.capabilities.mode == "tree"
    prompt = clear_prompt(model, 40)
    check_equal(rd, prompt, plain(model, prompt))
    assert calls


class Counting(TorchFunctionMode):
    """Counts the linear layers that it is shown."""

    count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.__name__ == "linear"
        return function(*args, **(kwargs or {}))


class CountingProducts(TorchDispatchMode):
    """Counts the matrix products that it is shown."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.linear)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Counting, CountingProducts])
def test_modes_see_every_layer(mode: Any, calls: list[tuple[int, ...]]) -> None:
    """FLOP counters and the like: what they are to see is left to torch."""
    model = tiny("llama")
    rd = RetroDraft(model, budget=9)
    prompt = clear_prompt(model, 40)
    calls.clear()
    with mode() as seen:
        rd.generate(prompt, max_new_tokens=12, do_sample=False)
    layers = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    assert seen.count >= layers * rd.stats.num_target_forwards and not calls


class Mapped(torch.nn.Linear):
    """A layer that is applied to each token by itself, by `vmap`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.vmap(super().forward, in_dims=1, out_dims=1)(input)


def test_what_is_mapped_is_left_to_torch(calls: list[tuple[int, ...]]) -> None:
    model = tiny("llama")
    model.model.layers[0].mlp.up_proj.__class__ = Mapped
    rd = RetroDraft(model, budget=9)
    assert rd.capabilities.mode == "tree"
    prompt = clear_prompt(model, 40)
    check_equal(rd, prompt, plain(model, prompt))
    assert calls


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_layers_are_left_to_torch(calls: list[tuple[int, ...]], layout: torch.layout) -> None:
    """Which multiplies them without a gradient, but not in inference mode: so the model is left to plain generate."""
    model = tiny("llama")
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight = torch.nn.Parameter(mlp.up_proj.weight.detach().to_sparse(layout=layout), requires_grad=False)
    with tree_hooks():
        functional.linear(torch.ones(2, 64), mlp.up_proj.weight)
    prompt, rd = clear_prompt(model, 40), RetroDraft(model, budget=9)
    with pytest.warns(UserWarning, match="inference tensor"):
        found = rd.generate(prompt, do_sample=False, max_new_tokens=9)
    assert torch.equal(found, model.generate(prompt, do_sample=False, max_new_tokens=9))


def test_compiled_layers_are_left_to_torch(calls: list[tuple[int, ...]]) -> None:
    model = tiny("llama")
    prompt = clear_prompt(model, 40)
    reference = plain(model, prompt)
    for layer in model.model.layers:
        layer.mlp.compile(backend="eager", fullgraph=True)
    rd = RetroDraft(model, budget=9)
    assert rd.capabilities.mode == "tree"
    calls.clear()
    check_equal(rd, prompt, reference)
    assert calls and all(shape[-1] == 64 for shape in calls)  # a down projection takes 96


def test_what_others_put_over_the_stand_in_stays() -> None:
    original = functional.linear
    try:
        with tree_hooks():
            ours = functional.linear

            def others(*args: Any, **kwargs: Any) -> torch.Tensor:
                return ours(*args, **kwargs)

            functional.linear = others
        assert functional.linear is others
        assert functional.linear(torch.ones(2, 3), torch.ones(4, 3)).tolist() == [[3.0] * 4] * 2
    finally:
        functional.linear = original
