"""What clients send: OpenAI's chat and completion requests, checked; and the errors they get back.

A parameter that would change the output and can't be honoured is refused, never passed over.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_CHOICES = 16  # `n`
MAX_PROMPTS = 64  # of one completions request
MAX_TOP_LOGPROBS = 20
NEUTRAL: dict[str, tuple[Any, ...]] = {  # parameters that are fine as long as they ask for nothing
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "echo": (False,),
    "suffix": ("",),
    "function_call": ("none",),
    "functions": ([],),
}
ADVICE = {
    "frequency_penalty": "leave it at 0, or send repetition_penalty",
    "presence_penalty": "leave it at 0, or send repetition_penalty",
    "modalities": 'only ["text"] is served',
    "response_format": 'only {"type": "text"} is served; ask for the format in the prompt',
    "echo": "put the prompt in front of the text yourself",
    "suffix": "only text after a prompt can be completed",
    "function_call": "send tools and tool_choice",
    "functions": "send tools",
    "best_of": "leave it out or set it to n",
    "reasoning_effort": "send what the model's chat template knows in chat_template_kwargs",
}

# How messages are rendered is the server's affair; a template of a client's own could keep it busy for ever.
RENDERING = {
    "chat_template", "conversation", "messages", "tools", "tokenize", "add_generation_prompt", "continue_final_message",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "padding", "truncation",
    "max_length", "processor_kwargs", "sanitize_control_tokens",
}  # fmt: skip

Text = Annotated[str, Field(max_length=1 << 26)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class ApiError(Exception):
    """An error with OpenAI's fields, to be sent with its status."""

    def __init__(
        self, status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None,
        code: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code

    def body(self) -> dict[str, Any]:
        """OpenAI's error JSON."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class StreamOptions(BaseModel):
    """Of a streamed answer."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against traffic analysis; none is sent


class Message(BaseModel):
    """A chat message; parts of text are joined, other fields go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Text | list[dict[str, Any]] | None = None

    def to_template(self) -> dict[str, Any]:
        """The message as chat templates know it. Raises ApiError for a part that is not text."""
        message: dict[str, Any] = {k: v for k, v in (self.model_extra or {}).items() if v is not None}
        message["role"] = "system" if self.role == "developer" else self.role
        message["content"] = _joined(self.content)
        return message


class Prediction(BaseModel):
    """OpenAI's predicted outputs: text that the answer is likely to repeat."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["content"]
    content: Text | list[dict[str, Any]]

    @property
    def text(self) -> str:
        """The predicted text."""
        return _joined(self.content)


class CommonRequest(BaseModel):
    """What chat and completions share."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None  # this and the next change nothing of the output
    service_tier: str | None = None
    # beyond OpenAI's, as other servers have them
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_honoured(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = {name: value for name, value in data.items() if value is not None}
        for name, neutral in NEUTRAL.items():
            if name in data and name not in cls.model_fields:
                if data[name] not in neutral:
                    raise ApiError(400, f"{name} is not supported: {ADVICE[name]}", param=name, code="unsupported")
                del data[name]
        if "best_of" in data:
            if data["best_of"] != data.get("n", 1):
                raise ApiError(
                    400, f"best_of is not supported: {ADVICE['best_of']}", param="best_of", code="unsupported"
                )
            del data["best_of"]
        for name in data:
            if name not in cls.model_fields:
                advice = ADVICE.get(name, "leave it out")
                raise ApiError(400, f"unknown parameter {name!r}: {advice}", param=name, code="unknown_parameter")
        return data

    @property
    def stops(self) -> list[str]:
        """The stop texts; empty ones are none."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in given if text]

    @property
    def session_id(self) -> str | None:
        """The session that the metadata names."""
        value = (self.metadata or {}).get("session_id")
        if value is not None and not isinstance(value, str):
            raise ApiError(400, "metadata.session_id must be a text", param="metadata.session_id")
        return value


class ChatRequest(CommonRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    store: bool | None = None  # this and the next two change nothing of the output
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # beyond OpenAI's, as other servers have it

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: set logprobs to true", param="top_logprobs")
        for number, tool in enumerate(self.tools or []):
            function = tool.get("function")
            name = function.get("name") if isinstance(function, dict) else None
            if tool.get("type") != "function" or not isinstance(name, str) or not name:
                raise ApiError(
                    400, f"tools[{number}] must be of type 'function' with a function.name", param=f"tools[{number}]"
                )
        for name in self.chat_template_kwargs or {}:
            if name in RENDERING:
                raise ApiError(
                    400, f"chat_template_kwargs holds variables of the model's template, and {name!r} is none: "
                    "leave it out", param="chat_template_kwargs",
                )  # fmt: skip
        if self.tool_choice not in (None, "auto", "none"):
            raise ApiError(
                400, "tool_choice can be 'auto' or 'none': the model can't be forced to call a tool, so ask for it in "
                "the prompt", param="tool_choice", code="unsupported",
            )  # fmt: skip
        return self

    @property
    def wants_tools(self) -> bool:
        """Whether the answer may hold tool calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def token_limit(self) -> int | None:
        """Most tokens of an answer, where the client gives a number."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        """Alternatives to report at each token; None where no probabilities are wanted."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(CommonRequest):
    """`POST /v1/completions`."""

    prompt: Text | TokenIds | Annotated[list[Text] | list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several prompts, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[int(token) for token in self.prompt]]
        return list(self.prompt)

    @property
    def token_limit(self) -> int:
        """Most tokens of an answer."""
        return 16 if self.max_tokens is None else self.max_tokens


class FileText(BaseModel):
    """A file as the agent sees it."""

    model_config = ConfigDict(extra="forbid")
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    text: Text


class FilesRequest(BaseModel):
    """`POST /v1/sessions/{id}/files`: texts only; the server reads no paths that a client names."""

    model_config = ConfigDict(extra="forbid")
    files: Annotated[list[FileText], Field(min_length=1, max_length=10_000)]

    @model_validator(mode="before")
    @classmethod
    def _one_file(cls, data: Any) -> Any:
        return {"files": [data]} if isinstance(data, dict) and "files" not in data else data


class FilesDeletion(BaseModel):
    """`DELETE /v1/sessions/{id}/files`."""

    model_config = ConfigDict(extra="forbid")
    paths: Annotated[list[str], Field(min_length=1, max_length=10_000)]


def checked_text(text: str, param: str) -> str:
    """`text`, unless it holds half of a surrogate pair, which JSON can spell and UTF-8 can't."""
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ApiError(400, f"{param} holds half of a surrogate pair: send valid Unicode", param=param)
    return text


def _joined(content: str | list[dict[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        text = part.get("text")
        if part.get("type") not in ("text", "refusal") or not isinstance(part.get("text", part.get("refusal")), str):
            raise ApiError(
                400, f"content parts of type {part.get('type')!r} are not supported: send text", param="messages",
                code="unsupported",
            )  # fmt: skip
        texts.append(text if text is not None else part["refusal"])
    return "".join(texts)
