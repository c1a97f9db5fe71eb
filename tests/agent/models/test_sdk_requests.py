"""What the providers' own clients know: how a request is sent, and which codes an error can have.

The clients that are installed for the tests are asked to send what we send, to a server that
takes down what comes. They are imported where they are used: each pytest process imports this
file, and they take seconds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pydantic import TypeAdapter, ValidationError

from agent.messages.message import Message
from agent.models.batches.calls import open_batches
from agent.models.client.endpoint import EndpointModel
from agent.models.dialects.dialect import DIALECTS, get_dialect
from agent.models.error_bodies import error_behind_200, read_refusal
from agent.models.errors import ModelError
from agent.models.model import ModelSettings, Request
from tests.agent.models.by_dialect import SAMPLES
from tests.helpers.answering import Handler, answering, listening
from tests.helpers.running import run, write_prompts

KEY = "sk-ant-of-the-test-0123456789"
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "F.", "parameters": {"type": "object"}},
    }
]
REQUEST = Request([{"role": "system", "content": "S."}, {"role": "user", "content": "U."}], TOOLS)

OF_THE_CONNECTION = frozenset({"host", "connection", "accept-encoding", "content-length"})
OF_THE_CLIENT = "x-stainless-"
EXEMPT = OF_THE_CONNECTION | {"user-agent"}


class Sent(NamedTuple):
    """A request as a server sees it."""

    method: str
    target: str
    """Path and query."""
    headers: dict[str, str]
    body: Any


def capture_request(send: Callable[[str], Coroutine[Any, Any, None]]) -> Sent:
    """What comes of a request; all are refused."""
    sent: list[Sent] = []

    class Taking(Handler):
        def take(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            said = {
                name: value
                for name, value in headers.items()
                if name not in EXEMPT and not name.startswith(OF_THE_CLIENT)
            }
            body = self.body()
            sent.append(Sent(self.command, self.path, said, json.loads(body) if body else None))
            self.send(400)

        do_GET = do_POST = take

    with listening(Taking) as root:
        asyncio.run(send(root))
    [request] = sent
    return request


def settings_of(dialect: str, root: str, **given: Any) -> ModelSettings:
    base_url = root if dialect == "anthropic_messages" else root + "/v1"
    return ModelSettings(name="m", api=dialect, base_url=base_url, key_env=None, **given)


def ours(dialect: str, *, is_streamed: bool, **given: Any) -> Sent:
    async def send(root: str) -> None:
        adapter = EndpointModel(settings_of(dialect, root, **given), KEY)
        on_delta = (lambda event: None) if is_streamed else None
        try:
            with pytest.raises(ModelError, match="HTTP 400"):
                await adapter.complete(Request(REQUEST.messages, TOOLS, on_delta=on_delta))
        finally:
            await adapter.close()

    return capture_request(send)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("with_options", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_request_is_that_of_the_provider_s_own_client(
    dialect: str, with_options: bool, is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Method, path, every header but a few, and a body that the client takes as it is."""
    for name in ("ANTHROPIC_CUSTOM_HEADERS", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.delenv(name, raising=False)
    sample = SAMPLES[dialect]
    sent = ours(dialect, is_streamed=is_streamed, **(sample.options if with_options else {}))
    assert sent == capture_request(lambda root: sample.send(root, KEY, sent.body))
    assert sent.body.get("stream", False) == is_streamed


CALL: Any = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CONVERSATION: list[Message] = [
    Message(role="system", content="S."),
    Message(role="user", content="U."),
    Message(role="assistant", content="I look.", tool_calls=[CALL]),
    Message(role="tool", tool_call_id="c1", name="f", content="2", is_error=False),
    Message(role="assistant", content="Two."),
    Message(role="user", content="And now?"),
]

PARAMS = {
    "openai_chat": ("openai.types.chat.completion_create_params", "CompletionCreateParams"),
    "openai_responses": ("openai.types.responses.response_create_params", "ResponseCreateParams"),
    "anthropic_messages": ("anthropic.types.message_create_params", "MessageCreateParams"),
}
"""Where the clients declare what their methods take, by API."""


def check_same(validated: Any, given: Any) -> None:
    """Pydantic validates iterables when they are read, and drops fields that a type lacks."""
    if isinstance(given, dict):
        assert validated.keys() == given.keys()
        for name in given:
            check_same(validated[name], given[name])
    elif isinstance(given, list):
        for one, other in zip(validated, given, strict=True):
            check_same(one, other)
    else:
        assert validated == given


@pytest.mark.parametrize("effort", [None, "none", "low", "high"])
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("dialect", PARAMS)
def test_a_body_has_the_type_that_the_client_declares(
    dialect: str, is_streamed: bool, effort: str | None
) -> None:
    """Each of its fields, in a conversation with tools that may be called or not."""
    module, name = PARAMS[dialect]
    params = getattr(import_module(module), name + ("Streaming" if is_streamed else "NonStreaming"))
    adapter: TypeAdapter[Any] = TypeAdapter(params)
    # The newest version of Anthropic's API takes no sampling; see the test of its header.
    sampling = {} if dialect == "anthropic_messages" else {"temperature": 0.5, "top_p": 0.9}
    settings = settings_of(
        dialect, "https://api.openai.com", max_tokens=9, reasoning_effort=effort, **sampling
    )
    on_delta = (lambda event: None) if is_streamed else None
    for tool_choice in ("auto", "none"):
        request = Request(CONVERSATION, TOOLS, tool_choice=tool_choice, on_delta=on_delta)
        body = get_dialect(dialect).body(settings, request)
        check_same(adapter.validate_python(body), body)
        with pytest.raises(ValidationError):
            adapter.validate_python({**body, "model": None})


@pytest.mark.parametrize("dialect", DIALECTS)
def test_batches_are_asked_for_as_the_provider_s_own_client_asks(dialect: str) -> None:
    async def send(root: str) -> None:
        batches = open_batches(settings_of(dialect, root), api_key=KEY)
        try:
            with pytest.raises(ModelError, match="HTTP 400"):
                await batches.state("b1")
        finally:
            await batches.close()

    async def send_theirs(root: str) -> None:
        if dialect == "anthropic_messages":
            from anthropic import APIStatusError, AsyncAnthropic

            async with AsyncAnthropic(base_url=root, api_key=KEY) as client:
                with pytest.raises(APIStatusError):
                    await client.messages.batches.retrieve("b1")
            return
        import openai

        async with openai.AsyncOpenAI(base_url=root + "/v1", api_key=KEY) as asker:
            with pytest.raises(openai.APIStatusError):
                await asker.batches.retrieve("b1")

    assert capture_request(send) == capture_request(send_theirs)


@pytest.mark.parametrize(
    "given",
    [{"temperature": 0.5}, {"top_p": 0.9}, {"extra_body": {"top_k": 5}}],
    ids=lambda given: next(iter(given)),
)
def test_sampling_goes_to_the_version_that_takes_it_with_that_version_s_header(
    given: dict[str, Any],
) -> None:
    """The pair that Anthropic's client sent until its first major version had ended."""
    headers = ours("anthropic_messages", is_streamed=False, **given).headers
    assert headers["anthropic-version"] == "2023-06-01"
    assert headers["x-api-key"] == KEY
    assert "authorization" not in headers


STOPS = {
    "no_credit": {
        (402, "linked_organization_billing_unavailable"),
        (402, "linked_organization_spend_limit_reached"),
        (403, "user_profile_billing_not_authorized"),
        (403, "user_profile_not_billable"),
        (429, "contract_spend_limit_reached"),
        (429, "enforced_spend_limit_reached"),
    },
    "blocked": {
        (400, "cmek_key_disabled"),
        (400, "cmek_key_network_blocked"),
        (400, "organization_on_hold"),
        (403, "sandbox_egress_restricted"),
    },
    "auth": {
        (400, "claude_code_key_creator_not_member"),
        (403, "api_key_scope_missing"),
        (403, "organization_level_scoped_api_key_required"),
    },
}
"""Codes about the account: no call will be answered until somebody has acted."""

PASSES = {
    "rate_limited": {(429, "ramp_limit_exceeded")},
    "overloaded": {
        (400, "request_body_timeout"),
        (409, "concurrent_membership_change"),
        (409, "external_key_changed"),
        (409, "scan_pending"),
        (409, "skill_read_blocked_undecryptable"),
        (503, "authorization_check_unavailable"),
        (503, "cmek_context_unavailable"),
        (503, "cmek_key_unreachable"),
        (503, "registration_pending"),
        (529, "compaction_unavailable"),
    },
}
"""Codes of what passes by itself."""

OF_A_MODEL_OR_FEATURE = {
    "forbidden": {
        (400, "claude_code_version_too_old"),
        (400, "organization_not_enrolled_in_beta"),
        (400, "organization_type_not_supported"),
        (400, "parent_organization_required"),
        (400, "workspace_human_review_disabled"),
        (400, "workspace_policy_violation"),
    },
}

OF_THE_REQUEST = {
    "bad_request": {
        *(
            (400, f"compaction_{what}")
            for what in (
                "block_ambiguous",
                "block_misplaced",
                "content_mismatch",
                "incomplete_turn",
                "nothing_to_summarize",
                "signature_invalid",
                "too_many_tool_references",
                "tool_changes_mismatch",
            )
        ),
        *(
            (400, f"thread_{what}")
            for what in (
                "already_continued",
                "continue_in_flight",
                "fingerprint_mismatch",
                "unsupported_request",
            )
        ),
        *((400, f"request_body_encoding_{what}") for what in ("invalid", "unsupported")),
        (400, "available_tools_limit_exceeded"),
        (400, "file_not_downloadable"),
        (400, "image_dimensions_too_large"),
        (400, "invalid_metadata"),
        (400, "storage_quota_exceeded"),
        (400, "tool_name_conflict"),
        (400, "tool_reference_unresolved"),
        (400, "unsupported_charset"),
        (400, "user_profile_not_found"),
        (400, "user_profile_required"),
        (413, "request_body_too_large_after_decoding"),
    },
    "not_found": {(404, "file_expired"), (404, "thread_not_found")},
}

OF_OTHER_ENDPOINTS = {
    "bad_request": {
        *(
            (400, code)
            for code in (
                "already_member",
                "approval_required",
                "bundle_attachment_not_supported",
                "bundle_on_call",
                "cannot_invite_emails_with_unverified_domains",
                "cannot_remove_last_member",
                "cannot_sign_out_primary_owner",
                "cannot_sign_out_self",
                "cmek_feature_unsupported",
                "cmek_not_approved",
                "email_domain_not_allowed",
                "environment_archived",
                "external_key_in_workspace_policy",
                "external_key_not_found",
                "external_key_provider_mismatch",
                "external_key_validation_failed",
                "external_key_validation_timed_out",
                "external_storage_in_use",
                "external_storage_in_workspace_policy",
                "external_storage_not_available",
                "gcp_project_not_verified",
                "grant_required",
                "human_review_not_available",
                "human_review_on_with_external_storage",
                "invalid_config_type_change",
                "invalid_storage_arn",
                "invite_already_exists",
                "key_profile_mismatch",
                "org_api_key_limit_exceeded",
                "org_member_limit_exceeded",
                "organization_not_eligible",
                "provider_not_allowed",
                "rbac_group_grants_owner_access",
                "rbac_group_order_limit_exceeded",
                "rbac_group_owner_access_unconfirmed",
                "region_not_supported",
                "scan_failed",
                "settings_document_limit_exceeded",
                "settings_history_limit_exceeded",
                "slack_channel_set_up_settings_refused",
                "storage_attach_limit_reached",
                "storage_not_approved",
                "storage_not_attachable",
                "storage_profile_mismatch",
                "storage_profile_still_required",
                "storage_verification_failed",
                "transcripts_storage_required",
                "unsupported_region",
                "workspace_api_key_limit_exceeded",
                "workspace_member_limit_exceeded",
            )
        ),
        (412, "heartbeat_precondition_failed"),
    },
    "forbidden": {
        *(
            (403, code)
            for code in (
                "cannot_sign_out_managed_member",
                "cannot_sign_out_membership_admin",
                "cannot_sign_out_owner",
                "cannot_sign_out_privileged_member",
                "claude_tag_writes_not_enabled",
                "compliance_configuration_restricted",
                "environment_create_disabled",
                "environment_update_disabled",
                "spend_limits_admin_api_writes_not_enabled",
            )
        ),
    },
    "not_found": {
        *(
            (404, code)
            for code in (
                "environment_not_found",
                "rbac_group_managed_settings_not_found",
                "rbac_group_not_found",
                "rbac_role_not_found",
                "slack_channel_set_up_environment_not_found",
            )
        ),
    },
    "overloaded": {
        *(
            (409, code)
            for code in (
                "gcp_project_controlled_by_another_organization",
                "plugin_name_taken",
                "skill_name_taken",
                "slack_channel_set_up_settings_conflict",
                "storage_already_registered",
                "storage_attached_during_archive",
                "storage_changed_concurrently",
                "storage_in_use",
                "workspace_changed_concurrently",
            )
        ),
        (503, "change_outcome_unknown"),
        (503, "workspace_created_incomplete"),
    },
}
"""Codes that no call of ours meets: they are those of their status."""

TABLES: tuple[dict[str, set[tuple[int, str]]], ...] = (
    STOPS,
    PASSES,
    OF_A_MODEL_OR_FEATURE,
    OF_THE_REQUEST,
    OF_OTHER_ENDPOINTS,
)
DUE = {place: kind for table in TABLES for kind, places in table.items() for place in places}


def anthropic_error(code: str, type: str = "invalid_request_error") -> dict[str, Any]:
    """An error as Anthropic sends it; its words decide nothing."""
    return {"type": type, "message": "No.", "details": {"error_code": code}}


CLIENT = "2.14.0"
"""The version of Anthropic's client whose codes the tables have."""


def test_every_code_of_anthropic_has_its_consequence() -> None:
    for (status, code), kind in DUE.items():
        body = json.dumps({"type": "error", "error": anthropic_error(code)}).encode()
        refusal = read_refusal(status, {}, body)
        assert (refusal.kind, refusal.code) == (kind, code)


def test_the_tables_have_every_code_of_anthropic_s_client() -> None:
    import anthropic
    from anthropic._error_classes import ERROR_CLASSES

    known = {(status, code) for status, code in ERROR_CLASSES if code is not None}
    new = known - set(DUE)
    if new and anthropic.__version__ != CLIENT:
        pytest.skip(f"anthropic {anthropic.__version__} has codes that are judged by status: {new}")
    assert new == set(), "decide what each of them means for a run"


@pytest.mark.parametrize("code", sorted(code for places in STOPS.values() for _, code in places))
def test_a_code_that_stops_a_run_does_so_inside_a_stream_too(code: str) -> None:
    [kind] = {kind for kind, places in STOPS.items() if code in {known for _, known in places}}
    refusal = error_behind_200(anthropic_error(code, "rate_limit_error"), "the stream")
    assert (refusal.kind, refusal.action) == (kind, "stop_run")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"error": {"code": "billing_not_active", "type": "x"}}, "no_credit"),
        ({"error": {"code": "rate_limit_exceeded", "type": "insufficient_quota"}}, "no_credit"),
        ({"error": {"details": {"error_code": ["odd"]}, "code": "account_deactivated"}}, "blocked"),
        ({"error": {"details": {"error_code": "new"}, "type": "billing_error"}}, "no_credit"),
        ({"code": "insufficient_quota", "message": "Out."}, "no_credit"),
        ({"object": "error", "message": "context length is 5", "code": 400}, "context_exceeded"),
        ({"detail": "no"}, "bad_request"),
    ],
)
def test_codes_are_looked_for_where_the_clients_look(error: Any, kind: str) -> None:
    assert read_refusal(400, {}, json.dumps(error).encode()).kind == kind


