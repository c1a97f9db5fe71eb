"""The cost of a call: by the user's own prices, else by the table of genai-prices.

An unknown price is None, never 0.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from agent.messages.message import Usage as Counts
from agent.models.admission import CostEstimate
from agent.models.model import Completion, ModelSettings, Price, Request

if TYPE_CHECKING:
    from genai_prices import Usage as Tokens
    from genai_prices.types import PriceCalculation

log = logging.getLogger(__name__)

_UNSEEN_TOKENS = 1000
"""Allowance for tokens that providers add to a request, such as their text about tools."""

_BYTES_PER_TOKEN = 4
"""Approximate bytes of a token in English text and code."""

_MILLION = 1_000_000

_DATE = re.compile(r"-(?:\d{8}|\d{4}-\d\d-\d\d)$")
"""The date in the name of a model's snapshot; the table may have only the name without it."""


_BATCH = {"processing": "batch"}
"""The table's name for calls in batches."""

_BATCH_SHARE = 0.5
"""Price in a batch as a share of the price, if the table lacks it: both providers' discount."""

_HOUR_WRITE = 2.0
"""Price of writing into a cache of an hour, as a multiple of the input price (Anthropic's list)."""

_FEES = {"openrouter": 0.05}
"""Fees of providers, as shares of the price: OpenRouter takes one for calls with the user's key."""


def price(
    completion: Completion, settings: ModelSettings, *, by_batch: bool = False
) -> float | None:
    """Dollars of one call; None if its usage or the model's price is unknown."""
    usage = completion.usage
    if usage is None or usage["input_tokens"] is None or usage["output_tokens"] is None:
        return None
    for_an_hour = min(completion.hour_cache_writes, usage["cache_write_tokens"] or 0)
    if own := settings.own_price:
        return _own_cost(own, usage, for_an_hour=for_an_hour, by_batch=by_batch)
    calculation = _find(settings.name, settings.provider) or (
        completion.model and _find(completion.model, settings.provider)
    )
    if not calculation:
        _warn(settings.name)
        return None
    cost = _batch_cost if by_batch else _cost
    try:
        return _table_cost(calculation, usage, cost, for_an_hour)
    except ValueError:  # counts that contradict each other: more tokens cached than read
        return None


def add_cost(
    completion: Completion, settings: ModelSettings, *, by_batch: bool = False
) -> Completion:
    """Add the cost to a reply: by the user's prices, by the endpoint's report, or by the table."""
    if completion.cost_usd is not None and settings.own_price is None:
        return completion
    cost_usd = price(completion, settings, by_batch=by_batch)
    is_unchanged = cost_usd == completion.cost_usd
    return completion if is_unchanged else replace(completion, cost_usd=cost_usd)


def estimate_cost(
    request: Request, settings: ModelSettings, *, by_batch: bool = False
) -> CostEstimate:
    """Estimate the most that one attempt of a request can use."""
    # No tokenizer makes more tokens than there are bytes, and the JSON around a message is longer
    # than the marks that a chat template puts there. All input may be new to the provider's cache,
    # and written into it at a higher price.
    size, pointed = request.size(settings), request.pointed()
    most_in = size + pointed.most + _UNSEEN_TOKENS
    most_out = request.reply_bound(settings)
    likely_in = size // _BYTES_PER_TOKEN + pointed.likely
    if most_out is None:
        return CostEstimate(None, None, likely_in)
    for_an_hour = request.asks_for_hour_writes(settings)
    rates = _max_rates(settings, most_in.bit_length(), by_batch=by_batch, for_an_hour=for_an_hour)
    if rates is None:
        return CostEstimate(None, most_in + most_out, likely_in)
    usd = most_in * rates.input + most_out * rates.output
    return CostEstimate(usd, most_in + most_out, likely_in)


