"""Where the service is, from the environment."""

from __future__ import annotations

import pytest
from batch_trajectories_e2b.service import Service, SettingsError
from loopback import KEY, Loopback

from toolsets.sandbox.factory import sandbox_problem


def test_only_the_key_has_to_be_given() -> None:
    service = Service.from_environment({"E2B_API_KEY": KEY})
    assert service.api_url == "https://api.e2b.app"
    assert service.machine_url("i1", None) == "https://49983-i1.e2b.app"
    assert service.machine_url("i1", "eu.example.org") == "https://49983-i1.eu.example.org"


def test_a_server_of_ones_own_has_a_domain_or_urls() -> None:
    given = {"E2B_API_KEY": KEY, "E2B_DOMAIN": "example.org", "E2B_USER": "root"}
    service = Service.from_environment(given)
    assert service.api_url == "https://api.example.org"
    assert service.machine_url("i1", None) == "https://49983-i1.example.org"
    assert service.user == "root"
    urls = {"E2B_API_URL": "http://10.0.0.1:3000/", "E2B_SANDBOX_URL": "http://10.0.0.1:3002"}
    service = Service.from_environment({**given, **urls})
    assert service.api_url == "http://10.0.0.1:3000"
    assert service.machine_url("i1", "example.org") == "http://10.0.0.1:3002"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"E2B_API_KEY": ""}, "set E2B_API_KEY"),
        ({"E2B_API_URL": "api.example.org"}, "E2B_API_URL is 'api.example.org'; set it to a URL"),
        ({"E2B_LIFETIME_S": "5 min"}, "E2B_LIFETIME_S is '5 min'; set it to a number"),
        ({"E2B_LIFETIME_S": "1"}, "from 6"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        Service.from_environment({"E2B_API_KEY": KEY, **given})


def test_the_key_is_not_shown() -> None:
    service = Service.from_environment({"E2B_API_KEY": KEY})
    assert KEY not in repr(service)
    assert service.without_secrets(f"you sent {KEY}") == "you sent [E2B_API_KEY]"


def test_a_start_says_what_to_do(service: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sandbox_problem("e2b") is None
    monkeypatch.setenv("E2B_API_KEY", "e2b_wrong")
    problem = sandbox_problem("e2b")
    assert problem is not None
    assert "401: Invalid API key; set E2B_API_KEY" in problem
    monkeypatch.delenv("E2B_API_KEY")
    assert (sandbox_problem("e2b") or "").startswith("sandbox e2b: set E2B_API_KEY")
