"""Limits that several runs share: imported where `shared_limits` is given.

ledger   who may spend how much, as a log of which each entry is the whole state
sharing  a run's part of the budget and of the rates; the thread that keeps it

Other rooms import sharing.
"""
