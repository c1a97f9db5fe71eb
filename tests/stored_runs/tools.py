"""The tools that the stored runs were made with."""

from typing import Any

PAGES = {"atlas": 312, "primer": 96}


def count_pages(title: str) -> int:
    """The number of pages of a book.

    Args:
        title: The title of the book.
    """
    return PAGES[title]


TOOLS: list[Any] = [count_pages]
