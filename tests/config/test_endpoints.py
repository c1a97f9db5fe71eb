"""Several models and endpoints in one run: who asks whom, with which key, within which limits."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from agent.models.resolve import read_key
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.config.fingerprint import data_options, update_names
from batch_trajectories.config.loading import load_config
from batch_trajectories.config.models import (
    called_models,
    endpoint_limits,
    set_up_models,
    setup_of_task,
    sibling_options,
)
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.records.tasks import Task
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.helpers.running import WRITE_A_NOTE, lines, run, write_rows


def config(**given: Any) -> RunConfig:
    fields = {"dataset_file": "p.jsonl", "run_name": "r", "enabled_toolsets": "none", **given}
    return load_config(None, fields)


def task(n: int, **columns: Any) -> Task:
    return Task(
        id=f"t{n}",
        prompt_id=f"t{n}",
        sample=0,
        input_digest="d",
        columns={"prompt": "x", **columns},
    )


LOCAL = {"base_url": "http://127.0.0.1:8000/v1"}


class TestNames:
    def test_a_model_of_a_named_endpoint_is_asked_as_the_endpoint_says(self) -> None:
        own = {
            **LOCAL,
            "api": "anthropic_messages",
            "temperature": 0.3,
            "extra_body": {"top_k": 5},
        }
        given = config(model="local:m:7b", endpoints={"local": own}, temperature=1.0, top_p=0.9)
        [model] = called_models(set_up_models(given))
        assert (model.name, model.base_url) == ("m:7b", LOCAL["base_url"])
        assert (model.api, model.reference) == ("anthropic_messages", "local:m:7b")
        assert (model.temperature, model.top_p, model.extra_body) == (0.3, 0.9, {"top_k": 5})

    def test_a_variable_that_is_named_must_hold_a_key(self) -> None:
        given = config(model="local:m", endpoints={"local": {**LOCAL, "key_env": "LOCAL_KEY"}})
        with pytest.raises(ConfigError, match="LOCAL_KEY"):
            set_up_models(given)

    def test_without_a_variable_no_key_leaves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-not-for-strangers")
        given = config(model="local:m", endpoints={"local": LOCAL})
        assert read_key(called_models(set_up_models(given))[0]) == "no-key"

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"endpoints": {"a b": LOCAL}}, "a name may only have letters"),
            ({"endpoints": {"a": {"base_url": "ftp://x"}}}, "must start with http"),
            ({"endpoints": {"a": {"base_url": "http://sk-1@x"}}}, "must not have a password"),
            ({"endpoints": {"a": {"base_url": "http://x?key=1"}}}, "must not have a password"),
            ({"endpoints": {"a": {"base_url": "http:///v1"}}}, "must name a host"),
            (
                {"endpoints": {"a": {"base_url": "http://x/v1/chat/completions/"}}},
                r"must end before /chat/completions: http://x/v1 \(",
            ),
            (
                {"endpoints": {"a": {"base_url": "http://x/v1/messages"}}},
                r"before /v1/messages: http://x \(",
            ),
            ({"endpoints": {"a": {**LOCAL, "key_env": ""}}}, "a.key_env"),
            ({"endpoints": {"openai": LOCAL}}, "is the name of a built-in endpoint"),
            ({"endpoints": {"a": {**LOCAL, "rpn": 1}}}, "a.rpn"),
            ({"endpoints": {"a": {}}}, "in a: base_url is missing"),
            ({"model": "b:m", "endpoints": {"a": LOCAL}}, "unknown prefix 'b'. Known: a, "),
            ({"model": "Openai:m"}, "unknown prefix 'Openai'; did you mean 'openai'[?] Known: "),
            ({"model": "m", "models": {"a": 1}}, "give one"),
            ({"models": {"a": 0, "b": 0}}, "above 0"),
            ({"models": {"a": -1}}, "must be at least 0"),
            ({"models": {"scripted": 1, "b": 1}}, "cannot be combined"),
            ({"models": {}}, "at least 1"),
        ],
    )
    def test_impossible_values_are_refused(self, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            set_up_models(config(**fields))


MODELS = {"local:a": 3, "local:b": 1, "local:c": 0}
GIVEN: dict[str, Any] = {"models": MODELS, "endpoints": {"local": LOCAL}}


class TestDraw:
    def drawn(self, n: int, seed: int = 0, **columns: Any) -> str:
        given = config(**GIVEN, seed=seed)
        setups = set_up_models(given)
        return setup_of_task(setups, given, task(n, **columns)).settings.reference

    def test_weights_decide_how_often(self) -> None:
        given = config(**GIVEN)
        setups = set_up_models(given)
        counts = Counter(
            setup_of_task(setups, given, task(n)).settings.reference for n in range(10_000)
        )
        assert set(counts) == {"local:a", "local:b"}
        assert abs(counts["local:b"] - 2500) < 150

    def test_the_same_task_asks_the_same_model_in_every_start(self) -> None:
        first = [self.drawn(n) for n in range(30)]
        assert first == [self.drawn(n) for n in range(30)]
        assert first != [self.drawn(n, seed=1) for n in range(30)]

    def test_a_row_names_its_own_even_one_without_weight(self) -> None:
        assert {self.drawn(n, model="local:c") for n in range(20)} == {"local:c"}

    def test_the_order_of_models_does_not_matter(self) -> None:
        turned = dict(reversed(MODELS.items()))
        given = config(models=turned, endpoints={"local": LOCAL})
        setups = set_up_models(given)
        drawn = [setup_of_task(setups, given, task(n)).settings.reference for n in range(50)]
        assert drawn == [self.drawn(n) for n in range(50)]
        assert data_options(given) == data_options(config(**GIVEN))


class TestBounds:
    def test_limits_of_an_endpoint_apply_only_to_it(self) -> None:
        given = config(
            models={"a:m": 1, "b:m": 1},
            max_in_flight=50,
            rpm=600,
            num_workers=2,
            batch_size=40,
            endpoints={
                "a": {**LOCAL, "max_in_flight": 8, "tpm": 1000},
                "b": {"base_url": "http://127.0.0.1:8001/v1", "rpm": 60},
            },
        )
        a, b = endpoint_limits(given, set_up_models(given)).values()
        assert (a.ceiling, a.start, a.rpm, a.tpm) == (8, 8, 600, 1000)
        assert (b.ceiling, b.start, b.rpm, b.tpm) == (50, 50, 60, None)

    def test_a_slash_at_the_end_makes_no_other_endpoint(self) -> None:
        slash = {"base_url": LOCAL["base_url"] + "/"}
        given = config(models={"a:m": 1, "b:n": 1}, endpoints={"a": LOCAL, "b": slash})
        assert len(endpoint_limits(given, set_up_models(given))) == 1

    def test_an_endpoint_that_nothing_asks_means_nothing(self) -> None:
        options = config(model="a:m", endpoints={"a": LOCAL})
        more = config(model="a:m", endpoints={"a": LOCAL, "b": {**LOCAL, "temperature": 1}})
        assert data_options(options) == data_options(more)

    def test_two_names_of_one_endpoint_share_the_lower_limits(self) -> None:
        given = config(
            models={"a:m": 1, "b:n": 1},
            endpoints={"a": {**LOCAL, "rpm": 60}, "b": {**LOCAL, "rpm": 30, "max_in_flight": 3}},
        )
        [only] = endpoint_limits(given, set_up_models(given)).values()
        assert (only.rpm, only.ceiling) == (30, 3)


def test_a_run_asks_each_endpoint_with_its_own_key_and_dialect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_A", "sk-key-of-a-1234567890")
    monkeypatch.setenv("KEY_B", "sk-key-of-b-1234567890")
    rows = [{"prompt": f"Question {n}"} for n in range(30)]
    rows += [{"prompt": "Mine", "model": "b:two"}, {"prompt": "Whose?", "model": "c:three"}]
    write_rows(tmp_path / "p.jsonl", *rows)
    with (
        FakeEndpoint(key="sk-key-of-a-1234567890", latency_s=0.0, turns=1) as a,
        FakeEndpoint(key="sk-key-of-b-1234567890", latency_s=0.0, turns=1) as b,
    ):
        settings = {
            "models": {"a:one": 1, "b:two": 1},
            "endpoints": {
                "a": {"base_url": a.openai_url, "key_env": "KEY_A", "max_in_flight": 2},
                "b": {
                    "base_url": b.anthropic_url,
                    "key_env": "KEY_B",
                    "api": "anthropic_messages",
                },
            },
        }
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
        done = run(
            tmp_path,
            config="run.yaml",
            dataset_file="p.jsonl",
            run_name="r",
            num_workers=2,
            enabled_toolsets="none",
        )
        most_at_a = a.journal()["max_in_flight"]
    assert done.returncode == 0, done.stderr
    assert (
        "p.jsonl:32: discarded: `model`: 'c:three' is not a model of this run (a:one, b:two)"
        in (done.stderr)
    )
    assert most_at_a <= 2
    run_dir = tmp_path / "trajectories" / "r"
    records = lines(run_dir / "records.jsonl")
    assert len(records) == 31
    kinds = {(record["model"], record["api"]) for record in records}
    assert kinds == {("a:one", "openai_chat"), ("b:two", "anthropic_messages")}
    assert {r["model"] for r in records if r["row"]["prompt"] == "Mine"} == {"b:two"}
    summary = orjson.loads((run_dir / "summary.json").read_bytes())
    calls = {call["endpoint"]: call["replies"] for call in summary["last_start"]["calls"]}
    assert set(calls) == {a.openai_url, b.anthropic_url}
    assert sum(calls.values()) == 31
    for file in run_dir.rglob("*"):
        assert not file.is_file() or b"sk-key-of" not in file.read_bytes()
    status = run(tmp_path, "status", "r")
    assert status.returncode == 0, status.stderr
    again = run(
        tmp_path,
        config="run.yaml",
        dataset_file="p.jsonl",
        run_name="r",
        num_workers=1,
        enabled_toolsets="none",
        rpm=600,
    )
    assert again.returncode == 0, again.stderr


@pytest.mark.slow
def test_streamed_replies_make_the_same_rows(tmp_path: Path) -> None:
    write_rows(tmp_path / "p.jsonl", *({"id": f"q{n}", "prompt": f"Go {n}"} for n in range(6)))
    files = []
    with FakeEndpoint(latency_s=0.0, turns=3, reasoning_chars=40, **WRITE_A_NOTE) as endpoint:
        for name, flag in (("whole", "--no_stream_replies"), ("streamed", "--stream_replies")):
            done = run(
                tmp_path,
                flag,
                dataset_file="p.jsonl",
                run_name=name,
                model="m",
                num_workers=1,
                base_url=endpoint.openai_url,
                key_env="none",
                enabled_toolsets="file",
            )
            assert done.returncode == 0, done.stderr
            # The fake endpoint counts tokens by the size of the request, so metadata differs.
            rows = lines(tmp_path / "trajectories" / f"{name}.jsonl")
            files.append([(row["id"], row["conversations"]) for row in rows])
        assert endpoint.journal()["streamed"] == 18
    assert files[0] == files[1]


def test_the_endpoint_of_a_simulated_user_is_fixed_for_the_run() -> None:
    other = {**LOCAL, "temperature": 0.5}
    user = {"model": "own:m"}
    first = config(model="scripted", simulated_user=user, endpoints={"own": LOCAL})
    second = config(model="scripted", simulated_user=user, endpoints={"own": other})
    assert data_options(first)["endpoints"] != data_options(second)["endpoints"]


@pytest.mark.parametrize(
    ("of_run", "name", "means"),
    [
        ({"model": "m", "base_url": "http://h/v1", "key_env": "K"}, "qwen3", "own"),
        ({"model": "m", "base_url": "http://h/v1", "key_env": "K"}, "mistral:7b", "own"),
        ({"model": "openai:m", "base_url": "http://h/v1", "key_env": "K"}, "openai:n", "own"),
        ({"model": "m", "base_url": "http://h/v1", "key_env": "K"}, "openai:n", {}),
        ({"model": "openai:m"}, "n", {"model": "openai:n"}),
        ({"model": "openai:m", "key_env": "K"}, "n", {"model": "openai:n", "key_env": "K"}),
        ({"model": "openai:m", "key_env": "K"}, "anthropic:n", {}),
        ({"model": "scripted"}, "scripted", {}),
        ({"model": "local:m", "endpoints": {"local": LOCAL}}, "n", {"model": "local:n"}),
    ],
)
def test_a_judge_without_a_provider_of_its_own_is_asked_at_the_runs_endpoint(
    of_run: dict[str, Any], name: str, means: Any
) -> None:
    found = sibling_options(config(**of_run), name)
    expected = {"model": name, "base_url": "http://h/v1", "key_env": "K"}
    given = {key: value for key, value in found.items() if value is not None}
    assert given == (expected if means == "own" else {"model": name} | means)


def test_models_of_earlier_versions_are_named_in_full() -> None:
    """A bare name was one of OpenRouter, unless there was a base URL."""
    assert update_names({"model": "a/b"}, None) == {"model": "openrouter:a/b"}
    assert update_names({"model": "a/b:free"}, None) == {"model": "openrouter:a/b:free"}
    assert update_names({"model": "a/b"}, "http://h/v1") == {"model": "a/b"}
    for name in ("scripted", "openai:m"):
        assert update_names({"model": name}, None) == {"model": name}
    several = {"model": "a/b", "models": {"c": 1, "openai:m": 2}}
    assert update_names(several, None) == {"models": {"openrouter:c": 1, "openai:m": 2}}


def test_a_slash_means_the_same_as_a_colon_unless_there_is_a_base_url() -> None:
    own = {"mine": {"base_url": "http://127.0.0.1:1/v1"}}
    for slash, colon, more in (
        ("openai/gpt-5", "openai:gpt-5", {}),
        ("openrouter/vendor/m:free", "openrouter:vendor/m:free", {}),
        ("mine/vendor/m", "mine:vendor/m", {"endpoints": own}),
        ("mine/vendor/m", "mine:vendor/m", {"endpoints": json.dumps(own)}),
    ):
        by_slash, by_colon = config(model=slash, **more), config(model=colon, **more)
        assert by_slash == by_colon
        assert data_options(by_slash) == data_options(by_colon)
    both = config(
        models={"openai/a": 1, "groq/openai/b": 2}, prices={"openai/a": {"input": 1, "output": 2}}
    )
    assert both.models == {"openai:a": 1, "groq:openai/b": 2}
    assert [*both.prices] == ["openai:a"]
    server = config(model="openai/gpt-oss-20b", base_url="http://127.0.0.1:8000/v1")
    assert server.model == "openai/gpt-oss-20b"
    with pytest.raises(ConfigError, match="'vendor/m' has no provider and no --base_url"):
        set_up_models(config(model="vendor/m"))


def test_an_endpoint_may_call_the_variable_of_its_key_as_other_programs_do() -> None:
    entry = {"base_url": "http://127.0.0.1:1/v1", "api_key_env": "MINE"}
    assert config(endpoints={"a": entry}).endpoints["a"].key_env == "MINE"
