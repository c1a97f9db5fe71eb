"""The objects of a mirror, at s3, gs, az or file URLs; credentials come from the environment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from batch_trajectories.basics.errors import EnvironmentStop, missing
from batch_trajectories.basics.text import clip

_REQUEST_S = 15
"""Timeout of a request."""

_AT_A_TIME = 16
_SHOWN = 300

_QUERY = re.compile(r"\?[^\s)\"']*")
"""Of a URL; that of Azure may be a signature."""


class BucketFailed(EnvironmentStop):
    """A request to the bucket failed."""


class Bucket:
    """The objects below a URL. Its methods can be called in any thread."""

    def __init__(self, url: str) -> None:
        """Raises `ConfigError` without the extra, and `BucketFailed` for a URL it cannot use."""
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise missing(f"{url}: a mirror", "mirror") from None
        self.url = url
        self._obstore = obstore
        more: dict[str, Any] = {}
        if url.startswith("file:"):
            more["mkdir"] = True
        else:
            # Retries are ours: they count against the lag that a run allows.
            more["retry_config"] = {"max_retries": 0}
            # Only an endpoint that the user names, as a server in their network, can be http.
            more["client_options"] = {"timeout": f"{_REQUEST_S}s", "allow_http": True}
        try:
            self._store = from_url(url, **more)
        except (obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise self._failed(error) from None

    def create(self, name: str, content: bytes) -> bool:
        """Create an object; False if there is one of this name. Raises `BucketFailed`."""
        try:
            self._obstore.put(self._store, name, content, mode="create", use_multipart=False)
        except self._obstore.exceptions.AlreadyExistsError:
            return False
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise self._failed(error) from None
        return True

    def read(self, name: str) -> bytes | None:
        """The content of an object, None if there is none. Raises `BucketFailed`."""
        try:
            return bytes(self._obstore.get(self._store, name).bytes())
        except FileNotFoundError:
            return None
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise self._failed(error) from None

    def after(self, directory: str, name: str) -> Iterator[tuple[str, bytes]]:
        """The objects of a directory whose names sort after `name`, in order.

        Reads some ahead. Raises `BucketFailed`.
        """
        begin = f"{directory}/{name}"
        try:
            found = self._obstore.list(self._store, prefix=directory, offset=begin)
            listed = found.collect()
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise self._failed(error) from None
        # Azure also lists the name from which it begins.
        paths = sorted(path for path in (str(entry["path"]) for entry in listed) if path > begin)
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            for first in range(0, len(paths), _AT_A_TIME):
                few = paths[first : first + _AT_A_TIME]
                for path, content in zip(few, pool.map(self.read, few), strict=True):
                    if content is None:
                        raise BucketFailed(f"{self.url}/{path}: it was removed")
                    yield path.rpartition("/")[2], content

    def _failed(self, error: Exception) -> BucketFailed:
        """The error without the library's repetitions, and without what may be secret."""
        said = str(error).partition("Debug source")[0]
        said = clip(" ".join(_QUERY.sub("?…", said).split()), max_chars=_SHOWN)
        return BucketFailed(f"{self.url}: {said}")
