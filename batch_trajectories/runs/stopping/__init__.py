"""Which samples of a prompt are needed: `--until_passed`, and the cascade of models.

rule      a pure function from the outcomes of a prompt's samples to those to run, and their models
outcomes  the outcomes of a run's samples, from its index and journals
opening   opens samples while a run works
model_budgets  what the conversations of each model of a cascade may cost
unbiased  pass@k where the number of samples depends on how they ended

Other rooms import model_budgets, opening, outcomes, rule, unbiased.
"""