class Reserves:
    """The worst cases of one model's calls, raised once a call has used more than its estimate.

    That can happen: the table may lack a surcharge or have another provider's price, and a server
    may add tokens to a request.
    """

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._usd = self._tokens = 1.0
        """The factors by which estimates were exceeded."""

    def estimate(self, request: Request, *, by_batch: bool = False) -> CostEstimate:
        """Estimate the most that one attempt can use; see `estimate_cost`."""
        return estimate_cost(request, self._settings, by_batch=by_batch)

    def worst_case(self, estimate: CostEstimate) -> CostEstimate:
        """Raise the estimate as far as earlier estimates were too low."""
        if self._usd == self._tokens == 1.0:
            return estimate
        usd, tokens = estimate.usd, estimate.tokens
        return estimate._replace(
            usd=None if usd is None else usd * self._usd,
            tokens=None if tokens is None else math.ceil(tokens * self._tokens),
        )

    def learn(self, estimate: CostEstimate, completion: Completion) -> None:
        """Raise later worst cases if a call has used more than its estimate."""
        usage, usd = completion.usage, completion.cost_usd
        if usd is not None and estimate.usd and usd > self._usd * estimate.usd:
            log.warning(
                "A call of %s cost $%.6f, and at most $%.6f was expected. More is reserved for "
                "its calls from now on.",
                self._settings.name,
                usd,
                self._usd * estimate.usd,
            )
            self._usd = usd / estimate.usd
        used = sum(usage[kind] or 0 for kind in ("input_tokens", "output_tokens")) if usage else 0
        if estimate.tokens and used > self._tokens * estimate.tokens:
            self._tokens = used / estimate.tokens


class _Rates(NamedTuple):
    """Dollars per token of input and of output."""

    input: float
    output: float


def _max_rates(
    settings: ModelSettings, bits: int, *, by_batch: bool, for_an_hour: bool
) -> _Rates | None:
    """The highest rates in a request of fewer than 2 ** `bits` tokens; None if they are unknown."""
    if (own := settings.own_price) is None:
        return _max_table_rates(
            settings.name, settings.provider, bits, by_batch=by_batch, for_an_hour=for_an_hour
        )
    share = _BATCH_SHARE if by_batch else 1.0
    highest_rate = max(own.input, own.cache_read, own.cache_write)
    if for_an_hour:
        highest_rate = max(highest_rate, _own_hour_write(own))
    return _Rates(share * highest_rate / _MILLION, share * own.output / _MILLION)


def _table_cost(
    calculation: PriceCalculation,
    usage: Counts,
    cost: Callable[[PriceCalculation, Tokens], float],
    for_an_hour: int,
) -> float:
    """Dollars of one call by the table. Raises `ValueError` if its counts contradict each other."""
    from genai_prices import Usage

    written = usage["cache_write_tokens"]
    dollars = cost(
        calculation,
        Usage(
            input_tokens=usage["input_tokens"],
            output_tokens=usage["output_tokens"],
            cache_read_tokens=usage["cache_read_tokens"],
            # Writes for an hour count as plain input here; the rest of their price is added below.
            cache_write_tokens=written and written - for_an_hour,
        ),
    )
    if for_an_hour and (size := usage["input_tokens"]):
        # All input of this request at the plain price: long requests may cost more per token.
        plain = cost(calculation, Usage(input_tokens=size)) / size
        dollars += (_HOUR_WRITE - 1) * plain * for_an_hour
    return dollars


def _own_cost(own: Price, usage: Counts, *, for_an_hour: int, by_batch: bool) -> float | None:
    """Dollars of one call by the user's prices; None if its counts contradict each other."""
    read, written = usage["cache_read_tokens"] or 0, usage["cache_write_tokens"] or 0
    fresh = (usage["input_tokens"] or 0) - read - written
    if fresh < 0:
        return None
    output = usage["output_tokens"] or 0
    dollars = (
        fresh * own.input
        + read * own.cache_read
        + (written - for_an_hour) * own.cache_write
        + for_an_hour * _own_hour_write(own)
        + output * own.output
    ) / _MILLION
    return _BATCH_SHARE * dollars if by_batch else dollars


