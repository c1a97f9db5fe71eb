"""The demo's own tools: the catalogue of a small library. Any typed function can be a tool."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Literal

BOOKS = {
    "B1": {"title": "The Sea Around Us", "author": "Rachel Carson", "year": 1951, "copies": 2},
    "B2": {"title": "Silent Spring", "author": "Rachel Carson", "year": 1962, "copies": 0},
    "B3": {"title": "Flatland", "author": "Edwin A. Abbott", "year": 1884, "copies": 1},
}


def find_books(query: str, by: Literal["title", "author"] = "title") -> list[dict[str, object]]:
    """Find books whose title or author contains some words.

    Args:
        query: The words, in any case.
        by: Where to look for them.
    """
    found = [id for id, book in BOOKS.items() if query.lower() in str(book[by]).lower()]
    return [{"id": id, **BOOKS[id]} for id in found]


def due_date(book_id: str, days: int = 28) -> dict[str, object]:
    """Tell when a book that is lent on 1 March 2024 has to be back.

    Args:
        book_id: The id that `find_books` gave.
        days: For how long it is lent, at most 28.
    """
    if book_id not in BOOKS:
        raise ValueError(f"there is no book {book_id!r}")
    if not 0 < days <= 28:
        raise ValueError("books are lent for 1 to 28 days")
    return {"book": BOOKS[book_id]["title"], "back_on": str(date(2024, 3, 1) + timedelta(days))}


TOOLS = [find_books, due_date]
