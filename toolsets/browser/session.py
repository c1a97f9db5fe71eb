"""The browser of one conversation: its cookies, its pages, and actions on them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from yarl import URL

from batch_trajectories.basics.errors import ToolError
from batch_trajectories.basics.text import clip, valid_utf8
from toolsets.browser.process import Chromium
from toolsets.context import SharedBrowser
from toolsets.net.guard import check_url

_log = logging.getLogger(__name__)

_ACTION_S = 5.0
_ANSWER_S = 2.0
_LOAD_S = 30.0
_STARTED_LOADING_S = 0.25
"""Seconds in which an action that opens another page starts to load it."""
_DEADLINE_S = 60.0
_CLOSE_S = 5.0
_MAX_PAGES = 5
_MAX_NOTES = 20
_VIEWPORT = {"width": 1280, "height": 800}
_REF = re.compile(r"(f\d+)?e\d+")
_NET_ERROR = re.compile(r"net::(ERR_\w+)")

NOTHING_OPEN = "no page is open; open one with browser_navigate"


class PageState(NamedTuple):
    """The state of a page, and the notes about it."""

    title: str
    url: str
    snapshot: str
    """The elements of the page as text, with a ref for each."""
    notes: list[str]


class BrowserSession:
    """The pages and cookies of one conversation; handles one call at a time.

    The first page opens the session, and the end of the task's context closes it.
    """

    def __init__(self, browsers: SharedBrowser) -> None:
        self._browsers = browsers
        self._lock = asyncio.Lock()
        self._chromium: Chromium | None = None
        self._context: Any = None
        self._page: Any = None
        self._notes: list[str] = []
        self._loading: set[Any] = set()
        self._loaded = asyncio.Event()
        self._shown = asyncio.Event()
        self._last_request = ""
        self._failed = ""
        browsers.open()

    async def close(self) -> None:
        """Close the pages and delete the cookies; the browser stops with its last user."""
        async with self._lock:
            try:
                await self._close_context()
            finally:
                await self._browsers.close()

    async def navigate(self, url: str) -> None:
        """Open `url`; raises `ToolError` if it is not allowed or fails."""
        # Keeps the fragment: the page's scripts may read it.
        target = str(check_url(url).with_fragment(URL(url.strip()).fragment or None))

        async def go(page: Any) -> None:
            self._shown.clear()
            response = await page.goto(
                target, wait_until="domcontentloaded", timeout=_LOAD_S * 1000
            )
            if response is not None and response.status >= 400:
                self._note(f"the server answered with HTTP {response.status}")

        await self.act(go, opens=True)

    async def act(
        self,
        action: Callable[[Any], Awaitable[Any]],
        *,
        opens: bool = False,
        only_looks: bool = False,
    ) -> Any:
        """Run an action on the page, wait until the page has loaded, return the action's result.

        With `opens`, a page is opened if there is none. With `only_looks`, the session does not
        wait for pages that the action loads. Raises `ToolError`.
        """
        from playwright.async_api import Error

        async with self._lock:
            page = await self._current(opens=opens)
            self._failed = ""
            try:
                async with asyncio.timeout(_DEADLINE_S):
                    result = await action(page)
                    if not only_looks:
                        await self._await_load()
                if self._failed:
                    raise self._network_error(self._failed)
                return result
            except TimeoutError:
                await self._close_page()
                raise ToolError(
                    f"the page did not answer within {_DEADLINE_S:g} s and was closed; "
                    "open another with browser_navigate"
                ) from None
            except Error as error:
                if self._failed:
                    # Chromium shows its error page a little later; it would replace the next page.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_ANSWER_S):
                            await self._shown.wait()
                raise await self._describe(error) from error

    async def read(self) -> PageState:
        """Return the present state of the page, and the notes since the last call."""

        async def look(_: Any) -> tuple[str, str, str]:
            # An action before this one may have led to another page.
            page = await self._current(opens=False)
            snapshot = await page.aria_snapshot(mode="ai", timeout=_ACTION_S * 1000)
            return await page.title(), page.url, snapshot

        title, url, snapshot = await self.act(look, only_looks=True)
        notes, self._notes = self._notes, []
        return PageState(
            title=clip(valid_utf8(" ".join(title.split())), max_chars=300),
            url=clip(valid_utf8(url), max_chars=1000),
            snapshot=valid_utf8(snapshot),
            notes=[valid_utf8(note) for note in notes],
        )

    async def back(self, page: Any) -> None:
        """Go to the page before; in a tab that a page opened, close the tab."""
        response = await page.go_back(wait_until="domcontentloaded", timeout=_LOAD_S * 1000)
        if response is not None:
            return
        if len(self._context.pages) > 1 and await page.opener() is not None:
            await page.close()
            self._note("the tab was closed; this is the one before")

    @staticmethod
    async def element(page: Any, ref: str) -> Any:
        """Return the element with a ref of the last snapshot. Raises `ToolError` if it is gone."""
        plain = ref.strip().strip("[]@").removeprefix("ref=")
        if not _REF.fullmatch(plain):
            shown = clip(ref, max_chars=50)
            raise ToolError(f"{shown!r} is not a ref; refs are in the snapshot, such as e12")
        locator = page.get_by_ref(plain)
        if not await locator.count():
            raise ToolError(f"nothing on the page has the ref {plain} now; see browser_snapshot")
        return locator

    async def _current(self, *, opens: bool) -> Any:
        """Return the current page; with `opens`, open one. Raises `ToolError` without one."""
        if self._chromium is not None and not self._chromium.browser.is_connected():
            self._chromium = self._context = self._page = None
            if not opens:
                raise ToolError(
                    "the browser has ended, and its pages and cookies are gone; start again with "
                    "browser_navigate"
                )
        if self._page is None or self._page.is_closed():
            pages = self._context.pages if self._context is not None else []
            self._page = pages[-1] if pages else None
        if self._page is None:
            if not opens:
                raise ToolError(NOTHING_OPEN)
            await self._open()
        return self._page

    async def _open(self) -> None:
        from playwright.async_api import Error

        if self._chromium is None:
            self._chromium = await self._browsers.chromium()
        try:
            if self._context is None:
                self._context = await self._chromium.browser.new_context(
                    accept_downloads=False, service_workers="block", viewport=_VIEWPORT
                )
                self._context.set_default_timeout(_ACTION_S * 1000)
                for event, handler in (
                    ("page", self._on_page),
                    ("dialog", self._on_dialog),
                    ("request", self._on_request),
                    ("requestfinished", self._on_request_over),
                    ("requestfailed", self._on_request_failed),
                ):
                    self._context.on(event, handler)
            self._page = await self._context.new_page()
        except Error as error:
            self._chromium = self._context = self._page = None
            raise ToolError("the browser has ended; try again") from error

    async def _await_load(self) -> None:
        """Wait until the page that an action opened has loaded."""
        from playwright.async_api import Error

        await asyncio.sleep(_STARTED_LOADING_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOAD_S):
                while self._loading:
                    self._loaded.clear()
                    await self._loaded.wait()
        self._loading.clear()
        # Images and scripts may load late or never; the page is shown without them.
        with contextlib.suppress(Error):
            page = self._context.pages[-1] if self._page.is_closed() else self._page
            await page.wait_for_load_state("load", timeout=_ACTION_S * 1000)

    async def _is_responsive(self) -> bool:
        """Whether the page still responds, so that no script blocks it."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._page.evaluate("0")
        except Exception:
            return False
        return True

    async def _close_page(self) -> None:
        """Close a page that does not respond; if that fails, close all pages."""
        page, self._page = self._page, None
        try:
            async with asyncio.timeout(_CLOSE_S):
                await page.close()
        except Exception as error:
            _log.info("A page that does not respond cannot be closed, so all pages are: %r", error)
            await self._close_context()

    async def _close_context(self) -> None:
        context, self._context, self._page = self._context, None, None
        self._loading.clear()
        if context is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_S):
                await context.close()
        except Exception as error:
            _log.info("The pages of a conversation were not closed: %s", error)

    async def _describe(self, error: Exception) -> ToolError:
        from playwright.async_api import TimeoutError as ActionTimeout

        message = str(error).partition("\nCall log:")[0]
        self._loading.clear()
        if match := _NET_ERROR.search(message):
            return self._network_error(match[1])
        if "Download is starting" in message:
            return ToolError(
                "that is a file to download, which the browser does not do; web_fetch reads text"
            )
        if "crashed" in message.lower():
            await self._close_page()
            return ToolError("the page crashed and was closed; open another with browser_navigate")
        if "has been closed" in message:
            return ToolError(f"the page has been closed; {NOTHING_OPEN}")
        if isinstance(error, ActionTimeout):
            if not await self._is_responsive():
                await self._close_page()
                return ToolError(
                    "the page does not answer and was closed; open another with browser_navigate"
                )
            return ToolError(
                f"not done within the time: {_plain(message)}; take a new browser_snapshot to see "
                "what is there"
            )
        return ToolError(_plain(message))

    def _network_error(self, name: str) -> ToolError:
        """A network error of Chromium (`name`) in words for the model."""
        with contextlib.suppress(ValueError):
            url = URL(self._last_request)
            failure = self._chromium and self._chromium.proxy.failure(
                (url.raw_host or "").lower(), url.port or 0
            )
            if failure and name.startswith(("ERR_SOCKS", "ERR_PROXY", "ERR_TUNNEL")):
                return ToolError(f"{clip(str(url), max_chars=200)}: {failure}")
        shown = clip(self._last_request, max_chars=200)
        return ToolError(f"{shown}: the page could not be loaded ({name})")

    def _note(self, message: str) -> None:
        if len(self._notes) < _MAX_NOTES:
            self._notes.append(message)

    async def _on_page(self, page: Any) -> None:
        page.on("framenavigated", self._on_navigated)
        page.on("download", lambda _: self._note("a download was refused"))
        if page is self._page or self._page is None:
            return
        if len(self._context.pages) > _MAX_PAGES:
            self._note("a further tab was closed at once: too many are open")
            with contextlib.suppress(Exception):
                await page.close()
            return
        self._page = page
        self._note("a new tab was opened and is shown now; browser_back closes it")

    async def _on_dialog(self, dialog: Any) -> None:
        if dialog.type != "beforeunload":
            message = clip(" ".join(dialog.message.split()), max_chars=300)
            self._note(f"the page showed a dialog ({dialog.type}), which was dismissed: {message}")
        with contextlib.suppress(Exception):
            # "beforeunload" asks whether to leave the page: always yes.
            await (dialog.accept() if dialog.type == "beforeunload" else dialog.dismiss())

    def _on_request(self, request: Any) -> None:
        if _loads_a_page(request):
            self._last_request = request.url
            self._loading.add(request)

    def _on_request_failed(self, request: Any) -> None:
        if request in self._loading and (match := _NET_ERROR.search(request.failure or "")):
            self._failed = "" if match[1] == "ERR_ABORTED" else match[1]
        self._on_request_over(request)

    def _on_navigated(self, frame: Any) -> None:
        if frame.parent_frame is None:
            self._shown.set()

    def _on_request_over(self, request: Any) -> None:
        self._loading.discard(request)
        self._loaded.set()


def _loads_a_page(request: Any) -> bool:
    from playwright.async_api import Error

    if not request.is_navigation_request():
        return False
    try:
        return request.frame.parent_frame is None
    except Error:
        return True  # The first request of a new tab has no frame yet.


def _plain(message: str) -> str:
    """Return a message of Playwright without the name of its method."""
    return clip(re.sub(r"^\w+\.\w+: ", "", " ".join(message.split())), max_chars=300)