def _own_hour_write(own: Price) -> float:
    """The user's price of writing into a cache of an hour, for which there is no setting."""
    return max(own.cache_write, _HOUR_WRITE * own.input)


@lru_cache(maxsize=256)
def _max_table_rates(
    name: str, provider: str | None, bits: int, *, by_batch: bool, for_an_hour: bool
) -> _Rates | None:
    """The highest rates by the table; see `_max_rates`."""
    # Cached, because computing a price takes longer than all the rest of an estimate. Longer
    # requests may cost more per token, never less.
    if (calculation := _find(name, provider)) is None:
        return None
    from genai_prices import Usage

    size, replied = 2**bits, _MILLION
    cost = _batch_cost if by_batch else _cost
    plain = cost(calculation, Usage(input_tokens=size))
    cached = cost(calculation, Usage(input_tokens=size, cache_write_tokens=size))
    both = cost(calculation, Usage(input_tokens=size, output_tokens=replied))
    max_input = max(plain, cached, _HOUR_WRITE * plain if for_an_hour else 0.0)
    with_fee = 1 + _FEES.get(provider or "", 0.0)
    return _Rates(with_fee * max_input / size, with_fee * (both - plain) / replied)


def _cost(calculation: PriceCalculation, tokens: Tokens) -> float:
    return float(calculation.model.calc_price(tokens, calculation.provider).total_price)


def _batch_cost(calculation: PriceCalculation, tokens: Tokens) -> float:
    full = _cost(calculation, tokens)
    price = calculation.model.calc_price(tokens, calculation.provider, price_context=_BATCH)
    cost = float(price.total_price)
    return cost if cost < full else full * _BATCH_SHARE


def has_known_price(settings: ModelSettings) -> bool:
    """Whether calls of a model will have a price; calls of the scripted model cost nothing."""
    if settings.api == "scripted" or settings.own_price is not None:
        return True
    return _find(settings.name, settings.provider) is not None


def table_price(settings: ModelSettings) -> Price | None:
    """The table's price of a model for a short request; None if it has none."""
    if (calculation := _find(settings.name, settings.provider)) is None:
        return None
    from genai_prices import Usage

    size = 1000

    def dollars(**tokens: int) -> float:
        return round(_cost(calculation, Usage(**tokens)) * (_MILLION / size), 6)

    read = dollars(input_tokens=size)
    return Price(
        input=read,
        output=dollars(output_tokens=size),
        cache_read=dollars(input_tokens=size, cache_read_tokens=size),
        cache_write=dollars(input_tokens=size, cache_write_tokens=size),
    )


def load_table() -> None:
    """Import the price table, but not the HTTP client with which it could update itself.

    That client takes longer to import than the table; the first use of it imports it.
    """
    if "genai_prices" in sys.modules or "httpx2" in sys.modules:
        return
    later = ModuleType("httpx2")
    later.__dict__["__getattr__"] = lambda name: getattr(import_module("httpx2"), name)
    sys.modules["httpx2"] = later
    try:
        import_module("genai_prices.data")
    finally:
        del sys.modules["httpx2"]


@lru_cache(maxsize=64)
def _find(name: str, provider: str | None) -> PriceCalculation | None:
    """Find the table's entry for a model; None if it has none."""
    # Cached, because a search costs more than a whole model call.
    load_table()
    from genai_prices import Usage, calc_price

    for known_as in (name, _DATE.sub("", name)):
        with contextlib.suppress(LookupError, ValueError):
            return calc_price(Usage(input_tokens=0), model_ref=known_as, provider_id=provider)
    return None


@lru_cache(maxsize=64)
def _warn(name: str) -> None:
    """Warn once per model, by means of the cache."""
    log.warning(
        "The price of model %s is unknown, and so is what its calls cost. The config can give it "
        "under `prices`.",
        name,
    )
