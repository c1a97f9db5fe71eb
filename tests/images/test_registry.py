"""Images from a registry by its HTTP protocol: names, logins, retries, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import email.utils
import json
import logging
import os
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.fakes.fake_images import MACHINE, Entry, layer_of
from tests.fakes.fake_registry import LIST, MANIFEST, FakeRegistry, Faults
from toolsets.images.names import ImageError
from toolsets.images.registry import client
from toolsets.images.registry.names import parse_name, registry_address
from toolsets.images.registry.pulling import Puller
from toolsets.images.registry.settings import RegistrySettings
from toolsets.images.registry.tokens import parse_challenges
from toolsets.images.store import ImageStore

BASE = layer_of([Entry("base", os.urandom(300_000)), Entry("etc/name", b"base")])
TOP = layer_of([Entry("top", os.urandom(200_000)), Entry("etc/.wh.name")])
SECRET = "s3cret-pass"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short pauses, and no login of the user who runs the tests."""
    monkeypatch.setattr(client, "_FIRST_PAUSE_S", 0.01)
    for name in ("REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))


def pull(directory: Path, *references: str, **settings: Any) -> None:
    async def pull_all() -> None:
        async with Puller(directory, RegistrySettings(**settings)) as puller:
            for reference in references:
                await puller.pull(reference)

    asyncio.run(pull_all())


def log_in(tmp_path: Path, **config: Any) -> None:
    (tmp_path / "docker").mkdir(exist_ok=True)
    (tmp_path / "docker" / "config.json").write_text(json.dumps(config))


def encoded(user: str, password: str) -> str:
    return base64.b64encode(f"{user}:{password}".encode()).decode()


def files_of(directory: Path, reference: str) -> set[str]:
    root = ImageStore(directory).unpack(reference).rootfs
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("reference", "whole"),
    [
        ("python", "docker.io/library/python:latest"),
        ("org/name:1.2", "docker.io/org/name:1.2"),
        ("index.docker.io/python:3", "docker.io/library/python:3"),
        ("ghcr.io/a/b/c", "ghcr.io/a/b/c:latest"),
        ("host:5000/x:y", "host:5000/x:y"),
        ("localhost:5000/x", "localhost:5000/x:latest"),
        (f"x.org/y@sha256:{'0' * 64}", f"x.org/y@sha256:{'0' * 64}"),
        (f"x.org/y:t@sha256:{'0' * 64}", f"x.org/y:t@sha256:{'0' * 64}"),
    ],
)
def test_names_mean_what_they_mean_to_container_programs(reference: str, whole: str) -> None:
    assert str(parse_name(reference)) == whole


@pytest.mark.parametrize(
    "reference",
    [
        f"sha256:{'0' * 64}",
        "localhost/built:1",
        "x.org/../y",
        "x.org/Upper",
        "x.org/a:b:c",
        "x.org/a@sha512:00",
        "x.org/a/",
        "evil host/x",
        "x.org:port/a",
        "",
    ],
)
def test_other_names_are_refused(reference: str) -> None:
    with pytest.raises(ImageError, match="image "):
        parse_name(reference)


def test_only_this_machine_is_asked_without_encryption() -> None:
    assert registry_address("127.0.0.1:5000") == "http://127.0.0.1:5000"
    assert registry_address("[::1]:5000") == "http://[::1]:5000"
    assert registry_address("localhost:5000") == "http://localhost:5000"
    assert registry_address("registry.example:5000") == "https://registry.example:5000"
    assert registry_address("10.0.0.1") == "https://10.0.0.1"


def test_an_image_is_fetched_and_unpacked(tmp_path: Path) -> None:
    with FakeRegistry() as registry:
        registry.add_image("org/calc", "1", [BASE, TOP], {"WorkingDir": "/etc"})
        reference = f"{registry.host}/org/calc:1"
        pull(tmp_path, reference, reference)
        assert set(registry.whole_answers().values()) == {1}
        assert len(registry.requests_of("/manifests/")) == 1
    image = ImageStore(tmp_path).unpack(reference)
    assert image.workdir == "/etc"
    assert files_of(tmp_path, reference) == {"base", "top"}, "the whiteout hides etc/name"