@pytest.mark.parametrize(
    ("status", "code", "type", "meaning"),
    [
        (429, "enforced_spend_limit_reached", "rate_limit_error", "a limit on its spending"),
        pytest.param(
            400,
            "organization_on_hold",
            "invalid_request_error",
            "takes no calls from this account",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_account_that_is_stopped_stops_the_run(
    tmp_path: Path, status: int, code: str, type: str, meaning: str
) -> None:
    """Exit 4 although calls were answered before; nothing fails, and the same command continues."""
    write_prompts(tmp_path / "p.jsonl", 12)
    reply = {
        "id": "msg",
        "model": "m",
        "role": "assistant",
        "stop_reason": "end_turn",
        "content": [{"type": "text", "text": "Yes."}],
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }
    is_stopped = [True]
    answered: list[str] = []

    def answer(path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if is_stopped[0] and len(answered) >= 4:
            return status, {"type": "error", "error": anthropic_error(code, type)}
        answered.append(path)
        return 200, reply

    with answering(answer) as (root, _):
        given: dict[str, Any] = {
            "run_name": "r",
            "dataset_file": "p.jsonl",
            "enabled_toolsets": "none",
            "model": "anthropic:m",
            "base_url": root,
            "key_env": "none",
            "num_workers": 1,
            "batch_size": 2,
        }
        stopped = run(tmp_path, **given)
        assert stopped.returncode == 4, stopped.stderr
        assert meaning in stopped.stderr
        is_stopped[0] = False
        assert run(tmp_path, **given).returncode == 0
    summary = json.loads((tmp_path / "trajectories/r/summary.json").read_text())
    assert (summary["done"], summary["failed"]) == (12, 0)
