"""pass@k of prompts that got samples until enough of them had passed.

Where sampling stops at a pass, the share of passes is biased: a prompt that passed at once has
100 %. The estimate without bias counts the orders in which the samples of a prompt can have ended
(Girshick, Mosteller and Savage, 1946): the share of those that begin with k failures estimates the
chance that k samples all fail.
"""

from __future__ import annotations

from math import comb

from batch_trajectories.runs.stopping.rule import StoppingRule


def chance_where_stopped(count: int, passed: int, k: int, rule: StoppingRule) -> float | None:
    """The chance that one of `k` samples passes, of a prompt with `passed` of `count` judged ones.

    Unbiased for all k up to the maximum of samples. None if `rule` did not stop this prompt: its
    number of samples was fixed.
    """
    failed = count - passed
    if passed < rule.passed or failed < rule.failed:
        return None
    if not (orders := _orders(passed, failed, rule)):
        return None  # it has more than the rule asks for: from a start with another one
    return 1 - _orders(passed, failed - k, rule, before=k) / orders


def _orders(passed: int, failed: int, rule: StoppingRule, *, before: int = 0) -> int:
    """The orders of so many passes and failures, after `before` failures, that stop at the last."""
    if failed < 0:
        return 0
    orders = 0
    if passed == rule.passed:  # the last one passed
        orders += comb(passed - 1 + failed, failed)
    if rule.failed and failed + before == rule.failed and failed:  # the last one failed
        orders += comb(passed + failed - 1, passed)
    return orders