@pytest.mark.parametrize(
    ("compress", "ending"),
    [
        (lambda raw: raw, ""),
        (lambda raw: pa.compress(raw, codec="zstd", asbytes=True), "+zstd"),
    ],
)
def test_layers_may_be_packed_in_other_ways(tmp_path: Path, compress: Any, ending: str) -> None:
    with FakeRegistry() as registry:
        registry.add_image("x", "1", [BASE], compress=compress, ending=ending)
        pull(tmp_path, f"{registry.host}/x:1")
        assert files_of(tmp_path, f"{registry.host}/x:1") == {"base", "etc/name"}


def test_images_share_their_layers(tmp_path: Path) -> None:
    with FakeRegistry() as registry:
        for number in range(5):
            own = layer_of([Entry("own", f"{number}".encode())])
            registry.add_image(f"org/{number}", "1", [BASE, BASE, own])
        pull(tmp_path, *(f"{registry.host}/org/{number}:1" for number in range(5)))
        assert set(registry.whole_answers().values()) == {1}
        stored = sum(path.stat().st_size for path in (tmp_path / "registry/.blobs").rglob("*"))
        manifests = sum(len(raw) for raw, _ in registry.manifests.values()) / 2
        directories = 4 * 4096
        assert stored < sum(map(len, registry.blobs.values())) + manifests + directories + 1000


def test_the_image_for_this_machine_is_chosen(tmp_path: Path) -> None:
    with FakeRegistry() as registry:
        own = registry.add_image("x", "own", [BASE])
        other = registry.add_image("x", "other", [TOP], architecture="mips")
        digest = registry.add_list(
            "x",
            "1",
            {"unknown/unknown": other, "linux/mips": other, f"linux/{MACHINE}": own},
        )
        registry.add_list("x", "mips", {"linux/mips": other, "windows/amd64": other})
        by_digest = f"{registry.host}/x@{digest}"
        pull(tmp_path, f"{registry.host}/x:1", by_digest)
        with pytest.raises(ImageError, match=rf"not made for linux/{MACHINE}; there is linux/mips"):
            pull(tmp_path, f"{registry.host}/x:mips")
    assert ImageStore(tmp_path).find(f"{registry.host}/x:1").digest == own
    assert ImageStore(tmp_path).find(by_digest).digest == own
    with pytest.raises(ImageError, match="is not in"):
        ImageStore(tmp_path).find(f"{registry.host}/x:latest")


def test_a_list_in_a_list_without_end_is_refused(tmp_path: Path) -> None:
    with FakeRegistry() as registry:
        digest = registry.add_image("x", "0", [BASE])
        for depth in range(5):
            digest = registry.add_list("x", f"{depth}", {f"linux/{MACHINE}": digest})
        with pytest.raises(ImageError, match="nested too deeply"):
            pull(tmp_path, f"{registry.host}/x:4")


# Logins.


@pytest.mark.parametrize("scheme", ["bearer", "basic"])
def test_the_login_of_docker_is_used(tmp_path: Path, scheme: str) -> None:
    with FakeRegistry(login=("me", SECRET), scheme=scheme) as registry:
        registry.add_image("x", "1", [BASE])
        with pytest.raises(ImageError, match="docker login 127") as refused:
            pull(tmp_path, f"{registry.host}/x:1")
        log_in(tmp_path, auths={registry.host: {"auth": encoded("me", "wrong")}})
        with pytest.raises(ImageError, match=r"the login is refused|needs a login") as wrong:
            pull(tmp_path, f"{registry.host}/x:1")
        log_in(tmp_path, auths={f"http://{registry.host}": {"auth": encoded("me", SECRET)}})
        pull(tmp_path, f"{registry.host}/x:1")
    assert "wrong" not in str(wrong.value)
    assert SECRET not in str(refused.value)


def test_an_identity_token_is_exchanged(tmp_path: Path) -> None:
    with FakeRegistry(login=("me", SECRET)) as registry:
        registry.add_image("x", "1", [BASE])
        entry = {"auth": encoded("me", ""), "identitytoken": SECRET}
        log_in(tmp_path, auths={registry.host: entry})
        pull(tmp_path, f"{registry.host}/x:1")
        assert [one.method for one in registry.requests_of("/token")] == ["POST"]


