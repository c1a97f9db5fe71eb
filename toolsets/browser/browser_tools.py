"""The browser tools: open pages, read them as snapshots with refs, act on elements by ref."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from batch_trajectories.basics.errors import ToolError
from batch_trajectories.basics.text import clip, valid_utf8
from toolsets.browser.process import Browsers
from toolsets.browser.session import NOTHING_OPEN, BrowserSession
from toolsets.context import ToolContext
from toolsets.tool import ToolResult, tool

_RESOURCE = "browser"
_MAX_CHARS = 80_000
_DEFAULT_PAGE_CHARS = 8_000
"""Maximum number of characters of the snapshot after each action."""
_MAX_IMAGES = 100
_MAX_TEXT_CHARS = 10_000

Ref = Annotated[str, Field(max_length=50, description="The element's ref in the last snapshot.")]


@tool(sequential=True)
async def browser_navigate(
    context: ToolContext,
    url: Annotated[str, Field(min_length=1, description="Address of the page: http or https.")],
) -> ToolResult:
    """Open a web page in the browser. Gives a snapshot of the page, with a ref per element."""
    session = _session(context, opens=True)
    await session.navigate(url)
    return await _show(session)


@tool(sequential=True)
async def browser_snapshot(
    context: ToolContext,
    max_chars: Annotated[
        int, Field(ge=1, le=_MAX_CHARS, description="How many characters to show at most.")
    ] = 20_000,
    offset: Annotated[int, Field(ge=0, description="First character to show.")] = 0,
) -> ToolResult:
    """Show the page in the browser as a tree of its elements and texts, with refs."""
    return await _show(_session(context), max_chars=max_chars, offset=offset)


@tool(sequential=True)
async def browser_click(context: ToolContext, ref: Ref) -> ToolResult:
    """Click an element of the page. Gives a new snapshot."""

    async def click(page: Any) -> None:
        await (await BrowserSession.element(page, ref)).click()

    return await _act(context, click)


@tool(sequential=True)
async def browser_type(
    context: ToolContext,
    ref: Ref,
    text: Annotated[
        str, Field(max_length=_MAX_TEXT_CHARS, description="Replaces what the field holds.")
    ],
    submit: Annotated[bool, Field(description="Press Enter afterwards.")] = False,
) -> ToolResult:
    """Type text into a field of the page. Gives a new snapshot."""

    async def fill(page: Any) -> None:
        field = await BrowserSession.element(page, ref)
        await field.fill(text)
        if submit:
            await field.press("Enter")

    return await _act(context, fill)


@tool(sequential=True)
async def browser_select(
    context: ToolContext,
    ref: Ref,
    option: Annotated[str, Field(max_length=1000, description="Its text or value.")],
) -> ToolResult:
    """Choose an option of a drop-down list of the page. Gives a new snapshot."""

    async def select(page: Any) -> None:
        await (await BrowserSession.element(page, ref)).select_option(option)

    return await _act(context, select)


@tool(sequential=True)
async def browser_press(
    context: ToolContext,
    key: Annotated[
        str,
        Field(
            min_length=1, max_length=50, description="Enter, Tab, Escape, ArrowDown, a, Control+a."
        ),
    ],
) -> ToolResult:
    """Press a key in the page, where its focus is. Gives a new snapshot."""
    return await _act(context, lambda page: page.keyboard.press(key))


@tool(sequential=True)
async def browser_scroll(
    context: ToolContext,
    direction: Literal["up", "down"],
    screens: Annotated[int, Field(ge=1, le=20, description="How far.")] = 1,
) -> ToolResult:
    """Scroll the page, as is needed where more loads on scrolling. Gives a new snapshot."""
    way = screens if direction == "down" else -screens
    return await _act(
        context, lambda page: page.evaluate("n => window.scrollBy(0, n * window.innerHeight)", way)
    )


@tool(sequential=True)
async def browser_back(context: ToolContext) -> ToolResult:
    """Go back to the page before. Gives a new snapshot."""
    return await _act(context, _session(context).back)


@tool(sequential=True)
async def browser_get_images(context: ToolContext) -> list[Any]:
    """List the images of the page, with address, description and size in pixels."""
    images = await _session(context).act(
        lambda page: page.locator("img").evaluate_all(
            """(all, most) => all.slice(0, most).map(image => ({
                url: String(image.currentSrc || image.src).slice(0, 1000),
                alt: String(image.alt).slice(0, 300),
                width: image.naturalWidth,
                height: image.naturalHeight,
            }))""",
            _MAX_IMAGES,
        )
    )
    return [
        {
            "url": valid_utf8(clip(str(image["url"]), max_chars=1000)),
            "alt": valid_utf8(clip(str(image["alt"]), max_chars=300)),
            "width": image["width"],
            "height": image["height"],
        }
        for image in images[:_MAX_IMAGES]
    ]


@tool(sequential=True)
async def browser_screenshot(
    context: ToolContext,
    path: Annotated[
        str, Field(min_length=1, description="File to write in the workspace.")
    ] = "screenshot.png",
) -> ToolResult:
    """Save what the browser shows of the page as a PNG file in the workspace."""
    if not path.lower().endswith(".png"):
        raise ToolError("the file is a PNG: its name must end in .png")
    picture = await _session(context).act(lambda page: page.screenshot(type="png"))
    await asyncio.to_thread(context.workspace.write_bytes, path, picture)
    details = {"path": path, "bytes": len(picture)}
    return ToolResult(f"Saved {path} ({len(picture)} bytes).", details=details)


BROWSER_TOOLS = (
    browser_back,
    browser_click,
    browser_get_images,
    browser_navigate,
    browser_press,
    browser_screenshot,
    browser_scroll,
    browser_select,
    browser_snapshot,
    browser_type,
)


def _session(context: ToolContext, *, opens: bool = False) -> BrowserSession:
    """Return the browser of the task; with `opens`, start it. Raises `ToolError` without one."""
    held = context.held.get(_RESOURCE)
    if isinstance(held, BrowserSession):
        return held
    if not opens:
        lost = " (what was open before the conversation was taken up again is gone)"
        raise ToolError(NOTHING_OPEN + lost * context.resumed)
    browsers = context.browsers or Browsers(context.web.allow if context.web is not None else ())
    session = context.held[_RESOURCE] = BrowserSession(browsers)
    return session


async def _act(context: ToolContext, action: Callable[[Any], Awaitable[Any]]) -> ToolResult:
    session = _session(context)
    await session.act(action)
    return await _show(session)


async def _show(
    session: BrowserSession, *, max_chars: int = _DEFAULT_PAGE_CHARS, offset: int = 0
) -> ToolResult:
    """Return the page for the model; a long one is cut at the end of a line."""
    title, url, snapshot, notes = await session.read()
    if offset and offset >= len(snapshot):
        raise ToolError(f"the snapshot has only {len(snapshot)} characters")
    end = min(offset + max_chars, len(snapshot))
    if end < len(snapshot):
        end = snapshot.rfind("\n", offset, end) + 1 or end
    lines = [f"Title: {title}"] if title else []
    lines += [f"URL: {url}", *(f"Note: {note}" for note in notes), ""]
    lines.append(snapshot[offset:end].rstrip("\n") or "[an empty page]")
    if is_part := end < len(snapshot):
        lines.append(
            f"[characters {offset}-{end} of {len(snapshot)}; browser_snapshot with offset={end} "
            "goes on]"
        )
    details = {"url": url, "chars": len(snapshot), "truncated": is_part}
    return ToolResult("\n".join(lines), details=details)
