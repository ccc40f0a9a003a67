"""The routes: OpenAI's, sessions and their files, health and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from retrodraft.server.access import Access
from retrodraft.server.engine import Engine, Finished, Job
from retrodraft.server.generation import Options, sampling_arguments
from retrodraft.server.prompts import Prompts
from retrodraft.server.protocol import (
    ApiError,
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    FilesDeletion,
    FilesRequest,
    checked_text,
)
from retrodraft.server.responses import Answer, Replies
from retrodraft.server.sessions import checked_name
from retrodraft.server.streaming import Delta
from retrodraft.tree import Int32

LOOPBACK = ("127.0.0.1", "localhost", "::1")
CLOSED = 499  # the client went away; nobody sees it

log = logging.getLogger("retrodraft.server")


@dataclass(frozen=True)
class Settings:
    """What the routes need to know."""

    model: str  # the name that clients send
    api_keys: Sequence[str] = ()  # none: everybody is the namespace "default"
    max_body_bytes: int = 8 << 20
    host: str = "127.0.0.1"


def create_app(engine: Engine, prompts: Prompts, settings: Settings) -> FastAPI:
    """The application; its lifespan starts and closes the engine."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(engine.close)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    metrics = engine.metrics
    if settings.host in LOOPBACK and not settings.api_keys:
        # A web page could otherwise reach this server through a host name that it points here.
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK[:2], "[::1]", "::1"], www_redirect=False)
    app.add_middleware(
        Access, api_keys=settings.api_keys, max_body_bytes=settings.max_body_bytes, fail=metrics.fail
    )  # fmt: skip
    created = int(time.time())

    def model_record() -> dict[str, Any]:
        return {
            "id": settings.model, "object": "model", "created": created, "owned_by": "retrodraft",
            "max_model_len": engine.max_context,
        }  # fmt: skip

    def check_model(name: str) -> None:
        if name != settings.model:
            raise ApiError(
                404, f"there is no model {name!r}: this server has {settings.model!r}", param="model",
                code="model_not_found",
            )  # fmt: skip

    def options_of(body: CommonRequest, token_limit: int | None, num_top: int | None) -> Options:
        sampling = sampling_arguments(body, engine.rd.model.generation_config, engine.rd.vocab_size)
        chat = body if isinstance(body, ChatRequest) else None
        tools = chat.tools if chat is not None and chat.wants_tools else None
        prediction = chat.prediction.text if chat is not None and chat.prediction is not None else ""
        return Options(
            token_limit=token_limit, sampling=sampling, seed=body.seed,
            stops=[checked_text(stop, "stop") for stop in body.stops], num_top_logprobs=num_top,
            prediction=checked_text(prediction, "prediction"),
            tool_names={tool["function"]["name"] for tool in tools} if tools else None,
            parallel_calls=chat is None or chat.parallel_tool_calls is not False,
        )  # fmt: skip

    async def answer(request: Request, body: CommonRequest, ids: list[Int32], options: Options) -> Response:
        name = request.headers.get("x-session-id") or body.session_id
        job = Job(
            request.state.namespace, checked_name(name) if name is not None else None, ids, body.n or 1, options
        )  # fmt: skip
        replies = Replies(prompts.tokenizer, settings.model, isinstance(body, ChatRequest))
        engine.submit(job)
        if not body.stream:
            return await _whole(request, engine, job, replies)
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        if job.session is not None:
            headers["X-Session-Id"] = job.session
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        events = _events(engine, job, replies, isinstance(body, ChatRequest), with_usage)
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        check_model(body.model)
        options = options_of(body, body.token_limit, body.num_top_logprobs)
        messages = [message.to_template() for message in body.messages]
        tools = body.tools if body.wants_tools else None
        ids = await asyncio.to_thread(prompts.chat, messages, tools, body.chat_template_kwargs or {})
        return await answer(request, body, [ids], options)

    @app.post("/v1/completions")
    async def complete(request: Request, body: CompletionRequest) -> Response:
        check_model(body.model)
        options = options_of(body, body.token_limit, body.logprobs)
        ids = [await asyncio.to_thread(prompts.completion, text, engine.rd.vocab_size) for text in body.prompts]
        return await answer(request, body, ids, options)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_record()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(name)
        return model_record()

    @app.get("/v1/sessions")
    async def sessions(request: Request) -> dict[str, Any]:
        records = await asyncio.to_thread(engine.sessions.records, request.state.namespace)
        return {"object": "list", "data": records}

    @app.post("/v1/sessions/{name}/files")
    async def add_files(request: Request, name: str, body: FilesRequest) -> dict[str, Any]:
        files = {
            checked_text(file.path, "path"): checked_text(file.text, f"the text of {file.path!r}")
            for file in body.files
        }  # fmt: skip
        await asyncio.to_thread(engine.sessions.add_files, request.state.namespace, name, files)
        return {"id": name, "object": "session", "added": list(files)}

    @app.delete("/v1/sessions/{name}/files")
    async def remove_files(request: Request, name: str, body: FilesDeletion) -> dict[str, Any]:
        paths = [checked_text(path, "path") for path in body.paths]
        removed, absent = await asyncio.to_thread(engine.sessions.remove_files, request.state.namespace, name, paths)
        return {"id": name, "object": "session", "removed": removed, "not_found": absent}

    @app.get("/v1/sessions/{name}/files")
    async def files(request: Request, name: str) -> dict[str, Any]:
        held = await asyncio.to_thread(engine.sessions.files, request.state.namespace, name, prompts.tokenize)
        return {"id": name, "object": "session", "files": held}

    @app.get("/health")
    async def health() -> Response:
        status = "ok" if engine.alive else "stopped"
        return JSONResponse({"status": status}, 200 if engine.alive else 503)

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        metrics.fail(error.status)
        return JSONResponse(error.body(), error.status, {"Retry-After": "1"} if error.status in (429, 503) else None)

    @app.exception_handler(RequestValidationError)
    async def on_bad_request(request: Request, error: RequestValidationError) -> Response:
        return await on_api_error(request, _bad_request(error))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        known = {404: f"there is no {request.url.path}", 405: f"{request.method} is not allowed here"}
        message = known.get(error.status_code, str(error.detail))
        return await on_api_error(request, ApiError(error.status_code, message))

    @app.exception_handler(Exception)
    async def on_fault(request: Request, error: Exception) -> Response:
        message = "the server failed on this request; see its log"
        return await on_api_error(request, ApiError(500, message, kind="server_error"))

    return app