def test_a_credential_helper_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = tmp_path / "bin" / "docker-credential-mine"
    helper.parent.mkdir()
    answer = json.dumps({"Username": "me", "Secret": SECRET})
    helper.write_text(f"#!/bin/sh\ncat > {tmp_path}/asked\necho '{answer}'\n")
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{helper.parent}:{os.environ['PATH']}")
    with FakeRegistry(login=("me", SECRET)) as registry:
        registry.add_image("x", "1", [BASE])
        log_in(tmp_path, auths={registry.host: {}}, credsStore="mine")
        pull(tmp_path, f"{registry.host}/x:1")
        assert (tmp_path / "asked").read_text() == registry.host
        log_in(tmp_path, credHelpers={registry.host: "other"})
        with pytest.raises(ImageError, match="docker-credential-other, which is not installed"):
            pull(tmp_path / "2", f"{registry.host}/x:1")


def test_a_token_is_asked_for_once_and_again_when_it_is_old(tmp_path: Path) -> None:
    with FakeRegistry(needs_token=True) as registry:
        registry.add_image("x", "1", [BASE, TOP])
        pull(tmp_path, f"{registry.host}/x:1")
        assert len(registry.requests_of("/token")) == 1
        registry.token_life_s = 0
        registry.add_image("y", "1", [layer_of([Entry("y", b"y")])])
        pull(tmp_path, f"{registry.host}/y:1")
        assert len(registry.requests_of("/token")) > 1


