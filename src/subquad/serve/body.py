"""Bodies of requests: OpenAI's parameters to what the engine needs. What is not supported is refused by name."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from subquad.checks import LARGEST, check_plain, nearest, refuse, shown
from subquad.models import Sampling
from subquad.serve.vocabulary import Vocabulary

MOST_CHOICES = 1024  # of one request: n times the number of prompts
MOST_STOPS, LONGEST_STOP = 16, 1000
MOST_TOP = 20  # log-probabilities of other tokens than the drawn one
COMPLETION_STEPS, CHAT_STEPS = 16, 1024  # where max_tokens is not given; the first is OpenAI's


class Refused(Exception):
    """An answer in OpenAI's form for errors."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def content(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a body asks for, checked."""

    chat: bool
    prompts: tuple[tuple[int, ...], ...]
    echoed: tuple[str, ...] = ()  # the text of each prompt with echo, otherwise empty
    begun: tuple[bool, ...] = ()  # with echo: whether a prompt is only the start token, as its text was empty
    steps: int
    n: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    stop: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()  # tokens that end the text
    logprobs: int | None = None
    stream: bool = False
    usage: bool = False  # a last event of a stream says what was used


# Parameters that change nothing here, whatever their value: they tell OpenAI who asks
IGNORED = {
    "user": str, "metadata": Mapping[str, Any], "safety_identifier": str, "prompt_cache_key": str,
    "prompt_cache_retention": str,
}  # fmt: skip
# Parameters that are accepted at values that ask for nothing special; None is accepted for all
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "service_tier": ("auto", "default"),
    "store": (False,),
}  # fmt: skip
NEUTRAL_COMPLETION: dict[str, tuple[Any, ...]] = {"best_of": (1,), "suffix": ("",)}
NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"), "parallel_tool_calls": (True, False), "modalities": (["text"],), "audio": (),
    "prediction": (), "reasoning_effort": (), "verbosity": ("medium",), "web_search_options": (), "moderation": (),
}  # fmt: skip
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
BOTH: dict[str, Any] = {
    "model": str, "max_tokens": int, "n": int, "temperature": float, "top_p": float, "top_k": int, "min_p": float,
    "repetition_penalty": float, "seed": int, "stop": str | list[str], "stream": bool,
    "stream_options": Mapping[str, Any], "ignore_eos": bool,
}  # fmt: skip
COMPLETION: dict[str, Any] = {**BOTH, "prompt": Any, "logprobs": int, "echo": bool}
CHAT: dict[str, Any] = {**BOTH, "messages": Any, "max_completion_tokens": int, "logprobs": bool, "top_logprobs": int}


KNOWN = frozenset({*COMPLETION, *CHAT, *NEUTRAL, *NEUTRAL_COMPLETION, *NEUTRAL_CHAT, *IGNORED})


