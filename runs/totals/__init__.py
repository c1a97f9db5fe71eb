"""What a run comes to, computed from disk.

accounts  done, failed, discarded, pending, and their sums
spending  what the run spent in all
forecast  what the whole will take, from a sample
"""