def test_secrets_are_in_no_log_and_go_to_no_other_host(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Registries redirect blobs to other servers, by addresses that are secrets themselves."""
    caplog.set_level(logging.DEBUG)
    faults = Faults(share=0.4, kinds=("500", "cut"))
    login = ("me", SECRET)
    with FakeRegistry(faults=faults) as other, FakeRegistry(login=login) as registry:
        other.blobs = registry.blobs
        registry.blobs_at = f"http://{other.host}"
        registry.add_image("x", "1", [BASE, TOP])
        registry.add_image("gone", "1", [TOP])
        log_in(tmp_path, auths={registry.host: {"auth": encoded(*login)}})
        pull(tmp_path, f"{registry.host}/x:1")
        other.blobs = {}
        with pytest.raises(ImageError, match="404") as gone:
            pull(tmp_path / "2", f"{registry.host}/gone:1")
        assert other.seen
        assert {one.authorization for one in other.seen} == {None}
        assert any(one.authorization for one in registry.seen)
        secrets = [SECRET, encoded(*login), "s3cret", *registry.tokens]
    for text in (caplog.text, str(gone.value)):
        assert not [one for one in secrets if one in text]


def test_a_damaged_file_of_logins_is_named_and_not_quoted(tmp_path: Path) -> None:
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "config.json").write_text(f'{{"auths": "{SECRET}')
    with FakeRegistry(login=("me", SECRET)) as registry:
        registry.add_image("x", "1", [BASE])
        with pytest.raises(ImageError, match=r"docker/config\.json: not JSON") as refused:
            pull(tmp_path, f"{registry.host}/x:1")
    assert SECRET not in str(refused.value)


def test_challenges_are_read() -> None:
    header = (
        'Basic realm="a, b", Bearer realm="https://t/x",'
        'scope="repository:a/b:pull,push" , service=s'
    )
    basic, bearer = parse_challenges([header])
    assert basic == ("basic", {"realm": "a, b"})
    assert bearer.parameters == {
        "realm": "https://t/x",
        "scope": "repository:a/b:pull,push",
        "service": "s",
    }
    assert parse_challenges(["", "???", "Negotiate"]) == [("negotiate", {})]


# Faults.


@pytest.mark.parametrize("kind", ["500", "503", "429", "cut", "drop", "flip"])
def test_faults_are_tried_again(tmp_path: Path, kind: str) -> None:
    with FakeRegistry(faults=Faults(share=0.3, kinds=(kind,), seed=3)) as registry:
        references = []
        for number in range(6):
            own = layer_of([Entry("own", os.urandom(50_000))])
            registry.add_image(f"n{number}", "1", [BASE, own])
            references.append(f"{registry.host}/n{number}:1")
        pull(tmp_path, *references)
        assert [one for one in registry.seen if not one.is_whole and one.status != 200] or [
            one for one in registry.requests_of("/blobs/") if not one.is_whole
        ], "there were faults"
        assert set(registry.whole_answers().values()) <= {1}
    for reference in references:
        assert "own" in files_of(tmp_path, reference)


def test_a_download_that_was_cut_continues_where_it_was(tmp_path: Path) -> None:
    large = layer_of([Entry("large", os.urandom(20_000_000))])
    with FakeRegistry(faults=Faults(share=0.5, kinds=("cut",), seed=6)) as registry:
        registry.add_image("x", "1", [large])
        pull(tmp_path, f"{registry.host}/x:1")
        starts = [
            one.first_byte or 0 for one in registry.requests_of("/blobs/") if one.status < 300
        ]
        assert any(one.first_byte and one.status == 206 for one in registry.seen)
    # What was on its way when the connection broke is lost, and is asked for again.
    assert starts == sorted(starts)


def test_a_registry_without_ranges_sends_all_again(tmp_path: Path) -> None:
    faults = Faults(share=0.5, kinds=("cut",), seed=5)
    with FakeRegistry(faults=faults, ignores_ranges=True) as registry:
        registry.add_image("x", "1", [BASE, TOP])
        pull(tmp_path, f"{registry.host}/x:1")
        assert files_of(tmp_path, f"{registry.host}/x:1") == {"base", "top"}


def test_a_fetch_that_was_stopped_continues_where_it_was(tmp_path: Path) -> None:
    large = layer_of([Entry("large", os.urandom(3_000_000))])
    with FakeRegistry(bytes_per_s=3e6) as registry:
        registry.add_image("x", "1", [large])
        reference = f"{registry.host}/x:1"
        asyncio.run(_stop_in_the_middle(registry, tmp_path, reference))
        assert not ImageStore(tmp_path).has(reference)
        registry.bytes_per_s = None
        pull(tmp_path, reference)
        assert any(one.first_byte > 500_000 for one in registry.seen)
        assert len(registry.requests_of("/manifests/")) == 1
    assert files_of(tmp_path, reference) == {"large"}


async def _stop_in_the_middle(registry: FakeRegistry, directory: Path, reference: str) -> None:
    async with Puller(directory, RegistrySettings()) as puller:
        pulling = asyncio.create_task(puller.pull(reference))
        while puller.blobs.fetched_bytes < 1_000_000:
            await asyncio.sleep(0.01)
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling


def test_whoever_needs_what_another_fetches_waits_for_it(tmp_path: Path) -> None:
    """Locks are those of files, so it does not matter which process waits."""
    with FakeRegistry(bytes_per_s=1e6) as registry:
        for name in "ab":
            registry.add_image(name, "1", [BASE, layer_of([Entry(name)])])
        references = [f"{registry.host}/{name}:1" for name in "aab"]
        asyncio.run(_pull_at_once(tmp_path, references))
        assert set(registry.whole_answers().values()) == {1}
        assert len(registry.seen) == len(registry.blobs) + 2, "and one manifest of each image"


async def _pull_at_once(directory: Path, references: list[str]) -> None:
    async with AsyncExitStack() as stack:
        made = [Puller(directory, RegistrySettings()) for _ in references]
        pullers = [await stack.enter_async_context(one) for one in made]
        pulls = map(Puller.pull, pullers, references)
        await asyncio.gather(*pulls)


def test_downloads_share_a_limit(tmp_path: Path) -> None:
    with FakeRegistry(bytes_per_s=1e6) as registry:
        references = []
        for number in range(6):
            registry.add_image(f"n{number}", "1", [layer_of([Entry("x", os.urandom(100_000))])])
            references.append(f"{registry.host}/n{number}:1")
        most = asyncio.run(_count_downloads(registry, tmp_path, references))
    assert most == 2


async def _count_downloads(registry: FakeRegistry, directory: Path, references: list[str]) -> int:
    settings = RegistrySettings(parallel=2)
    most = 0
    async with Puller(directory, settings) as one, Puller(directory, settings) as two:
        pulls = [one.pull(reference) for reference in references[::2]]
        pulls += [two.pull(reference) for reference in references[1::2]]
        pulling = asyncio.gather(*pulls)
        while not pulling.done():
            most = max(most, registry.sending_now)
            await asyncio.sleep(0.005)
        await pulling
    return most


def test_an_image_shares_its_files_with_one_that_is_not_there_yet(tmp_path: Path) -> None:
    """What is known of the next images decides which layers are unpacked for several."""
    with FakeRegistry() as registry:
        for name in "ab":
            registry.add_image(name, "1", [BASE, layer_of([Entry(name)])])
        references = [f"{registry.host}/{name}:1" for name in "ab"]

        async def pull_first() -> None:
            async with Puller(tmp_path, RegistrySettings()) as puller:
                await puller.plan(references[1])
                await puller.pull(references[0])

        asyncio.run(pull_first())
        store = ImageStore(tmp_path, is_filled=True)
        first = store.unpack(references[0]).rootfs / "base"
        pull(tmp_path, references[1])
    store.add_fetched(tmp_path / "registry" / registry.host / "b:1")
    second = store.unpack(references[1]).rootfs / "base"
    assert first.samefile(second)


@pytest.mark.parametrize("as_date", [False, True])
def test_a_busy_registry_is_waited_for_by_all_as_long_as_it_says(
    tmp_path: Path, as_date: bool
) -> None:
    later = email.utils.formatdate(time.time() + 3, usegmt=True) if as_date else "2"
    with FakeRegistry(faults=Faults(share=1, kinds=("429",), retry_after=later)) as registry:
        for name in "abc":
            registry.add_image(name, "1", [BASE])
        asyncio.run(_pull_from_busy(registry, tmp_path))


async def _pull_from_busy(registry: FakeRegistry, directory: Path) -> None:
    async with Puller(directory, RegistrySettings()) as puller:
        first = asyncio.create_task(puller.pull(f"{registry.host}/a:1"))
        while not registry.seen:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        others = [asyncio.create_task(puller.pull(f"{registry.host}/{name}:1")) for name in "bc"]
        await asyncio.sleep(0.5)
        assert len(registry.seen) == 1, "nobody asks it meanwhile"
        registry.faults.share = 0
        await asyncio.wait_for(asyncio.gather(first, *others), 60)


def test_a_content_that_is_always_wrong_is_refused(tmp_path: Path) -> None:
    with FakeRegistry() as registry:
        registry.add_image("x", "1", [BASE])
        (layer,) = [digest for digest, raw in registry.blobs.items() if len(raw) > 10_000]
        registry.blobs[layer] = registry.blobs[layer][:-1] + b"?"
        with pytest.raises(ImageError, match=f"the digest of {layer} is not that of its content"):
            pull(tmp_path, f"{registry.host}/x:1")
        assert not ImageStore(tmp_path).has(f"{registry.host}/x:1")
        registry.blobs[layer] += b"more"
        with pytest.raises(ImageError, match="sends more than its"):
            pull(tmp_path, f"{registry.host}/x:1")


def test_a_manifest_with_another_digest_is_refused(tmp_path: Path) -> None:
    with FakeRegistry() as registry:
        digest = registry.add_image("x", "1", [BASE])
        raw, kind = registry.manifests["x", digest]
        registry.manifests["x", digest] = raw + b" ", kind
        with pytest.raises(ImageError, match=f"another manifest than {digest}"):
            pull(tmp_path, f"{registry.host}/x@{digest}")


@pytest.mark.parametrize(
    ("content", "kind", "reason"),
    [
        ({"schemaVersion": 1, "fsLayers": []}, "application/json", "schema 1"),
        (b"no json", MANIFEST, "sends no JSON"),
        ([], MANIFEST, "no JSON object"),
        ({"mediaType": "text/html"}, MANIFEST, "type 'text/html'"),
        ({"layers": []}, MANIFEST, "entry without a size"),
        ({"manifests": {}}, LIST, "no `manifests`"),
        (
            {"layers": [{"mediaType": "application/x-encrypted", "digest": "", "size": 1}]},
            MANIFEST,
            "type 'application/x-encrypted'",
        ),
        (
            {"config": {"digest": f"sha256:{'0' * 64}", "size": 1 << 50}, "layers": []},
            MANIFEST,
            "GB; at most",
        ),
        (
            {"config": {"digest": f"sha256:{'0' * 64}", "size": 1 << 30}, "layers": []},
            MANIFEST,
            "configuration is larger than",
        ),
        ({"config": {"digest": "sha512:00", "size": 1}, "layers": []}, MANIFEST, "of SHA-256"),
        (b" " * (5 << 20), MANIFEST, "more than 4 MiB"),
    ],
)
def test_what_is_no_image_is_refused_by_name(
    tmp_path: Path, content: Any, kind: str, reason: str
) -> None:
    with FakeRegistry() as registry:
        registry.add_manifest("x", "1", content, kind)
        with pytest.raises(ImageError, match=reason) as refused:
            pull(tmp_path, f"{registry.host}/x:1")
    assert f"{registry.host}/x:1" in str(refused.value)


def test_mirrors_are_asked_first(tmp_path: Path) -> None:
    with FakeRegistry() as registry, FakeRegistry() as mirror:
        registry.add_image("x", "1", [BASE])
        registry.add_image("only", "1", [TOP])
        mirror.add_image("cache/x", "1", [BASE])
        mirrors = {registry.host: f"http://{mirror.host}/cache"}
        references = [f"{registry.host}/{name}:1" for name in ("x", "only")]
        pull(tmp_path, *references, mirrors=mirrors)
        assert {one.path.split("/")[2] for one in registry.seen} == {"only"}
        assert mirror.requests_of("/cache/x/blobs/")
    assert files_of(tmp_path, references[0]) == {"base", "etc/name"}


def test_a_mirror_that_fails_is_left_alone_for_a_while(tmp_path: Path) -> None:
    failing = Faults(share=1, kinds=("500",))
    with FakeRegistry() as registry, FakeRegistry(faults=failing) as mirror:
        references = []
        for number in range(10):
            registry.add_image(f"n{number}", "1", [BASE])
            references.append(f"{registry.host}/n{number}:1")
        pull(tmp_path, *references, mirrors={registry.host: [f"http://{mirror.host}"]})
        assert 1 <= len(mirror.seen) <= 3


def test_a_redirect_without_end_is_refused(tmp_path: Path) -> None:
    with FakeRegistry() as registry:
        registry.add_image("x", "1", [BASE])
        registry.blobs_at = f"http://{registry.host}"
        with pytest.raises(ImageError, match="redirects"):
            pull(tmp_path, f"{registry.host}/x:1")


def test_fetched_layers_take_no_more_than_allowed(tmp_path: Path) -> None:
    with FakeRegistry() as registry:
        registry.add_image("small", "1", [BASE])
        registry.add_image("large", "1", [BASE, TOP])
        pull(tmp_path, f"{registry.host}/small:1", max_gb=0.0004)
        with pytest.raises(ImageError, match=r"max_gb of --registry allows 0\.0004 GB"):
            pull(tmp_path, f"{registry.host}/large:1", max_gb=0.0004)
        pull(tmp_path, f"{registry.host}/large:1", max_gb=0.0006)


def test_a_path_that_leads_outside_is_refused(tmp_path: Path) -> None:
    """Layers of registries are unpacked as carefully as those of archives."""
    with FakeRegistry() as registry:
        registry.add_image("x", "1", [layer_of([Entry("../../outside", b"x")])])
        pull(tmp_path, f"{registry.host}/x:1")
        with pytest.raises(ImageError, match="leads outside"):
            ImageStore(tmp_path).unpack(f"{registry.host}/x:1")
    assert not list(tmp_path.rglob("outside"))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"mirror": {}}, "mirror"),
        ({"mirrors": {"index.docker.io": "https://x"}}, "is called docker.io"),
        ({"mirrors": {"https://x.org": "https://x"}}, "not the host of a registry"),
        ({"mirrors": {"docker.io": "ftp://x"}}, "must be an address"),
        ({"mirrors": {"docker.io": "https://me:pw@x"}}, "no user or password"),
        ({"parallel": 0}, "parallel"),
        ({"max_gb": 0}, "max_gb"),
    ],
)
def test_settings_are_checked(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RegistrySettings(**given)
