"""What a start would do, checked before any call.

plan             all checks of a start
executor_choice  opens the executor that the config names
logprobs         what is said of log-probabilities before the first call
preview          what a dry run shows

Other rooms import executor_choice, plan, preview.
"""