@dataclass(frozen=True)
class Reader:
    """Reads bodies for one model."""

    name: str
    vocabulary: Vocabulary
    longest: int  # tokens of a prompt and its answer

    def completion(self, body: Mapping[str, Any]) -> Asked:
        given = self._known(body, COMPLETION, NEUTRAL | NEUTRAL_COMPLETION)
        read = self._prompts(given.get("prompt"))
        logprobs, echo = given.get("logprobs"), given.get("echo", False)
        _check_range("logprobs", logprobs, 0, MOST_TOP)
        prompts = tuple(prompt or (self.vocabulary.start,) for prompt in read)
        steps = self._steps("max_tokens", given.get("max_tokens"), prompts, COMPLETION_STEPS, 0)
        echoed = tuple(self._text(prompt) for prompt in read) if echo else ()
        begun = tuple(not prompt for prompt in read) if echo else ()
        return self._asked(
            given, chat=False, prompts=prompts, echoed=echoed, begun=begun, steps=steps, logprobs=logprobs
        )

    def chat(self, body: Mapping[str, Any]) -> Asked:
        given = self._known(body, CHAT, NEUTRAL | NEUTRAL_CHAT)
        if "messages" not in given:
            raise Refused(400, "messages is missing: accepted is a list of messages", param="messages")
        prompts = (self._chat_tokens(given["messages"]),)
        names = [name for name in ("max_completion_tokens", "max_tokens") if name in given]
        if len(names) == 2 and given[names[0]] != given[names[1]]:
            _wrong("max_tokens", "max_completion_tokens and max_tokens differ: accepted is one of them")
        name = names[0] if names else "max_tokens"
        steps = self._steps(name, given.get(name), prompts, CHAT_STEPS, 1)
        top = given.get("top_logprobs")
        _check_range("top_logprobs", top, 0, MOST_TOP)
        if top is not None and not given.get("logprobs"):
            _wrong("top_logprobs", f"top_logprobs={top} cannot work without logprobs=true")
        logprobs = (top or 0) if given.get("logprobs") else None
        return self._asked(given, chat=True, prompts=prompts, steps=steps, logprobs=logprobs)

    def _known(
        self, body: Mapping[str, Any], hints: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]
    ) -> dict[str, Any]:
        """The parameters that are not null, of the right types."""
        for name, value in body.items():
            if value is None:
                continue
            hint = hints.get(name, IGNORED.get(name))
            if hint is not None:
                words = {str: "a text", str | list[str]: "a text or a list of texts"}.get(hint)
                if words is not None and not _fits(value, hint):
                    _checked(name, refuse, name, value, words)
                if name == "seed" and type(value) is int and not -LARGEST <= value <= LARGEST:
                    _checked(name, refuse, name, value, "an integer from -(2**63 - 1) to 2**63 - 1")
                _checked(name, check_plain, name, value, hint)
            elif name not in neutral:
                known = [*hints, *neutral, *IGNORED]
                _wrong(name, f"{shown(name)} is no parameter of this endpoint{nearest(name, known)}")
            elif not any(type(value) is type(other) and value == other for other in neutral[name]) and not (
                type(value) is float and value == 0 in neutral[name]
            ):
                accepted = " or ".join(shown(other) for other in (*neutral[name], None))
                _wrong(name, f"{name}={shown(value)} is not supported: accepted is {accepted}")
        given = {name: value for name, value in body.items() if value is not None and name in hints}
        if given.get("model", self.name) != self.name:
            message = f"model={shown(given['model'])} does not exist: this server has {shown(self.name)}"
            raise Refused(404, message, param="model", code="model_not_found")
        return given

    def _asked(self, given: Mapping[str, Any], **rest: Any) -> Asked:
        n, stop, options = given.get("n", 1), given.get("stop", ()), given.get("stream_options", {})
        _check_range("n", n, 1, MOST_CHOICES)
        if n * len(rest["prompts"]) > MOST_CHOICES:
            _wrong("n", f"n={n} with {len(rest['prompts'])} prompts: accepted are at most {MOST_CHOICES} choices")
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if len(stop) > MOST_STOPS or not all(0 < len(text) <= LONGEST_STOP for text in stop):
            accepted = f"at most {MOST_STOPS} texts of 1 to {LONGEST_STOP:,} characters"
            _wrong("stop", f"stop={shown(stop)} cannot work: accepted are {accepted}")
        odd = [name for name in options if name not in ("include_usage", "include_obfuscation")]
        if odd or not all(isinstance(value, bool) for value in options.values()) or options.get("include_obfuscation"):
            _wrong("stream_options", f"stream_options={shown(options)} cannot work: accepted is include_usage")
        if options and not given.get("stream"):
            _wrong("stream_options", "stream_options cannot work without stream=true")
        seed = given.get("seed")
        sampling = {name: given[name] for name in SAMPLING if name in given}
        if sampling.get("top_k") in (0, -1):  # as other servers say "all"
            del sampling["top_k"]
        return Asked(
            n=n, stop=stop, stream=given.get("stream", False), usage=options.get("include_usage", False),
            sampling=self._sampling(sampling), seed=secrets.randbits(62) if seed is None else seed,
            ends=() if given.get("ignore_eos") else self.vocabulary.ends, **rest,
        )  # fmt: skip

    def _sampling(self, options: Mapping[str, Any]) -> Sampling:
        for name, value in options.items():
            if name != "top_p" or value != 0:
                _checked(name, lambda name=name, value=value: Sampling(**{name: value}))
        if options.get("top_p") == 0:  # the most probable token alone, at OpenAI too
            options = {**{n: v for n, v in options.items() if n != "top_p"}, "temperature": 0}
        return Sampling(**options, exclude=self.vocabulary.never)

    def _prompts(self, prompt: Any) -> tuple[tuple[int, ...], ...]:
        """Tokens of each prompt, none for an empty text.

        Accepted: a text, a list of texts, tokens, a list of lists of tokens; null or nothing is an empty text.
        """
        texts = prompt in (None, "") or isinstance(prompt, str)
        if texts:
            return (self._tokens(prompt or ""),)
        if not isinstance(prompt, list):
            _refuse_prompt(prompt)
        if prompt and all(isinstance(part, str | list) for part in prompt) and len({type(p) for p in prompt}) == 1:
            return tuple(self._tokens(part) for part in prompt)
        return (self._tokens(prompt),)

    def _tokens(self, prompt: str | list[Any]) -> tuple[int, ...]:
        vocab = self.vocabulary.vocab
        if prompt == []:
            _wrong("prompt", "prompt=[] cannot work: accepted are at least one token, or a text")
        if len(prompt) > self.longest and (isinstance(prompt, list) or self.vocabulary.kind != "text"):
            self._too_long(len(prompt))
        if isinstance(prompt, str):
            tokens = _checked("prompt", self.vocabulary.encode, prompt)
        elif all(type(token) is int and 0 <= token < vocab for token in prompt):
            tokens = prompt
        else:
            odd = next(token for token in prompt if type(token) is not int or not 0 <= token < vocab)
            _wrong("prompt", f"prompt holds {shown(odd)}: accepted are tokens, integers from 0 to {vocab - 1}")
        return tuple(tokens)

    def _text(self, prompt: Sequence[int]) -> str:
        decoder = self.vocabulary.decoder()
        return "".join([*map(decoder.push, prompt), decoder.flush()])

    def _chat_tokens(self, messages: Any) -> tuple[int, ...]:
        accepted = "a list of objects with a role and a content, which is text or a list of text parts"
        if not isinstance(messages, list) or not messages:
            _wrong("messages", f"messages={shown(messages)} cannot work: accepted is {accepted}")
        read = []
        for number, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                _wrong("messages", f"messages[{number}]={shown(message)} cannot work: accepted is {accepted}")
            odd = [key for key in message if key not in ("role", "content", "name") and message[key]]
            if odd:
                _wrong("messages", f"messages[{number}] has {shown(odd[0])}: accepted are role, content and name")
            content = message.get("content")
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            if not isinstance(parts, list) or not all(
                isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
                for part in parts
            ):
                _wrong("messages", f"messages[{number}].content={shown(content)} cannot work: accepted is text")
            text = "".join(part["text"] for part in parts)
            read.append({**{k: v for k, v in message.items() if k in ("role", "name") and v}, "content": text})
        return tuple(_checked("messages", self.vocabulary.render, read)) or (self.vocabulary.start,)

    def _steps(self, name: str, steps: int | None, prompts: Sequence[Sequence[int]], default: int, least: int) -> int:
        longest = max(map(len, prompts))
        room = self.longest - longest
        if room < 1:
            self._too_long(longest)
        if steps is None:
            return min(default, room)
        _check_range(name, steps, least, None)
        if steps > room:
            message = f"{name}={steps} cannot work with a prompt of {longest:,} tokens: accepted is at most {room:,}"
            raise Refused(400, message, param=name, code="context_length_exceeded")
        return steps

    def _too_long(self, length: int) -> NoReturn:
        message = f"the prompt has {length:,} tokens: accepted are at most {self.longest:,} with the answer's"
        raise Refused(400, message, param="prompt", code="context_length_exceeded")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is a text, or a list of texts if that is accepted too."""
    return isinstance(value, str) or (
        hint is not str and isinstance(value, list) and all(isinstance(part, str) for part in value)
    )


def _check_range(name: str, value: int | None, least: int, most: int | None) -> None:
    if value is not None and not least <= value <= (value if most is None else most):
        accepted = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most:,}"
        _checked(name, refuse, name, value, accepted)


def _checked(param: str, function: Any, *args: Any) -> Any:
    """Call a function whose ValueError is the client's mistake."""
    try:
        return function(*args)
    except ValueError as error:
        raise Refused(400, str(error), param=param) from error


def _wrong(param: str, message: str) -> NoReturn:
    raise Refused(400, message, param=param)


def _refuse_prompt(prompt: Any) -> NoReturn:
    _wrong(
        "prompt", f"prompt={shown(prompt)} cannot work: accepted is text, a list of texts, tokens or lists of tokens"
    )
