"""Lists of models: clients ask which ones a server has."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from agent.gateway.answers import Answer
from agent.models.dialects.anthropic_messages import API as MESSAGES
from agent.models.dialects.gemini import API as GEMINI
from agent.models.dialects.gemini import PATH as GEMINI_PATH
from batch_trajectories.basics import exact_json

List = Callable[[str, Mapping[str, str]], Coroutine[Any, Any, Answer]]
"""Answers a request for the list, from its path and its headers (names lower-case)."""

_BELOW_ROOT = {MESSAGES: "/v1/models", GEMINI: GEMINI_PATH}


def names_only(names: Iterable[str]) -> List:
    """The list of these names, in one body that clients of every API can read."""
    known = list(dict.fromkeys(names))
    body = {
        "object": "list",
        "data": [
            {
                **{"id": name, "object": "model", "created": 0, "owned_by": "run"},
                **{"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"},
            }
            for name in known
        ],
        **{"has_more": False, "first_id": None, "last_id": None},
        "models": [
            {"name": f"models/{name}", "supportedGenerationMethods": ["generateContent"]}
            for name in known
        ],
    }

    async def answer(path: str, headers: Mapping[str, str]) -> Answer:
        del path, headers
        reply = Answer()
        reply.finish([exact_json.dumps(body)])
        return reply

    return answer


def api_asked(path: str, headers: Mapping[str, str], otherwise: str) -> str:
    """The API by which a client asks for the list: the path of two of them is the same."""
    if path.startswith("/v1beta"):
        return GEMINI
    return MESSAGES if "anthropic-version" in headers else otherwise


def path_below_root(api: str, path: str) -> str:
    """Where an endpoint of this API has the list, with the query of the client's path."""
    _, mark, query = path.partition("?")
    return _BELOW_ROOT.get(api, "/models") + mark + query