async def _whole(request: Request, engine: Engine, job: Job, replies: Replies) -> Response:
    """Collect all answers; a client that goes away ends the job."""

    async def hear_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        job.mailbox.put(0, ApiError(CLOSED, "the client closed the connection"))

    answers = [Answer() for _ in range(job.num_answers)]
    listener = asyncio.create_task(hear_disconnect())
    try:
        while any(answer.finished is None for answer in answers):
            for index, event in await job.mailbox.take():
                if isinstance(event, ApiError):
                    raise event
                if isinstance(event, Delta):
                    answers[index].delta.extend(event)
                else:
                    answers[index].finished = event
    finally:
        listener.cancel()
        engine.cancel(job)
    body = replies.whole(answers, job.n, job.options.num_top_logprobs is not None)
    finished = answers[0].finished
    return JSONResponse(body, headers={"X-Session-Id": finished.session if finished is not None else ""})


async def _events(engine: Engine, job: Job, replies: Replies, chat: bool, with_usage: bool) -> AsyncIterator[str]:
    """Server-sent events of a job; closing the iterator ends the job."""
    with_logprobs = job.options.num_top_logprobs is not None
    finished: list[Finished] = []
    try:
        if chat:
            for index in range(job.num_answers):
                yield _event(replies.opening(index))
        while len(finished) < job.num_answers:
            merged: list[tuple[int, Any]] = []  # what came meanwhile in one chunk an answer
            for index, event in await job.mailbox.take():
                last = merged[-1] if merged else (-1, None)
                if isinstance(event, Delta) and isinstance(last[1], Delta) and last[0] == index:
                    last[1].extend(event)
                else:
                    merged.append((index, event))
            for index, event in merged:
                if isinstance(event, ApiError):
                    yield _event(event.body())
                    return
                if isinstance(event, Delta):
                    yield _event(replies.chunk(index, event, with_logprobs))
                else:
                    finished.append(event)
                    yield _event(replies.last(index, event))
        if with_usage:
            yield _event(replies.total(finished, job.n))
        yield "data: [DONE]\n\n"
    finally:
        engine.cancel(job)


def _event(record: dict[str, Any]) -> str:
    return f"data: {json.dumps(record, separators=(',', ':'))}\n\n"


def _bad_request(error: RequestValidationError) -> ApiError:
    """The first complaint, as a sentence about the parameter."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        reason = (first.get("ctx") or {}).get("error", "")
        return ApiError(400, f"the request body is not JSON: {reason}")
    where = [str(part) for part in first["loc"][1:] if not str(part).startswith(("function-", "constrained-"))]
    if not where:
        return ApiError(400, "send a JSON object, with 'Content-Type: application/json'")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown parameter {'.'.join(where)!r}: leave it out", param=".".join(where))
    return ApiError(400, f"{'.'.join(where)}: {first['msg']}", param=".".join(where))
